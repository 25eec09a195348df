"""What the benchmarks of real text make of answers: where texts part, what noise explains, what is cut of a prompt.
That a planted fault is seen is tried on made-up answers here; on the demo's model the benchmark does it itself.
"""

import ast
from dataclasses import replace

import pytest

from benchmarks import real_text
from benchmarks.client import BenchmarkError
from benchmarks.planted import FILE, REPOSITORY, faulty
from benchmarks.real_text import Asked, Measured, Session, cut_to
from benchmarks.recordings import Conversation, Request
from benchmarks.same_text import (
    Answer,
    Drawn,
    check_reuse,
    compared,
    figures,
    place_of_difference,
    read_prompts,
    told,
)


def said(*tokens: str | bytes, gap: float = 1.0, finish_reason: str = "stop", shift: float = 0.0) -> Answer:
    """An answer of these tokens, whose gaps are `gap`, or off it by `shift`."""
    pieces = [token.encode() if isinstance(token, str) else token for token in tokens]
    drawn = tuple(Drawn(piece, gap + shift) for piece in pieces)
    return Answer(b"".join(pieces).decode(), finish_reason, drawn, 20, 19)


def test_a_text_parts_at_the_token_that_says_something_else() -> None:
    """Also within a word, within a character of several bytes, where one of both has ended, and by its end alone."""
    cold = said("Por", "to", " is", " blue")
    assert place_of_difference(cold, cold) is None
    assert place_of_difference(cold, said("Por", "ter")) == 1
    assert place_of_difference(cold, said("Lisbon")) == 0
    assert place_of_difference(cold, said("Por", "to", " is")) == 3
    assert place_of_difference(cold, said("Por", "to", " is", " blue", ".")) == 4
    assert place_of_difference(cold, said("Por", "to", " is", " blue", finish_reason="length")) == 4
    two = said("a ", b"\xc3", b"\xa9")
    assert place_of_difference(two, said("a ", b"\xc3", b"\xa8")) == 2


def test_noise_is_measured_before_texts_part() -> None:
    """A difference where the two best tokens are closer than that is explained by it, another one is not."""
    cold = [said("a", "b", gap=2.0), said("c", "d", gap=0.01), said("e", "f", gap=2.0)]
    ways = {"warm": [said("a", "b", gap=2.0, shift=0.05), said("c", "x", gap=9.0), said("e", "f", gap=2.0)]}
    ways["warm"][1] = replace(ways["warm"][1], tokens=(Drawn(b"c", 0.02), Drawn(b"x", 9.0)))
    found = compared(cold, ways)
    assert found.noise == pytest.approx(0.05)
    assert [(each.way, each.number, each.place, each.gap) for each in found.differences] == [("warm", 1, 1, 0.01)]
    assert found.num_prompts == 1 and not found.unexplained
    ways["warm"][2] = said("e", "g", gap=2.0)
    assert [each.number for each in compared(cold, ways).unexplained] == [2]


def test_where_the_cold_answer_has_ended_the_other_one_says_how_close_it_was() -> None:
    """The token that ends an answer is not among its tokens; where nobody says it, noise explains nothing."""
    cold = [said("a")]
    assert compared(cold, {"warm": [said("a", "b", gap=0.5)]}).differences[0].gap == 0.5
    unsaid = replace(said("a", "b"), tokens=())
    assert compared(cold, {"streamed": [unsaid]}).unexplained


def test_a_bound_is_missed_by_a_text_that_differs_and_by_a_fault_that_nobody_sees() -> None:
    """With the wheel's BLAS by any; with a fast one by what noise does not explain, and by two prompts."""
    cold = [said("a", "b", gap=2.0), said("c", "d", gap=2.0)]
    other = [said("a", "x", gap=2.0), said("c", "d", gap=2.0, shift=3.0)]

    def missed(ways: list[Answer], planted: list[Answer], is_fast: bool) -> list[bool]:
        found = figures({"cold": cold, "warm": ways}, planted, is_fast=is_fast)
        return [figure.is_missed for figure in found]

    unseen, seen = [said("a", "b", gap=2.0)], [said("q", "b", gap=2.0)]
    assert missed(cold, seen, is_fast=False) == [False, False, False]
    assert missed(cold, unseen, is_fast=False) == [False, False, True]
    assert missed([other[0], cold[1]], seen, is_fast=False) == [True, True, False]
    assert missed([other[0], cold[1]], seen, is_fast=True) == [False, True, False]
    assert missed(other, unseen, is_fast=True) == [False, False, True]
    assert missed([other[0], said("y")], seen, is_fast=True) == [True, True, False]
    assert "'ab' : 'ax'" in told({"cold": cold, "warm": other})


