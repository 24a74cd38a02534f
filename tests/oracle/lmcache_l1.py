"""LMCache's own L1Manager, eviction controller, store and prefetch controllers as an oracle of a CPU tier's journal.

    ENGINE_PYTHON lmcache_l1.py < journals.json > results.json

In:  [{"chunks": 40, "disk": true, "eviction": ["ARC", 0.8, 0.2],
       "journal": [["lookup", [slot, key, ...]], ["store", [id, key, ...]], ...]}, ...]
Out: [{"checked": {"lookup": 12, ...}, "evicted": 30, "wrong": [[index, what LMCache did], ...]}, ...]

The journal says what was asked of the tier, in which order, and when a transfer ended; LMCache is asked the same in
the same order and decides by itself what is hit, stored, written to disk and dropped. Where that is not what the
journal says, the note is wrong. See `Simulator.take_journal` for the notes.

Everything runs in one thread: the controllers' own loops are called for one turn at a time, their clock (`sleep` in the
eviction loop, the time-out of `poll` in the others) takes no time. The disk is a set of keys whose transfers end when
the journal says so. Objects are 4 KiB in a real, small L1 arena; nothing copies data.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.internal_api import L1ManagerListener, L2StoreResult
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import MockL2AdapterConfig
from lmcache.v1.distributed.storage_controllers import eviction_controller, prefetch_controller, store_controller
from lmcache.v1.distributed.storage_controllers.prefetch_policy import create_prefetch_policy
from lmcache.v1.distributed.storage_controllers.store_policy import create_store_policy
from lmcache.v1.distributed.storage_controllers.utils import L1ManagerDescriptor, L2AdapterDescriptor
from lmcache.v1.platform.event_notifier import create_event_notifier

CHUNK_BYTES = 4096
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([CHUNK_BYTES])], dtypes=[torch.uint8])
TTL_S = 3600  # locks must not expire on the oracle's slow clock
STORE_TAG = "l1-write"


class OneTurn:
    """In the place of a loop's stop flag: the loop runs once."""

    def __init__(self) -> None:
        self.stopped = False

    def is_set(self) -> bool:
        self.stopped, stop = not self.stopped, self.stopped
        return stop


