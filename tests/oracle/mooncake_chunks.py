"""The harness's plugin below LMCache's adapter, driven as that adapter drives it; in the environment that has Mooncake.

    PYTHONPATH=PLUGIN python mooncake_chunks.py PARAMS put|get BYTES NAME…

PARAMS: the adapter_params of its spec, as JSON. put stores a chunk of BYTES under each name, whose content follows from
the name. get prints which names are there, and how many of their chunks come back unharmed.
"""

import json
import select
import sys
from typing import Any

from kv_mooncake import EndedBatch, MooncakeClient


def content(name: str, size: int) -> bytes:
    return (name[-64:].encode() * (size // 64 + 1))[:size]


def ended(client: MooncakeClient, number: int) -> EndedBatch:
    poller = select.poll()
    poller.register(client.event_fd(), select.POLLIN)
    assert poller.poll(60_000), "the batch does not end"
    [batch] = client.drain_completions()
    assert batch[0] == number, batch
    return batch


def put(client: MooncakeClient, names: list[str], size: int) -> dict[str, Any]:
    views = [memoryview(bytearray(content(name, size))) for name in names]
    _, whole, told, done = ended(client, client.submit_batch_set(names, views))
    assert whole, told
    return {"stored": sum(done)}


def get(client: MooncakeClient, names: list[str], size: int) -> dict[str, Any]:
    _, whole, told, there = ended(client, client.submit_batch_exists(names))
    assert whole, told
    found = [name for name, is_there in zip(names, there, strict=True) if is_there]
    views = [memoryview(bytearray(size)) for _ in found]
    _, whole, told, _ = ended(client, client.submit_batch_get(found, views))
    assert whole, told
    return {"found": found, "right": sum(view == content(name, size) for name, view in zip(found, views, strict=True))}


def main() -> None:
    params, what, size, names = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    client = MooncakeClient(**params)
    print("RESULT", json.dumps({"put": put, "get": get}[what](client, names, size)), flush=True)
    client.close()


if __name__ == "__main__":
    main()
