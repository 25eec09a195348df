"""Rows that decode beside one another with drafts say what each says alone and plainly, and leave what a cold row
holds: however they draw, however much of each one's drafts is right, whoever joins, leaves or breaks. And the negative
controls: faults in how the rows of a batch come back, each of which that law must notice."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvserve.core import Draft, GenerationRequest
from kvserve.engine import drafted, drafted_batch
from kvserve.engine.batch_costs import MAX_BATCH_TOKENS, BatchCosts
from kvserve.engine.draft_support import DraftSettings, find_draft_support
from kvserve.engine.drafted_batch import DraftedBatch
from kvserve.engine.kv_buffers import BatchKv, RightAligned
from kvserve.engine.leaf_forms import LeafForm
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, MEASURED_WIDTHS, PassCosts
from kvserve.engine.rows import Row
from kvserve.engine.verified import draw
from kvserve.prompt.tokenizer import load_tokenizer
from tests.engine import led_drafts
from tests.engine.drafts import Silent
from tests.engine.engines import CUTTABLE, FAMILIES, prompt_of, request
from tests.engine.led_drafts import (
    NUM_TOKENS,
    PROMPT,
    LedDrafter,
    answered,
    assert_kept,
    assert_same,
    check_together,
    decoded_together,
    drafts_tried,
    entered,
    new_pool,
    row_of,
    run,
    said_plainly,
    ways_of_drawing,
    with_drafts,
)
from tests.engine.test_drafted_law import loaded
from tests.engine.test_drafted_rows import FORM, grammar_of
from tests.engine.test_kv_quantisation import WIDE, uniform
from tests.laws import IS_FULL, sampled, sampled_cells
from tests.models import tiny_model
from tests.starts import always_paying


def shorter(each: GenerationRequest, num_tokens: int) -> GenerationRequest:
    """The same without its first tokens: rows of a batch are of unequal length."""
    return replace(each, prompt=type(each.prompt)(each.prompt.ids[num_tokens:]))


def four_rows() -> list[GenerationRequest]:
    """One for each way of drawing, of four lengths."""
    return [shorter(each, 5 * number) for number, each in enumerate(ways_of_drawing().values())]


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [("half", "none", "most", "all"), ("none", None, "all", "most")], ids=str)
@pytest.mark.parametrize("family", sorted(CUTTABLE))
@sampled_cells(lambda family, accepted: family == "qwen3" and None not in accepted)
def test_four_rows_with_drafts_say_what_each_says_alone(family: str, accepted: Sequence[str | None]) -> None:
    """Greedy, seeded, under penalties and with log-probabilities beside one another, also beside one without drafts."""
    found = check_together(loaded(family), four_rows(), accepted)
    for each, spoilt in zip(found, accepted, strict=True):
        assert (each.end.drafting.num_accepted_tokens > 0) == (spoilt not in ("none", None))


@pytest.mark.parametrize("drawing", sampled(ways_of_drawing(), ("seeded",)))
@pytest.mark.parametrize("family", sampled(sorted(CUTTABLE), ("qwen3",)))
def test_two_rows_with_drafts_say_what_each_says_alone(family: str, drawing: str) -> None:
    """Of two lengths, one of them wholly right: passes are saved."""
    each = ways_of_drawing()[drawing]
    rows = [each, shorter(each, 9)]
    for accepted in [("half", "all"), ("none", "most"), ("all", None)] if IS_FULL else [("half", "all")]:
        found = check_together(loaded(family), rows, accepted)
        for row, spoilt in zip(found, accepted, strict=True):
            if spoilt == "all":
                assert row.end.drafting.num_steps <= NUM_TOKENS // 3


@pytest.mark.parametrize("family", sampled(sorted(set(FAMILIES) - CUTTABLE), ("gemma3", "qwen3_5")))
def test_rows_whose_caches_cannot_be_cut_one_by_one_decode_plainly(family: str) -> None:
    """Beside one another, and say what each says alone; a start says why."""
    with always_paying():
        support = find_draft_support(loaded(family), DraftSettings(is_on=True))
    assert support.ways is not None and support.together is None
    [note] = [note for note in support.notes if "share passes" in note]
    assert support.why_not_together in note and "cannot be cut row by row" in note
    check_together(loaded(family), four_rows(), ("half", "none", "most", "all"))


def test_under_a_grammar_a_row_says_beside_others_what_it_says_alone() -> None:
    """The grammar prunes its own row's drafts, and its stop token ends that row alone."""
    stop = sorted(load_tokenizer(tiny_model("qwen3")).stop_token_ids)
    forms = [request(PROMPT, 40, stop=stop, temperature=1.0, seed=4), request(PROMPT[7:], NUM_TOKENS)]
    check_together(
        loaded("qwen3"), forms, ("half", "most"), lambda place: [grammar_of(FORM, len(PROMPT))] if place == 0 else []
    )


