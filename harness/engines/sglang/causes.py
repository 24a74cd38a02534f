"""Why HiCache served less than its storage holds: what it counts by reason (SGLang 0.5.23), and the cure."""

from __future__ import annotations

from collections.abc import Mapping

from harness.collectors.prometheus import Metrics

_UNFULFILLED = "sglang:storage_prefetch_unfulfilled_tokens_total"
_DROPPED = "sglang:hicache_dropped_tokens_total"
_CURES = {
    "below_threshold": "HiCache fetches no fewer than hicache.prefetch_threshold; lower it",
    "deadline": "hicache.prefetch ended the fetch before it was complete; set it to wait_complete",
    "host_capacity": "the host pool had no room for them; enlarge cache.cpu",
    "device_capacity": "the GPU had no room for them; enlarge cache.gpu",
    "storage_transfer": "the storage gave less than it had said; see the log",
    "write_through_unbacked_eviction": "the GPU dropped them before they were copied; enlarge cache.gpu or cache.cpu",
}


def lost_tokens(metrics: Metrics) -> dict[str, int]:
    """Totals by reason: found in storage and not used, and dropped from the GPU before a copy was made."""
    found: dict[str, int] = {}
    for name in (_UNFULFILLED, _DROPPED):
        for reason, tokens in metrics.by_label(name, "reason").items():
            found[reason] = found.get(reason, 0) + tokens
    return found


def cause(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """In one clause, what was lost most between two looks, and the cure; None: SGLang reports no loss."""
    moved = {reason: tokens - before.get(reason, 0) for reason, tokens in after.items()}
    reason = max(moved, key=lambda name: moved[name], default=None)
    if reason is None or moved[reason] <= 0:
        return None
    return f"SGLang counts {moved[reason]} tokens as lost by {reason}: {_CURES.get(reason, 'see the log')}"
