"""What `harness init` writes for the simulator."""

from __future__ import annotations

from harness.engines.proposal import PREFIX_TOKENS, Proposal, Wanted, known_model, roomy_cache
from harness.engines.sim.settings import SimSettings
from simulator.calibration import load_calibration
from simulator.models import load_model
from traces.tiers import states_in

_BLOCK_TOKENS = 32


def propose_sim(wanted: Wanted) -> Proposal:
    """The model is the one that the preset was fitted on, unless one is named. Raises UserError."""
    preset = wanted.hardware or SimSettings().hardware
    known = load_calibration(preset)
    model, _ = known_model(wanted.model or known.fitted_on.model, wanted.model_file)
    cache, notes = roomy_cache(load_model(model), _BLOCK_TOKENS), []
    tiers = states_in(cache)
    if known.constants["page_cache.read.latency_s"] is None:
        cache["disk"] |= {"odirect": True}
        tiers.remove("disk")
        notes.append(f"{preset} has no times of the page cache: the disk is read past it, and state disk is left out")
    return Proposal(model, PREFIX_TOKENS + 1, {"hardware": preset}, cache, tiers, notes)
