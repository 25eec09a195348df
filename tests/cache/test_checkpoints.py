"""Where a prefill stops."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkpoint_budget import GIB, run_eliding_loop, run_tool_loop
from kvserve.cache.checkpoints import MessageEnd, PromptOutline, Stop, last_cut, plan_stops
from kvserve.core import ImageSpan
from tests.laws import num_examples

AGENT = (
    MessageEnd(500, "system"),
    MessageEnd(600, "user", is_genuine_user=True),
    *(MessageEnd(600 + 100 * n, "assistant" if n % 2 else "tool") for n in range(1, 21)),
)


def offsets(stops: tuple[Stop, ...]) -> list[int]:
    return [stop.offset for stop in stops]


def plan(outline: PromptOutline, usable: int = 0, matched: int = 0, *, needs: bool = True) -> tuple[Stop, ...]:
    return plan_stops(outline, num_usable_tokens=usable, num_matched_tokens=matched, needs_checkpoints=needs)


def test_a_cold_agent_prompt_stops_where_agents_come_back() -> None:
    """System + tools, the user message, the newest ten message ends, of which the last is before the tail."""
    stops = plan(PromptOutline(2605, AGENT, system_end=480))
    kinds = {stop.offset: stop.kind for stop in stops}
    assert kinds[480] == "system" and kinds[600] == "user" and kinds[2600] == "tail"
    newest = [1700, 1800, 1900, 2000, 2100, 2200, 2300, 2400, 2500, 2600]
    assert offsets(stops) == [480, 600, *newest]


def test_a_warm_prompt_stops_only_in_what_it_computes() -> None:
    """Nothing at or before the restored offset; the divergence point that this very prefill discovers is one."""
    stops = plan(PromptOutline(2605, AGENT, system_end=480), usable=2300, matched=2345)
    assert [(stop.offset, stop.kind) for stop in stops] == [
        (2345, "divergence"),
        (2400, "message"),
        (2500, "message"),
        (2600, "tail"),
    ]


def test_a_state_is_taken_before_the_images_of_a_message() -> None:
    """Before a message's first image, once per message, and never inside one."""
    images = (ImageSpan(620, 660, "a"), ImageSpan(660, 700, "b"), ImageSpan(750, 790, "c"))
    ends = (MessageEnd(600, "user", True), MessageEnd(740, "user", True), MessageEnd(800, "user", True))
    stops = plan(PromptOutline(805, ends, images=images), usable=0, matched=680)
    assert [(stop.offset, stop.kind) for stop in stops if stop.kind in ("image", "divergence")] == [
        (620, "image"),
        (750, "image"),
    ]


def test_where_all_can_be_cut_only_the_anchor_and_distance_count() -> None:
    """No state is needed: segments end at the system prompt and every so often."""
    stops = plan(PromptOutline(5001, AGENT, system_end=480), needs=False, matched=100)
    assert [(stop.offset, stop.kind) for stop in stops] == [(480, "system"), (1986, "stride"), (3493, "stride")]


def test_a_raw_prompt_is_kept_to_its_end() -> None:
    """It has no messages; sent again, or with more behind it, it starts from where its prefill ended."""
    assert [(stop.offset, stop.kind) for stop in plan(PromptOutline(502))] == [(501, "tail")]
    assert plan(PromptOutline(502), needs=False) == ()
    assert plan(PromptOutline(1)) == ()


def test_a_stride_has_tokens() -> None:
    """A stride of 0 is refused."""
    with pytest.raises(ValueError, match="stride"):
        plan_stops(PromptOutline(10), num_usable_tokens=0, num_matched_tokens=0, needs_checkpoints=True, max_stride=0)


@given(
    sizes=st.lists(st.integers(1, 900), max_size=30),
    tail=st.integers(1, 9),
    usable=st.integers(0, 3000),
    matched=st.integers(0, 3000),
    needs=st.booleans(),
    stride=st.integers(1, 700),
    cut=st.sampled_from((1, 1, 7, 256)),
)
@settings(max_examples=num_examples(50))
def test_a_plan_keeps_its_promises(
    sizes: list[int], tail: int, usable: int, matched: int, needs: bool, stride: int, cut: int
) -> None:
    """Ascending, inside what is computed, never the last token, no gap wider than the stride, and where prefills are
    cut at places of their own, nowhere else."""
    ends, total = [], 0
    for number, size in enumerate(sizes):
        total += size
        ends.append(MessageEnd(total, "user" if number % 3 == 0 else "tool", is_genuine_user=number % 3 == 0))
    outline = PromptOutline(total + tail, tuple(ends), system_end=ends[0].offset if ends else None)
    usable = last_cut(min(usable, outline.num_tokens - 1), cut)
    stops = plan_stops(
        outline,
        num_usable_tokens=usable,
        num_matched_tokens=min(matched, outline.num_tokens),
        needs_checkpoints=needs,
        max_stride=stride,
        cut_tokens=cut,
    )
    places = offsets(stops)
    assert places == sorted(set(places))
    assert all(usable < place < outline.num_tokens for place in places)
    edges = [usable, *places, outline.num_tokens - 1]
    assert all(end - start < stride + cut for start, end in pairwise(edges))
    assert all(place % cut == 0 for place in places)
    if needs:
        wanted = {end.offset for end in ends if end.is_genuine_user} | {end.offset for end in ends[-8:]}
        assert {place for each in wanted if (place := last_cut(each, cut)) > usable} <= set(places)


@pytest.mark.parametrize(("budget_gib", "checkpoint_gib"), [(6, 2), (8, 3), (12, 4)])
def test_a_long_tool_loop_on_a_hybrid_stays_in_its_budget(budget_gib: int, checkpoint_gib: int) -> None:
    """100 turns with 147 MiB per checkpoint: never above the budget, every turn starts from all that was computed,
    and afterwards so do the next turn, the last user message and a new conversation on the system prompt."""
    report = run_tool_loop(max_bytes=budget_gib * GIB, max_checkpoint_bytes=checkpoint_gib * GIB)
    assert report.peak_bytes <= budget_gib * GIB
    assert report.stats.checkpoint_bytes <= checkpoint_gib * GIB
    assert report.next_turn.num_trim_missed_tokens == 0
    assert report.num_tokens - report.next_turn.num_usable_tokens < 900
    assert report.again_from_user.num_usable_tokens == report.last_user_end
    assert report.new_conversation.num_usable_tokens == report.system_end
    assert report.num_computed_tokens == report.num_new_prompt_tokens


def test_without_anchors_a_loop_would_lose_its_system_prompt() -> None:
    """Negative control: with room for two checkpoints only, the anchors cannot all be there."""
    report = run_tool_loop(max_bytes=12 * GIB, max_checkpoint_bytes=2 * 147 * 2**20, num_turns=20)
    starts = (report.again_from_user.num_usable_tokens, report.new_conversation.num_usable_tokens)
    assert starts != (report.last_user_end, report.system_end)


def test_a_client_that_elides_old_results_starts_before_the_one_it_elided() -> None:
    """It shows its newest five results: the newest that it does not show any more is nine messages from the end."""
    peak_bytes, num_lost = run_eliding_loop(num_turns=20)
    assert num_lost == 0
    assert peak_bytes <= 12 * GIB
