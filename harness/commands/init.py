"""`harness init`: writes an experiment of one's own, from flags, or from answers on a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.options import EngineChoice
from harness.commands.output import check_writable
from harness.engines import ENGINES
from harness.errors import ConfigError
from traces.errors import UserError

if TYPE_CHECKING:
    from harness.engines.proposal import Proposal

_File = Annotated[Path, Parameter(help="The experiment file to write.")]
_Model = Annotated[
    str | None,
    Parameter(help="A name of `harness list models`, a model YAML, or a folder of weights."),
]
_Disk = Annotated[Path | None, Parameter(help="vllm, sglang: the disk tier's folder, on the disk to judge.")]
_Hardware = Annotated[str | None, Parameter(help="sim: the preset, of `harness list presets`.")]
_Device = Annotated[Literal["cpu", "gpu"] | None, Parameter(help="vllm, sglang: its build. Default: gpu where one is.")]
_Attach = Annotated[str | None, Parameter(help="A vLLM, or the --engine, that runs already: its URL.")]
_LMCacheUrl = Annotated[
    str | None, Parameter(help="With --attach: the LMCache server's HTTP address (its --http-port, 8080 unless set).")
]
_LMCachePid = Annotated[
    int | None, Parameter(help="With --attach: the LMCache server's process. Default: what listens at that address.")
]
_DiskPath = Annotated[
    str | None,
    Parameter(help="With --attach: the folder of the chunk or page files. Default: what the server was started with."),
]


@told
def init(
    file: _File = Path("experiment.yaml"),
    /,
    *,
    engine: EngineChoice | None = None,
    model: _Model = None,
    disk: _Disk = None,
    hardware: _Hardware = None,
    device: _Device = None,
    attach: _Attach = None,
    lmcache_url: _LMCacheUrl = None,
    lmcache_pid: _LMCachePid = None,
    disk_path: _DiskPath = None,
    force: Annotated[bool, Parameter(negative="", help="Replaces a file that exists.")] = False,
) -> int:
    """Writes an experiment file for your model, engine and disk, each key explained.

    On a terminal it asks for what no option says; elsewhere it never asks. With --attach it takes block, chunk and
    tier sizes from the running servers, and finds the process and folder of the disk tier.

    Example: harness init mine.yaml --engine sim --hardware cpu-2core

    Example: harness init mine.yaml --engine vllm --model llama-3.2-3b --disk /mnt/nvme

    Example: harness init mine.yaml --attach http://127.0.0.1:8000 --lmcache-url http://127.0.0.1:8080

    Example: harness init mine.yaml --engine sglang --attach http://127.0.0.1:30000
    """
    from harness.engines.proposal import NamedServers, Wanted

    _check(file, force)
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if engine is None and attach is None and asks:
        engine, attach = _ask_engine()
    engine = engine or next(name for name, kind in ENGINES.items() if kind.attaches or (kind.propose and not attach))
    kind = ENGINES[engine]
    if kind.propose is None or (attach and not kind.attaches):
        can = [name for name, other in ENGINES.items() if (other.attaches if attach else other.propose)]
        raise ConfigError(
            f"--engine {engine}: {'--attach' if attach else 'init'} is for {' and '.join(can)}; choose one"
        )
    if asks and attach and kind.cache_server_url and lmcache_url is None:
        lmcache_url = _ask(
            "The LMCache server's HTTP address (its --http-port)", "http://127.0.0.1:8080", check=_check_cache
        )
    if asks and kind.simulated and hardware is None:
        hardware = _ask("Preset of the machine (`harness list presets`)", "cpu-2core", check=_check_hardware)
    if asks and model is None and not attach:
        model = _ask(
            "Model (`harness list models`, or a folder of weights; empty: the preset's, or a tiny one)",
            "",
            check=_check_model,
        )
    if asks and disk is None and not attach and not kind.simulated:
        disk = Path(_ask("Folder for the disk tier's files, on the disk to judge", ".", check=_check_disk))
    servers = NamedServers(attach, lmcache_url, lmcache_pid, disk_path) if attach else None
    wanted = Wanted(model or None, file.with_name(f"{file.stem}-model.yaml"), disk, hardware, device, servers)
    _write(file, engine, kind.propose(wanted))
    return DONE


def _check(file: Path, force: bool) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: an experiment is a YAML file; name it {file.with_suffix('.yaml')}")
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists already; choose another name, or replace it with --force")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; make it first")
    check_writable(file)


def _name(file: Path) -> str:
    """The experiment's name, from the file's: what a run's folder may be called."""
    return re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_")[:64] or "mine"


def _ask_engine() -> tuple[str | None, str | None]:
    """Engine, and the URL of one that runs already."""
    names = [name for name, kind in ENGINES.items() if kind.propose]
    what = _ask("What serves the load (attach: a vLLM that runs already)", names[0], *names, "attach")
    if what in names:
        return what, None
    return None, _ask("Its URL", "http://127.0.0.1:8000", check=_check_server)


def _ask(question: str, default: str, *choices: str, check: Callable[[str], object] = str) -> str:
    """An answer that `check` accepts. An answer that it refuses (UserError) is asked for again."""
    from rich.prompt import Prompt

    while True:
        try:
            answer = Prompt.ask(question, default=default, choices=list(choices) or None)
            check(answer)
        except EOFError:
            print()
            raise ConfigError("init: no answer came; answer, or give options: harness init --help") from None
        except KeyboardInterrupt:
            print()
            raise
        except UserError as error:
            print(f"harness: {error}", file=sys.stderr)
        else:
            return answer


def _check_model(named: str) -> None:
    from simulator.models import load_model

    if named and not (Path(named) / "config.json").is_file():
        load_model(named)


def _check_hardware(named: str) -> None:
    from simulator.calibration import load_calibration

    load_calibration(named)


def _check_disk(named: str) -> None:
    if not Path(named).is_dir():
        raise ConfigError(f"{named}: is no folder; name one that exists, on the disk to judge")


def _check_server(url: str) -> None:
    from harness.engines.vllm.found import find_server

    find_server(url)


def _check_cache(url: str) -> None:
    from harness.engines.vllm.found import find_cache

    find_cache(url)


def _write(file: Path, engine: str, proposal: Proposal) -> None:
    """Writes the file, reads it back as a run would, and says what to do next."""
    from harness.experiment.read import load_experiment
    from harness.experiment.write import experiment_text
    from harness.measure.run import RunRequest, new_folder, preflight

    content = {
        "name": _name(file),
        "seed": 1,
        "model": proposal.model,
        "workload": {"kind": "prefix", "prompt_tokens": proposal.prompt_tokens, "hit_rate": 1.0},
        "measure": {"tiers": proposal.tiers, "samples": 5, "budget": "10min"},
        "cache": proposal.cache,
        "engines": {engine: proposal.section},
    }
    title = f"Written by `harness init`. harness run {file} --engine {engine} measures it."
    file.write_text(experiment_text(content, title), encoding="utf-8")
    plan = load_experiment(file)
    print(f"wrote {file}: {engine}, model {proposal.model}, states {', '.join(proposal.tiers)}")
    for note in proposal.notes:
        print(f"note: {note}")
    name = plan.experiment.name
    folder = new_folder(name, engine)
    try:
        cells = [plan.base_cell()]
        preflight(RunRequest(name=name, cells=cells, engine=engine, experiment=plan.origin(), folder=folder))
    except UserError as error:
        print(f"harness: {file} is valid, and cannot run here yet: {error}", file=sys.stderr)
    print(f"measure:  harness run {file} --engine {engine}")
    print(f"worth it? harness worth {file} --engine {engine}")
