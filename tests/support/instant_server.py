"""An OpenAI-compatible server that costs next to nothing, so that a measurement shows the client's cost.

    $ python -m tests.support.instant_server --port 0 --tokens 8
    listening 43121

It streams made-up tokens at once or at a given pace, counts the prompt's tokens truthfully, and can misbehave in
each way that the load loop must survive (--fault). In a test: `server = await serve(fault="hang")`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
from collections import deque
from typing import Literal, cast, get_args

import msgspec
import uvloop

Fault = Literal[
    "status500", "json_error", "reset_midstream", "no_done", "no_usage", "split_events", "slow", "wrong_prompt_count",
    "hang", "error_event", "empty_text_first", "cut_chunk", "echo_key", "bad_event", "not_http", "close_delimited",
    "plain_json", "no_token_ids", "fewer_token_ids", "empty_texts", "usage_beside_text",
]  # fmt: skip

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class StreamOptions(msgspec.Struct, frozen=True):
    continuous_usage_stats: bool = False


class Ask(msgspec.Struct):
    prompt: list[int] | str
    max_tokens: int
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class Server:
    """What the tests look at: requests as they came, and how many were in flight at once."""

    def __init__(self, tokens: int | None, ttft_s: float, itl_s: float, fault: Fault | None) -> None:
        self.tokens, self.ttft_s, self.itl_s, self.fault = tokens, ttft_s, itl_s, fault
        self.seen: deque[tuple[bytes, bytes]] = deque(maxlen=10_000)
        self.in_flight = self.max_in_flight = self.connections = 0
        self.listener: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        self._server.connections += 1

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        _, marker, rest = head.partition(b"content-length:")
        length = int(rest.split(b"\r\n", 1)[0]) if marker else 0
        if len(self._buffer) < end + 4 + length:
            return
        exact_head, body = self._buffer[:end], self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        self._answer(exact_head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        server = self._server
        if head.startswith(b"GET /v1/models"):
            self._plain(200, b'{"object":"list","data":[{"id":"instant","object":"model"}]}')
        elif head.startswith(b"GET /health"):
            self._plain(200, b"{}")
        elif not head.startswith(b"POST /v1/completions"):
            self._plain(404, b'{"detail":"Not Found"}')
        else:
            server.seen.append((head, body))
            server.in_flight += 1
            server.max_in_flight = max(server.max_in_flight, server.in_flight)
            if server.fault is None and not server.ttft_s and not server.itl_s:
                server.in_flight -= 1
                self._transport.write(STREAM_HEAD + b"".join(map(chunk, events(server, body))) + b"0\r\n\r\n")
            else:
                self._task = asyncio.get_running_loop().create_task(self._stream(head, body))

    async def _stream(self, head: bytes, body: bytes) -> None:
        try:
            await misbehave(self._server, self._transport, head, body)
        finally:
            self._server.in_flight -= 1
            self._task = None

    def _plain(self, status: int, body: bytes) -> None:
        self._transport.write(plain(status, body))


def plain(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(server: Server, body: bytes) -> list[bytes]:
    """The whole stream, one element an event."""
    ask = msgspec.json.decode(body, type=Ask)
    count = server.tokens if server.tokens is not None else ask.max_tokens
    fault = server.fault
    token = (
        b'data: {"id":"c","object":"text_completion","created":1,"model":"instant","choices":[{"index":0,'
        b'"text":" x","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    )
    sent = len(ask.prompt) if isinstance(ask.prompt, list) else len(ask.prompt.split())
    prompt = sent + (fault == "wrong_prompt_count")
    usage = (
        b'data: {"id":"c","object":"text_completion","created":1,"model":"instant","choices":[],"usage":'
        b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'
        b"\n\n" % (prompt, prompt + count, count, sent // 2)
    )
    empty = token.replace(b'" x"', b'""')
    out = [empty if fault == "empty_texts" else token] * count
    if fault == "empty_text_first":
        out.insert(0, empty)
    if ask.return_token_ids and fault != "no_token_ids":
        head, index, tail = token.partition(b'"index":0')
        telling = head + index + b',"token_ids":[%d]' + tail
        out = [telling % ((sent + n) % 1000) for n in range(len(out))]
        # With the first, the prompt's, as vLLM tells them.
        out[0] = out[0].replace(index, b'"prompt_token_ids":%b,%b' % (msgspec.json.encode(ask.prompt), index), 1)
    if fault == "usage_beside_text":
        usage = usage.replace(b'"choices":[]', b'"choices":[{"index":0,"text":"","finish_reason":"length"}]')
    elif ask.stream_options.continuous_usage_stats:
        first = count - len(out) + 1  # an empty first chunk counts 0
        out = [event.replace(b'"usage":null', running(prompt, first + n)) for n, event in enumerate(out)]
    if fault == "fewer_token_ids":
        out[0] = out[0].replace(b"token_ids", b"other_ids")
    if fault == "bad_event":
        out.append(b"data: {not json\n\n")
    if fault == "error_event":
        return [*out, b'data: {"error":{"message":"the engine\\ndied","type":"Internal","code":500}}\n\n', DONE]
    if fault != "no_usage":
        out.append(usage)
    return out if fault == "no_done" else [*out, DONE]


def running(prompt: int, tokens: int) -> bytes:
    return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + tokens, tokens)


DONE = b"data: [DONE]\n\n"


async def misbehave(server: Server, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
    """Answers at the given pace, and in the way that the fault says."""
    fault = server.fault
    if fault == "status500":
        transport.write(plain(500, b"<html>\nInternal Server Error\n</html>", b"text/html"))
    elif fault == "json_error":
        transport.write(plain(400, b'{"error":{"message":"prompt is too long","type":"BadRequest","code":400}}'))
    elif fault == "echo_key":
        transport.write(plain(401, b'{"error":"no such key: ' + head.partition(b"Bearer ")[2].split()[0] + b'"}'))
    elif fault == "not_http":
        transport.write(b"220 mail.example ESMTP\r\n")
    elif fault == "plain_json":
        transport.write(plain(200, b'{"text":"all at once"}'))
    elif fault == "hang":
        await asyncio.sleep(3600)
    elif fault == "close_delimited":
        whole = b"".join(events(server, body)).replace(b"\n", b"\r\n")
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: hello\r\n\r\n" + whole)
        transport.close()
    else:
        await stream(server, transport, body)


async def stream(server: Server, transport: asyncio.Transport, body: bytes) -> None:
    transport.write(STREAM_HEAD)
    await asyncio.sleep(server.ttft_s)
    for number, event in enumerate(events(server, body)):
        if number:
            await asyncio.sleep(0.02 if server.fault == "slow" else server.itl_s)
        framed = chunk(event)
        if server.fault in ("reset_midstream", "cut_chunk") and number == 1:
            transport.write(framed[: len(framed) // 2])
            await asyncio.sleep(0.01)
            if server.fault == "reset_midstream":
                at_once = struct.pack("ii", 1, 0)  # no lingering: the kernel sends RST instead of FIN
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            transport.close()
            return
        for piece in [framed[i : i + 7] for i in range(0, len(framed), 7)]:
            if server.fault != "split_events":
                transport.write(framed)
                break
            transport.write(piece)
            await asyncio.sleep(0)
    transport.write(b"0\r\n\r\n")


async def serve(
    port: int = 0, *, tokens: int | None = None, ttft_ms: float = 0, itl_ms: float = 0, fault: Fault | None = None
) -> Server:
    """Listens on 127.0.0.1. tokens None: as many as each request asks for."""
    server = Server(tokens, ttft_ms / 1e3, itl_ms / 1e3, fault)
    loop = asyncio.get_running_loop()
    server.listener = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=4096)
    server.port = server.listener.sockets[0].getsockname()[1]
    return server


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, help="output tokens; default: what each request asks for")
    parser.add_argument("--ttft-ms", type=float, default=0)
    parser.add_argument("--itl-ms", type=float, default=0)
    parser.add_argument("--fault", choices=get_args(Fault))
    args = parser.parse_args()
    server = await serve(args.port, tokens=args.tokens, ttft_ms=args.ttft_ms, itl_ms=args.itl_ms, fault=args.fault)
    print("listening", server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
