"""The router: pins go first, turns and loads as stated, and the simulator's cluster routes the same."""

import msgspec
import pytest

from simulator.calibration import load_calibration
from simulator.cluster import Cluster, Routing, SharedTier
from simulator.columns import RequestColumns
from simulator.models import load_model
from simulator.simulate import Simulator
from traces.errors import SpecError
from traces.request import Request, Segment
from traces.routing import ROUTINGS, Router, route


def request(name: str, instance: int | None = None, wave: int = 0) -> Request:
    tokens = 64 + 32 * (sum(map(ord, name)) % 7)
    prompt = (Segment(sum(map(ord, name)), tokens),)
    return Request(id=name, prompt=prompt, output_tokens=4, instance=instance, wave=wave)


def simulator(blocks: int = 200, cpu_bytes: int | None = None, disk_bytes: int | None = None) -> Simulator:
    model, calibration = load_model("tiny-llama"), load_calibration("cpu-2core")
    return Simulator(
        model, calibration, "vllm-0.32", "lru", gpu_blocks=blocks, block_tokens=32, chunk_tokens=64,
        max_num_batched_tokens=256, max_num_seqs=8, cpu_bytes=cpu_bytes, disk_bytes=disk_bytes,
    )  # fmt: skip


def test_turns_loads_and_pins() -> None:
    assert [route("round-robin", request("a"), [9, 0, 0], sent) for sent in range(4)] == [0, 1, 2, 0]
    assert route("least-loaded", request("a"), [2, 1, 1], 0) == 1
    assert [route(routing, request("a", 2), [0, 0, 9], 0) for routing in ROUTINGS] == [2, 2, 2, 2]
    assert [route("session", request("a"), [2, 1, 1], 0, home, begun=[0, 5, 4]) for home in (None, 0)] == [2, 0]
    assert route("prefix-aware", request("a"), [2, 0, 1], 0, held=[64, 32, 64]) == 2


