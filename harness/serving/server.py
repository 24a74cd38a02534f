"""`harness serve`: an OpenAI-compatible server that answers at the calibrated simulator's times.

    serve(experiment, port=8000)

The server is one process on one core. It is deterministic: a request's cost depends on the experiment's model,
hardware and cache sizes, and on the requests before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket

import uvloop
from aiohttp import web

from harness.engines.sim.make import simulator_maker
from harness.errors import ServeError
from harness.experiment.model import Experiment
from harness.measure.preflight import check_cache
from harness.serving.app import App
from harness.serving.pacer import Pacer
from simulator.models import load_model
from simulator.simulate import Simulator

BACKLOG = 4096
GOODBYE_S = 1.0
GC_THRESHOLDS = (100_000, 20, 100)


def serve(experiment: Experiment, host: str, port: int, api_key_env: str | None = None) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit code. Raises ServeError and other one-line errors."""
    model = load_model(experiment.model)
    check_cache(experiment, model)
    if (instances := experiment.deployment.instances) > 1:
        raise ServeError(f"deployment.instances {instances}: a server is one engine; set it to 1")
    api_key = _key(api_key_env)
    simulator = simulator_maker(experiment, model, token_times=True)()
    with _listener(host, port) as listener:
        uvloop.run(_serve(simulator, listener, api_key))
    return 0


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ServeError(f"--api-key-env {variable}: the environment has no {variable}; export it, or leave this out")
    return key


def _listener(host: str, port: int) -> socket.socket:
    """Binds the socket, so that the user learns of a port in use before anything runs."""
    if not 0 <= port < 1 << 16:  # getaddrinfo takes a port modulo 65536
        raise ServeError(f"--port {port}: not a port; give one from 1 to 65535, or 0 for any free port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ServeError(f"--host {host} --port {port}: {_reason(error)}; give an address of this machine") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServeError(f"--port {port}: cannot listen on {host}: {_reason(error)}; choose another port") from None
    return listener


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


async def _serve(simulator: Simulator, listener: socket.socket, api_key: str | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    pacer = Pacer(simulator)
    runner = web.ServerRunner(web.Server(App(pacer, api_key), access_log=None), shutdown_timeout=GOODBYE_S)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    # The present objects stay alive, and a collection pauses all streams: exclude them and collect rarely.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {simulator.model.name} as {simulator.calibration.name} on {where}; Ctrl-C ends it", flush=True)
    try:
        await stop.wait()
    finally:
        pacer.close("the server is shutting down")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 3 * GOODBYE_S)
