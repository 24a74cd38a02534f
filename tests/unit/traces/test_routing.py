"""The router: pins go first, turns and loads as stated, and the simulator's cluster routes the same."""

import msgspec
import pytest

from simulator.calibration import load_calibration
from simulator.cluster import Cluster, Routing
from simulator.columns import RequestColumns
from simulator.models import load_model
from simulator.simulate import Simulator
from traces.errors import SpecError
from traces.request import Request, Segment
from traces.routing import ROUTINGS, route


def request(name: str, instance: int | None = None, wave: int = 0) -> Request:
    tokens = 64 + 32 * (sum(map(ord, name)) % 7)
    prompt = (Segment(sum(map(ord, name)), tokens),)
    return Request(id=name, prompt=prompt, output_tokens=4, instance=instance, wave=wave)


def simulator() -> Simulator:
    model, calibration = load_model("tiny-llama"), load_calibration("cpu-2core")
    return Simulator(
        model, calibration, "vllm-0.32", "lru", gpu_blocks=200, block_tokens=32, chunk_tokens=64,
        max_num_batched_tokens=256, max_num_seqs=8,
    )  # fmt: skip


def test_turns_loads_and_pins() -> None:
    assert [route("round-robin", request("a"), [9, 0, 0], sent) for sent in range(4)] == [0, 1, 2, 0]
    assert route("least-loaded", request("a"), [2, 1, 1], 0) == 1
    assert [route(routing, request("a", 2), [0, 0, 9], 0) for routing in (*ROUTINGS, "prefix-aware")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("routing", "instance", "said"),
    [
        ("prefix-aware", None, "does not tell which prefixes it holds; use least-loaded$"),
        ("random", None, "'random': is unknown; use one of round-robin, least-loaded$"),
        ("round-robin", 2, "pinned to instance 2; there are 0 to 1$"),
        ("round-robin", -1, "pinned to instance -1; there are 0 to 1$"),
    ],
)
def test_refusals(routing: str, instance: int | None, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        route(routing, request("a", instance), [0, 0], 0)


@pytest.mark.parametrize("pinned", [0, 7])
@pytest.mark.parametrize("routing", ROUTINGS)
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


@pytest.mark.parametrize("routing", [*ROUTINGS, "prefix-aware"])
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