def test_answers_whose_prompts_were_not_found_compare_nothing() -> None:
    """Nor cold ones of whose prompts something was found."""
    known = [said("a")]
    check_reuse("warm", known, is_kept=True)
    with pytest.raises(BenchmarkError, match="cold, prompt 0: 19 of 20"):
        check_reuse("cold", known, is_kept=False)
    with pytest.raises(BenchmarkError, match="from disk, prompt 1: 3 of 20"):
        check_reuse("from disk", [*known, replace(known[0], num_cached_tokens=3)], is_kept=True)


def test_the_planted_fault_fits_the_code() -> None:
    """Its text stands there once, and what comes out is another program."""
    text = (REPOSITORY / FILE).read_text("utf-8")
    assert ast.dump(ast.parse(faulty(text))) != ast.dump(ast.parse(text))
    with pytest.raises(ValueError, match="0 times"):
        faulty("nothing of it")


def test_there_are_fifty_prompts_and_no_two_alike() -> None:
    """Ten below each system prompt."""
    prompts = [tuple(message["content"] for message in messages) for messages in read_prompts()]
    assert len(set(prompts)) == len(prompts) == 50
    assert len({system for system, _ in prompts}) == 5


def test_a_prompt_is_cut_in_the_middle_of_its_system_text_and_no_more_than_it_must() -> None:
    """All requests of a conversation alike, so that they still begin alike; a short one stays as it is."""
    users = [{"role": "user", "content": "u" * number} for number in (1, 4)]
    bodies = [{"messages": [{"role": "system", "content": "abcdefghij" * 20}, *users[: at + 1]]} for at in (0, 1)]
    talk = Conversation("a", "a", tuple(Request(body, None) for body in bodies))

    def count(request: Request) -> int:
        return sum(len(message["content"]) for message in request.body["messages"])

    assert cut_to(talk, 201, count) is talk
    cut = cut_to(talk, 31, count)
    assert [request.body["messages"][0]["content"] for request in cut.requests] == ["abcdefghij" * 3] * 2
    assert [request.body["messages"][1:] for request in cut.requests] == [users[:1], users]


def test_first_tokens_have_bounds_where_the_issue_has_them() -> None:
    """At six thousand tokens with a fast BLAS; a slower turn misses, and a short prompt is shown only."""
    cold = Asked(100.0, 6_000, 0)
    last = Asked(106.0, 6_300, 0)
    question = Asked(0.8, 6_120, 6_100)
    one = Session(cold, question, (Asked(2.0, 6_100, 6_000), Asked(2.9, 6_200, 6_100)), Asked(9.0, 6_300, 6_000), last)
    assert one.ratio(Asked(10.4, 6_200, 0)) == pytest.approx(0.1)
    slow = replace(
        one, question=Asked(3.1, 6_120, 6_100), warm=(Asked(3.2, 6_100, 6_000),), killed=Asked(11.0, 6_300, 6_000)
    )
    short = replace(one, cold=replace(cold, num_prompt_tokens=1_500))

    def verdicts(session: Session, is_fast: bool) -> list[tuple[bool, bool]]:
        found = real_text.figures([Measured("PI", "8080", (session,))], is_fast=is_fast)
        return [(figure.bound is not None, figure.is_missed) for figure in found]

    assert verdicts(one, is_fast=True) == [(True, False)] * 3
    assert verdicts(slow, is_fast=True) == [(True, True)] * 3
    assert verdicts(slow, is_fast=False) == [(False, False)] * 3
    assert verdicts(replace(short, warm=slow.warm), is_fast=True) == [(False, False)] * 3
    table = real_text.table([Measured("PI", "8080", (one,))])
    assert "6,300 tokens | 100.0 s | 0.80 s (20 tokens) | 2.45 s (100 tokens) | 9.00 s (300 tokens)" in table
