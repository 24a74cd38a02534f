"""How long LMCache's server takes to answer the questions of vLLM's connector, timed where they are asked.

LMCache 0.5.6 asks for a look-up, is told that it has begun, and asks what came of it until that is known
(integration/vllm/vllm_multi_process_adapter.py). Each question is a future that another thread resolves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .pace import Report


def time_questions(connector: Any, report: Report) -> None:
    """connector: vLLM's, or None. One without such questions is left as it is."""
    adapter = getattr(connector, "scheduler_adapter", None)
    for client in getattr(adapter, "req_clients", {}).values():
        began_s: dict[str, float] = {}
        client.lookup = _look_ups(client.lookup, report, began_s)
        client.query_prefetch_status = _statuses(client.query_prefetch_status, report, began_s)


def _look_ups(ask: Callable[..., Any], report: Report, began_s: dict[str, float]) -> Callable[..., Any]:
    def asking(key: Any, *args: Any) -> Any:
        began_s[key.request_id] = asked_s = time.perf_counter()
        return _then(ask(key, *args), lambda _answer: report.answered("lookups", time.perf_counter() - asked_s))

    return asking


def _statuses(ask: Callable[..., Any], report: Report, began_s: dict[str, float]) -> Callable[..., Any]:
    def asking(request_id: str) -> Any:
        asked_s = time.perf_counter()

        def answered(chunks: int | None) -> None:
            now_s = time.perf_counter()
            report.answered("statuses", now_s - asked_s)
            if chunks is not None and (first_s := began_s.pop(request_id, None)) is not None:
                report.answered("finds", now_s - first_s)

        return _then(ask(request_id), answered)

    return asking


def _then(future: Any, answered: Callable[[Any], None]) -> Any:
    """The future, which calls this once its answer is there."""
    resolve = future.set_result

    def resolved(answer: Any) -> None:
        answered(answer)
        resolve(answer)

    future.set_result = resolved
    return future