@pytest.mark.parametrize("bits", sampled((4, 8), (8,)))
def test_rows_of_quantised_kv_are_drafted_beside_one_another(bits: Any) -> None:
    """Each token is packed for itself, so that rows are cut as in full precision."""
    model = load(tiny_model("qwen3", scale=WIDE), 131072, uniform(bits, 0))
    each = request(PROMPT, NUM_TOKENS)
    rows = [each, shorter(each, 9)]
    plain = [said_plainly(model, row) for row in rows]
    with drafts_tried():
        pool = new_pool(model)
        drafted = [row_of(with_drafts(row, said, "half")) for row, said in zip(rows, plain, strict=True)]
        for row in drafted:
            entered(pool, model, row)
        found = run(pool, *drafted)
    pool.discard()
    assert pool.draft_support.together is not None
    for ours, theirs in zip(found, plain, strict=True):
        assert_same(ours, theirs)
        assert ours.end.drafting.num_accepted_tokens > 0


# --- who joins, leaves and breaks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sampled(sorted(CUTTABLE), ("qwen3",)))
def test_rows_that_join_leave_and_are_cancelled_change_no_word(family: str) -> None:
    """Two decode with drafts, a third joins, one is taken out in the middle, and the others end where they should."""
    model, each = loaded(family), request(PROMPT, NUM_TOKENS)
    requests = [each, shorter(each, 4), shorter(each, 20)]
    plain = [said_plainly(model, row) for row in requests]
    with drafts_tried():
        for num_steps in range(1, 7) if IS_FULL else (3,):
            pool = new_pool(model)
            rows = [row_of(with_drafts(row, said, "half")) for row, said in zip(requests, plain, strict=True)]
            for row in rows[:2]:
                entered(pool, model, row)
            for _ in range(num_steps):
                pool.step()
            entered(pool, model, rows[2])
            for _ in range(num_steps):
                pool.step()
            assert [len(group.rows) for group in pool._groups if group.rows] == [3]
            looked_at = pool.look_at(rows[1])
            assert looked_at is not None
            assert_kept(model, looked_at)
            left = pool.remove(rows[1])
            assert left is not None
            assert_kept(model, left)
            assert tuple(rows[1].generated) == plain[1].tokens[: len(rows[1].generated)]
            found = run(pool, rows[0], rows[2])
            pool.discard()
            for ours, theirs in zip(found, (plain[0], plain[2]), strict=True):
                assert_same(ours, theirs)
                assert_kept(model, ours.left, may_have_moved=True)


def test_rows_that_grow_out_of_their_room_end_at_one_slot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow are copied, and that is when what rows left free behind them goes."""
    aligned, real = list[tuple[int, ...]](), RightAligned.align

    def align(self: Any) -> None:
        aligned.append(self.gaps)
        real(self)

    monkeypatch.setattr(RightAligned, "align", align)
    each = request(prompt_of(238, 3), NUM_TOKENS)
    check_together(loaded("qwen3"), [each, shorter(each, 11)], ("half", "all"))
    assert any(aligned)


class IdleLayer(Module):
    """A model with one cache more, which no pass writes."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.inner), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.inner(tokens, cache=cache[:-1])
        return logits


