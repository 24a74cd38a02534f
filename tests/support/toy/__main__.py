"""`harness` with a toy engine and a toy cache server: one dict entry each, and nothing else."""

from harness.caches import CACHES
from harness.engines import ENGINES
from tests.support.toy.kind import CACHE, KIND

ENGINES["toy"] = KIND
CACHES["toy-cache"] = CACHE

if __name__ == "__main__":
    from harness.commands.app import main

    main()
