"""What a start has found out about drafts is taken over by the next one, and should it be wrong no answer is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvserve.engine import draft_support, engine_start
from kvserve.engine.batch_costs import MAX_BATCH_TOKENS
from kvserve.engine.draft_nouns import DraftSettings, DraftsSeen, DraftSupport
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.model import CacheSupport
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, MEASURED_WIDTHS, PassCosts
from kvserve.engine.width_noise import NUM_TOKENS, WIDTHS, WidthNoise, find_width_noise, told
from kvserve.engine.worker import Engine
from tests.engine.engines import FAMILIES, engine_settings, generate, request, running_engine
from tests.engine.led_drafts import NUM_TOKENS as NUM_ANSWER_TOKENS
from tests.engine.led_drafts import PROMPT, LedDrafter, answered, entered, new_pool, row_of, with_drafts
from tests.engine.odd_caches import HidesItsArrays, use_cache
from tests.engine.test_drafted_law import loaded
from tests.engine.test_pass_width import LedModel
from tests.laws import sampled
from tests.models import tiny_model

ON, EXACT = DraftSettings(is_on=True), DraftSettings(is_on=True, is_exact=True)


@cache
def found_of(family: str) -> tuple[DraftSupport, DraftsSeen]:
    support = find_draft_support(loaded(family), ON)
    assert support.seen is not None
    return support, support.seen


def noises(num_agreeing: int, num_tokens: int = NUM_TOKENS) -> tuple[WidthNoise, ...]:
    """Passes of up to so many tokens are those of single steps."""
    return tuple(WidthNoise(width, 0.0 if width <= num_agreeing else 1.0, 0, num_tokens) for width in WIDTHS)


def agreeing(widths: Sequence[int]) -> tuple[WidthNoise, ...]:
    """Of the widths between, at which exact passes look besides."""
    return tuple(WidthNoise(width, 0.0, 0, NUM_TOKENS) for width in widths)


# --- what is remembered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5", "qwen3")))
def test_what_is_remembered_of_drafts_is_what_was_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of caches, as a file has it; no pass goes through the model."""
    model, (first, seen) = loaded(family), found_of(family)
    assert seen == DraftsSeen.from_row(seen.row())
    monkeypatch.setattr(type(model.module), "__call__", lambda *_, **__: pytest.fail("it was tried"))
    again = find_draft_support(model, ON, seen)
    assert again == replace(first, costs=again.costs, together=again.together)
    assert (again.together is None) is (first.together is None) is (MAX_BATCH_TOKENS not in seen.ratios)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the trials that ran."""
    ran: list[str] = []

    def counting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **more: Any) -> Any:
            if not more:  # what exact passes look at besides is no part of what is remembered
                ran.append(name)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    counting(draft_support, "_prove_all")
    counting(draft_support, "find_width_noise")
    counting(PassCosts, "measure")
    yield ran


ALL = ["measure", "_prove_all", "find_width_noise"]


@pytest.fixture
def only_drafts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a start takes most of its time."""
    monkeypatch.setattr(engine_start, "check_caches", lambda _: CacheSupport())
    monkeypatch.setattr(engine_start, "_draw_two_tokens", lambda *_: None)


@pytest.mark.usefixtures("only_drafts_are_tried")
def test_an_engine_tries_drafts_at_its_first_start_with_them(tmp_path: Path, tries: list[str]) -> None:
    """The next one says the same and answers the same; one without drafts leaves what is remembered, and one that finds
    the rest remembered adds drafts to it."""
    lines: list[str] = []

    def start(drafts: DraftSettings) -> tuple[list[str], Any]:
        disk = DiskSettings(tmp_path / "kv", None, 0, 24.0)
        engine = Engine(
            tiny_model("qwen3"),
            engine_settings(disk=disk, drafts=drafts),
            grammar_tokenizer=lambda _: None,
            report=pytest.fail,
            note=lines.append,
        )
        tries.clear()
        engine.start()
        try:
            engine.wait_until_ready(60)
            assert engine.can_draft is drafts.is_on
            each = request(PROMPT[:20], 8)
            [result] = generate(engine, replace(each, drafter=LedDrafter([])) if drafts.is_on else each)
            return list(tries), result.tokens
        finally:
            engine.stop(60)

    started = list(map(start, (DraftSettings(), ON, DraftSettings(), ON)))
    assert [tried for tried, _ in started] == [[], ALL, [], []]
    assert len({tokens for _, tokens in started}) == 1
    assert lines == []


