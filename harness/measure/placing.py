"""Brings a prefix into a warm state: the tier that the state names has it, and nothing that is asked before that tier.

A prefix gets into all tiers when the engine computes it. It leaves a tier by a reset; where the engine cannot empty
that tier and keep the one below, filler prompts push it out; a restart empties what lies in processes. proof.py then
says from counters who served the request.

The prompt is the shared prefix and a suffix that no other request ever has, so the hit is exactly the prefix.

Pushing out takes seconds. What only has to leave the engine's own cache is pushed out by the same fillers again and
again: the tiers below hold them, so that they are loaded in place of computed and stored. What was asked for least
recently leaves first, whether the fillers come from below or are new. Fillers for a tier below are always new. So for
those, several sets of prefixes are placed at once, as many as the state's tier keeps, and each serves one sample.

Of several instances, the last one is asked. Where the state's tier is shared, the first one has computed the prefix: a
hit is then of what another instance stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.engines.base import Emit, Engine, Restarts
from harness.experiment.cache import Eviction
from harness.experiment.model import Experiment
from harness.experiment.workloads import PrefixWorkload, hit_tokens
from harness.records import Capabilities, Resolved
from traces.load import Load
from traces.request import Request, Segment, Verdict, stable_id
from traces.tiers import State, all_tiers, state_named, tier_named

_UNKNOWN_TOKENS = 2**62
# More sets would save little: fillers already take a small share of each sample's time.
_MOST_SETS = 6


@dataclass
class Prefixes:
    """The prefixes of one sample, one for each of its requests, and where they are right now.

    resident: tiers that have them. absent: tiers that surely have not. home: the instance that computed them; None:
    none of several.
    """

    number: int
    resident: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    home: int | None = None


@dataclass
class Probe:
    """The requests that one cell sends, and where its prefixes are right now.

    sets: those that were made so far; most samples use the first one. current: the one that the next sample asks for.
    stray_tokens: what else was stored since the prefixes were computed. fillers_kept: whether that has the fillers of
    the engine's own cache. generation: which prefixes these are; a new one, where the old cannot be removed.
    """

    cell: str
    experiment: Experiment
    workload: PrefixWorkload
    resolved: Resolved
    capabilities: Capabilities
    stray_tokens: int = 0
    fillers_kept: bool = False
    generation: int = 0
    sets: list[Prefixes] = field(default_factory=lambda: [Prefixes(0)])
    current: int = 0

    @property
    def prefixes(self) -> Prefixes:
        return self.sets[self.current]

    @property
    def asked(self) -> int | None:
        """The instance that measured requests go to; None: there is one."""
        instances = self.experiment.deployment.instances
        return None if instances == 1 else instances - 1

    def home_for(self, state: State) -> int | None:
        """The instance that has to have computed the prefixes."""
        return 0 if self.asked is not None and state.served_by in self.experiment.deployment.shared else self.asked

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prefix that every measured request has to be served from its tier."""
        return hit_tokens(self.workload.prompt_tokens, self.workload.hit_rate, self.experiment.cache.chunk_tokens)

    def requests(self, state: str, index: int, *, fresh_prefix: bool = False) -> list[Request]:
        """One sample: `concurrency` requests, each with its own prefix and a suffix used once."""
        name = (self.experiment.seed, self.cell, state, index)
        suffix_tokens = self.workload.prompt_tokens - self.hit_tokens
        return [
            Request(
                id=f"{state}-{index:05d}-{slot:03d}",
                prompt=(*self._prefix(slot, self.current, *(name if fresh_prefix else ())),
                        Segment(stable_id("suffix", *name, slot), suffix_tokens)),
                output_tokens=self.workload.output_tokens,
                at_s=0.0,
                instance=self.asked,
            )
            for slot in range(self.workload.concurrency)
        ]  # fmt: skip

    def warmers(self, state: str, index: int, sets: Iterable[int] = (0,)) -> list[Request]:
        """The bare prefixes of these sets, one request each; none at a hit rate of 0."""
        if not self.hit_tokens:
            return []
        home, width = self.home_for(state_named(state)), self.workload.concurrency
        return [
            Request(
                id=f"warm-{state}-{index:05d}-{width * number + slot:03d}",
                prompt=self._prefix(slot, number),
                output_tokens=1,
                instance=home,
            )
            for number in sets
            for slot in range(width)
        ]

    def fillers(self, tiers: frozenset[str], state: str, index: int) -> list[Request]:
        """Prompts that nothing else ever has, as many as push all else out of these tiers: always the same ones for
        the engine's own cache, and new ones for a tier below."""
        each_tokens, count = fillers_for(self.experiment, self.resolved, tiers)
        own = () if _engines_own(tiers) else (state, index)
        name = (self.experiment.seed, self.cell, *own)
        return [
            Request(
                id=f"fill-{state}-{index:05d}-{number:05d}",
                prompt=(Segment(stable_id("filler", *name, number), each_tokens),),
                output_tokens=1,
                instance=self.asked,
            )
            for number in range(count)
        ]

    def _prefix(self, slot: int, number: int, *own: object) -> tuple[Segment, ...]:
        """number: of the set."""
        if not self.hit_tokens:
            return ()
        own = own or (("generation", self.generation) if self.generation else ())
        own += ("set", number) if number else ()
        return (Segment(stable_id("prefix", self.experiment.seed, self.cell, slot, *own), self.hit_tokens),)


