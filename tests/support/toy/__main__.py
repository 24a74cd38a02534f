"""`harness` with a toy engine and a toy cache server: one dict entry each and one for the simulator's pack of each."""

from harness.caches import CACHES
from harness.engines import ENGINES
from simulator.policies import ENGINE_POLICIES, TIER_POLICIES
from tests.support.toy.kind import CACHE, CACHE_PACK, ENGINE_PACK, KIND

ENGINES["toy"] = KIND
CACHES["toy-cache"] = CACHE
ENGINE_POLICIES[ENGINE_PACK.name] = ENGINE_PACK
TIER_POLICIES[CACHE_PACK.name] = CACHE_PACK

if __name__ == "__main__":
    from harness.commands.app import main

    main()
