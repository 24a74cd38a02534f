"""Which instance gets a request: the rules, and the router before several real engines.

    router = Router("session", instances=2)
    instance = router.choose(request)           # at the moment of sending
    router.sent(request, instance)
    router.ended(request, instance, answered=True)

The simulator's cluster has the same rules. It knows what its instances hold; a router before real engines remembers
what it has sent, and both agree as long as no instance has dropped any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.errors import SpecError
from traces.request import Request, Segment, reply_stream

ROUTINGS = ("round-robin", "least-loaded", "session", "prefix-aware")


def route(
    routing: str,
    request: Request,
    loads: Sequence[int],
    sent: int,
    home: int | None = None,
    begun: Sequence[int] = (),
    held: Sequence[int] = (),
) -> int:
    """The instance, from 0, decided at the moment of sending.

    loads: unfinished requests by instance. sent: how many requests the router has sent before. home: where the
    session's first request went; None: nowhere yet. begun: sessions that began there, by instance. held: tokens of the
    prompt's beginning, by instance, that it holds.
    A request's own `instance` goes before every routing. round-robin: `sent` modulo the number of instances.
    least-loaded: the fewest unfinished requests, and of those the lowest number. session: `home`; without one, the
    least loaded, and of those the one with the fewest sessions. prefix-aware: the most held tokens; of equal ones, the
    least loaded. Raises SpecError.
    """
    if request.instance is not None:
        if not 0 <= request.instance < len(loads):
            last = len(loads) - 1
            raise SpecError(f"request {request.id}: is pinned to instance {request.instance}; there are 0 to {last}")
        return request.instance
    if routing not in ROUTINGS:
        raise SpecError(f"routing {routing!r}: is unknown; use one of {', '.join(ROUTINGS)}")
    if routing == "round-robin":
        return sent % len(loads)
    if routing == "session" and home is not None:
        return home
    alike = [0] * len(loads)
    most = held if routing == "prefix-aware" else alike
    fewest = begun if routing == "session" else alike
    return min(range(len(loads)), key=lambda instance: (-most[instance], loads[instance], fewest[instance]))


class Router:
    """block_tokens: of an instance's GPU cache. chunk_tokens: of what lies below it; None: nothing does. shared: all
    instances can load what any of them has stored there."""

    def __init__(
        self,
        routing: str,
        instances: int,
        *,
        block_tokens: int = 1,
        chunk_tokens: int | None = None,
        shared: bool = False,
    ) -> None:
        self._routing, self._block_tokens, self._chunk_tokens = routing, block_tokens, chunk_tokens
        self._loads, self._sent = [0] * instances, 0
        self._homes: dict[str, int] = {}
        self._begun = [0] * instances
        self._shared = shared
        self.forget(blocks=True, chunks=True)

    def forget(self, *, blocks: bool, chunks: bool) -> None:
        """The instances' GPUs hold nothing any more; nor does what lies below them."""
        if blocks:
            self._own = [_Prefixes() for _ in self._loads]
        if chunks:
            each = 1 if self._shared else len(self._loads)
            self._stored = [_Prefixes() for _ in range(each)] * (len(self._loads) // each)

    def choose(self, request: Request) -> int:
        """Raises SpecError for a pin to an instance that is not there."""
        held = [self._held(request, at) for at in range(len(self._loads))] if self._routing == "prefix-aware" else ()
        home = self._homes.get(request.session) if request.session is not None else None
        return route(self._routing, request, self._loads, self._sent, home, self._begun, held)

    def sent(self, request: Request, instance: int) -> None:
        self._sent += 1
        self._loads[instance] += 1
        if request.session is not None and request.session not in self._homes:
            self._homes[request.session] = instance
            self._begun[instance] += 1

    def ended(self, request: Request, instance: int, *, answered: bool) -> None:
        self._loads[instance] -= 1
        if answered and self._routing == "prefix-aware":
            # The KV of a reply's last token is never computed.
            reply = Segment(reply_stream(request.id), request.output_tokens - 1)
            self._own[instance].add((*request.prompt, reply))
            self._stored[instance].add(request.prompt)

    def _held(self, request: Request, instance: int) -> int:
        """Tokens of the prompt in whole blocks of the GPU or whole chunks below it, whichever reaches further."""
        blocks = self._own[instance].common(request.prompt) // self._block_tokens * self._block_tokens
        if self._chunk_tokens is None:
            return blocks
        chunks = self._stored[instance].common(request.prompt) // self._chunk_tokens * self._chunk_tokens
        return max(blocks, chunks)


class _Prefixes:
    """Prompts, of which the longest beginning that another one shares with any is asked."""

    def __init__(self) -> None:
        # What follows a beginning (0: none): the longest segment of a stream, and the beginning that a whole one makes.
        self._longest: dict[tuple[int, int], int] = {}
        self._next: dict[tuple[int, int, int], int] = {}

    def add(self, prompt: Sequence[Segment]) -> None:
        at = 0
        for segment in prompt:
            stream = (at, segment.hash_id)
            self._longest[stream] = max(self._longest.get(stream, 0), segment.tokens)
            at = self._next.setdefault((*stream, segment.tokens), len(self._next) + 1)

    def common(self, prompt: Sequence[Segment]) -> int:
        """Tokens."""
        at, found = 0, 0
        for segment in prompt:
            shared = min(self._longest.get((at, segment.hash_id), 0), segment.tokens)
            found += shared
            whole = self._next.get((at, segment.hash_id, segment.tokens))
            if shared < segment.tokens or whole is None:
                break
            at = whole
        return found