def test_a_cache_that_no_pass_writes_hinders_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room and needs none."""
    inner = loaded("qwen3")
    model = replace(inner, module=IdleLayer(inner.module), leaf_forms=(*(inner.leaf_forms or ()), LeafForm("none")))
    support = new_pool(inner).draft_support
    tried = replace(support, ways=(*(support.ways or ()), "trim"))
    monkeypatch.setitem(led_drafts._supports, id(model), (model, tried))
    each = request(PROMPT, NUM_TOKENS // 3)
    requests = [each, shorter(each, 9)]
    plain = [said_plainly(inner, row) for row in requests]
    drafted = [with_drafts(row, said, "half") for row, said in zip(requests, plain, strict=True)]
    for ours, theirs in zip(decoded_together(model, drafted), plain, strict=True):
        assert_same(ours, theirs)
        assert ours.end.drafting.num_accepted_tokens > 2


class RecordingDrafter(LedDrafter):
    """Notes how many tokens it is asked for."""

    asked: list[int]

    def propose(self, max_num_tokens: int) -> Draft | None:
        self.asked.append(max_num_tokens)
        return super().propose(max_num_tokens)


@pytest.mark.parametrize("max_width", [16, 1])
def test_a_drafter_is_asked_for_no_more_than_a_pass_of_rows_takes(max_width: int) -> None:
    """To find more would cost every step; where no wide pass may be, nobody is asked."""
    model, each = loaded("qwen3"), request(PROMPT, 4 * NUM_TOKENS)
    drafters = [RecordingDrafter(prompt_of(4 * NUM_TOKENS, seed)) for seed in (1, 2)]
    pool, rows = new_pool(model), [row_of(replace(each, drafter=drafter)) for drafter in drafters]
    pool._draft_support = replace(pool.draft_support, together=BatchCosts(PassCosts(max_width)))
    with drafts_tried():
        for row, drafter in zip(rows, drafters, strict=True):
            drafter.asked = []
            entered(pool, model, row)
        for _ in range(6):
            pool.step()
    pool.discard()
    for drafter in drafters:
        assert bool(drafter.asked) is (max_width > 1)
        assert all(1 <= num_tokens <= max_width for num_tokens in drafter.asked)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("steps_a_pass", [1.0, 2.0])
def test_beside_a_row_without_a_draft_others_are_asked_where_a_pass_is_fair_to_it(
    steps_a_pass: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may come of their drafts where it is not, and to look for them would cost every step. All of them hear to
    the end what was said, as later answers are drafted from it."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    single, real = PassCosts(), PassCosts.note
    single.guess({width: 1.0 if width < 4 else steps_a_pass for width in (*MEASURED_WIDTHS, MAX_BATCH_TOKENS)})

    def note(costs: PassCosts, width: int, num_tokens: int, _seconds: float) -> None:
        real(costs, width, num_tokens, 1.0 if width == 1 else steps_a_pass)

    monkeypatch.setattr(PassCosts, "note", note)
    asked = [RecordingDrafter(prompt_of(NUM_TOKENS, seed)) for seed in (1, 2)]
    drafters: list[Any] = [*asked[:place], Silent(), *asked[place:]]
    pool, rows = new_pool(model), [row_of(replace(each, drafter=drafter)) for drafter in drafters]
    pool._draft_support = replace(pool.draft_support, together=BatchCosts(single))
    for drafter in asked:
        drafter.asked = []
    for row in rows:
        entered(pool, model, row)
    run(pool, *rows)
    for drafter in asked:
        num_beside = sum(num_tokens < MAX_PASS_TOKENS - 1 for num_tokens in drafter.asked)
        assert (num_beside > 3) is (steps_a_pass == 1.0), drafter.asked
        assert drafter.num_followed == NUM_TOKENS


def test_a_grammar_that_breaks_ends_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the row's form, and not only its drafts: who waits for that row hears of it, the others go on."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    grammar, plain = grammar_of(FORM, len(PROMPT)), said_plainly(model, shorter(each, 9))

    def broken(*_: Any) -> Any:
        raise RuntimeError("the form is lost")

    monkeypatch.setattr(grammar, "num_allowed", broken)
    with drafts_tried():
        pool = new_pool(model)
        rows = [row_of(replace(each, drafter=LedDrafter(PROMPT)), [grammar])]
        rows.append(row_of(with_drafts(shorter(each, 9), plain)))
        for row in rows:
            entered(pool, model, row)
        failed: tuple[Row, ...] = ()
        while not failed:
            step = pool.step()
            assert not step.evicted
            failed = step.failed
        assert failed == (rows[0],) and "the form is lost" in str(rows[0].failure)
        [found] = run(pool, rows[1])
    pool.discard()
    assert_same(found, plain)
    assert found.end.drafting.num_accepted_tokens > NUM_TOKENS // 2


class CostlyDrafter(LedDrafter):
    """Computes for its drafts, but for those that are free."""

    wants_pending = True

    def peek(self, max_num_tokens: int) -> Draft | None:
        raise AssertionError("it is not asked alone")

    def note_step(self, seconds: float) -> None:
        raise AssertionError("a step of several rows is not one of its own")

    def propose(self, max_num_tokens: int) -> Draft | None:
        raise AssertionError("all rows of the batch would wait")

    def propose_free(self, max_num_tokens: int) -> Draft | None:
        return super().propose(max_num_tokens)


def test_nothing_is_computed_for_a_draft_beside_others() -> None:
    """What is free is drafted all the same."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    requests = [each, shorter(each, 9)]
    plain = [said_plainly(model, row) for row in requests]
    costly = CostlyDrafter(plain[0].tokens)
    found = decoded_together(model, [replace(each, drafter=costly), requests[1]])
    for ours, theirs in zip(found, plain, strict=True):
        assert_same(ours, theirs)
    assert found[0].end.drafting.num_accepted_tokens > NUM_TOKENS // 2


