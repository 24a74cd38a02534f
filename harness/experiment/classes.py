"""Classes of service: who goes first, and what each class is promised."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from harness.experiment.fields import FROM_LIST, PositiveFloat, Strict
from harness.experiment.goals import checked_goal, parse_goal


def _of_a_class(text: str) -> str:
    checked_goal(text)
    if parse_goal(text).state is not None:
        raise ValueError(f"goal {text!r}: a class of service has no warm states; leave the state out")
    return text


class ServiceClass(Strict):
    """A class of service. Conversations belong to one, and so do requests without one.

    name: the class's name in figures.
    share: its share of the conversations, relative to the other classes' shares.
    priority: of all that may be sent, what has the lowest number goes first.
    goals: what the class's own figures have to keep, e.g. `e2e_p95<100ms`; judged beside measure.goals.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    share: PositiveFloat = 1.0
    priority: Annotated[int, Field(ge=0, le=1000)] = 0
    goals: Annotated[tuple[Annotated[str, AfterValidator(_of_a_class)], ...], FROM_LIST] = ()


# Those of the MLPerf Storage KV-cache benchmark: 15, 35 and 50 % of its users.
CLASS_SETS: dict[str, list[dict[str, Any]]] = {
    "mlperf": [
        {"name": "interactive", "share": 15, "priority": 0, "goals": ["e2e_p95<50ms", "e2e_p99<100ms"]},
        {"name": "responsive", "share": 35, "priority": 1, "goals": ["e2e_p95<100ms", "e2e_p99<200ms"]},
        {"name": "batch", "share": 50, "priority": 2, "goals": ["e2e_p95<1s", "e2e_p99<5s"]},
    ]
}


def _named_classes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in CLASS_SETS:
        raise ValueError(f"{value!r} is no set of classes; use {' or '.join(CLASS_SETS)}, or list them")
    return CLASS_SETS[value]


def _each_once(classes: tuple[ServiceClass, ...]) -> tuple[ServiceClass, ...]:
    names = [each.name for each in classes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"names {twice[0]} twice; name each class once")
    return classes


ServiceClasses = Annotated[
    tuple[ServiceClass, ...], FROM_LIST, BeforeValidator(_named_classes), AfterValidator(_each_once)
]
