"""What the words on a run's page mean, for those who got it forwarded."""

from __future__ import annotations

from collections.abc import Iterable

from harness.results.summary import FREE_LOAD
from traces.tiers import all_states

_WORDS = {
    "KV cache": "What the model keeps of each token of a prompt, so that it need not compute that token again.",
    "prefix": "The first part of a prompt. What an earlier request has computed of it can be reused.",
    "TTFT": "Time to first token: from sending a request to the arrival of the first token of its answer.",
    "TPOT": "Time per output token: the mean time between the tokens of an answer, after the first.",
    "prefill": "The engine computes the KV cache of the prompt's tokens that it does not find in a tier.",
    "tier": "A place that holds KV cache: the GPU's memory, CPU RAM, or storage.",
    "hit tokens": "Tokens of a prompt whose KV cache came from a tier.",
    "hit rate": "The share of the prompts' tokens whose KV cache came from a tier.",
    "hit-rate ceiling": (
        "Computed: the most of the prompts' tokens that any cache could have served that knew all prompts beforehand."
    ),
    "not computed": "Tokens of the prompt that some cache served, by the engine's own count of the request.",
    "preemptions": "How often the engine put a request back into its queue, for want of KV cache.",
    "block, chunk": "The engine's and the cache server's smallest pieces of KV cache, in tokens.",
    "turn, round": "One question of a conversation and its answer. They count from 0; prompts carry all earlier ones.",
    "trial": "The whole load, sent once from fresh caches. Several trials show how far its figures spread.",
    "cell": "One point of a sweep: one set of values of what it varies.",
    "sample": "One measurement of a state: placing the prefix there, sending the requests, reading the counters.",
    "proven": "The engine's and the cache server's own counters agree that the prefix came from that tier.",
    "verdict": "Whether the counters show that the tier that a row claims served its prefix.",
    "left out": "Rows without proof and failed requests: they are in no figure.",
    "send lag": "Actual send minus the intended one.",
    "goodput": "The share of requests whose own times are within every goal's bound.",
    "measured, paced, simulated": (
        "Measured: on real parts. Paced: a reference device or accelerator stood for one part, and kept its times."
        " Simulated: computed by a model, a prediction."
    ),
    "95 % interval": (
        "Where the true mean lies in 95 of 100 runs such as this one. Without one there were too few samples."
    ),
    "p50, p90, p95, p99": "Percentiles: so many of 100 requests took no longer. p50 is the median.",
    "sd": "Standard deviation: how far values lie from their mean, typically.",
    "CV": "Coefficient of variation: the standard deviation over requests, as a share of their mean.",
    "n for ±5 %": "How many samples would give the mean an interval of ±5 %.",
}
# What a column's heading is called in the list above, where the two differ.
_HEADINGS = {
    "mean ± 95 %": "95 % interval",
    "mean TTFT": "TTFT",
    "mean ± sd": "sd",
    "by trial": "trial",
    "turn": "turn, round",
    "round": "turn, round",
    "p50": "p50, p90, p95, p99",
    "p90": "p50, p90, p95, p99",
    "p95": "p50, p90, p95, p99",
    "p99": "p50, p90, p95, p99",
    "p99 of median TTFT": "send lag",
    "claimed tier": "tier",
    "verdicts": "verdict",
}


def glossary(states: Iterable[str]) -> list[tuple[str, str]]:
    """(word, meaning), the states of this run last."""
    used = set(states)
    own = [(state.name, _state(state.label, state.served_by)) for state in all_states() if state.name in used]
    load = [("load", "Requests as a trace has them: the engine serves each from where its prefix happens to be.")]
    return [*_WORDS.items(), *own, *(load if FREE_LOAD in used else [])]


def meaning_of(heading: str) -> str:
    """What a column's heading means, whatever stands before it ('simulated '); '' for one that needs no words."""
    plain = heading.removeprefix("simulated ").removeprefix("paced ")
    return _WORDS.get(_HEADINGS.get(plain, plain), "")


def _state(label: str, served_by: str | None) -> str:
    if served_by is None:
        return "No tier holds the prefix, so that the engine computes all of it."
    return f"The prefix lies in: {label}. No faster tier holds it."
