"""Users of different kinds, in conversations of bounded length."""

from __future__ import annotations

from traces.personas import Persona, PersonaSpec, persona_requests

ONE = (Persona(name="one", share=1.0, context_tokens=(100, 100), output_tokens=(10, 10)),)


def spec(turns: int, most: int | None) -> PersonaSpec:
    return PersonaSpec(users=2, turns=turns, personas=ONE, answers="none", conversation_tokens=most)


def test_a_turn_that_a_conversation_has_no_room_for_begins_another() -> None:
    found = persona_requests(spec(turns=7, most=310), seed=3)
    # Prompts of 100, 200 and 300 tokens, each with an answer of 10; the user goes on, and asks as often.
    assert [request.prompt_tokens for request in found] == 2 * [100, 200, 300, 100, 200, 300, 100]
    assert len({request.prompt[0].hash_id for request in found}) == 2 * 3


def test_without_a_bound_a_conversation_grows_with_each_turn() -> None:
    assert [request.prompt_tokens for request in persona_requests(spec(turns=4, most=None), seed=3)][:4] == [
        100, 200, 300, 400,
    ]  # fmt: skip


def test_a_turn_longer_than_the_bound_is_a_conversation_of_its_own() -> None:
    assert {request.prompt_tokens for request in persona_requests(spec(turns=4, most=50), seed=3)} == {100}