@pytest.mark.parametrize(
    ("routing", "instance", "said"),
    [
        ("random", None, "'random': is unknown; use one of round-robin, least-loaded, session, prefix-aware$"),
        ("round-robin", 2, "pinned to instance 2; there are 0 to 1$"),
        ("round-robin", -1, "pinned to instance -1; there are 0 to 1$"),
    ],
)
def test_refusals(routing: str, instance: int | None, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        route(routing, request("a", instance), [0, 0], 0)


@pytest.mark.parametrize("pinned", [0, 7])
@pytest.mark.parametrize("routing", ["round-robin", "least-loaded"])
def test_a_simulated_cluster_routes_the_same(routing: Routing, pinned: int) -> None:
    """pinned: every such request has an instance of its own choice; 0: none has."""
    cluster = Cluster(simulator(), instances=3, routing=routing)
    loads, expected, found = [0, 0, 0], {}, {}
    for number in range(40):
        asked = request(f"r{number}", number % 2 if pinned and number % pinned < 3 else None)
        expected[asked.id] = route(routing, asked, loads, number)
        loads[expected[asked.id]] += 1
        cluster.submit(asked, cluster.now_s)
        for done in cluster.advance(cluster.now_s + 0.01 * (number % 3)):
            found[done.id] = done.instance
            loads[done.instance] -= 1
    while len(found) < 40:
        found |= {done.id: done.instance for done in cluster.advance()}
    assert found == expected and set(found.values()) == {0, 1, 2}


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix-aware"])
def test_a_pin_holds_until_the_request_is_sent(routing: Routing) -> None:
    """Requests for later keep their pins, and an id that has completed may come again, where the router chooses."""
    cluster = Cluster(simulator(), instances=3, routing=routing)
    for number in range(12):
        cluster.submit(request(f"r{number}", 2 - number // 4), 0.1 * (12 - number))
    found: dict[str, int] = {}
    while done := cluster.advance():
        found |= {each.id: each.instance for each in done}
    assert found == {f"r{number}": 2 - number // 4 for number in range(12)}
    cluster.submit(request("r0"), cluster.now_s)
    [again] = cluster.advance()
    assert again.instance == (2 if routing == "prefix-aware" else 0), "the 13th request, or where its prefix is"


def turns(sessions: int, count: int) -> list[Request]:
    """Conversations whose prompts hold all earlier ones, their turns mixed."""
    found = []
    for number in range(count):
        for session in range(sessions):
            prompt = tuple(Segment(1000 * session + turn, 40 + 24 * session) for turn in range(number + 1))
            name = f"s{session}t{number}"
            found.append(Request(id=name, prompt=prompt, output_tokens=4, session=f"s{session}", turn=number))
    return found


@pytest.mark.parametrize("shared", [(), ("disk",)])
@pytest.mark.parametrize("levels", [False, True])
def test_what_a_router_remembers_is_what_a_cluster_holds_while_nothing_is_dropped(
    levels: bool, shared: tuple[SharedTier, ...]
) -> None:
    """One request at a time, some of them pinned to where their prefix is not."""
    if shared and not levels:
        pytest.skip("nothing to share")
    like = simulator(2000, *((2**30, 2**30) if levels else ()))
    cluster = Cluster(like, instances=3, routing="prefix-aware", shared=shared)
    chunk_tokens = 64 if levels else None
    router = Router("prefix-aware", 3, block_tokens=32, chunk_tokens=chunk_tokens, shared=bool(shared))
    chosen, found = [], []
    for number, asked in enumerate(turns(5, 6)):
        asked = msgspec.structs.replace(asked, instance=number % 3 if number % 4 == 0 else None)
        chosen.append(router.choose(asked))
        router.sent(asked, chosen[-1])
        cluster.submit(asked, cluster.now_s)
        [done] = cluster.advance()
        cluster.drain()
        router.ended(asked, done.instance, answered=True)
        found.append(done.instance)
    assert chosen == found and set(found) == {0, 1, 2}


def test_a_session_stays_where_it_began() -> None:
    cluster = Cluster(simulator(), instances=3, routing="session")
    homes: dict[str | None, set[int]] = {}
    asked = turns(4, 3)
    for first in asked[:4]:
        cluster.submit(first, 0.0)
    rest = {one.id: one for one in asked}
    while done := cluster.advance():
        for each in done:
            ended = rest.pop(each.id)
            homes.setdefault(ended.session, set()).add(each.instance)
            if after := rest.get(f"{ended.session}t{ended.turn + 1}"):
                cluster.submit(after, cluster.now_s)
    assert not rest and [len(where) for where in homes.values()] == [1, 1, 1, 1]
    assert {min(homes[f"s{number}"]) for number in range(3)} == {0, 1, 2}, "each began at the least loaded"
    with pytest.raises(ValueError, match="routing session chooses when it is sent; submit it then"):
        cluster.submit(request("later"), cluster.now_s + 1.0)
    with pytest.raises(ValueError, match=r"pinned to instance 3; there are 0 to 2$"):
        cluster.submit(request("a", 3), cluster.now_s)


def test_counters_by_instance_add_up_to_the_totals() -> None:
    for shared in ((), ("disk",), ("cpu", "disk")):
        cluster = Cluster(simulator(cpu_bytes=2**26, disk_bytes=2**30), instances=2, shared=shared)
        for asked in turns(3, 4):
            cluster.submit(asked, cluster.now_s)
            cluster.advance()
            cluster.drain()
            cluster.reset(["gpu"])
        totals, each = cluster.counters(), cluster.counters_by_instance()
        for name in totals.__struct_fields__:
            told, total = [getattr(one, name) for one in each], getattr(totals, name)
            alone = name in ("computed_tokens", "gpu_hit_tokens", "external_tokens") or not cluster.shares_server
            assert told == [None, None] if total is None or not alone else sum(told) == total, name
        assert totals.external_tokens > 0 and all(one.computed_tokens for one in each)


def test_a_pin_that_no_instance_can_serve_is_refused() -> None:
    simulator().submit(request("a", 0), 0.0)
    with pytest.raises(ValueError, match=r"^request a: is pinned to instance 1; there is one engine$"):
        simulator().submit(request("a", 1), 0.0)
    cluster = Cluster(simulator(), instances=2)
    for instance in (-1, 2):
        with pytest.raises(ValueError, match=rf"^request a: is pinned to instance {instance}; there are 0 to 1$"):
            cluster.submit(request("a", instance), 0.0)
    # What was refused is not in flight.
    cluster.submit(request("a", 1), 0.0)
    with pytest.raises(ValueError, match='"a" is in flight already'):
        cluster.submit(request("a", 0), 0.0)
    assert [done.instance for done in cluster.advance()] == [1]
    for bad in (request("a", 0), request("a", wave=1)):
        with pytest.raises(ValueError, match="send them through a Load"):
            RequestColumns.of([request("b"), bad])
    assert RequestColumns.of([msgspec.structs.replace(request("b"), at_s=1.0)]).ids == ["b"]