def raising(words: str) -> Callable[[RightAligned, Sequence[int]], None]:
    """In the place of `RightAligned.cut`, which only passes with drafts call."""

    def cut(_: RightAligned, __: Sequence[int]) -> None:
        raise RuntimeError(words)

    return cut


def test_a_pass_of_rows_that_breaks_hands_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows enter again from what their clients have heard, and go on without drafts, which may be to blame."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    requests = [each, shorter(each, 9)]
    plain = [said_plainly(model, row) for row in requests]

    with drafts_tried():
        pool = new_pool(model)
        rows = [row_of(with_drafts(row, said, "half")) for row, said in zip(requests, plain, strict=True)]
        for row in rows:
            entered(pool, model, row)
        monkeypatch.setattr(RightAligned, "cut", raising("broken in a pass"))
        evicted: tuple[Any, ...] = ()
        while not evicted:
            evicted = pool.step().evicted
        assert set(evicted) == set(rows)
        for row in rows:
            entered(pool, model, row)
        found = run(pool, *rows)
    for ours, theirs in zip(found, plain, strict=True):
        assert_same(ours, theirs)


def test_rows_that_memory_sends_back_are_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails says nothing of drafts."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    requests = [each, shorter(each, 9)]
    plain = [said_plainly(model, row) for row in requests]

    with drafts_tried():
        pool = new_pool(model)
        rows = [row_of(with_drafts(row, said, "most")) for row, said in zip(requests, plain, strict=True)]
        for row in rows:
            entered(pool, model, row)
        with monkeypatch.context() as patch:
            patch.setattr(RightAligned, "cut", raising("[malloc] Unable to allocate 9 bytes."))
            while not (step := pool.step()).evicted:
                assert not step.failed
        assert step.is_short_of_memory and set(step.evicted) == set(rows)
        for row in rows:
            entered(pool, model, row)
        found = run(pool, *rows)
    pool.discard()
    for ours, theirs in zip(found, plain, strict=True):
        assert_same(ours, theirs)
        assert ours.end.drafting.num_accepted_tokens > NUM_TOKENS // 3


def test_who_has_no_drafts_is_not_to_blame_for_passes_that_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, and whoever comes with drafts: after the first one rows beside one another decode plainly."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    plain = said_plainly(model, each)

    monkeypatch.setattr(RightAligned, "cut", raising("broken in a pass"))
    with drafts_tried():
        pool = new_pool(model)
        alone, first, second = row_of(each), *(row_of(with_drafts(each, plain, "half")) for _ in range(2))
        for row in (alone, first):
            entered(pool, model, row)
        while not (step := pool.step()).evicted:
            assert not step.failed
        assert pool.draft_support.together is None and "broken in a pass" in pool.draft_support.why_not_together
        for row in (alone, first, second):
            entered(pool, model, row)
        found = run(pool, alone, first, second)
    assert all(row.failure is None and row.num_generator_failures == 0 for row in (alone, first, second))
    for ours in found:
        assert_same(ours, plain)


