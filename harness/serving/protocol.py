"""OpenAI's completions protocol as bytes: parses and checks requests, builds answers. No I/O."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from harness.serving.prompts import flatten, reply_word
from simulator.simulate import Completion

DEFAULT_TOKENS = {"completion": 16, "chat": 128}
MAX_TOKENS = 1 << 24  # far beyond any model; a longer answer would not fit in memory
Kind = Literal["completion", "chat"]


class Refused(Exception):
    """An error that the server answers, in OpenAI's format."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = " ".join(message.split()), status, kind, param

    def body(self) -> bytes:
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": said})


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both kinds. The server ignores sampling parameters: it samples nothing and ends no reply early."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    logprobs: bool | int | None = None


class CompletionAsk(_Ask, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]

    def text_or_ids(self) -> str | list[int]:
        """The one prompt. Raises Refused if the request has several prompts or none."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and (not prompt or not all(isinstance(part, int) for part in prompt)):
            if len(prompt) != 1:
                raise Refused(f"prompt holds {len(prompt)} prompts; send exactly one a request", param="prompt")
            prompt = prompt[0]
        checked: str | list[int] = prompt
        return checked


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise Refused(f"content of type {part.type!r} has no tokens here; send text", param="messages")
        return "".join(part.text or "" for part in self.content)


class ChatAsk(_Ask, frozen=True, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None

    def text_or_ids(self) -> str:
        """The chat as one text. Raises Refused if the chat has no message."""
        if not self.messages:
            raise Refused("messages is empty; send at least one", param="messages")
        return flatten([(message.role, message.text()) for message in self.messages])


Ask = CompletionAsk | ChatAsk
_decoders: dict[Kind, msgspec.json.Decoder[Any]] = {
    "completion": msgspec.json.Decoder(CompletionAsk),
    "chat": msgspec.json.Decoder(ChatAsk),
}


def parse(kind: Kind, body: bytes) -> Ask:
    """Parses a request's body. Raises Refused if it is not JSON, lacks a field, or asks for an unsupported feature."""
    try:
        ask: Ask = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not a {kind} request: {error or 'nested too deeply'}") from None
    for name in ("n", "best_of"):
        if getattr(ask, name) not in (None, 1):
            raise Refused(f"{name} must be 1: the server gives one answer per request", param=name)
    if ask.echo:
        raise Refused("echo is not supported; leave it out", param="echo")
    if ask.logprobs:
        raise Refused("logprobs are not supported: the server samples nothing; leave them out", param="logprobs")
    if ask.stream_options is not None and not ask.stream:
        raise Refused("stream_options need stream=true; set it, or leave them out", param="stream_options")
    return ask


def output_tokens(ask: Ask) -> int:
    """The answer's number of tokens, always the maximum asked for. Raises Refused below 1 or above MAX_TOKENS."""
    limit, default = ask.max_tokens, DEFAULT_TOKENS["completion"]
    if isinstance(ask, ChatAsk):
        limit, default = (
            limit if ask.max_completion_tokens is None else ask.max_completion_tokens,
            DEFAULT_TOKENS["chat"],
        )
    tokens = default if limit is None else limit
    if not 1 <= tokens <= MAX_TOKENS:
        raise Refused(f"max_tokens must be between 1 and {MAX_TOKENS}, not {tokens}", param="max_tokens")
    return tokens


class Reply:
    """The bytes of one answer, whose tokens are all the same word.

    `simulated`, next to the final usage, is not part of OpenAI's protocol. It holds the simulator's figures for the
    request: times in seconds of this machine's monotonic clock, and tokens by the source of their KV. began_s is the
    simulator's second 0 on that clock.
    """

    def __init__(self, ask: Ask, number: int, model: str, prompt_tokens: int, tokens: int, began_s: float) -> None:
        self.prompt_tokens, self.output_tokens, self._began_s = prompt_tokens, tokens, began_s
        self._chat = isinstance(ask, ChatAsk)
        self._word = reply_word(number)
        options = ask.stream_options or StreamOptions()
        self._continuous = bool(options.continuous_usage_stats and options.include_usage)
        self._usage = bool(options.include_usage)
        name, stem = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._head = {"id": f"{stem}-{number}", "object": name, "created": int(time.time()), "model": model}
        chunk = self._head | ({"object": "chat.completion.chunk"} if self._chat else {})
        self._chunk_head = b"data: " + msgspec.json.encode(chunk)[:-1]
        self._running = self._event({"content": self._word}, None)
        self._opening = self._event({"role": "assistant", "content": ""}, None) + self._close(0) if self._chat else b""

    def opening(self) -> bytes:
        """The bytes right before the first token's chunk."""
        return self._opening

    def chunks(self, begin: int, end: int) -> bytes:
        """The events of tokens begin to end - 1, counted from 0."""
        last = end == self.output_tokens
        if not self._continuous:
            out = (self._running + self._close(0)) * (end - begin - last)
        else:
            out = b"".join(self._running + self._close(token + 1) for token in range(begin, end - last))
        return out + self._event({"content": self._word}, "length") + self._close(end) if last else out

    def ending(self, completion: Completion) -> bytes:
        """The bytes after the last token's chunk."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        final = {"choices": [], "usage": self._final_usage(completion), "simulated": self._simulated(completion)}
        return b"%b,%b\n\ndata: [DONE]\n\n" % (self._chunk_head, msgspec.json.encode(final)[1:])

    def whole(self, completion: Completion) -> bytes:
        """The whole answer, for a request without streaming."""
        text = self._word * self.output_tokens
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
        usage = {"usage": self._final_usage(completion), "simulated": self._simulated(completion)}
        return msgspec.json.encode({**self._head, "choices": [choice], **usage})

    def _event(self, delta: dict[str, str], finish: str | None) -> bytes:
        said = {"delta": delta} if self._chat else {"text": delta["content"]}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return b'%b,"choices":[%b]' % (self._chunk_head, msgspec.json.encode(choice))

    def _close(self, tokens: int) -> bytes:
        """The end of an event, with the running usage if the client asked for it."""
        if not self._continuous:
            return b',"usage":null}\n\n' if self._usage else b"}\n\n"
        counts = (self.prompt_tokens, self.prompt_tokens + tokens, tokens)
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % counts

    def _final_usage(self, completion: Completion) -> dict[str, Any]:
        prompt, output = completion.prompt_tokens, completion.output_tokens
        cached = {"cached_tokens": prompt - completion.computed}
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
        return {**counts, "prompt_tokens_details": cached}

    def _simulated(self, completion: Completion) -> dict[str, Any]:
        first_s, last_s = completion.first_token_s, completion.last_token_s
        tokens = {f"{tier}_tokens": getattr(completion, tier) for tier in ("computed", "gpu", "cpu", "disk")}
        return {
            "first_token_s": None if first_s is None else self._began_s + first_s,
            "last_token_s": None if last_s is None else self._began_s + last_s,
            **tokens,
            "preemptions": completion.preemptions,
        }
