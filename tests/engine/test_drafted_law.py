"""With drafts an answer is the one without, token for token, and what is kept of it is what a cold row holds: for every
family, every way of drawing, every acceptance, and wherever an answer ends."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from kvserve.engine.model import LoadedModel, load
from tests.engine.engines import FAMILIES, HYBRID, WINDOWED, request
from tests.engine.led_drafts import (
    ACCEPTED,
    NUM_TOKENS,
    PROMPT,
    assert_kept,
    assert_same,
    check_law,
    decoded,
    drafts_tried,
    entered,
    new_pool,
    row_of,
    run,
    ways_of_drawing,
    with_drafts,
)
from tests.laws import IS_FULL, THREE_KINDS, sampled, sampled_cells
from tests.models import tiny_model

STEPS = range(2, 8) if IS_FULL else (3, 5)
"""How many a row makes before it is looked at; of two that follow each other one leaves states behind."""


@cache
def loaded(family: str) -> LoadedModel:
    return load(tiny_model(family), 131072)


def in_every_run(family: str, drawing: str) -> bool:
    return family in THREE_KINDS and (drawing == "greedy" or (drawing, family) == ("seeded", "qwen3_5"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drawing", ways_of_drawing())
@sampled_cells(in_every_run)
def test_an_answer_with_drafts_is_the_one_without(family: str, drawing: str) -> None:
    """None, half, most and all of the drafted tokens are what the model draws."""
    check_law(loaded(family), ways_of_drawing()[drawing], tuple(ACCEPTED) if IS_FULL else ("half", "all"))


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_drafts_save_passes(family: str) -> None:
    """What is drawn as drafted comes in one pass, and every token is counted where it came from."""
    each = request(PROMPT, NUM_TOKENS)
    plain = decoded(loaded(family), each)
    found = decoded(loaded(family), with_drafts(each, plain))
    drafting = found.end.drafting
    assert drafting.num_accepted_tokens == drafting.num_drafted_tokens >= NUM_TOKENS // 2
    assert drafting.num_steps == NUM_TOKENS - drafting.num_accepted_tokens
    assert set(drafting.by_source) == {"conversation"}
    assert decoded(loaded(family), with_drafts(each, plain, "none")).end.drafting.num_accepted_tokens == 0


@pytest.mark.parametrize("is_repeated", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@sampled_cells(lambda family, is_repeated: family in ("qwen3", "qwen3_5") or (family in THREE_KINDS and is_repeated))
def test_an_answer_ends_with_its_stop_token_wherever_the_draft_goes_on(family: str, is_repeated: bool) -> None:
    """Nothing behind it is said or kept; a state stands behind it where later prompts have it, else before it. What is
    kept does not depend on what was drafted, which depends on how long passes take."""
    model = loaded(family)
    words = decoded(model, request(PROMPT, NUM_TOKENS)).tokens
    place = next(place for place in range(7, NUM_TOKENS) if words[place] not in words[:place])
    each = request(PROMPT, NUM_TOKENS, stop=[words[place]])
    each = replace(each, turn_end=words[place] if is_repeated else words[place] + 1)
    plain = decoded(model, each)
    assert plain.end.reason == "stop" and len(plain.tokens) == place
    for spoilt in ("none", "half", "all", lambda at: at == place) if IS_FULL else ("half", "all"):
        drafter_of: Callable[[int], bool] | str = spoilt
        found = decoded(model, with_drafts(replace(each), replace(plain, tokens=words), drafter_of))
        assert_same(found, plain)
        if family in HYBRID:
            assert (found.left.tokens[-1] == words[place]) is is_repeated
        if family not in WINDOWED:
            assert found.left.tokens == plain.left.tokens
        assert_kept(model, found.left)


@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_what_a_row_leaves_between_two_steps_are_its_own_tokens(family: str) -> None:
    """After each step of a row of which half is drafted wrongly: looked at, and taken out."""
    model = loaded(family)
    each = request(PROMPT, NUM_TOKENS)
    plain = decoded(model, each)
    with drafts_tried():
        for num_steps in STEPS:
            pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
            entered(pool, model, row)
            for _ in range(num_steps):
                pool.step()
            looked_at = pool.look_at(row)
            assert looked_at is not None
            assert_kept(model, looked_at)
            left = pool.remove(row)
            assert left is not None
            assert_kept(model, left)
            pool.discard()


@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_a_row_that_is_taken_out_enters_again_where_it_was(family: str) -> None:
    """Put back, or converted: the token that is drawn is handed out, and its caches hold all the others."""
    model = loaded(family)
    each = request(PROMPT, NUM_TOKENS, temperature=1.0, seed=5)
    plain = decoded(model, each)
    with drafts_tried():
        for num_steps in STEPS:
            pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
            entered(pool, model, row)
            for _ in range(num_steps):
                pool.step()
            assert not pool.hand_out_drawn(row).failed
            left = pool.remove(row)
            assert left is not None and left.tokens == row.tokens()[:-1]
            pool.enter(row, left.caches)
            [found] = run(pool, row)
            assert_same(found, plain)
            assert_kept(model, found.left)
            pool.discard()


@pytest.mark.parametrize("num_others", sampled((1, 3), (1,)))
@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_rows_that_join_and_leave_change_no_word(family: str, num_others: int) -> None:
    """It decodes by itself with drafts, beside others without, and by itself again."""
    model = loaded(family)
    each, short = request(PROMPT, NUM_TOKENS), [request(PROMPT[seed + 1 :], 3) for seed in range(num_others)]
    plain, plain_others = decoded(model, each), [decoded(model, other) for other in short]
    with drafts_tried():
        pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
        entered(pool, model, row)
        for _ in range(3):
            pool.step()
        assert [group.is_drafted for group in pool._groups if group.rows] == [True]
        others = [row_of(other) for other in short]
        for other in others:
            entered(pool, model, other)
        assert [len(group.rows) for group in pool._groups if group.rows] == [1 + num_others]
        found_others = run(pool, *others)
        pool.step()
        assert [group.is_drafted for group in pool._groups if group.rows] == [True]
        [found] = run(pool, row)
    pool.discard()
    assert_same(found, plain)
    assert [other.tokens for other in found_others] == [other.tokens for other in plain_others]
    assert found.end.drafting.num_accepted_tokens > 3
    assert_kept(model, found.left)
