"""What rows with drafts do beside the law: under a grammar, in a running engine, where memory is short, where the KV
changes its form, and where something breaks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import llguidance
import mlx.core as mx
import pytest
from llguidance.numpy import fill_next_token_bitmask
from mlx_lm.models.cache import RotatingKVCache

from kvserve.core import Draft, Drafted, GenerationDone, Grammar, ThinkingLimit
from kvserve.engine import decode, draft_support
from kvserve.engine import rows as rows_module
from kvserve.engine.draft_nouns import DraftSettings
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.kv_buffers import with_arrays
from kvserve.engine.logits_processors import GrammarProcessor
from kvserve.engine.model import load
from kvserve.engine.pass_costs import MEASURED_WIDTHS, PassCosts
from kvserve.engine.quantised import Quantiser
from kvserve.engine.retreat import Retreat
from kvserve.engine.row_drafts import RowDrafts
from kvserve.engine.self_check import CachesDiffer
from kvserve.engine.width_noise import WidthNoise, agreeing_width, find_width_noise
from kvserve.prompt.tokenizer import load_tokenizer
from tests.engine.engines import (
    CACHE,
    assert_exact,
    cached,
    generate,
    let_prompts_take_no_time,
    prompt_of,
    request,
    running_engine,
)
from tests.engine.full_engines import NUM_ANSWER_TOKENS, check, full_engine
from tests.engine.led_drafts import (
    ACCEPTED,
    NUM_TOKENS,
    PROMPT,
    LedDrafter,
    assert_same,
    decoded,
    decoded_together,
    drafts_tried,
    entered,
    new_pool,
    row_of,
    run,
    with_drafts,
)
from tests.engine.moving_rows import put_backs_counted
from tests.engine.odd_caches import HidesItsArrays, ShortMemory, Unmergeable, use_cache
from tests.engine.test_drafted_law import loaded
from tests.engine.test_kv_quantisation import QWEN3, engine_of, uniform
from tests.laws import IS_FULL, THREE_KINDS, sampled, sampled_cells
from tests.models import tiny_model

# --- under a grammar --------------------------------------------------------------------------------------------------

FORM = 'start: "{" /[a-z]{2,5}/ ": " ("yes" | "no") ", " /[0-9]+/ "}"'


def grammar_of(lark: str, num_prompt_tokens: int = len(PROMPT), family: str = "qwen3") -> GrammarProcessor:
    tokenizer = load_tokenizer(tiny_model(family))
    eos = sorted(tokenizer.stop_token_ids)
    guide = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=loaded(family).vocab_size, eos_token=eos)
    return GrammarProcessor(Grammar(lark), guide, num_prompt_tokens)


def limit_of(family: str, max_num_tokens: int) -> ThinkingLimit:
    """Of a row whose prompt opened thinking."""
    tokenizer = load_tokenizer(tiny_model(family))
    closing = tokenizer.encode("</think>")
    return ThinkingLimit(
        max_num_tokens, "<think>", "</think>", closing, anywhere=True, is_open=True, decode=tokenizer.decode
    )


def test_a_grammar_that_is_asked_what_is_forced_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the question breaks in the middle: the row's own tokens come next."""
    grammar, real, num_asked = grammar_of('start: "yes, of course" | "yes, indeed"'), fill_next_token_bitmask, 0

    def broken(*args: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            raise RuntimeError("out of breath")
        real(*args)

    forced = grammar.forced((), 9)
    assert len(forced) > 1
    with monkeypatch.context() as patch:
        patch.setattr("llguidance.numpy.fill_next_token_bitmask", broken)
        with pytest.raises(RuntimeError, match="out of breath"):
            grammar.forced((), 9)
    assert grammar.forced((), 9) == forced


def test_what_a_grammar_forbids_is_left_out_of_a_draft() -> None:
    """The pass ends before it."""
    tokens = load_tokenizer(tiny_model("qwen3")).encode("yes")
    drafter = LedDrafter([*tokens[:1], 5, 6])
    drafts = RowDrafts(request(PROMPT), drafter, grammar_of('start: "yes" | "no"'))
    draft = drafts.propose(None, 8)
    assert draft is not None and draft.tokens == tuple(tokens[:1])
    barred = RowDrafts(request(PROMPT), LedDrafter([5, 6]), grammar_of('start: "yes" | "no"'))
    assert barred.propose(None, 8) is None


def test_what_a_grammar_leaves_no_choice_of_is_drafted() -> None:
    """Tokens that have to come are always right; letters that can be cut in several ways are no such tokens."""
    model = loaded("qwen3")
    lark = 'start: "no" <|im_start|> <|im_start|> <|im_start|> <|im_start|> "yes"'
    each = request(PROMPT, 9, temperature=1.0, seed=4)
    plain = decoded(model, each, [grammar_of(lark)])
    found = decoded(model, replace(each, drafter=LedDrafter([])), [grammar_of(lark)])
    assert_same(found, plain)
    drafted = found.end.drafting.by_source["grammar"]
    assert drafted.num_tokens == drafted.num_accepted > 0


# --- in an engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sampled(THREE_KINDS, {"qwen3_5"}))
def test_what_is_kept_of_a_drafted_answer_is_what_a_cold_row_holds(family: str) -> None:
    """A next turn finds all of it and writes what a cold server writes, beside others and after eviction."""
    prompt = prompt_of(90)
    with running_engine(family) as engine, drafts_tried():
        plain = generate(engine, request(prompt, NUM_TOKENS))[0]
        third = [*prompt, *plain.tokens, *prompt_of(9, 2)]
        engine.clear_cache()
        expected = generate(engine, request(third, 8))[0]
        engine.clear_cache()
        drafter = LedDrafter(plain.tokens, lambda place: place % 3 == 1)
        found = generate(engine, replace(request(prompt, NUM_TOKENS), drafter=drafter))[0]
        assert_exact(found, plain.tokens)
        again = generate(engine, request(third, 8))[0]
        assert_exact(again, expected.tokens)
        assert cached(again) == len(prompt) + NUM_TOKENS
        engine.clear_cache()
        drafters = [LedDrafter(plain.tokens), LedDrafter(expected.tokens)]
        asked = (request(prompt, NUM_TOKENS), request(third, 8))
        both = [replace(each, drafter=drafter) for each, drafter in zip(asked, drafters, strict=True)]
        for result, words in zip(generate(engine, *both), (plain, expected), strict=True):
            assert_exact(result, words.tokens)


NUM_HELD_TOKENS = 160
"""Not as many as two prompts and their answers have."""


@pytest.mark.parametrize("family", sampled(THREE_KINDS, {"gemma3"}))
def test_what_was_evicted_of_a_drafted_answer_is_written_again(family: str) -> None:
    """Another prompt has taken its place: what goes on from it writes what a cold server writes."""
    prompt, max_bytes = prompt_of(90), int(loaded(family).sizes.held(NUM_HELD_TOKENS))
    with running_engine(family, cache=replace(CACHE, max_bytes=max_bytes)) as engine, drafts_tried():
        plain = generate(engine, request(prompt, NUM_TOKENS))[0]
        third = [*prompt, *plain.tokens, *prompt_of(9, 2)]
        engine.clear_cache()
        expected = generate(engine, request(third, 8))[0]
        engine.clear_cache()
        generate(engine, replace(request(prompt, NUM_TOKENS), drafter=LedDrafter(plain.tokens, ACCEPTED["half"])))
        generate(engine, request([*prompt[:40], *prompt_of(50, 5)], 4))
        again = generate(engine, replace(request(third, 8), drafter=LedDrafter(expected.tokens)))[0]
        assert_exact(again, expected.tokens)
        assert cached(again) < len(prompt)


@pytest.mark.parametrize("bits", sampled((4, 8), {8}))
def test_an_answer_that_comes_past_the_start_of_quantised_kv(bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass goes beyond it: the row is converted where it is without drafts, and what is kept of it is the same."""
    prompt, converted, real = prompt_of(90), list[int](), Quantiser.convert

    def convert(self: Quantiser, caches: list[Any]) -> list[Any]:
        converted.extend(leaf.offset for leaf in caches[:1])
        return real(self, caches)

    monkeypatch.setattr(Quantiser, "convert", convert)
    with engine_of(replace(QWEN3, kv=uniform(bits, 101))) as engine, drafts_tried():
        converted.clear()
        plain = generate(engine, request(prompt, NUM_TOKENS))[0]
        assert converted == [101]
        following = request([*prompt, *plain.tokens, *prompt_of(9, 2)], 8)
        expected = generate(engine, following)[0]
        engine.clear_cache()
        for is_spoilt in (lambda _: False, lambda place: place % 3 == 2):
            engine._ask(lambda scheduler: scheduler._pool.draft_support)
            converted.clear()
            drafter = LedDrafter(plain.tokens, is_spoilt)
            found = generate(engine, replace(request(prompt, NUM_TOKENS), drafter=drafter))[0]
            assert_exact(found, plain.tokens)
            assert isinstance(found.end, GenerationDone) and found.end.drafting.num_accepted_tokens > 5
            assert converted == [101]
            again = generate(engine, following)[0]
            assert_exact(again, expected.tokens)
            assert cached(again) == cached(expected) > len(prompt)
            engine.clear_cache()


@pytest.mark.parametrize("family", sampled(THREE_KINDS, ("qwen3_5",)))
def test_a_drafted_row_that_is_put_back_waits_until_there_is_room(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft takes counts for who lets it in as for who puts it back: else it comes and goes without end."""
    num_room, num_tokens = (680, 200) if IS_FULL else (520, 110)  # where windows are, a row outgrows later
    monkeypatch.setattr(rows_module, "ANSWER_ALLOWANCE_TOKENS", NUM_ANSWER_TOKENS)
    monkeypatch.setattr(decode, "extra_padding_tokens", lambda *_: 10**12)  # each by itself, as of other lengths
    let_prompts_take_no_time(monkeypatch)
    asked = [
        replace(request(prompt_of(60, seed), num_tokens), drafter=LedDrafter([1] * num_tokens, width=2))
        for seed in (0, 1)
    ]
    with full_engine(family, num_room, 0.99) as engine, put_backs_counted() as rows, drafts_tried():
        ends = [found.end for found in generate(engine, *asked)]
        check(engine)
    assert [end.reason for end in ends if isinstance(end, GenerationDone)] == ["length"] * 2
    assert len(rows) == 1
    assert all(end.drafting.num_drafted_tokens > 50 for end in ends if isinstance(end, GenerationDone))


def test_what_a_drafted_row_holds_is_counted() -> None:
    """States before a draft, and the rows of a pass in windows; nothing where all can be cut."""
    for family, is_more in (("qwen3", False), ("qwen3_5", True), ("gemma3", True)):
        model = loaded(family)
        pool, row = new_pool(model), row_of(replace(request(PROMPT, 9), drafter=LedDrafter([])))
        entered(pool, model, row)
        assert (pool.bytes_besides(row) > 0) is is_more
        assert pool.padding_bytes() == pool.bytes_besides(row)
        pool.discard()


# --- where something breaks -------------------------------------------------------------------------------------------


def test_a_move_between_generators_that_breaks_touches_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It enters again from its tokens; the row for which it moved decodes all the same."""
    model, each, other = loaded("qwen3"), request(PROMPT, NUM_TOKENS), request(PROMPT[3:], 6)
    plain, plain_other = decoded(model, each), decoded(model, other)
    with drafts_tried():
        pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
        entered(pool, model, row)
        for _ in range(3):
            pool.step()
        with monkeypatch.context() as patch:

            def broken(*_: Any, **__: Any) -> Any:
                raise RuntimeError("broken on the way")

            patch.setattr(pool, "_taken_out", broken)
            beside = row_of(other)
            moved = pool.make_way(beside)
        assert (moved.evicted, moved.failed, pool.rows()) == ((row,), (), [])
        entered(pool, model, beside)
        [found_other] = run(pool, beside)
        entered(pool, model, row)
        [found] = run(pool, row)
    assert_same(found, plain)
    assert_same(found_other, plain_other)


def test_a_pass_that_breaks_hands_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row enters again from what its client has heard."""
    model, each = loaded("qwen3_5"), request(PROMPT, NUM_TOKENS)
    plain = decoded(model, each)
    real = Retreat.back

    def broken(self: Retreat, *counts: int) -> int:
        monkeypatch.setattr(Retreat, "back", real)
        raise RuntimeError("broken in a pass")

    with drafts_tried():
        pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
        entered(pool, model, row)
        monkeypatch.setattr(Retreat, "back", broken)
        evicted: tuple[Any, ...] = ()
        while not evicted:
            evicted = pool.step().evicted
        assert evicted == (row,)
        entered(pool, model, row)
        [found] = run(pool, row)
    assert_same(found, plain)


class RaisingDrafter(LedDrafter):
    """Breaks its promise in one of its methods, once the answer has begun."""

    where = "propose"

    def _break(self, name: str) -> None:
        if name == self.where and self.num_followed > 3:
            raise ValueError(f"no {name} comes to mind")

    def follow(self, tokens: Sequence[int]) -> None:
        self._break("follow")
        super().follow(tokens)

    def propose(self, max_num_tokens: int) -> Draft | None:
        self._break("propose")
        return super().propose(max_num_tokens)

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        self._break("judge")
        super().judge(draft, num_tried, num_accepted)


@pytest.mark.parametrize("where", ["follow", "propose", "judge"])
@pytest.mark.parametrize("num_others", [0, 1])
@sampled_cells(lambda where, num_others: (where, num_others) in (("propose", 1), ("judge", 0)))
def test_a_drafter_that_breaks_costs_its_own_row_its_drafts(where: str, num_others: int) -> None:
    """No row enters again, others are drafted as before, and the end of the answer says why it was not."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    plain = decoded(model, each)
    drafter = RaisingDrafter(plain.tokens)
    drafter.where = where
    others = [with_drafts(each, plain)] * num_others
    found = decoded_together(model, [replace(each, drafter=drafter), *others])
    for ours in found:
        assert_same(ours, plain)
    assert found[0].end.drafting.failure == f"ValueError: no {where} comes to mind"
    for other in found[1:]:
        assert other.end.drafting.failure == "" and other.end.drafting.num_accepted_tokens > NUM_TOKENS // 2


def test_a_row_that_breaks_with_drafts_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is to blame would raise again, and the row would fail, whose answer needs no drafts."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    plain = decoded(model, each)

    def broken(_: Retreat, *__: int) -> int:
        raise RuntimeError("broken in every pass")

    monkeypatch.setattr(Retreat, "back", broken)
    with drafts_tried():
        pool, row = new_pool(model), row_of(with_drafts(each, plain, "half"))
        entered(pool, model, row)
        evicted: tuple[Any, ...] = ()
        while not evicted:
            evicted = pool.step().evicted
        entered(pool, model, row)
        [found] = run(pool, row)
    assert_same(found, plain)


WHY_NOT = {
    Unmergeable: "Unmergeable writes into its arrays",
    HidesItsArrays: "a row that comes back from wrong tokens has logits that are off",
    ShortMemory: "a row that comes back from wrong tokens has logits that are off",
}


@pytest.mark.parametrize("new_cache", sampled((Unmergeable, HidesItsArrays, ShortMemory), (HidesItsArrays,)))
def test_caches_that_do_not_come_back_decode_plainly(monkeypatch: pytest.MonkeyPatch, new_cache: type) -> None:
    """What was found by trying holds, whatever the class: the text is the same, and nothing is drafted. A class that is
    kept whole and writes into its arrays is among them, though it could be trimmed."""
    use_cache(monkeypatch, new_cache)
    with running_engine() as engine, drafts_tried():
        plain = generate(engine, request(PROMPT, NUM_TOKENS))[0]
        engine.clear_cache()
        drafted = replace(request(PROMPT, NUM_TOKENS), drafter=LedDrafter(plain.tokens, lambda place: place % 3 == 1))
        found = generate(engine, drafted)[0]
        why_not = engine._ask(lambda scheduler: scheduler._pool.draft_support.why_not)
    assert_exact(found, plain.tokens)
    assert isinstance(found.end, GenerationDone)
    assert found.end.drafting.num_drafted_tokens == 0
    assert WHY_NOT[new_cache] in why_not, why_not


def test_a_class_that_writes_into_what_is_held_is_found() -> None:
    """However little of it shows in logits."""
    leaf = SimpleNamespace(rows=mx.zeros((1, 4)))
    retreat = Retreat.before([leaf], ["hold"])
    before = [with_arrays(held, mx.contiguous) for held in retreat.held]
    mx.eval(before[0].rows)
    leaf.rows = leaf.rows + 1
    draft_support._check_held(retreat, before)
    retreat.held[0].rows[0, 0] = 1
    with pytest.raises(CachesDiffer, match="writes into its arrays"):
        draft_support._check_held(retreat, before)


# --- by themselves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [5, 13, 40])
@pytest.mark.parametrize("num_kept", [0, 1, 3, 6])
def test_a_window_that_comes_back_is_the_one_that_was(num_tokens: int, num_kept: int) -> None:
    """Growing, just full and full; also where all of the pass goes, and where single tokens follow."""

    def rows(first: int, count: int) -> mx.array:
        return mx.broadcast_to(mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None], (1, 1, count, 2))

    def seen(leaf: Any, first: int, count: int) -> list[float]:
        keys, _ = leaf.update_and_fetch(rows(first, count), rows(first, count))
        found: list[float] = sorted(keys[0, 0, :, 0].tolist())
        return found[-(13 + count - 1) :]

    plain, tried = RotatingKVCache(max_size=13), RotatingKVCache(max_size=13)
    for leaf in (plain, tried):
        for place in range(num_tokens):
            seen(leaf, place, 1)
    retreat = Retreat.before([tried], ["window"])
    tried.update_and_fetch(rows(500, 6), rows(500, 6))
    tried.keys[..., :, :] = tried.keys  # written in place later, as a row's own
    assert retreat.back(6, num_kept) == num_kept
    for leaf in (plain,):
        for place in range(num_kept):
            seen(leaf, 500 + place, 1)
    assert tried.offset == plain.offset
    for count in (1, 1, 4, 1):
        first = 1000 + tried.offset
        ours, theirs = seen(tried, first, count), seen(plain, first, count)
        assert ours[-min(len(theirs), 13) :] == theirs[-min(len(theirs), 13) :]


def test_so_many_tokens_are_tried_as_are_worth_it() -> None:
    """None where passes cost what their tokens do or drafts are never right, many where they cost nothing; where tokens
    pass again they are worth less."""
    dear, cheap, between = PassCosts(), PassCosts(), PassCosts()
    for width in MEASURED_WIDTHS:
        dear.note(width, 100, float(width))
        cheap.note(width, 100, 1.0)
        between.note(width, 100, 1 + 0.25 * (width - 1))
    assert cheap.num_worth([], 100, 0, goes_back=False) == 0
    assert PassCosts().num_worth([1.0], 100, 0, goes_back=False) == 0
    assert dear.num_worth([0.9] * 9, 100, 0, goes_back=False) == 0
    assert cheap.num_worth([0.5] * 30, 100, 0, goes_back=False) == 15
    assert cheap.num_worth([0.0] * 9, 100, 0, goes_back=False) == 0
    assert cheap.num_worth([0.9] * 30, 100, 10, goes_back=True) == 5
    worth = [between.num_worth([chance] * 9, 100, 0, goes_back=False) for chance in (0.2, 0.6, 0.9, 1.0)]
    assert worth == sorted(worth) and worth[0] == 0 and worth[-1] == 9
    assert between.num_worth([0.6] * 9, 100, 0, goes_back=True) <= worth[1]
    assert between.seconds(3, 100_000) == pytest.approx(1.5)


def test_costs_follow_what_is_measured() -> None:
    """One pass that something delayed says nothing; several do, at their length."""
    costs = PassCosts()
    for width in MEASURED_WIDTHS:
        costs.note(width, 10, 1.0)
    costs.note(1, 1000, 1.0)
    costs.note(8, 1000, 2.0)
    costs.note(8, 1000, 90.0)
    costs.note(8, 1000, 2.0)
    assert costs.seconds(8, 1000) == 2.0
    assert costs.seconds(8, 10) == 1.0


def test_what_became_of_drafts_is_counted_by_source() -> None:
    """A token that was drawn before it was tried is no drafted one."""
    told: list[tuple[int, int]] = []
    drafter = LedDrafter([1, 2, 3], judged=told)
    drafts = RowDrafts(request(PROMPT), drafter)
    drafts.judge(Draft((1, 2, 3), (1.0,) * 3, "records"), 3, 2, num_given=1)
    drafts.judge(Draft((4,), (1.0,), "grammar"), 1, 1)
    drafts.judge(Draft((7, 8), (0.5,) * 2, "records"), 1, 0, num_given=1)
    drafting = drafts.drafting(10)
    assert drafting.by_source == {"records": Drafted(2, 1), "grammar": Drafted(1, 1)}
    assert drafting.num_steps == 8
    assert told == [(3, 2), (1, 0)]


@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5"), {"qwen3_5"}))
def test_passes_are_measured_where_drafts_are_tried(family: str) -> None:
    """Of each width, on this machine."""
    support = find_draft_support(load(tiny_model(family), 131072))
    assert support.ways is not None and not support.why_not
    taken: Sequence[float | None] = [support.costs.seconds(width, 30) for width in range(1, 17)]
    assert all(seconds is not None and seconds > 0 for seconds in taken)


def _module_with_noise(tokens: mx.array, cache: Any) -> mx.array:
    """The next token follows from the last; passes of more than four tokens are a little off."""
    logits = mx.zeros((*tokens.shape, 50)) + (mx.arange(50) == ((tokens * 7 + 1) % 50)[..., None])
    return logits + (1e-3 if tokens.shape[1] > 4 else 0.0)


def noises_of(noises: Sequence[WidthNoise], between: float = 0.0) -> Callable[..., tuple[WidthNoise, ...]]:
    """In the place of the look: these, and so much for the widths between."""

    def find(*_: object, widths: Sequence[int] = (), **__: int) -> tuple[WidthNoise, ...]:
        return tuple(WidthNoise(width, between, 0, 256) for width in widths) or tuple(noises)

    return find


def test_a_width_between_that_differs_is_none_of_exact_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have a kernel of its own: all up to the widest are looked at, where passes are to be exact."""
    asked, real = list[int](), find_width_noise

    def odd(tokens: mx.array, cache: Any) -> mx.array:
        asked.append(tokens.shape[1])
        return mx.zeros((*tokens.shape, 9)) + (1e-3 if tokens.shape[1] == 6 else 0.0)

    monkeypatch.setattr(draft_support, "find_width_noise", lambda *_, **more: real(odd, list, **more))
    support = find_draft_support(loaded("qwen3"), DraftSettings(is_on=True, is_exact=True))
    assert support.costs.max_width == 5 and "at most 5 tokens" in "".join(support.notes)
    assert set(range(1, 17)) <= set(asked)
    asked.clear()
    assert find_draft_support(loaded("qwen3"), DraftSettings(is_on=True)).costs.max_width == 16
    assert 6 not in asked


def test_how_far_wide_passes_are_from_single_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 256 tokens where it is anything, and passes are no wider than agrees to the bit where that is asked for."""
    noises = find_width_noise(_module_with_noise, list)
    assert [noise.width for noise in noises if noise.max_difference] == [8, 16]
    assert {noise.num_tokens for noise in noises} == {256}
    assert agreeing_width(noises) == 4
    exact = find_width_noise(lambda tokens, cache: mx.zeros((*tokens.shape, 9)), list)
    assert {noise.num_tokens for noise in exact} == {16} and agreeing_width(exact) == 16
    monkeypatch.setattr(draft_support, "find_width_noise", noises_of(noises))
    for is_exact, width in ((False, 16), (True, 4)):
        support = find_draft_support(loaded("qwen3"), DraftSettings(is_on=True, is_exact=is_exact))
        assert support.costs.max_width == width
        assert len(support.notes) == 1 + is_exact and ("at most 4 tokens" in support.notes[0]) is is_exact
    assert find_draft_support(loaded("qwen3"), DraftSettings(max_num_tokens=3)).costs.max_width == 4


@pytest.mark.parametrize("family", sampled(THREE_KINDS, ("qwen3",)))
def test_a_model_says_at_its_start_what_passes_cost(family: str) -> None:
    """Where drafts are on, before any request; what there is to know of it a person hears."""
    with running_engine(family, drafts=DraftSettings(is_on=True)) as engine:
        support = engine._ask(lambda scheduler: scheduler._pool._draft_support)
    assert support is not None and support.ways is not None and support.costs.seconds(16, 30)