class Way(NamedTuple):
    """How a prefix leaves what must not have it: the tiers that fillers push it out of, those that a restart empties,
    and what `reset` empties then.

    stays: what has it still, whatever the engine does.
    """

    empties: frozenset[str]
    pushes: frozenset[str]
    stays: frozenset[str]
    ends: frozenset[str] = frozenset()


def way_to(state: State, can: Capabilities) -> Way:
    """The way to a state from a prefix in all tiers. A reset that would also empty the state's own tier is no way."""
    tiers = {tier.name for tier in all_tiers()}
    # The page cache is asked to forget where the engine says that it can; a tier that the engine has not, has nothing.
    unwanted = {name for name in state.must_not_have if name in can.tiers or name not in tiers}
    ends = can.tiers - can.keeps if state.restarted else frozenset[str]()
    unwanted -= ends
    usable = [names for names in can.resets if names & unwanted and state.served_by not in names]
    chosen = [names for names in usable if names <= unwanted]
    left = unwanted.difference(*chosen)
    chosen += [names for names in usable if names & left]
    empties = frozenset().union(*chosen)
    left -= empties
    pushes = frozenset(left & tiers) if state.served_by is not None else frozenset()
    return Way(empties, pushes, frozenset(left - pushes), ends)


def everything(can: Capabilities) -> frozenset[str]:
    """All that a reset can empty, but for a page cache that is dropped on its own."""
    tiers = {tier.name for tier in all_tiers()}
    return frozenset().union(*(names for names in can.resets if names & tiers))


def empties_all(can: Capabilities) -> bool:
    """Whether a reset empties every tier that the engine has."""
    return bool(can.tiers) and can.tiers <= everything(can)


def obstacle(state: State, experiment: Experiment, can: Capabilities, resolved: Resolved) -> str | None:
    """Why the engine cannot be brought into the state, and the cure; None where it can."""
    way = way_to(state, can)
    if state.served_by is None:
        return None  # a prefix that the engine has never seen is in no tier
    if way.stays:
        return f"the engine cannot empty {' and '.join(sorted(way.stays))}; remove the state"
    unsized = sorted(tier for tier in way.pushes if not resolved.bytes_for_one(tier))
    if unsized or (way.pushes and not resolved.kv_bytes_per_token):
        what = f"the size of {unsized[0]}" if unsized else "the bytes of a token's KV"
        return f"fillers have to push the prefix out of {_and(way.pushes)}, and the engine does not say {what}"
    size = resolved.bytes_for_one(state.served_by)
    if not way.pushes or size is None:
        return None
    each_tokens, count = fillers_for(experiment, resolved, way.pushes)
    workload = experiment.workload
    assert isinstance(workload, PrefixWorkload)
    sample_tokens = workload.concurrency * (workload.prompt_tokens + workload.output_tokens)
    need = (each_tokens * count + sample_tokens) * (resolved.kv_bytes_per_token or 0)
    kept = int(kept_share(state.served_by, experiment) * size)
    if need <= kept:
        return None
    return (
        f"fillers have to push the prefix out of {_and(way.pushes)}, and {state.served_by} has to keep {need:,} bytes"
        f" meanwhile, of which it holds {kept:,}; enlarge cache.{state.served_by}, or make the tiers above it smaller"
    )


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def kept_share(tier: str, experiment: Experiment) -> float:
    """The share of a tier's capacity that it fills before it evicts: LMCache evicts its RAM from a watermark on."""
    return (experiment.cache.eviction or Eviction()).watermark if tier_named(tier).kind == "memory" else 1.0


