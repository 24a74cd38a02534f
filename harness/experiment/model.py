"""The experiment file as strict models.

They refuse an unknown key, a wrong unit and an impossible combination before anything starts. A refusal is one line
with the file, the place in it, and the cure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, ValidationInfo, create_model, model_validator

from harness.engines import ENGINES
from harness.errors import SettingsError
from harness.experiment.cache import Cache
from harness.experiment.deployment import Deployment, upgraded
from harness.experiment.fields import Strict
from harness.experiment.measure import Measure
from harness.experiment.report import ReportSettings
from harness.experiment.storage import Storage
from harness.experiment.tiers import expanded
from harness.experiment.workloads import PrefixWorkload, SyntheticWorkload, Workload, check_free, hit_tokens
from traces.tiers import all_states, state_named, state_names

Settings = TypeVar("Settings", bound=Strict)


class EngineSections(Strict):
    """Settings by engine; --engine chooses one. The sections are those of ENGINES."""

    def of(self, settings: type[Settings]) -> Settings:
        """The section of that class. Raises SettingsError if the file lacks a section that it needs."""
        name = next(name for name, kind in ENGINES.items() if kind.settings() is settings)
        section = getattr(self, name)
        if section is None:
            needed = _required(settings)
            raise SettingsError(
                f"engines.{name} is not set; add {' and '.join(needed)}, or --set engines.{name}.{needed[0]}=…"
            )
        assert isinstance(section, settings)
        return section


def _required(settings: type[Strict]) -> list[str]:
    return [name for name, field in settings.model_fields.items() if field.is_required()]


def _section(settings: type[Strict]) -> Any:
    """A section that a file may leave out. It then has its defaults; if some key has no default, it is None."""
    return (settings | None, None) if _required(settings) else (settings, settings())


if TYPE_CHECKING:
    Engines = EngineSections
else:
    sections = {name: _section(kind.settings()) for name, kind in ENGINES.items()}
    Engines = create_model("Engines", __base__=EngineSections, __doc__=EngineSections.__doc__, **sections)


class Experiment(Strict):
    """One experiment, with everything that its result depends on.

    name: the run's name, in folders and reports.
    description: one sentence for readers.
    seed: the same seed gives the same requests on every engine.
    model: a name of `harness list models`, a YAML file or a config.json: gives the KV bytes per token.
    workload: what is sent.
    measure: what is sampled, and how often.
    cache: the tiers and their sizes.
    storage: the device below the disk tier, and its trace.
    deployment: how many engines serve the load.
    report: what the report compares.
    engines: settings by engine.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: Annotated[str, Field(min_length=1)] = "tiny-llama"
    workload: Workload
    measure: Measure = Measure()
    cache: Cache
    storage: Storage | None = None
    deployment: Deployment = Deployment()
    report: ReportSettings = ReportSettings()
    engines: Engines = Engines()

    @model_validator(mode="before")
    @classmethod
    def _upgraded(cls, config: Any, info: ValidationInfo) -> Any:
        """Puts a list of tiers into the short form. Moves keys of older manifests to their place: in an experiment file
        the author corrects them."""
        if not isinstance(config, dict):
            return config
        kept = isinstance(info.context, dict) and info.context.get("resolved")
        return expanded(upgraded(config) if kept else config)

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        check_workload(self.workload, self.measure, self.cache)
        if self.report.against is not None and isinstance(self.workload, PrefixWorkload):
            raise ValueError(
                "report.against is for free loads; states of a prefix are held against recompute; remove it"
            )
        if self.storage is not None:
            check_device(self.storage, self.cache)
        for kind in ENGINES.values():
            kind.consistent(self)
        return self


def check_device(storage: Storage, cache: Cache) -> None:
    """Refuses a device that nothing would use. Raises ValueError with the cure."""
    if cache.disk is None:
        raise ValueError("storage needs cache.disk, the tier that it is about; add it, e.g. {capacity: 2GiB}")
    if storage.device is None:
        return
    if cache.disk.path is not None:
        raise ValueError("storage.device and cache.disk.path exclude each other; keep one")
    if cache.disk.capacity > storage.device.size:
        raise ValueError(
            f"cache.disk.capacity {cache.disk.capacity} does not fit storage.device.size {storage.device.size}; enlarge"
        )


def check_workload(workload: Workload, measure: Measure, cache: Cache) -> None:
    """Refuses combinations that no single section can see. Raises ValueError with the cure."""
    if isinstance(workload, PrefixWorkload | SyntheticWorkload):
        if workload.prompt_tokens <= cache.chunk_tokens and workload.hit_rate > 0:
            raise ValueError(
                f"workload.prompt_tokens {workload.prompt_tokens} holds no whole chunk of {cache.chunk_tokens} tokens"
                f" before its last token; use at least {cache.chunk_tokens + 1}"
            )
        hit_tokens(workload.prompt_tokens, workload.hit_rate, cache.chunk_tokens)
    if isinstance(workload, PrefixWorkload):
        _check_tiers(measure, cache)
        if measure.must_reach:
            raise ValueError("measure.must_reach is for free loads; a prefix workload names measure.tiers")
        if measure.trials > 1:
            raise ValueError("measure.trials is for free loads; a prefix workload has measure.samples; use that")
        return
    if measure.tiers:
        raise ValueError(f"measure.tiers needs workload.kind prefix, not {workload.kind}; remove it")
    if measure.until or measure.samples:
        raise ValueError(f"measure.samples and until need workload.kind prefix, not {workload.kind}; remove them")
    if measure.must_reach and getattr(cache, measure.must_reach) is None:
        raise ValueError(f"measure.must_reach is {measure.must_reach}, but cache.{measure.must_reach} is not set")
    check_free(workload)


def _check_tiers(measure: Measure, cache: Cache) -> None:
    if not measure.tiers:
        raise ValueError(f"measure.tiers is empty; name some of {', '.join(state_names())}")
    if measure.samples is None and measure.until is None:
        raise ValueError("measure says neither samples nor until; add one, e.g. samples: 10")
    for name in measure.tiers:
        state = state_named(name)
        for tier in state.needs & set(Cache.model_fields):
            if getattr(cache, tier) is None:
                raise ValueError(f"measure.tiers names {name}, but cache.{tier} is not set; add it, or remove {name}")
            if state.from_device is False and getattr(getattr(cache, tier), "odirect", False):
                cold = " or ".join(each.name for each in all_states() if each.served_by == tier and each.from_device)
                raise ValueError(
                    f"measure.tiers names {name} (page cache warm), but odirect bypasses the page cache; use {cold}"
                )


def results_root() -> Path:
    """The folder of runs: $HARNESS_RESULTS, else ./results."""
    return Path(os.environ.get("HARNESS_RESULTS", "results"))
