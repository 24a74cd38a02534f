"""The routes of `harness serve`: HTTP in, the pacer's tokens out. A bad request gets a 400 with a one-line message."""

from __future__ import annotations

import hmac
import time
from array import array
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec
from aiohttp import web

from harness import __version__
from harness.serving.pacer import Pacer, Stream
from harness.serving.prompts import from_ids, from_text, request_name
from harness.serving.protocol import Ask, Kind, Refused, Reply, output_tokens, parse
from traces.request import Request, Segment

MAX_BODY_BYTES = 64 << 20
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    """A handler for aiohttp's low-level server, which avoids the cost of aiohttp's routing."""

    def __init__(self, pacer: Pacer, api_key: str | None = None) -> None:
        self._pacer, self._api_key = pacer, api_key
        self._model = pacer.simulator.model
        self._numbers = count(1)
        self._began = int(time.time())
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/reset_prefix_cache": ("POST", self._reset),
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            method, handler = self._routes.get(request.path, ("", self._health))
            if not method:
                raise Refused(f"no such path: {request.path}", 404, "NotFoundError")
            if request.method != method:
                raise Refused(f"{request.path} takes {method}, not {request.method}", 405, "MethodNotAllowedError")
            self._check_key(request)
            return await handler(request)
        except Refused as refused:
            return _json(refused.body(), refused.status)

    def _check_key(self, request: web.BaseRequest) -> None:
        if self._api_key is None or request.path in ("/health", "/version", "/metrics"):
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise Refused("the API key is missing or wrong", 401, "AuthenticationError")

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answer(request, "completion")

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def _answer(self, request: web.BaseRequest, kind: Kind) -> web.StreamResponse:
        ask = parse(kind, await _body(request))
        if ask.model not in (None, self._model.name):
            raise Refused(f"the model {ask.model!r} is not served; ask for {self._model.name!r}", 404, "NotFoundError")
        tokens, prompt = output_tokens(ask), self._segments(ask)
        number = next(self._numbers)
        asked = Request(id=request_name(number), prompt=prompt, output_tokens=tokens)
        try:
            if refusal := self._pacer.simulator.refusal(asked):
                raise Refused(refusal)
            stream = self._pacer.submit(asked)
        except ValueError as error:
            raise Refused(str(error)) from None
        prompt_tokens = sum(segment.tokens for segment in prompt)
        reply = Reply(ask, number, self._model.name, prompt_tokens, tokens, self._pacer.began_s)
        if ask.stream:
            return await _stream(request, stream, reply)
        while stream.completion is None:
            await stream.more(stream.tokens)
            _check(stream)
        return _json(reply.whole(stream.completion))

    def _segments(self, ask: Ask) -> tuple[Segment, ...]:
        prompt, block_tokens = ask.text_or_ids(), self._pacer.simulator.block_tokens
        if isinstance(prompt, str):
            return from_text(prompt, block_tokens)
        try:
            ids = array("I", prompt)
        except (OverflowError, TypeError):
            raise Refused("prompt holds a value that is not a token id; send integers from 0", param="prompt") from None
        if ids and max(ids) >= self._model.vocab_size:
            limit = f"{self._model.name} has {self._model.vocab_size}"
            raise Refused(f"token id {max(ids)} is out of vocabulary: {limit}", param="prompt")
        return from_ids(ids, block_tokens)

    async def _models(self, _request: web.BaseRequest) -> web.StreamResponse:
        model = {"id": self._model.name, "object": "model", "created": self._began, "owned_by": "kv-harness"}
        limits = {"max_model_len": self._model.max_position}
        return _json(msgspec.json.encode({"object": "list", "data": [model | limits]}))

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _request: web.BaseRequest) -> web.StreamResponse:
        simulator = self._pacer.simulator
        rules = {"engine_policy": simulator.engine_policy.name, "tier_policy": simulator.tier_policy.name}
        said = {"version": __version__, "engine": "harness serve", "calibration": simulator.calibration.name}
        return _json(msgspec.json.encode(said | rules))

    async def _metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=metrics(self._pacer), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _reset(self, request: web.BaseRequest) -> web.StreamResponse:
        external = request.query.get("reset_external", "false").lower() in ("true", "1")
        what = frozenset({"gpu", "cpu", "disk", "page_cache"} if external else {"gpu"})
        return _json(msgspec.json.encode({"success": self._pacer.reset(what)}))


def metrics(pacer: Pacer) -> str:
    """The pacer's counters in Prometheus' text format, under vLLM's names."""
    pacer.catch_up()
    simulator = pacer.simulator
    totals, (running, waiting) = simulator.counters(), simulator.queues
    sources = {
        "local_compute": totals.computed_tokens,
        "local_cache_hit": totals.gpu_hit_tokens,
        "external_kv_transfer": totals.external_tokens or 0,
    }
    labels = f'engine="0",model_name="{simulator.model.name}"'
    sizes = f'block_size="{simulator.block_tokens}",engine="0",num_gpu_blocks="{simulator.gpu_blocks}"'
    families = (
        ("prompt_tokens_total", "counter", [(labels, sum(sources.values()))]),
        ("prompt_tokens_by_source_total", "counter", [(f'{labels},source="{s}"', n) for s, n in sources.items()]),
        ("generation_tokens_total", "counter", [(labels, pacer.generated_tokens)]),
        ("num_requests_running", "gauge", [(labels, running)]),
        ("num_requests_waiting", "gauge", [(labels, waiting)]),
        ("cache_config_info", "gauge", [(sizes, 1)]),
    )
    lines = []
    for name, kind, samples in families:
        lines.append(f"# TYPE vllm:{name} {kind}\n")
        lines += [f"vllm:{name}{{{labelled}}} {value}\n" for labelled, value in samples]
    return "".join(lines)


async def _body(request: web.BaseRequest) -> bytes:
    body = bytearray()
    while part := await request.content.readany():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(f"the body is larger than {MAX_BODY_BYTES} bytes; send less", 413)
    return bytes(body)


def _check(stream: Stream) -> None:
    """Raises Refused if the simulator could not serve the request."""
    if stream.failure is not None:
        raise Refused(stream.failure, 503, "ServiceUnavailableError")
    if stream.completion is not None and stream.completion.error is not None:
        raise Refused(stream.completion.error)


async def _stream(request: web.BaseRequest, stream: Stream, reply: Reply) -> web.StreamResponse:
    """Sends server-sent events. The headers go out at once, as vLLM's do; each token goes out at its own time."""
    response = web.StreamResponse(headers=_SSE)
    try:
        await response.prepare(request)
        sent, chunk = 0, reply.opening()
        while True:
            await stream.more(sent)
            _check(stream)
            tokens, completion = stream.tokens, stream.completion
            chunk += reply.chunks(sent, tokens) + (reply.ending(completion) if completion else b"")
            if completion is not None:
                await response.write_eof(chunk)
                break
            await response.write(chunk)
            sent, chunk = tokens, b""
    except ConnectionResetError:
        pass  # the client disconnected; the simulator completes its request all the same
    except Refused as refused:
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % refused.body())
    return response


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})