def fillers_for(experiment: Experiment, resolved: Resolved, tiers: frozenset[str]) -> tuple[int, int]:
    """(tokens of each filler, how many): the largest of these tiers, filled anew. A filler is at most as long as a
    prompt. The engine's own cache drops what is oldest, block by block; of a tier below, one filler more makes sure."""
    workload, chunk_tokens = experiment.workload, experiment.cache.chunk_tokens
    assert isinstance(workload, PrefixWorkload)
    most_tokens = max(1, workload.prompt_tokens // chunk_tokens) * chunk_tokens
    largest = max((resolved.bytes_for_one(tier) or 0 for tier in tiers), default=0)
    tokens = -(-largest // (resolved.kv_bytes_per_token or 1)) + (1 if _engines_own(tiers) else most_tokens)
    count = -(-tokens // most_tokens)
    return -(-tokens // (count * chunk_tokens)) * chunk_tokens, count


def sets_of(state: State, probe: Probe) -> int:
    """How many sets of prefixes are placed at once: as many as the tiers keep beside the fillers and one more sample.

    One where only the engine's own cache has to forget them, as its fillers come back sooner than more prefixes are
    stored; where each sample restarts the engine; or where a model computes the samples: it takes no time for fillers.
    """
    way = way_to(state, probe.capabilities)
    if _engines_own(way.pushes) or state.restarted or probe.capabilities.deterministic:
        return 1
    left_tokens = _kept_tokens(probe, way) - _filler_tokens(probe, way.pushes)
    return max(1, min(left_tokens // _sample_tokens(probe) - 1, _MOST_SETS))


async def place(engine: Engine, probe: Probe, name: str, index: int, emit: Emit) -> None:
    """Brings a set of prefixes into the state of that name, for the next sample; warm-up and filler requests are
    emitted. index: of the sample; below 0 for one that only warms up.
    """
    state, can = state_named(name), probe.capabilities
    way = way_to(state, can)
    probe.current = 0
    if state.served_by is None:
        await _empty(engine, probe, everything(can))
        return
    group = _group(probe, state, way, sets_of(state, probe))
    probe.current = group[0].number
    below = tier_named(state.served_by).offload
    lost = [one for one in group if state.served_by not in one.resident or (below and _foreign(one, probe, state))]
    crowded = _crowded(probe, group, way)
    # The cache server looks for every prompt, and reads what only its storage holds: the engine's own hit waits for it.
    read_first = not below and any(_in_storage_alone(one, can) for one in group)
    # A prefix comes up into the engine's cache by being asked for; into a tier below only by being computed anew.
    elsewhere = below and (len(lost) == len(group) or any(one.resident for one in lost))
    if crowded or read_first or elsewhere:
        await _start_over(engine, probe)
        lost = group
    if lost:
        computed = [one for one in lost if not one.resident]
        warmers = probe.warmers(name, index, [one.number for one in lost])
        await engine.replay(Load(warmers, concurrency=1), emit)
        for one in lost:
            one.resident |= can.tiers if one in computed else _own_tiers(can)
            one.home = probe.home_for(state) if one in computed else one.home
            one.absent.clear()
    pushes = _to_push(group, way)
    if pushes:
        fillers = probe.fillers(pushes, name, index)
        await engine.replay(Load(fillers, concurrency=1), emit)
        probe.stray_tokens += _new_filler_tokens(probe, pushes)
        probe.fillers_kept |= _engines_own(pushes)
        _left(probe, pushes)
    if lost or pushes:
        await engine.metrics()  # waits for the stores, so that nothing is still on its way down
    if state.restarted:
        assert isinstance(engine, Restarts), "an engine that keeps a tier through a restart"
        probe.resolved = await engine.restart()
        _left(probe, way.ends)
    # A server that starts may read its files: they leave the page cache after that.
    await _empty(engine, probe, way.empties)


def _group(probe: Probe, state: State, way: Way, count: int) -> list[Prefixes]:
    """The sets to place now. Those that an earlier push left in the state come first, and need no other."""
    probe.sets += [Prefixes(number) for number in range(len(probe.sets), count)]
    sets = probe.sets[:count]
    ready = [one for one in sets if state.served_by in one.resident and way.pushes <= one.absent]
    return ready if way.pushes and ready else sets


def _to_push(group: list[Prefixes], way: Way) -> frozenset[str]:
    return way.pushes.difference(frozenset.intersection(*(frozenset(one.absent) for one in group)))


def _foreign(one: Prefixes, probe: Probe, state: State) -> bool:
    """Whether another instance has computed them than the state is about."""
    return bool(one.resident) and one.home != probe.home_for(state)


def _crowded(probe: Probe, group: list[Prefixes], way: Way) -> bool:
    """Whether what else is stored, with fillers yet to come, could push prefixes out of the smallest tier that is to
    keep them. They and the next sample have to fit."""
    pushes = _to_push(group, way)
    to_come = _new_filler_tokens(probe, pushes) if pushes else 0
    need_tokens = to_come + (len(group) + 1) * _sample_tokens(probe)
    return probe.stray_tokens > max(0, _kept_tokens(probe, way) - need_tokens)


def _filler_tokens(probe: Probe, pushes: frozenset[str]) -> int:
    each_tokens, count = fillers_for(probe.experiment, probe.resolved, pushes)
    return each_tokens * count


def _new_filler_tokens(probe: Probe, pushes: frozenset[str]) -> int:
    """What the next fillers for these tiers store: nothing, where they were stored before."""
    return 0 if probe.fillers_kept and _engines_own(pushes) else _filler_tokens(probe, pushes)


async def _empty(engine: Engine, probe: Probe, what: frozenset[str]) -> None:
    if what:
        await engine.reset(what)
    _left(probe, what)
    if _in_no_tier(probe):
        _nothing_else(probe)


def _left(probe: Probe, tiers: frozenset[str]) -> None:
    """No set is in these tiers any more."""
    for one in probe.sets:
        one.resident -= tiers
        one.absent |= tiers


def _in_no_tier(probe: Probe) -> bool:
    return all(one.absent >= probe.capabilities.tiers for one in probe.sets)


async def _start_over(engine: Engine, probe: Probe) -> None:
    """No tier has the prefixes: all are empty or, where one cannot be emptied, the prefixes are new ones."""
    await _empty(engine, probe, everything(probe.capabilities))
    if not _in_no_tier(probe):
        probe.generation += 1
        _left(probe, probe.capabilities.tiers)
    _nothing_else(probe)


def _nothing_else(probe: Probe) -> None:
    """No tier has anything beside the prefixes that counts."""
    probe.stray_tokens, probe.fillers_kept = 0, False


def _in_storage_alone(one: Prefixes, can: Capabilities) -> bool:
    """Whether storage has the prefixes and the RAM before it, which is there, has not."""
    kinds = {tier.name: tier.kind for tier in all_tiers()}
    ram = {tier for tier in can.tiers if kinds[tier] == "memory"}
    stored = {tier for tier in one.resident if kinds.get(tier) in ("storage", "store")}
    return bool(ram and stored and not ram & one.resident)


def _own_tiers(can: Capabilities) -> set[str]:
    return {tier for tier in can.tiers if _engines_own([tier])}


def _engines_own(tiers: Iterable[str]) -> bool:
    """Whether the engine itself holds these."""
    return not any(tier_named(tier).offload for tier in tiers)


def _kept_tokens(probe: Probe, way: Way) -> int:
    """Tokens that the smallest tier keeps for sure. A tier that fillers are to push the prefixes out of does not
    count."""
    per_token = probe.resolved.kv_bytes_per_token or 1
    tiers = [tier.name for tier in all_tiers() if tier.offload and tier.name not in way.pushes]
    sizes = [size for tier in tiers if (size := probe.resolved.bytes_for_one(tier))]
    filled = 1.0 if probe.capabilities.evicts_when_full else (probe.experiment.cache.eviction or Eviction()).watermark
    share = filled - 0.05
    return int(share * min(sizes) / per_token) if sizes else _UNKNOWN_TOKENS // 2


def _sample_tokens(probe: Probe) -> int:
    return probe.workload.concurrency * probe.workload.prompt_tokens


def after_sample(probe: Probe, name: str, verdict: Verdict, *, fresh_prefix: bool) -> None:
    """What a measured sample itself left behind: it computed or fetched its prefixes, and its suffixes stay.

    After one that was not proven the prefixes may be anywhere: the next one starts from empty tiers.
    """
    now = probe.prefixes
    now.absent.clear()
    if verdict != "proven":
        for one in probe.sets:
            one.resident.clear()
            one.absent.clear()
        probe.stray_tokens = _UNKNOWN_TOKENS
        return
    own = probe.workload.prompt_tokens - (0 if fresh_prefix else probe.hit_tokens)
    probe.stray_tokens += probe.workload.concurrency * own
    if state_named(name).served_by is not None:
        now.resident |= _own_tiers(probe.capabilities)
    elif not fresh_prefix:
        now.resident |= probe.capabilities.tiers
        now.home = probe.asked


def needs_fresh_prefix(can: Capabilities, name: str) -> bool:
    """Whether a sample that the engine has to compute brings a prefix of its own: some tier cannot be emptied."""
    return state_named(name).served_by is None and not everything(can) >= can.tiers