class Disk(L2AdapterInterface):
    """An L2 adapter without a disk: stores and loads end when told, look-ups at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[ObjectKey] = set()
        self.events = [create_event_notifier() for _ in range(3)]
        self.tasks = 0
        self.storing: dict[int, list[ObjectKey]] = {}
        self.loading: dict[int, list[ObjectKey]] = {}
        self.stored: dict[int, L2StoreResult] = {}
        self.found: dict[int, Bitmap] = {}
        self.loaded: dict[int, Bitmap] = {}
        self.submitted: list[int] = []

    def get_store_event_fd(self) -> int:
        return self.events[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self.events[1].fileno()

    def get_load_event_fd(self) -> int:
        return self.events[2].fileno()

    def next_task(self) -> int:
        self.tasks += 1
        return self.tasks

    def submit_store_task(self, keys: list[ObjectKey], _objects: list[Any]) -> int:
        task = self.next_task()
        self.storing[task] = list(keys)
        self.submitted.append(task)
        return task

    def end_store(self, task: int) -> None:
        self.held.update(self.storing.pop(task))
        self.stored[task] = L2StoreResult(True, 0)
        self.events[0].notify()

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        done, self.stored = self.stored, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], _layouts: Any) -> int:
        task = self.next_task()
        self.found[task] = bits(key in self.held for key in keys)
        self.events[1].notify()
        return task

    def query_lookup_and_lock_result(self, task: int) -> Bitmap | None:
        return self.found.pop(task, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        pass

    def submit_load_task(self, keys: list[ObjectKey], _objects: list[Any]) -> int:
        task = self.next_task()
        self.loading[task] = list(keys)
        return task

    def end_load(self, task: int) -> None:
        self.loaded[task] = bits(True for _ in self.loading.pop(task))
        self.events[2].notify()

    def query_load_result(self, task: int) -> Bitmap | None:
        return self.loaded.pop(task, None)

    def close(self) -> None:
        for event in self.events:
            event.close()


def bits(flags: Any) -> Bitmap:
    values = list(flags)
    bitmap = Bitmap(len(values))
    for index, value in enumerate(values):
        if value:
            bitmap.set(index)
    return bitmap


class Deletions(L1ManagerListener):
    """Keys that L1 dropped, in order."""

    def __init__(self) -> None:
        self.keys: list[ObjectKey] = []

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        self.keys += keys

    def ignore(self, keys: list[ObjectKey]) -> None:
        pass

    on_l1_keys_reserved_read = on_l1_keys_read_finished = on_l1_keys_reserved_write = ignore
    on_l1_keys_write_finished = on_l1_keys_finish_write_and_reserve_read = on_l1_keys_accessed = ignore


class LMCache:
    def __init__(self, case: dict[str, Any]) -> None:
        size = case["chunks"] * CHUNK_BYTES
        memory = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
        config = L1ManagerConfig(memory, write_ttl_seconds=TTL_S, read_ttl_seconds=TTL_S)
        self.l1 = L1Manager(config)
        self.deletions = Deletions()
        self.l1.register_listener(self.deletions)
        self.evictor = eviction_controller.L1EvictionController(self.l1, EvictionConfig(*case["eviction"]))
        self.disk = Disk() if case["disk"] else None
        adapters = [self.disk] if self.disk else []
        described = [L2AdapterDescriptor(0, MockL2AdapterConfig(1.0, 1.0)) for _ in adapters]
        self.storer = store_controller.StoreController(self.l1, adapters, described, create_store_policy("default"))
        managers = [L1ManagerDescriptor(self.l1.l1_manager_id, config)]
        policy = create_prefetch_policy("default")
        self.prefetcher = prefetch_controller.PrefetchController([self.l1], managers, adapters, described, policy)
        for controller in (self.evictor, self.storer, self.prefetcher):
            controller._stop_flag = OneTurn()
        self.keys: dict[int, ObjectKey] = {}
        self.numbers: dict[ObjectKey, int] = {}
        self.requests: dict[int, int] = {}  # slot -> prefetch request
        self.writing: dict[int, list[ObjectKey]] = {}
        self.disk_tasks: dict[int, int | None] = {}
        self.last: Any = None  # what the next note is to say

    def named(self, numbers: list[int]) -> list[ObjectKey]:
        return [self.key(number) for number in numbers]

    def key(self, number: int) -> ObjectKey:
        if number not in self.keys:
            key = ObjectKey(number.to_bytes(8, "big"), "model", 0)
            self.keys[number], self.numbers[key] = key, number
        return self.keys[number]

    def turn(self) -> None:
        """The controllers' loops, until they have nothing to do."""
        if self.disk is not None:
            self.storer._store_loop()
            busy = True
            while busy:  # a submission, a look-up or a load that ended wakes the loop for the next turn
                self.prefetcher._prefetch_loop()
                status = self.prefetcher.report_status()
                startable = status["in_flight_request_count"] < status["max_in_flight"]
                busy = status["lookup_phase_count"] > 0 or (startable and status["pending_queue_size"] > 0)

    # One method for each kind of note: it returns None, or what LMCache did where that is not what the note says.

    def lookup(self, numbers: list[int]) -> Any:
        row = GroupedObjectKeys(self.named(numbers[1:]), 0, LAYOUT)
        self.requests[numbers[0]] = self.prefetcher.submit_prefetch_request(PrefetchTaskSpec([row]))
        self.turn()

    def answer(self, numbers: list[int]) -> Any:
        result = self.prefetcher.query_prefetch_result(self.requests.pop(numbers[0]))
        if result is None:
            return "not answered yet"
        hit, in_l1 = result.hit_cells[0], set(result.l1_hit_cells[0].get_indices_list())
        flags = [int(index in in_l1) for index in hit.get_indices_list()]
        return None if flags == numbers[1:] else flags

    def prefetched(self, numbers: list[int]) -> Any:
        request = self.prefetcher._in_flight_requests.get(self.requests[numbers[0]])
        if request is None or not request.inflight_load_tasks:
            return "nothing is being loaded"
        assert self.disk is not None
        self.disk.end_load(request.inflight_load_tasks[0])
        self.turn()
        return None

    def release(self, numbers: list[int]) -> Any:
        results = self.l1.finish_read(self.named(numbers))
        failed = [self.numbers[key] for key, error in results.items() if error.name != "SUCCESS"]
        return failed or None

    def touch(self, numbers: list[int]) -> Any:
        self.l1.touch_keys(self.named(numbers))

    def store(self, numbers: list[int]) -> Any:
        keys = self.named(numbers[1:])
        results = self.l1.reserve_write(keys, [False] * len(keys), LAYOUT, tag=STORE_TAG)
        taken = [key for key in keys if results[key][1] is not None]
        self.writing[numbers[0]] = taken
        self.last = [self.numbers[key] for key in taken]

    def storing(self, numbers: list[int]) -> Any:
        return None if self.last == numbers else self.last

    def stored(self, numbers: list[int]) -> Any:
        self.l1.finish_write(self.writing.pop(numbers[0]), tag=STORE_TAG)
        if self.disk is None:
            self.last = []
            return
        self.disk.submitted.clear()
        self.turn()
        tasks = self.disk.submitted
        new = [key for task in tasks for key in self.disk.storing[task] if key not in self.disk.held]
        self.last = [self.numbers[key] for key in new]
        for task in tasks:
            if new:
                self.disk_tasks[numbers[1]] = task
            else:  # files that exist are skipped, in no time
                self.disk.end_store(task)
        self.turn()

    writes = storing

    def written(self, numbers: list[int]) -> Any:
        task = self.disk_tasks.pop(numbers[0])
        assert self.disk is not None and task is not None
        self.disk.end_store(task)
        self.turn()

    def tick(self, numbers: list[int]) -> Any:
        dropped: list[int] = []
        for _ in range(numbers[0]):
            self.deletions.keys.clear()
            self.evictor.eviction_loop()
            if not self.deletions.keys:  # nor will the next tick drop anything
                break
            dropped += [self.numbers[key] for key in self.deletions.keys]
        return None if dropped == numbers[1:] else dropped

    def close(self) -> None:
        self.l1.close()
        if self.disk is not None:
            self.disk.close()


def run(case: dict[str, Any]) -> dict[str, Any]:
    cache = LMCache(case)
    checked: dict[str, int] = {}
    wrong: list[list[Any]] = []
    evicted = 0
    for index, (what, numbers) in enumerate(case["journal"]):
        checked[what] = checked.get(what, 0) + 1
        evicted += len(numbers) - 1 if what == "tick" else 0
        did = getattr(cache, what)(numbers)
        if did is not None:
            wrong.append([index, did])
            break  # what follows would only differ for the same reason
    cache.close()
    return {"checked": checked, "evicted": evicted, "wrong": wrong}


def main() -> None:
    eviction_controller.time = SimpleNamespace(sleep=lambda _seconds: None, monotonic=time.monotonic)
    store_controller.STORE_LOOP_POLL_TIMEOUT_MS = prefetch_controller.PREFETCH_LOOP_POLL_TIMEOUT_MS = 0
    print(json.dumps([run(case) for case in json.load(sys.stdin)]), file=RESULT)


if __name__ == "__main__":
    RESULT, sys.stdout = sys.stdout, sys.stderr  # libraries print
    main()
