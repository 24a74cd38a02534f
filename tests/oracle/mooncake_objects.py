"""A small client of a Mooncake pool, in the environment that has Mooncake.

    python mooncake_objects.py MASTER put|get COUNT BYTES

put stores COUNT objects of BYTES each, whose content follows from their number. get prints how many are there with
their own content, how many have another one, and how many are missing.
"""

import json
import sys
import time

from mooncake.store import MooncakeDistributedStore

_NO_ROOM = -200


def content(number: int, size: int) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def put(store: MooncakeDistributedStore, count: int, size: int) -> dict[str, int]:
    """Waits where the pool has no room until the master has made some."""
    deadline = time.monotonic() + 60
    for number in range(count):
        while (code := store.put(f"object-{number}", content(number, size))) == _NO_ROOM:
            if time.monotonic() > deadline:
                return {"stored": number}
            time.sleep(0.05)
        assert code == 0, code
    return {"stored": count}


def get(store: MooncakeDistributedStore, count: int, size: int) -> dict[str, int]:
    found = {"right": 0, "wrong": 0, "missing": 0}
    for number in range(count):
        value = store.get(f"object-{number}")
        found["missing" if not value else "right" if value == content(number, size) else "wrong"] += 1
    return found


def main() -> None:
    master, what, count, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master) == 0
    print("RESULT", json.dumps({"put": put, "get": get}[what](store, count, size)), flush=True)
    store.close()


if __name__ == "__main__":
    main()
