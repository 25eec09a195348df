"""What the benchmark of speculation makes of answers: what counts as speed, which side is which, what is missed, and
how much a led drafter knows. The server and the engine that it asks are tried by the benchmark itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafted_families, nothing_drafted, speculation
from benchmarks.client import BenchmarkError, Stream
from benchmarks.decode_rate import Arrived, tokens_per_second
from benchmarks.drafted_families import Led, Written, num_unexplained
from benchmarks.figure import Bound, Figure
from benchmarks.led_drafts import OF_EDITS, Lead, LedDrafter, Wanted, lead_for
from benchmarks.same_text import Answer, Compared, Drawn
from benchmarks.speculation_asked import (
    FOUR,
    Pair,
    Prompt,
    Texts,
    Told,
    acceptance,
    all_pairs,
    compared_texts,
    num_from_records,
    read_prompts,
    tokens_a_step,
    told_by,
)
from benchmarks.stall import Silence
from kvserve.core import TokenLogprobs
from kvserve.core.drafting import Drafting

SAME = Texts((), Compared((), 0.0))


def prompt(kind: str = "edit", name: str = "a") -> Prompt:
    return Prompt(kind, name, "s", "u")


def told(text: str = "x" * 101, seconds: float = 10.0, num_accepted: int = 0, num_rejected: int = 0) -> Told:
    """An answer of a token for each character, which come evenly."""
    num_tokens = len(text)
    parts = tuple((place * seconds / (num_tokens - 1), 1) for place in range(num_tokens))
    return Told(text, "stop", Arrived(parts, num_tokens), num_accepted, num_rejected)


def pair(kind: str, speed: float, **drafted: Any) -> Pair:
    num = 4 if kind == FOUR else 1
    prompts = tuple(prompt("prose" if kind == FOUR else kind, str(number)) for number in range(num))
    return Pair(prompts, (told(),) * num, (told(seconds=10 / speed, **drafted),) * num)


# --- prompts and rates ------------------------------------------------------------------------------------------------


def test_there_are_thirty_prompts_and_an_edit_shows_a_file() -> None:
    """Of 30 to 80 lines; prose shows nothing that could be copied."""
    prompts = read_prompts()
    kinds = [each.kind for each in prompts]
    assert [kinds.count(kind) for kind in ("edit", "copy", "extraction", "prose")] == [10, 5, 5, 10]
    assert len({each.name for each in prompts}) == len({each.said for each in prompts}) == 30
    for each in prompts:
        _, *files = each.said.split("```")
        if each.kind == "edit":
            assert 30 <= len(files[0].strip().splitlines()) - 1 <= 80, each.name
        if each.kind == "prose":
            assert not files and len(each.said) < 130


def test_what_came_with_the_first_tokens_is_no_speed() -> None:
    """A pass that accepts a draft brings eight tokens at once, in one part or in several; the first is not timed."""
    assert tokens_per_second([Arrived(((0.0, 8), (1.0, 8), (2.0, 8)), 24)]) == 8
    bursts = tuple((second + place / 10_000, 1) for second in (0.0, 1.0, 2.0) for place in range(8))
    assert tokens_per_second([Arrived(bursts, 24)]) == pytest.approx(8, rel=1e-3)
    assert tokens_per_second([Arrived(((0.0, 1), (0.1, 3), (0.2, 2)), 12)]) == pytest.approx(50)


def test_answers_beside_one_another_are_timed_from_when_all_have_begun() -> None:
    """To the end of the last; those that did not run beside one another say nothing."""
    early = Arrived(tuple((float(at), 1) for at in range(11)), 11)
    late = Arrived(tuple((4.0 + at, 1) for at in range(11)), 11)
    assert tokens_per_second([early, late]) == (6 + 10) / 10
    for answers in ([Arrived((), 0)], [Arrived(((0.0, 5),), 5)]):
        with pytest.raises(BenchmarkError):
            tokens_per_second(answers)


def test_an_answer_is_read_off_its_stream() -> None:
    """Text, end, and what its usage says of drafts."""
    events = [
        '{"choices": [{"delta": {"content": "ab"}, "finish_reason": null}]}',
        '{"choices": [{"delta": {"content": "c"}, "finish_reason": null}]}',
        '{"choices": [{"delta": {}, "finish_reason": "length"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6, "completion_tokens_details": '
        '{"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1}}}',
        "[DONE]",
    ]
    stream = Stream(None, 0.0)  # type: ignore[arg-type]
    stream.feed(b"HTTP/1.0 200 OK\r\n\r\n", 0.5)
    for at, event in enumerate(events):
        stream.feed(f"data: {event}\n\n".encode(), 1.0 + at)
    found = told_by(stream)
    assert found == Told("abc", "length", Arrived(((1.0, 2), (2.0, 1)), 6), 4, 1)
    assert found.num_steps == 2


def test_drafts_from_other_answers_are_seen_in_what_the_server_tells() -> None:
    """Also where it tells of no drafts."""
    body = {"speculation": {"by_source": {"records": {"num_drafted_tokens": 3, "num_accepted_tokens": 0}}}}
    assert num_from_records(body) == 3
    assert num_from_records({"speculation": {"by_source": {}}}) == num_from_records({}) == 0


# --- pairs and figures ------------------------------------------------------------------------------------------------


def test_both_sides_take_turns_and_prose_runs_at_once_as_well() -> None:
    """Each prompt once a round on each side; who is first changes, and no side is taken for the other."""
    prompts = [prompt("edit"), prompt("copy"), *(prompt("prose", str(number)) for number in range(6))]
    asked: list[tuple[int, bool]] = []

    def ask(some: Sequence[Prompt], is_drafted: bool) -> tuple[Told, ...]:
        asked.append((len(some), is_drafted))
        return tuple(told(num_accepted=int(is_drafted)) for _ in some)

    pairs = all_pairs(prompts, ask, 2)
    assert len(pairs) == 2 * (8 + 2) and [each.kind for each in pairs[:10]].count(FOUR) == 2
    assert asked[:6] == [(1, False), (1, True), (1, True), (1, False), (1, False), (1, True)]
    assert asked[20:22] == [(1, True), (1, False)]
    assert all(each.drafted[0].num_accepted and not each.plain[0].num_accepted for each in pairs)
    assert [each.name for each in pairs[9].prompts] == ["2", "3", "4", "5"]


def test_a_bound_is_missed_by_a_kind_that_is_too_slow() -> None:
    """Prose may lose three parts of a hundred on any machine; what copies must gain where the BLAS is fast."""
    speeds = {"edit": 1.3, "copy": 1.9, "extraction": 0.5, "prose": 0.98, FOUR: 0.96}
    pairs = [pair(kind, speed) for kind, speed in speeds.items()]

    def missed(is_fast: bool) -> list[str]:
        return [
            each.name.partition(":")[0] for each in speculation.figures(pairs, SAME, is_fast=is_fast) if each.is_missed
        ]

    assert missed(True) == ["edits", "prose, four streams at once"]
    assert missed(False) == ["prose, four streams at once"]
    assert not any(each.is_missed for each in speculation.figures([pair("edit", 1.41)] * 3, SAME, is_fast=True))


def test_the_median_of_a_kind_counts_and_answers_that_are_too_short_do_not() -> None:
    """They are told of; a kind that has no others says nothing."""
    short = Pair((prompt(),), (told("x" * 5),), (told("x" * 5, seconds=99.0),))
    pairs = [pair("edit", 1.0, num_accepted=50, num_rejected=50), pair("edit", 2.0), pair("edit", 1.5), short]
    speed, steps, *_ = speculation.figures(pairs, SAME, is_fast=True)
    assert speed.value == pytest.approx(1.5) and len(speed.rounds) == 3 and "1 too short" in speed.absolute
    assert steps.rounds == pytest.approx((101 / 51, 1.0, 1.0)) and "50% of drafted" in steps.absolute
    assert "| edit | a | 5 | too short |" in speculation.table(pairs)
    with pytest.raises(BenchmarkError, match="edits"):
        speculation.figures([short], SAME, is_fast=True)


def test_drafts_of_all_answers_count_together() -> None:
    """As many passes as tokens that were not drafted; nothing drafted is no share."""
    pairs = [pair("edit", 1.0, num_accepted=50, num_rejected=30), pair("copy", 1.0, num_accepted=0)]
    assert tokens_a_step(pairs) == pytest.approx(202 / 152)
    assert acceptance(pairs) == 50 / 80 and acceptance(pairs[1:]) is None
    assert speculation.wanted_of(pairs[1:]) == OF_EDITS
    assert speculation.wanted_of(pairs[:1]) == Wanted(101 / 51, 0.625)


def test_equal_texts_are_not_asked_again() -> None:
    def judge(_prompt: Prompt, _is_drafted: bool) -> Answer:
        raise AssertionError("asked again")

    assert compared_texts([pair("edit", 1.0), pair(FOUR, 1.0)], judge) == SAME


@pytest.mark.parametrize(("gap", "num_missed"), [(1e-6, 0), (0.5, 1)])
def test_a_text_that_differs_is_a_fault_unless_two_tokens_were_as_near_as_noise(gap: float, num_missed: int) -> None:
    """Noise is what the gaps of the drafted answer move by before the texts part; one prompt of each kind helps."""
    same, other = pair("copy", 1.0), pair("edit", 1.0)
    other = replace(other, plain=(told("abcd" * 20),), drafted=(told("abce" * 20),))

    def judge(asked: Prompt, is_drafted: bool) -> Answer:
        text = other.plain[0].text if asked.kind == "edit" else same.plain[0].text
        gaps = [gap if place == 3 and asked.kind == "edit" else 2.0 for place in range(len(text))]
        drawn = tuple(Drawn(letter.encode(), each + 1e-4 * is_drafted) for letter, each in zip(text, gaps, strict=True))
        return Answer(text, "stop", drawn, 0, 0)

    texts = compared_texts([same, other], judge)
    assert [each.kind for each in texts.prompts] == ["edit", "copy"]
    assert texts.compared.noise == pytest.approx(1e-4)
    assert [each.place for each in texts.compared.differences] == [3]
    found = speculation.figures([same, other], texts, is_fast=False)
    assert sum(figure.is_missed for figure in found) == num_missed
    assert next(speculation.told(texts)).startswith("0, answer 1: differs from token 3 on")


def test_a_part_that_is_measured_again_takes_its_old_place_in_the_file() -> None:
    """The others stay as they are."""
    text = speculation.with_section("", "One", "a")
    text = speculation.with_section(text, "Two", "b\n\n| c |")
    again = speculation.with_section(text, "One", "d")
    assert again == f"{speculation.TITLE}\n## Two\n\nb\n\n| c |\n\n## One\n\nd\n"


def test_what_is_saved_names_no_path() -> None:
    given = speculation._parse(["--blas", "/opt/some/lib.so", "--nothing-drafted", "--rounds", "2", "--save"])
    assert speculation._command(given) == "python -m benchmarks.speculation --nothing-drafted --rounds 2"


# --- led drafts -------------------------------------------------------------------------------------------------------


def accepted_as_by_the_engine(drafter: LedDrafter, answer: Sequence[int]) -> tuple[int, int, int]:
    """Passes, tokens that were drafted, and those accepted, where what is drawn is the answer. A draft is asked for
    before the token is read that was drawn last, and again behind that one where it is another or known."""
    place = num_followed = num_steps = num_drafted = num_accepted = 0
    is_read = False

    def proposed(end: int) -> tuple[int, ...]:
        nonlocal num_followed
        drafter.follow(answer[num_followed:end])
        num_followed = max(end, num_followed)
        draft = drafter.propose(100)
        return draft.tokens if draft is not None else ()

    while place < len(answer):
        num_steps += 1
        tried: tuple[int, ...] = ()
        if not is_read and (found := proposed(place)):
            is_read, tried = True, found[1:] if found[0] == answer[place] else proposed(place + 1)
        elif is_read:
            tried = proposed(place + 1)
        behind = answer[place + 1 : place + 1 + len(tried)]
        num_right = next(
            (at for at, pair in enumerate(zip(tried, behind, strict=False)) if pair[0] != pair[1]), len(behind)
        )
        place, is_read = place + 1 + num_right, bool(tried)
        num_drafted, num_accepted = num_drafted + len(tried), num_accepted + num_right
    return num_steps, num_drafted, num_accepted


@pytest.mark.parametrize("wanted", [OF_EDITS, Wanted(2.5, 0.9), Wanted(1.2, 0.3), Wanted(1.0, 0.5)])
def test_a_led_drafter_is_accepted_as_often_as_is_wanted(wanted: Wanted) -> None:
    """About so many tokens come a step, and of the drafted ones that share is right."""
    answer = [300 + place * 7919 % 600 for place in range(8_000)]
    found = accepted_as_by_the_engine(LedDrafter(answer, lead_for(wanted), 0), answer)
    num_steps, num_drafted, num_accepted = found
    assert len(answer) / num_steps == pytest.approx(wanted.tokens_a_step, rel=0.1)
    if wanted.tokens_a_step > 1:
        assert num_accepted / num_drafted == pytest.approx(wanted.acceptance, abs=0.06)


def test_a_led_drafter_keeps_to_what_is_asked_of_it() -> None:
    """No more tokens than are asked for, none behind the end, and none once the answer is another one."""
    drafter = LedDrafter([5, 6, 7], Lead(known=1.0, spoiled=0.0), 0)
    first = drafter.propose(2)
    assert first is not None and first.tokens == (5, 6) and first.chances == (1.0, 1.0)
    drafter.follow([5, 6])
    last = drafter.propose(8)
    assert last is not None and last.tokens == (7,)
    drafter.follow([7])
    assert drafter.propose(8) is None
    lost = LedDrafter([5, 6, 7], Lead(known=1.0, spoiled=0.0), 0)
    lost.follow([4])
    assert lost.propose(8) is None
    spoiled = LedDrafter([5, 6, 7], Lead(known=1.0, spoiled=1.0), 0).propose(8)
    assert spoiled is not None and spoiled.tokens == (4, 7, 6)


def led(family: str, speed: float, num_steps: int, **other: Any) -> Led:
    return Led(family, 10.0, 10.0 * speed, 130, num_steps, 60, 30, **({"is_same": True} | other))


def test_a_family_must_save_steps_and_lose_no_time() -> None:
    """With a fast BLAS; without one nothing need be drafted, and no text may be another for no reason."""
    fine = [led("qwen3_5", 1.0, 100)] * 3
    bad = [led("gemma3", 0.98, 101, is_same=False, num_unexplained=1), *[led("gemma3", 0.98, 101)] * 2]

    def missed(is_fast: bool) -> list[bool]:
        return [each.is_missed for each in drafted_families.figures([*fine, *bad], is_fast=is_fast)]

    assert missed(True) == [False, False, False, True, True, True]
    assert missed(False) == [False, False, False, False, False, True]


def test_an_answer_of_the_engine_may_part_where_two_tokens_are_as_near_as_noise() -> None:
    """Noise is what log-probabilities move by with drafts, on the tokens before."""

    def written(tokens: Sequence[int], gaps: Sequence[float] | None) -> Written:
        logprobs = [
            None if gaps is None else TokenLogprobs(-0.1, ((token, -0.1), (0, -0.1 - gaps[place])))
            for place, token in enumerate(tokens)
        ]
        return Written(tuple(tokens), tuple(logprobs), Arrived((), len(tokens)), Drafting())

    plain, drafted = written([7, 8, 9], None), written([7, 8, 4], None)
    moved = written([7, 8, 4], [2.001, 2.0, 1.0])
    assert num_unexplained(written([7, 8, 9], [2.0, 2.0, 0.0001]), moved, (plain, drafted)) == 0
    assert num_unexplained(written([7, 8, 9], [2.0, 2.0, 0.5]), moved, (plain, drafted)) == 2


def test_where_nothing_is_drafted_speed_is_compared_and_drafts_are_told() -> None:
    usage = {"completion_tokens": 192, "completion_tokens_details": {"rejected_prediction_tokens": 3}}
    figure = nothing_drafted.speed(1, [(10.0, 9.6), (10.0, 9.8), (10.0, 9.9)], [usage] * 3)
    assert figure.value == pytest.approx(0.98) and not figure.is_missed
    assert figure.absolute.endswith("9 tokens drafted beside 576")
    assert nothing_drafted.speed(1, [(10.0, 9.6)], [usage]).is_missed
    own = nothing_drafted.own_time(1, [(1.0, 0.9)], [usage])
    assert own.value == pytest.approx(1000 * 0.1 / 512) and own.is_missed
    assert not nothing_drafted.own_time(8, [(1.0, 0.9)], [usage]).is_missed
    gap, prefill = nothing_drafted.stall([(Silence(0.12, 2.0, 9), Silence(0.1, 2.0, 9))])
    assert gap.value == pytest.approx(1.2) and gap.is_missed
    assert prefill.value == 1 and not prefill.is_missed


# --- the parts together -----------------------------------------------------------------------------------------------


def figure(name: str, value: float) -> Figure:
    return Figure("speculation", name, "", (value,), Bound("at least", 1.0), "")


def test_every_part_is_kept_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The led drafts are like those of the edits that were measured before them; the exit code says what is missed."""
    wanted: list[Wanted] = []

    def families(_library: object, _num_rounds: int, like: Wanted) -> tuple[str, list[Figure]]:
        wanted.append(like)
        return "led", [figure("b", 0.5)]

    def fails(_num_rounds: int) -> list[Figure]:
        raise BenchmarkError("no server")

    file = tmp_path / "speculation.md"
    monkeypatch.setattr(speculation, "RESULTS", file)
    monkeypatch.setattr(speculation, "fast_library", lambda _: Path("/opt/some/lib.so"))
    monkeypatch.setattr(speculation, "prompts_part", lambda *_: ("asked", [figure("a", 2.0)], Wanted(2.0, 0.7)))
    monkeypatch.setattr(speculation, "families_part", families)
    monkeypatch.setattr(nothing_drafted, "run", fails)
    assert speculation.main(["--prompts"]) == 0
    assert not file.exists()
    assert speculation.main(["--prompts", "--families", "--save"]) == 1
    assert "missed: b" in capsys.readouterr().out
    assert speculation.main(["--save"]) == 1
    assert "failed: no server" in capsys.readouterr().out
    assert wanted == [Wanted(2.0, 0.7)] * 2
    text = file.read_text("utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Prompts of real text",
        "## Led drafts on random models",
    ]
    assert "asked" in text and "led" in text and "/opt" not in text
