"""How exactly a reference network repeats: 20 transfers of 64 MiB, and 1,000 round trips, through it and without it.

    $ python scripts/bench_lib/network.py [--bandwidth 1.25GB/s] [--latency 200us] [--transfers 20]

Client, proxy and server share this machine's cores: its loopback alone, which is shown first, has to be faster than the
link that is asked for. Exit code 1 where transfers vary by more than a percent, or take another time than the link's.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from harness.caches.stores.base import StorePlan
from harness.caches.stores.link import NetworkLink
from harness.experiment.cache import Network, Remote

TRANSFER_BYTES, ROUND_TRIPS, UNCOUNTED = 64 << 20, 1000, 2
TARGET_CV, TARGET_SHARE = 0.01, 0.01
PAUSE_S, PATIENCE_S = 0.0005, 60.0


class Times(NamedTuple):
    transfers_s: list[float]
    round_trips_s: list[float]


def serve(listener: socket.socket) -> None:
    """Answers each request of 8 bytes, a number, with as many bytes."""
    body = memoryview(bytes(TRANSFER_BYTES))

    def answer(client: socket.socket) -> None:
        while asked := client.recv(8):
            client.sendall(body[: int.from_bytes(asked, "little")])

    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(client,), daemon=True).start()


def measure(place: tuple[str, int], transfers: int) -> Times:
    """The first transfers open TCP's windows, and do not count."""
    taken: tuple[list[float], list[float]] = ([], [])
    buffer = bytearray(4 << 20)
    with socket.create_connection(place, timeout=PATIENCE_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for into, size, count in ((taken[0], TRANSFER_BYTES, transfers), (taken[1], 1, ROUND_TRIPS)):
            for _ in range(count + UNCOUNTED):
                began_s, missing = time.perf_counter(), size
                client.sendall(size.to_bytes(8, "little"))
                while missing:
                    missing -= client.recv_into(buffer)
                into.append(time.perf_counter() - began_s)
                time.sleep(PAUSE_S)
    return Times(taken[0][UNCOUNTED:], taken[1][UNCOUNTED:])


def told(name: str, times: Times) -> tuple[float, float]:
    """Prints a line; returns the transfers' median and their CV."""
    median_s = statistics.median(times.transfers_s)
    cv = statistics.stdev(times.transfers_s) / statistics.mean(times.transfers_s)
    trips_us = [trip * 1e6 for trip in times.round_trips_s]
    print(
        f"{name:<18} {median_s * 1e3:8.2f} ms  CV {cv:6.2%}  {TRANSFER_BYTES / median_s / 1e9:6.3f} GB/s"
        f"   round trip {statistics.median(trips_us):6.0f} us (p90 {statistics.quantiles(trips_us, n=10)[8]:6.0f} us)"
    )
    return median_s, cv


async def through_link(network: Network, place: tuple[str, int], transfers: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        remote = Remote.model_validate({"capacity": "1GiB", "adapter": "resp"})
        link = NetworkLink(network, place, StorePlan(remote=remote, folder=Path(folder)))
        link.start()
        try:
            await link.ready()
            times = await asyncio.to_thread(measure, (link.host, link.port), transfers)
            passed = link.passed().down_bytes
            asked = (transfers + UNCOUNTED) * TRANSFER_BYTES + ROUND_TRIPS + UNCOUNTED
            print(f"counted by the link: {passed:,} bytes of {asked:,}")
            return times
        finally:
            await link.child.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="1.25GB/s")
    parser.add_argument("--latency", default="200us", help="of a round trip")
    parser.add_argument("--transfers", type=int, default=20)
    asked = parser.parse_args()
    network = Network.model_validate({"bandwidth": asked.bandwidth, "latency": asked.latency})
    listener = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.Process(target=serve, args=(listener,), daemon=True)
    server.start()
    place = listener.getsockname()
    try:
        told("loopback alone", measure(place, asked.transfers))
        median_s, cv = told("reference network", asyncio.run(through_link(network, place, asked.transfers)))
    finally:
        server.kill()
    due_s = TRANSFER_BYTES / network.bandwidth + network.latency
    print(f"asked: {due_s * 1e3:.2f} ms a transfer; the median is {median_s / due_s - 1:+.2%} off")
    return int(cv > TARGET_CV or abs(median_s / due_s - 1) > TARGET_SHARE)


if __name__ == "__main__":
    sys.exit(main())