def test_rows_beside_one_another_are_tried_once_and_only_where_they_can_be_cut(
    tries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that could not try them leaves it to the next one, which measures their widest pass alone; that they came
    back is believed of no caches that cannot be cut one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(draft_support, "_prove_together", lambda *_: 1 / 0)
        first = find_draft_support(loaded("qwen3"), ON)
    assert first.together is None and "ZeroDivisionError" in first.why_not_together
    assert first.seen is not None and MAX_BATCH_TOKENS not in first.seen.ratios
    tries.clear()
    second = find_draft_support(loaded("qwen3"), ON, first.seen)
    assert tries == [] and second.together is not None and second.seen is not None
    assert tuple(second.seen.ratios) == (*MEASURED_WIDTHS, MAX_BATCH_TOKENS)
    assert DraftsSeen.from_row(second.seen.row()) == second.seen
    _, whole = found_of("gemma3")
    wrong = replace(whole, ratios={**whole.ratios, MAX_BATCH_TOKENS: 32.0})
    found = find_draft_support(loaded("gemma3"), ON, wrong)
    assert found.together is None and "cannot be cut row by row" in found.why_not_together


def test_what_does_not_come_back_is_tried_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been the machine that was short of something."""
    with monkeypatch.context() as patch:
        patch.setattr(draft_support, "_prove", lambda *_: 1 / 0)
        support = find_draft_support(loaded("qwen3"), ON)
    assert support.ways is None and support.seen is None
    assert find_draft_support(loaded("qwen3")).seen is None, "noise was not looked at"


# --- should it be wrong -----------------------------------------------------------------------------------------------


def test_ways_that_are_not_those_of_the_caches_are_tried_and_not_taken(tries: list[str]) -> None:
    """States would be trimmed: what is remembered says that a row came back, never how one does."""
    _, seen = found_of("qwen3_5")
    tries.clear()
    found = find_draft_support(loaded("qwen3_5"), ON, replace(seen, ways=("trim",) * len(seen.ways)))
    assert found.ways == seen.ways and "hold" in seen.ways and tries == ALL


@pytest.mark.parametrize(
    ("ratios", "may_draft"),
    [
        pytest.param((1.0, 1.0), True, id="too cheap"),
        pytest.param((1.8, 1e9), True, id="too dear, but for the narrowest"),
        pytest.param((1e9, 1e9), False, id="no draft pays"),
    ],
)
def test_costs_that_are_wrong_change_no_word(ratios: tuple[float, float], may_draft: bool) -> None:
    """However many tokens are tried because of them; what passes take is measured meanwhile."""
    model, (_, seen), each = loaded("qwen3_5"), found_of("qwen3_5"), request(PROMPT, NUM_ANSWER_TOKENS)

    def answer(support: DraftSupport, drafter: LedDrafter | None) -> Any:
        pool, row = new_pool(model), row_of(replace(each, drafter=drafter))
        pool._draft_support = support
        entered(pool, model, row)
        left = []
        while not left:
            left = list(pool.step().finished)
        return answered(row, left[0])

    plain = answer(find_draft_support(model, ON, seen), None)
    narrow, wide = ratios
    remembered = dict.fromkeys(MEASURED_WIDTHS, wide) | {1: 1.0, 2: narrow}
    wrong = find_draft_support(model, ON, replace(seen, ratios=remembered))
    drafter = with_drafts(each, plain, "half").drafter
    assert isinstance(drafter, LedDrafter)
    found = answer(wrong, drafter)
    assert found.tokens == plain.tokens
    assert bool(found.end.drafting.num_drafted_tokens) is (wrong.ways is not None) is may_draft


def test_noise_that_is_wrong_makes_no_exact_pass_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants passes exact looks at one of each width in any case. Where that is noisier than what is remembered, or
    not all tokens were looked at, all are; where it is less noisy, passes stay as narrow as they were, and no look is
    needed where no width is left."""
    looks: list[int] = []

    def find(
        _module: Any, _caches: Any, num_tokens: int, *_: float, widths: Sequence[int] = (), **__: int
    ) -> tuple[WidthNoise, ...]:
        if widths:
            return agreeing(widths)
        looks.append(num_tokens)
        return noises(4, num_tokens)

    model, (_, seen) = loaded("qwen3"), found_of("qwen3")
    monkeypatch.setattr(draft_support, "find_width_noise", find)
    for wrong in (noises(16, MAX_PASS_TOKENS), noises(8), noises(4, 96)):
        found = find_draft_support(model, EXACT, replace(seen, noises=wrong))
        assert found.seen == replace(seen, noises=noises(4)) and looks[-1] == NUM_TOKENS
        assert found.costs.max_width == 4 and "at most 4 tokens" in found.notes[0]
    looks.clear()
    for width in (4, 2):
        kept = replace(seen, noises=noises(width))
        found = find_draft_support(model, EXACT, kept)
        assert (found.costs.max_width, found.seen) == (width, kept)
    assert looks == [MAX_PASS_TOKENS] * 2
    none = find_draft_support(model, EXACT, replace(seen, noises=noises(1, 48)))
    assert none.costs.max_width == 1 and "after 0 of 48 (256 would" in none.notes[0]
    assert find_draft_support(model, ON, kept).costs.max_width == MAX_PASS_TOKENS, "it was not asked for"
    assert looks == [MAX_PASS_TOKENS] * 2


# --- how much is looked at --------------------------------------------------------------------------------------------


def test_noise_is_looked_at_for_as_long_as_there_is_time() -> None:
    """One pass of each width in any case, and so many tokens as fit; who reads of it reads how many they were."""
    passes: list[int] = []

    def module(tokens: mx.array, cache: Any) -> mx.array:
        passes.append(tokens.shape[1])
        return mx.zeros((*tokens.shape, 9)) + (1e-3 if tokens.shape[1] > 4 else 0.0)

    each = MAX_PASS_TOKENS + sum(MAX_PASS_TOKENS // width for width in WIDTHS)
    for max_passes, num_looks in ((1, 1), (each * 3, 3), (each * 4 - 1, 3), (each * 99, 16)):
        passes.clear()
        found = find_width_noise(module, list, NUM_TOKENS, max_passes, lambda: len(passes))
        assert len(passes) == each * num_looks
        assert {noise.num_tokens for noise in found} == {num_looks * MAX_PASS_TOKENS}
        words = told(found, is_exact=False)
        assert f"after 0 of {num_looks * MAX_PASS_TOKENS}" in words and ("256 would" in words) == (num_looks < 16)


@pytest.mark.usefixtures("only_drafts_are_tried")
def test_a_start_looks_in_proportion_to_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as long as the load took until then; who wants passes exact waits. The clock is asked once for each load
    before, and once behind."""
    asked: list[tuple[int, float]] = []

    def find(
        _module: Any, _caches: Any, num_tokens: int, max_seconds: float = 0.0, *, widths: Sequence[int] = (), **_: int
    ) -> tuple[WidthNoise, ...]:
        if widths:
            return agreeing(widths)
        asked.append((num_tokens, max_seconds))
        return noises(16)

    times = iter((100.0, 108.0, 200.0, 201.0))
    monkeypatch.setattr(draft_support, "find_width_noise", find)
    monkeypatch.setattr(engine_start, "perf_counter", lambda: next(times))
    for drafts in (ON, EXACT):
        engine = Engine(
            tiny_model("qwen3"), engine_settings(drafts=drafts), grammar_tokenizer=lambda _: None, report=pytest.fail
        )
        engine.start()
        engine.wait_until_ready(60)
        engine.stop(60)
    assert asked == [(NUM_TOKENS, 4.0), (NUM_TOKENS, float("inf"))]


# --- costs ------------------------------------------------------------------------------------------------------------


def test_guessed_costs_hold_until_passes_are_measured() -> None:
    """From the first plain step on, in its seconds; the first pass of a width may have been compiled, and says
    nothing."""
    costs = PassCosts()
    costs.guess({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0, 16: 4.0})
    costs.note(1, 100, 50.0)
    assert costs.seconds(8, 100) is None and costs.num_worth([1.0] * 9, 100, 0, goes_back=False) == 0
    costs.note(1, 100, 0.5)
    assert costs.seconds(8, 100) == 1.0 and costs.seconds(8, 10_000) == 1.0 and costs.seconds(4, 100) == 0.5
    costs.note(8, 100, 50.0)
    assert costs.seconds(8, 100) == 1.0
    costs.note(8, 100, 7.0)
    assert costs.seconds(8, 100) == 7.0 and costs.seconds(8, 10_000) == 7.0 and costs.seconds(16, 100) == 2.0


def test_no_pass_is_remembered_as_dearer_than_a_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that something delayed would never be tried again, at no start; too cheap a guess is tried and corrected."""
    taken = {1: 1.0, 2: 1.5, 4: 90.0, 8: 2.0, 16: 0.5}
    model, costs = LedModel(monkeypatch, taken.__getitem__), PassCosts()
    assert costs.measure(model, list) == dict.fromkeys(MEASURED_WIDTHS, 1.0)
    taken[16] = 3.0
    assert costs.measure(model, list) == {1: 1.0, 2: 1.5, 4: 2.0, 8: 2.0, 16: 3.0}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_texts_to_draft_from_have_memory_where_there_are_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where they are off, or where caches do not come back."""

    def bound(drafts: DraftSettings) -> int | None:
        with running_engine(drafts=drafts) as engine:
            report = engine.status.memory
        assert report is not None
        return report.accounts["drafts"].max_bytes

    assert (bound(ON) or 0) > 0 == bound(DraftSettings())
    use_cache(monkeypatch, HidesItsArrays)
    assert bound(ON) == 0


def test_where_no_width_is_exact_nothing_is_drafted_and_no_memory_is_set_aside() -> None:
    """Where passes have to be exact; another start may allow noise, with what was remembered."""
    _, seen = found_of("qwen3")
    support = find_draft_support(loaded("qwen3"), EXACT, replace(seen, noises=noises(1)))
    assert (support.ways, support.row_bytes, support.costs.max_width) == (None, 0, 1)
    assert support.why_not and support.why_not in support.notes[-1]
    assert support.seen is not None and support.seen.noises == noises(1)
    assert find_draft_support(loaded("qwen3"), ON, support.seen).ways is not None
