"""How long LMCache's server takes to answer the questions of vLLM's connector, timed where they are asked.

LMCache 0.5.6 asks for a look-up, is told that it has begun, and asks what came of it until that is known
(integration/vllm/vllm_multi_process_adapter.py). Each question is a future that another thread resolves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .pace import Report

_KINDS = {"lookups": "lookup", "statuses": "query_prefetch_status"}


def time_questions(connector: Any, report: Report) -> None:
    """connector: vLLM's, or None. One without such questions is left as it is."""
    adapter = getattr(connector, "scheduler_adapter", None)
    for client in getattr(adapter, "req_clients", {}).values():
        for kind, name in _KINDS.items():
            setattr(client, name, _timed(getattr(client, name), kind, report))


def _timed(ask: Callable[..., Any], kind: str, report: Report) -> Callable[..., Any]:
    def asking(*args: Any, **kwargs: Any) -> Any:
        asked_s = time.perf_counter()
        future = ask(*args, **kwargs)
        resolve = future.set_result

        def resolved(answer: Any) -> None:
            report.answered(kind, time.perf_counter() - asked_s)
            resolve(answer)

        future.set_result = resolved
        return future

    return asking