@pytest.mark.parametrize("words", ["[malloc] Unable to allocate 9 bytes.", "[malloc] maximum allowed buffer size"])
def test_drafts_are_given_up_before_a_row_is_blamed_for_memory(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps take less: a row ends only if these have no memory either."""
    model, each = loaded("qwen3"), request(PROMPT, NUM_TOKENS)
    plain = said_plainly(model, each)

    monkeypatch.setattr(RightAligned, "cut", raising(words))
    with drafts_tried():
        pool = new_pool(model)
        rows = [row_of(each), row_of(with_drafts(each, plain, "most"))]
        for _ in range(2 if "Unable" in words else 1):
            for row in rows:
                entered(pool, model, row)
            while not (step := pool.step()).evicted:
                assert not step.failed
            assert step.is_short_of_memory and set(step.evicted) == set(rows)
        for row in rows:
            entered(pool, model, row)
        found = run(pool, *rows)
    for ours in found:
        assert_same(ours, plain)


def test_no_pass_of_rows_goes_beyond_where_the_form_of_the_kv_changes() -> None:
    """Each row is where it is converted exactly then, whatever is drafted for it."""
    start = len(PROMPT) + 10
    model = load(tiny_model("qwen3", scale=WIDE), 131072, uniform(8, start))
    requests = [request(PROMPT, NUM_TOKENS), request(PROMPT[3:], NUM_TOKENS)]
    rows, num_steps = _at_quantise_start(model, requests)
    assert num_steps > 10
    drafters = [LedDrafter([*row.generated, *prompt_of(9)]) for row in rows]
    drafted = [replace(row.request, drafter=drafter) for row, drafter in zip(rows, drafters, strict=True)]
    found, num_drafted_steps = _at_quantise_start(model, drafted)
    assert num_drafted_steps < 8
    assert [row.num_tokens for row in found] == [start, start - 3]
    assert [row.generated for row in found] == [row.generated for row in rows]


def _at_quantise_start(model: LoadedModel, requests: Sequence[GenerationRequest]) -> tuple[list[Row], int]:
    """Rows where the first of them is to be converted, and how many steps that took."""
    pool, rows, num_steps = new_pool(model), [row_of(each) for each in requests], 0
    with drafts_tried():
        for row in rows:
            entered(pool, model, row)
        while pool.at_quantise_start() != rows[:1]:
            pool.step()
            num_steps += 1
            assert rows[0].num_tokens <= len(PROMPT) + 10
    pool.discard()
    return rows, num_steps


# --- negative controls ------------------------------------------------------------------------------------------------

type Plant = Callable[[pytest.MonkeyPatch], None]


def _cut_with(change: Callable[[list[int]], list[int]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = RightAligned.cut
        patch.setattr(RightAligned, "cut", lambda self, num_dropped: real(self, change(list(num_dropped))))

    return plant


def _one_row_is_not_cut(dropped: list[int]) -> list[int]:
    return [0, *dropped[1:]]


def _rows_are_cut_as_their_neighbours(dropped: list[int]) -> list[int]:
    return dropped[::-1]


def _padding_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Where rows end at unequal slots each does not see its own first token."""
    real = RightAligned.uneven_mask

    def uneven_mask(self: Any, num_tokens: int, window_size: int | None = None) -> Any:
        mask = real(self, num_tokens, window_size)
        return mask & (mx.arange(mask.shape[-1]) != self.left_padding[:, None, None, None])

    patch.setattr(RightAligned, "uneven_mask", uneven_mask)


def _gaps_are_seen(patch: pytest.MonkeyPatch) -> None:
    """What was rejected stays visible, until it is written over."""
    real = BatchKv.make_mask

    def make_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        gaps, self.gaps = self.gaps, ()
        mask = real(self, *args, **kwargs)
        self.gaps = gaps
        return mask

    patch.setattr(BatchKv, "make_mask", make_mask)


def _positions_stay(patch: pytest.MonkeyPatch) -> None:
    """A row's next tokens are told apart from their places by what was dropped, until rows are copied."""
    real, real_stack = RightAligned.cut, RightAligned._stack

    def cut(self: Any, num_dropped: Sequence[int]) -> None:
        offset = self.offset
        real(self, num_dropped)
        self.offset = offset

    def stack(self: Any, parts: Any, *args: Any) -> None:
        if len(parts) == self.offset.size:
            self.offset = mx.array([num_tokens for _, _, num_tokens in parts])
        real_stack(self, parts, *args)

    patch.setattr(RightAligned, "cut", cut)
    patch.setattr(RightAligned, "_stack", stack)


def _another_sampler_goes_on(patch: pytest.MonkeyPatch) -> None:
    real = DraftedBatch._drawn

    def drawn(self: Any, logits: mx.array, *args: Any) -> Any:
        found = real(self, logits, *args)
        self.samplers[1](logits[0, :1])
        return found

    patch.setattr(DraftedBatch, "_drawn", drawn)


def _processors_see_a_neighbours_token(patch: pytest.MonkeyPatch) -> None:
    real = DraftedBatch._draw

    def draw(self: Any, place: int, taken: mx.array, logits: mx.array) -> mx.array:
        return real(self, place, taken if place else taken ^ 1, logits)

    patch.setattr(DraftedBatch, "_draw", draw)


FAULTS: dict[str, tuple[Plant, str]] = {
    "one row's KV is not cut": (_cut_with(_one_row_is_not_cut), "greedy"),
    "rows are cut as their neighbours": (_cut_with(_rows_are_cut_as_their_neighbours), "greedy"),
    "padding is off by one": (_padding_is_off_by_one, "greedy"),
    "what was rejected is seen": (_gaps_are_seen, "greedy"),
    "positions stay where they were": (_positions_stay, "greedy"),
    "another row's sampler goes on": (_another_sampler_goes_on, "seeded"),
    "processors see another token": (_processors_see_a_neighbours_token, "penalties"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_planted_in_a_batch_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law holds without it, as its own tests show, and not with it."""
    plant, drawing = FAULTS[name]
    each = replace(ways_of_drawing()[drawing], max_tokens=NUM_TOKENS // 2)
    requests = [each, shorter(each, 9)]
    for row in requests:
        said_plainly(loaded("qwen3"), row)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_together(loaded("qwen3"), requests, ("half", "most"))


@pytest.mark.parametrize("fault", sampled((_cut_with(_one_row_is_not_cut), _gaps_are_seen), (_gaps_are_seen,)))
def test_a_start_finds_caches_whose_rows_do_not_come_back(fault: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By trying, whatever their class: rows beside one another then decode plainly."""
    fault(monkeypatch)
    with always_paying():
        support = find_draft_support(loaded("qwen3"))
    assert support.ways is not None and support.together is None
    assert "beside others" in support.why_not_together


@pytest.mark.long
def test_in_exact_mode_rows_beside_one_another_decode_plainly() -> None:
    """Their passes are not compared bit by bit."""
    with always_paying():
        support = find_draft_support(loaded("qwen3"), DraftSettings(is_on=True, is_exact=True))
    assert support.together is None and "not measured" in support.why_not_together


def test_who_has_no_drafts_is_in_no_drafted_batch() -> None:
    """Where no row of a batch has a drafter nothing of this runs."""
    model = loaded("qwen3")
    pool, rows = new_pool(model), [row_of(request(PROMPT[number:], 4)) for number in range(2)]
    for row in rows:
        entered(pool, model, row)
    assert [group.is_drafted_together for group in pool._groups if group.rows] == [False]
    run(pool, *rows)
    pool.discard()


# --- what passes cost -------------------------------------------------------------------------------------------------

type Noted = list[tuple[int, int, float]]
"""How many rows a pass had, with how many tokens each, and its seconds."""


@contextmanager
def noted_passes(*, are_learnt: bool = True) -> Iterator[Noted]:
    """What passes of rows, and of a row by itself, are measured to cost meanwhile."""
    noted, real = list[tuple[int, int, float]](), BatchCosts.of
    num_rows_of, note = dict[int, int](), PassCosts.note

    def of(self: BatchCosts, num_rows: int) -> PassCosts:
        costs = real(self, num_rows)
        num_rows_of[id(costs)] = num_rows
        return costs

    def noting(self: PassCosts, width: int, num_tokens: int, seconds: float) -> None:
        noted.append((num_rows_of.get(id(self), 1), width, seconds))
        if are_learnt:
            note(self, width, num_tokens, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchCosts, "of", of)
        patch.setattr(PassCosts, "note", noting)
        yield noted


def ticking(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Passes are measured by this clock."""
    for module in (drafted, drafted_batch):
        patch.setattr(module, "perf_counter", clock)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("drawing", ["greedy", "seeded", "penalties"])
def test_a_pass_costs_what_its_draws_cost_too(num_rows: int, drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only draws move: a plain step has its own in its time as well."""
    model, each, num_draws = loaded("qwen3"), ways_of_drawing()[drawing], 0
    requests = [shorter(each, 9 * number) for number in range(num_rows)]
    plain = [said_plainly(model, row) for row in requests]

    def drawing_slowly(*args: Any) -> mx.array:
        nonlocal num_draws
        num_draws += 1
        return draw(*args)

    for module in (drafted, drafted_batch):
        monkeypatch.setattr(module, "draw", drawing_slowly)
    ticking(monkeypatch, lambda: float(num_draws))
    pool = new_pool(model)
    pool._draft_support = replace(pool.draft_support, costs=PassCosts(), together=BatchCosts(PassCosts()))
    rows = [row_of(with_drafts(row, said)) for row, said in zip(requests, plain, strict=True)]
    with drafts_tried(), noted_passes(are_learnt=False) as noted:
        for row in rows:
            entered(pool, model, row)
        for _ in range(3):
            pool.step()
    pool.discard()
    wide = [seconds for number, width, seconds in noted if width > 1 and number == num_rows]
    assert wide and all(seconds >= num_rows * (1 if drawing == "greedy" else 2) for seconds in wide)
    for row in rows:
        assert row.drafts is not None and row.drafts.seconds_saved == -sum(wide)


def test_plain_steps_are_measured_for_the_rows_of_their_pass() -> None:
    """A step waits for the pass that the one before it has begun: the first one of five for none, and the first one
    after a row has left for one that had that row in it too."""
    model = loaded("qwen3")
    pool, steps = new_pool(model), dict[int, list[list[int]]]()
    rows = [row_of(replace(request(PROMPT, 5 + 4 * (number > 0)), drafter=LedDrafter([]))) for number in range(3)]
    with drafts_tried(), noted_passes() as noted:
        for row in rows:
            entered(pool, model, row)
        while (num_rows := len(pool.rows())) > 1:
            pool.step()
            steps.setdefault(num_rows, []).append([number for number, _, _ in noted])
            noted.clear()
    pool.discard()
    assert [each for each in steps[3] if each] == [[3]] * 4
    assert steps[2][0] == [] and steps[2][1:] and all(each == [2] for each in steps[2][1:])


def test_drafts_end_where_they_are_no_longer_worth_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 128 tokens, where passes are measured to cost too much: the text is the one without, and of plain steps
    those are measured that came behind two others."""
    model, each = loaded("qwen3"), request(prompt_of(116, 3), NUM_TOKENS)
    requests = [each, shorter(each, 9)]
    plain = [said_plainly(model, row) for row in requests]
    costs, now = BatchCosts(PassCosts()), 0.0
    for _ in range(6):
        for width in range(1, 9):
            costs.of(2).note(width, 100, 1.0)
            costs.of(2).note(width, 200, 1.0 if width == 1 else 50.0)

    def a_second_later() -> float:
        nonlocal now
        now += 1
        return now

    ticking(monkeypatch, a_second_later)
    kinds, lengths, measured = list[str](), list[int](), list[bool]()
    pool = new_pool(model)
    pool._draft_support = replace(pool.draft_support, together=costs)
    rows = [row_of(with_drafts(row, said, "most")) for row, said in zip(requests, plain, strict=True)]
    for name in ("_plain_step", "_verify"):
        monkeypatch.setattr(DraftedBatch, name, _kind_noted(getattr(DraftedBatch, name), name, kinds, lengths))
    for row in rows:
        entered(pool, model, row)
    left = dict[Row, Any]()
    with noted_passes() as noted:
        while len(pool.rows()) > 1:
            num_kinds = len(kinds)
            left |= {each.row: each for each in pool.step().finished}
            if len(kinds) > num_kinds:
                measured.append((2, 1) in [(number, width) for number, width, _ in noted])
            noted.clear()
    while len(left) < 2:
        left |= {each.row: each for each in pool.step().finished}
    pool.discard()
    for row, theirs in zip(rows, plain, strict=True):
        assert_same(answered(row, left[row]), theirs)
    pairs = list(zip(kinds, lengths, strict=True))
    assert sum(kind == "_verify" for kind in kinds) >= 2
    assert all(length < 128 for kind, length in pairs if kind == "_verify")
    assert sum(kind == "_plain_step" and length >= 128 for kind, length in pairs) >= 3
    for place in range(2, len(kinds)):
        assert measured[place] is (kinds[place - 2 : place + 1] == ["_plain_step"] * 3)


def _kind_noted(real: Any, name: str, kinds: list[str], lengths: list[int]) -> Any:
    def step(self: Any, *args: Any) -> Any:
        if self.uids:
            kinds.append(name)
            lengths.append(self._longest)
        return real(self, *args)

    return step
