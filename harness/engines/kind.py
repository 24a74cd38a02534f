"""What the harness knows of an engine before it makes one, as data: one EngineKind an engine, in ENGINES.

A kind stands below the experiment's models, and `harness --help` and `harness doctor` read it: its module imports
nothing that takes time. What its functions need, its settings included, they import when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.proposal import Proposal, Wanted
    from harness.experiment.fields import Cores, Strict
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec
    from traces.request import Request

EngineName = str  # a key of ENGINES
Clock = Callable[[], float]


class DiskTier(NamedTuple):
    """How the bytes of an engine's disk tier move, as an experiment has it.

    real: on a real device, which the harness can make for the run and trace. modelled: a reference device's limit
    enters the model, and there is nothing to trace. none: storage.device and storage.trace have no meaning. why: for
    what is not real, the reason and the cure, as the end of a refusal.
    """

    moves: Literal["real", "modelled", "none"]
    why: str = ""


class Traits(NamedTuple):
    """What of an engine's transfers waits for what (simulator/calibration.py has the same names)."""

    synchronous_loads: bool = False
    shared_core: bool = False
    yields_core: bool = False
    serial_chunks: bool = False
    copied_reads: bool = False
    launches_steps: bool = False


class Packs(NamedTuple):
    """The simulator's packs (simulator/policies/) that stand for an engine and its cache server.

    pool_policy: of a pool and what is below it; None: there is none, and the file's own stays. pool_lease: its lease in
    seconds; None: the pack's.
    """

    engine_policy: str
    tier_policy: str
    pool_policy: str | None = None
    pool_lease: float | None = None

    @property
    def settings(self) -> dict[str, str | float]:
        """The keys of engines.sim that they set."""
        return {key: value for key, value in self._asdict().items() if value is not None}


class Environment(NamedTuple):
    """What an environment in .engines/NAME has to hold: one of `distributions`, and all of `also`."""

    distributions: tuple[str, ...]
    also: tuple[str, ...] = ()


def packs_of_the_file(experiment: Experiment) -> Packs:
    """The packs that the file names in engines.sim: of an engine that can stand for anything, only the user knows."""
    from harness.engines.sim.settings import SimSettings

    settings = experiment.engines.of(SimSettings)
    return Packs(settings.engine_policy, settings.tier_policy, settings.pool_policy, settings.pool_lease)


def _accept(_experiment: Experiment) -> None:
    """Nothing of an experiment is wrong for this engine."""


def _accept_here(_experiment: Experiment, _results: Path) -> None:
    """Nothing of this machine is wrong for this engine."""


def _accept_load(_experiment: Experiment, _model: ModelSpec, _requests: Sequence[Request]) -> None:
    """Nothing of a load is too much for this engine."""


def _none_given(_experiment: Experiment) -> Mapping[str, float]:
    return {}


def _unpinned(_experiment: Experiment) -> Cores:
    from harness.experiment.fields import Cores

    return Cores()


def _disk_path(experiment: Experiment, results: Path) -> Path:
    disk = experiment.cache.disk
    return Path(disk.path) if disk and disk.path else results


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """One engine. What has no default, each engine has to say: a silent default would be a false number.

    settings: the model of its section in `engines:`. make: the engine, nothing of it started; SettingsError.
    disk, traits: see DiskTier and Traits.
    given: constants of the cost model, by name, that the engine keeps because the experiment says so: the simulator
    gets the same ones, and no fit changes them. SettingsError.
    packs: what stands for it in a validation and in a calibration's fit; None: the simulator has nothing like it.
    consistent: refuses a file whose sections contradict each other (ValueError with the cure). Every file is asked,
    whatever engine will run it.
    check: refuses what this machine lacks (PreflightError), before a run of this engine. check_load: refuses the
    requests of a free load that the tiers can never hold (PreflightError).
    cores: where its processes and the load are pinned. disk_path: where the files of its disk tier are.
    unproven: what to add to the settings before a missing tier can be proven; "" where nothing helps.
    untold: what to set so that it tells its answers token by token; "" where nothing helps.
    propose: what `harness init` writes for it; None: nothing. attaches: it can be one that runs already;
    cache_server_url: whose cache server then has an address of its own.
    runs_already: it and its cache server run already, so that the cache server cannot be left out.
    without_gpu: cache.gpu may be 0. simulated: its times are computed, whatever machine it runs on.
    environment: what scripts/engine_env has to install for it; None: nothing. traps: by what its tiers silently serve
    less, told by `harness doctor` where it is installed.
    """

    settings: Callable[[], type[Strict]]
    make: Callable[[Experiment, ModelSpec, Path, Clock], Engine]
    disk: Callable[[Experiment], DiskTier]
    traits: Callable[[Experiment], Traits]
    packs: Callable[[Experiment], Packs | None]
    given: Callable[[Experiment], Mapping[str, float]] = _none_given
    consistent: Callable[[Experiment], None] = _accept
    check: Callable[[Experiment, Path], None] = _accept_here
    check_load: Callable[[Experiment, ModelSpec, Sequence[Request]], None] = _accept_load
    cores: Callable[[Experiment], Cores] = _unpinned
    disk_path: Callable[[Experiment, Path], Path] = _disk_path
    unproven: Callable[[Experiment], str] = lambda _: ""
    untold: str = ""
    propose: Callable[[Wanted], Proposal] | None = None
    attaches: bool = False
    cache_server_url: bool = False
    runs_already: Callable[[Experiment], bool] = lambda _: False
    without_gpu: bool = False
    simulated: bool = False
    environment: Environment | None = None
    traps: str = ""
