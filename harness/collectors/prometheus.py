"""One scrape of a /metrics page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx


class Metrics:
    """The samples of one scrape, by the names that the page gives them.

    A page has hundreds of lines, most of them buckets, and one is read several times for each sample of a run: only
    the lines of the metrics that are asked for are parsed.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[str]] = {}
        for line in text.split("\n"):
            if line and not line.startswith("#"):
                self._lines.setdefault(line.partition(" ")[0].partition("{")[0], []).append(line)

    def total(self, name: str, **labels: str) -> int | None:
        """Sums over all label sets that contain `labels`; None if the metric has no such sample."""
        values = [sample.value for sample in self._matching(name, labels)]
        return round(sum(values)) if values else None

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums over all label sets, by the values of one label; without samples that lack it."""
        found: dict[str, float] = {}
        for sample in self._matching(name, {}):
            if (value := sample.labels.get(label)) is not None:
                found[value] = found.get(value, 0.0) + sample.value
        return {value: round(total) for value, total in found.items()}

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the metric's first sample, which carry an info metric's facts; empty if it has no sample."""
        return next((dict(sample.labels) for sample in self._matching(name, {})), {})

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        wanted = labels.items()
        families = text_string_to_metric_families("\n".join(self._lines.get(name, ())) + "\n")
        samples = (sample for family in families for sample in family.samples)
        return (s for s in samples if all(s.labels.get(k) == v for k, v in wanted))


async def scrape(client: httpx.AsyncClient, url: str) -> Metrics:
    """Reads the page once. Raises httpx.HTTPError."""
    response = await client.get(url)
    response.raise_for_status()
    return Metrics(response.text)
