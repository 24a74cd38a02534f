"""Pushes every object out of a Mooncake pool's RAM onto the SSD below it, by others that are then removed.

    python -I mooncake_push.py MASTER METRICS_URL POOL_BYTES

Runs in the environment that has Mooncake. The objects that push are pinned, so that the master evicts all else; with as
many as the RAM holds, nothing else is left. Exit code 1: something is.
"""

import sys
import time
import urllib.request

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

_PIECE_BYTES = 4 * 2**20
_PREFIX = "kv-harness-push-"
_NO_ROOM = -200
_PATIENCE_S = 60.0


def main() -> int:
    master, url, pool_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store, pinned = MooncakeDistributedStore(), ReplicateConfig()
    pinned.with_hard_pin = True
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 4 * _PIECE_BYTES, "tcp", "", master):
        print("error: cannot reach the master", file=sys.stderr)
        return 1
    piece, count, alone, deadline = bytes(_PIECE_BYTES), 0, False, time.monotonic() + _PATIENCE_S
    while not alone and time.monotonic() < deadline:
        code = _NO_ROOM if count >= pool_bytes // _PIECE_BYTES else store.put(f"{_PREFIX}{count}", piece, pinned)
        count += code == 0
        if code == _NO_ROOM:
            time.sleep(0.1)
            alone = in_ram(url) <= count
    store.remove_by_regex(f"^{_PREFIX}.*", True)
    store.close()
    return 0 if alone else 1


def in_ram(url: str) -> int:
    """Objects that have a copy in RAM."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("mem_cache_nums_ "))


if __name__ == "__main__":
    sys.exit(main())
