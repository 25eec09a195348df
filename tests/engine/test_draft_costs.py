"""Whether a draft pays is decided by what was measured: seconds are handed in."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.engine.draft_costs import FIRST_REST_QUESTIONS, MAX_REST_QUESTIONS, DraftCosts


def costs_of(*, a_step: float = 1.0, a_pass: float = 0.1, a_prompt_token: float = 0.01) -> DraftCosts:
    costs = DraftCosts(prefill_seconds=a_prompt_token)
    costs.note_pass(a_pass)
    costs.note_step(a_step)
    return costs


def test_nothing_is_drafted_before_a_step_was_seen() -> None:
    costs = DraftCosts()
    costs.note_pass(0.0)
    assert not costs.pays(1.0)
    assert not costs.earns_back(0, 1000)
    assert costs.is_worth_it, "what is computed while nobody waits does not depend on it"


def test_a_token_is_drafted_while_it_is_likely_enough_for_its_pass() -> None:
    costs = costs_of(a_pass=0.4)
    assert costs.pays(0.6)
    assert not costs.pays(0.4)
    assert not costs_of(a_pass=1.0).pays(1.0), "a model as slow as the target"


def test_what_is_claimed_and_not_drawn_is_claimed_no_more() -> None:
    costs = costs_of()
    before = costs.chance(0.9)
    for _ in range(20):
        costs.note_judged(0.9, 1, 0)
    assert costs.chance(0.9) < 0.5 * before
    for _ in range(40):
        costs.note_judged(1.8, 2, 2)
    assert costs.chance(0.9) > before


def test_a_model_that_has_nothing_to_say_is_left() -> None:
    costs = costs_of()
    for _ in range(100):
        costs.note_nothing()
        costs.note_unused()
    assert not costs.is_worth_it


def test_a_model_that_was_left_is_tried_again() -> None:
    costs = costs_of(a_pass=0.3)
    while costs.is_worth_it:
        costs.note_judged(2.0, 2, 0)
    for _ in range(2000):
        costs.note_unused()
    assert costs.is_worth_it


def test_drafts_that_lost_time_make_it_rest_longer_each_time() -> None:
    costs = costs_of()
    rests = []
    for _ in range(10):
        while not costs.rests():
            costs.note_outcome(2.0, 1)
        rests.append(1 + sum(costs.rests() for _ in range(2 * MAX_REST_QUESTIONS)))
    assert rests[0] == FIRST_REST_QUESTIONS
    assert rests == sorted(rests)
    assert rests[-1] == MAX_REST_QUESTIONS
    costs.note_outcome(0.5, 4)
    assert not costs.rests()


def test_a_prompt_is_computed_where_the_answer_earns_it_back() -> None:
    costs = costs_of()
    assert costs.earns_back(1000, 200)
    assert not costs.earns_back(100_000, 200)
    assert not costs.earns_back(1000, 2)


@given(st.integers(0, 100_000), st.integers(1, 100_000))
def test_no_more_is_expected_than_may_be_written(num_generated: int, more: int) -> None:
    assert 0 <= DraftCosts().num_left_tokens(num_generated, num_generated + more) <= more
