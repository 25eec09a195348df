"""A model for which it matters where a prefill is cut: every prompt is cut at the same places, and what is kept of one
is what would be computed anew."""

from collections.abc import Iterator

import pytest

from kvserve.engine.leaf_forms import LeafForm
from kvserve.engine.prefill import Prefill
from kvserve.engine.self_check import CUT_TOKENS
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    assert_close,
    assert_exact,
    cached,
    cold_with_logits,
    generate,
    generate_with_logits,
    prompt_of,
    running_engine,
    turn,
)
from tests.engine.odd_caches import ForgetsAtCuts, ForgetsAtCutsUnseen, use_cache
from tests.engine.test_warmer import AT_ONCE, ended, job

FIRST = prompt_of(700)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, ForgetsAtCuts)
        with running_engine(warming=AT_ONCE) as running:
            yield running


def after(engine: Engine) -> list[int]:
    """A first turn, and the prompt of the next one."""
    engine.clear_cache()
    [answer] = generate(engine, turn(FIRST, 20))
    return [*FIRST, *answer.tokens, *prompt_of(30, 3)]


def test_a_warm_row_is_the_row_that_is_computed_anew(engine: Engine) -> None:
    """Bit for bit. It begins where every prompt is cut; answers, which are computed one by one, are not kept."""
    support = engine.status.cache_support
    assert support is not None and (support.can_keep, support.cut_tokens) == (True, CUT_TOKENS)
    assert any("ForgetsAtCuts holds depends on where a prefill is cut" in note for note in support.notes)
    second = after(engine)
    warm, logits = generate_with_logits(engine, turn(second, 8))
    assert cached(warm) == 512
    expected, cold_logits = cold_with_logits(engine, second, 8)
    assert_exact(warm, expected.tokens)
    assert_close(logits, cold_logits, 0)


def test_where_it_is_not_seen_a_warm_row_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: more is reused then, and the logits are not those of a cold row."""
    monkeypatch.setattr(LeafForm, "depends_on_cuts", False)
    use_cache(monkeypatch, ForgetsAtCutsUnseen)
    with running_engine() as engine:
        second = after(engine)
        warm, logits = generate_with_logits(engine, turn(second, 8))
        assert cached(warm) > len(FIRST)
        _, cold_logits = cold_with_logits(engine, second, 8)
    with pytest.raises(AssertionError):
        assert_close(logits, cold_logits)


def test_chunks_have_one_length_however_long_they_take(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last one: neither a stream beside it nor a message's end cuts a prompt elsewhere."""
    lengths: list[int] = []
    step = Prefill.step

    def noted(*args: object) -> int:
        lengths.append(step(*args))  # type: ignore[arg-type]
        return lengths[-1]

    monkeypatch.setattr(Prefill, "step", noted)
    engine.clear_cache()
    engine._ask(lambda scheduler: scheduler._chunk_length._newest.append(1.0))  # a token a second
    generate(engine, turn(FIRST, 1), turn([*FIRST[:650], *prompt_of(50, 5)], 1))
    assert sorted(lengths) == [187, 187, 256, 256], "the second prompt has the first one's beginning"


def test_what_is_computed_ahead_ends_where_prompts_are_cut(engine: Engine) -> None:
    """The rest would have to be cut elsewhere; the job is done all the same."""
    engine.clear_cache()
    result = ended(engine.warm(job(600, FIRST)))
    assert (result.state, result.num_computed_tokens) == ("done", 512)
    warm, logits = generate_with_logits(engine, turn(FIRST, 8))
    assert cached(warm) == 512
    assert_close(logits, cold_with_logits(engine, FIRST, 8)[1], 0)
