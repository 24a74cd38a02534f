"""Event streams, fed byte by byte and in every split: where the reads fall must not matter."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from harness.engines.http.dialect import Completions
from harness.engines.http.stream import MAX_EVENT_BYTES, Answer, EventDecoder, EventTooLong
from traces.request import TokensByTier

STREAM = b': hello\n\ndata: {"a": 1}\n\ndata:two\ndata: lines\nid: 7\n\nevent: ping\n\n\n\ndata: [DONE]'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_the_same_wherever_they_are_split(newline: bytes) -> None:
    text = STREAM.replace(b"\n", newline)
    splits = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in [*splits, [text[at : at + 1] for at in range(len(text))]]:
        decoder = EventDecoder()
        got = [event for piece in pieces for event in decoder.feed(piece)]
        assert got + decoder.flush() == EVENTS
        assert decoder.flush() == []


def test_an_event_without_end_is_refused_and_a_long_read_of_short_ones_is_not() -> None:
    decoder, short = EventDecoder(), b"data: x\n\n"
    count = MAX_EVENT_BYTES // len(short) + 1
    assert len(decoder.feed(short * count)) == count
    decoder.feed(b"d" * MAX_EVENT_BYTES)
    with pytest.raises(EventTooLong, match=f"longer than {MAX_EVENT_BYTES} bytes"):
        decoder.feed(b"d")


def streaming() -> Answer:
    answer = Answer(sent_s=1.0, decode=Completions("m").decode)
    answer.status, answer.content_type = 200, "text/event-stream"
    return answer


def test_events_of_one_read_share_its_moment_and_nothing_counts_after_done() -> None:
    answer = streaming()
    answer.feed(b'data: {"choices":[{"text":""}]}\n\n', 2.0)
    answer.feed(b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\ndata: {"cho', 3.0)
    answer.feed(b'ices":[{"text":"c"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n', 4.0)
    answer.feed(b'data: [DONE]\n\ndata: {"choices":[{"text":"d"}]}\n\n', 5.0)
    answer.end(6.0)
    assert (answer.first_chunk_s, answer.token_s, answer.wants_more) == (2.0, [3.0, 3.0, 4.0], True)
    assert answer.failure(sent_tokens=9) is None
    assert answer.failure(sent_tokens=8) == "server counted 9 prompt tokens, sent 8"


def test_what_can_be_of_no_use_is_not_read_further() -> None:
    endless, text = streaming(), Answer(sent_s=1.0, decode=Completions("m").decode)
    endless.feed(b"d" * (MAX_EVENT_BYTES + 1), 2.0)
    text.status, text.content_type = 502, "text/html"
    text.feed(b"<p>" + b"x" * MAX_EVENT_BYTES, 2.0)
    assert (endless.wants_more, text.wants_more) == (False, False)
    assert (endless.failure(1) or "").startswith("an event of the stream is longer than")
    assert (text.failure(1) or "").startswith("HTTP 502: <p>xxx")


class Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    tokens_by_tier: ClassVar[TokensByTier] = {}


class Generated(msgspec.Struct):
    """An event of a server with a stream of its own shape: the count of tokens comes with each text."""

    text: str | None = None
    meta_info: Meta | None = None
    error: object = None
    token_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def usage(self) -> Meta | None:
        return self.meta_info


def test_another_dialect_is_read_by_the_same_answer() -> None:
    answer = Answer(sent_s=1.0, decode=msgspec.json.Decoder(Generated).decode)
    answer.status, answer.content_type = 200, "text/event-stream"
    for number, text in enumerate(("a", "ab", "ab"), 1):
        counts = f'{{"prompt_tokens":9,"completion_tokens":{min(number, 2)},"cached_tokens":8}}'
        answer.feed(f'data: {{"text":"{text}","meta_info":{counts}}}\n\n'.encode(), float(number))
    answer.feed(b"data: [DONE]\n\n", 4.0)
    assert answer.token_s == [1.0, 2.0]
    assert answer.usage is not None and answer.usage.cached_tokens == 8
    assert answer.failure(sent_tokens=9) is None
