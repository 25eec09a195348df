"""What is drafted for an answer: what followed the longest matches, whatever the cuts in which the answer came."""

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import Draft
from kvserve.drafting.acceptance import Acceptance
from kvserve.drafting.alignment import MAX_OTHERS, Alignment
from kvserve.drafting.kept_text import KeptText, TextOwner
from kvserve.drafting.text_drafter import MAX_PLACES, MAX_VOTERS, TextDrafter
from kvserve.drafting.text_index import MAX_MATCH_TOKENS, NGRAM_TOKENS, TextIndex
from tests.laws import num_examples

WORDS = st.lists(st.integers(0, 3), max_size=60)
TEXTS = st.lists(WORDS, max_size=3)


def _record(tokens: Sequence[int]) -> KeptText:
    return KeptText(TextOwner("reader"), TextIndex(tokens))


def _drafter(prompt: list[int], prediction: Sequence[int] = (), records: Sequence[list[int]] = ()) -> TextDrafter:
    return TextDrafter(prompt, TextIndex(prompt), prediction, records=[(_record(each), 0) for each in records])


def _matches(tail: Sequence[int], text: Sequence[int], places: range) -> list[tuple[int, Sequence[int]]]:
    """How many of the tail's tokens end at each of the newest of these places of a text, and what follows."""
    found = []
    for end in reversed(places):
        num = 0
        while num < len(tail) and num < end and text[end - 1 - num] == tail[-1 - num]:
            num += 1
        if num >= NGRAM_TOKENS:
            found.append((num, text[end:]))
    return found[:MAX_PLACES]


def _expected(texts: Sequence[tuple[Sequence[int], range]], tail: Sequence[int], max_num_tokens: int) -> list[int]:
    """The tokens that the places vote for, by a look at every place of every text."""
    found = [match for text, places in texts for match in _matches(tail[-MAX_MATCH_TOKENS:], text, places)]
    voters = sorted(found, key=lambda match: -match[0])[:MAX_VOTERS]
    drafted: list[int] = []
    while len(drafted) < max_num_tokens and voters:
        depth = len(drafted)
        weights: dict[int, int] = {}
        for num, behind in voters:
            weights[behind[depth]] = weights.get(behind[depth], 0) + (num + depth) ** 2
        drafted.append(max(weights, key=weights.__getitem__))
        voters = [each for each in voters if each[1][depth] == drafted[-1] and len(each[1]) > depth + 1]
    return drafted


def _follows_the_longest_matches(
    prompt: list[int], prediction: list[int], records: list[list[int]], answer: list[int], most: int
) -> None:
    whole, border = [*prompt, *answer], len(prompt) - min(MAX_MATCH_TOKENS, len(prompt))
    predicted = [[*prompt[-2 * MAX_MATCH_TOKENS :], *prediction]] if prediction else []
    others = [(text, range(1, len(text))) for text in records]
    texts = [(text, range(1, len(text))) for text in predicted]
    texts += [(whole, range(border + 1, len(whole))), (whole, range(1, border + 1)), *others]
    drafter = _drafter(prompt, prediction, records)
    drafter.follow(answer)
    draft = drafter.propose(most)
    expected = _expected(texts, whole, most) if len(whole) >= NGRAM_TOKENS else []
    drafted = list(draft.tokens) if draft is not None else []
    assert drafted == expected[: len(drafted)]
    assert len(drafted) <= len(expected)
    stretch = [*whole[-NGRAM_TOKENS:], *drafted]
    stands = (stretch == text[at : at + len(stretch)] for text, _ in texts for at in range(len(text)))
    assert not drafted or any(stands)


@settings(max_examples=num_examples(80), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=120),
    prediction=WORDS,
    records=TEXTS,
    answer=WORDS,
    most=st.integers(1, 9),
)
def test_a_draft_is_what_followed_the_longest_matches(
    prompt: list[int], prediction: list[int], records: list[list[int]], answer: list[int], most: int
) -> None:
    """As a search through all texts finds it; and all of it stands behind the answer's end in one of them."""
    _follows_the_longest_matches(prompt, prediction, records, answer, most)


@settings(max_examples=num_examples(40), deadline=None)
@given(prompt=WORDS, answer=WORDS, cuts=st.sets(st.integers(0, 60)), asked=st.sets(st.integers(0, 60)))
def test_any_cuts_of_an_answer_give_the_same_drafts(
    prompt: list[int], answer: list[int], cuts: set[int], asked: set[int]
) -> None:
    """Whoever asks at the same places gets the same tokens, chances and sources, judged or not."""
    whole, cut = _drafter(prompt), _drafter(prompt)
    for start in range(0, len(answer) + 1):
        if start in asked:
            drafts = whole.propose(8), cut.propose(8)
            assert drafts[0] == drafts[1]
            if drafts[1] is not None:
                cut.judge(drafts[1], 1, 0)
        ends = sorted(place for place in asked | {len(answer)} if place > start)
        if start in asked | {0} and ends:
            whole.follow(answer[start : ends[0]])
        cut.follow(answer[start : start + 1])
    assert list(whole.answer) == list(cut.answer) == answer


def _fared(draft: Draft | None) -> float:
    assert draft is not None
    return draft.chances[0]


COPIED = [*range(100, 160)]


def test_a_prediction_is_drafted_from_its_first_token() -> None:
    """And is found again behind what the model wrote otherwise, though the conversation says something else."""
    drafter = _drafter([1, 2, 3, 50, 51, 52, 7], prediction=[10, 11, 12, 13, 14, 15])
    draft = drafter.propose(4)
    assert draft is not None and draft.source == "prediction" and draft.tokens == (10, 11, 12, 13)
    drafter.follow([10, 99, 12, 13, 14])
    draft = drafter.propose(4)
    assert draft is not None and draft.source == "prediction" and draft.tokens == (15,)


def test_a_draft_says_where_its_words_come_from() -> None:
    """The conversation, the answer itself, other texts; nothing where nothing matches."""
    drafter = _drafter([1, 2, 3, 4, 5, 9], records=[[6, 7, 8, 20, 21]])
    assert drafter.propose(8) is None
    drafter.follow([1, 2, 3])
    draft = drafter.propose(8)
    assert draft is not None and (draft.source, draft.tokens[:4]) == ("conversation", (4, 5, 9, 1))
    drafter.follow([6, 7, 8])
    draft = drafter.propose(8)
    assert draft is not None and (draft.source, draft.tokens) == ("records", (20, 21))
    drafter.follow([30, 1, 2, 3])
    draft = drafter.propose(8)
    assert draft is not None and draft.tokens[0] == 6  # the answer's own, which is nearer


def test_a_longer_match_is_likelier_and_one_that_others_contradict_less() -> None:
    """Chances are of the token alone, those before it being right."""
    long, short = _drafter([*COPIED, 1]), _drafter([*COPIED, 1])
    long.follow(COPIED[:20])
    short.follow([5, *COPIED[17:20]])
    assert _fared(long.propose(4)) > _fared(short.propose(4))
    contradicted = _drafter([*COPIED, *COPIED[17:20], 77, 1])
    contradicted.follow([5, *COPIED[17:20]])
    assert _fared(contradicted.propose(4)) < _fared(short.propose(4))


def test_drafts_that_fail_become_unlikely_and_those_that_hold_likely_again() -> None:
    """Tried or not: what was drafted is compared with what came."""
    prompt = [token for start in range(100, 400, 3) for token in (1, start, start + 1, start + 2)]
    drafter = _drafter([*prompt, *prompt])
    chances = []
    for start in range(100, 400, 3):
        drafter.follow([start, start + 1, start + 2])
        chances.append(_fared(drafter.propose(1)))
        drafter.follow([1 if start > 250 else 2])
    assert chances[50] < 0.8 * chances[0]
    assert chances[90] > chances[62] > chances[51]  # the matches of the first two are equally long


def test_how_drafts_fared_is_known_to_the_readers_next_answer_alone() -> None:
    """An answer's own learning ends with it; another reader's state says nothing here."""
    reader = Acceptance()
    drafter = TextDrafter([1, 2, 3, 4, 9], TextIndex([1, 2, 3, 4, 9]), acceptance=reader)
    for number in range(30):
        drafter.follow([1, 2, 3])
        drafter.propose(1)
        drafter.follow([100 + number])

    def begin(acceptance: Acceptance | None) -> float:
        again = TextDrafter([1, 2, 3, 4, 9], TextIndex([1, 2, 3, 4, 9]), acceptance=acceptance)
        again.follow([1, 2, 3])
        return _fared(again.propose(1))

    assert begin(reader) < begin(None) == begin(Acceptance())


def _behind_other_words(num_along: int, others: Sequence[int], num_left: int, num_met: int) -> Sequence[int]:
    """What is drafted where a copy says these in place of `num_left` tokens and then met so many of the text again."""
    drafter = _drafter([*COPIED, 1])
    drafter.follow(COPIED[:num_along])
    assert drafter.propose(1) is not None
    again = num_along + num_left
    drafter.follow([*others, *COPIED[again : again + num_met]])
    draft = drafter.propose(4)
    return draft.tokens if draft is not None else ()


OTHERS = st.lists(st.integers(900, 903), min_size=1, max_size=3)


@settings(max_examples=num_examples(60), deadline=None)
@given(num_along=st.integers(3, 40), others=OTHERS, num_left=st.integers(0, 3), num_met=st.integers(1, 2))
def test_a_copy_goes_on_behind_other_words(num_along: int, others: list[int], num_left: int, num_met: int) -> None:
    """The step behind a replaced token has the text's next one as its draft, and the first step that met a token of the
    text again, where more or fewer came than were left out."""
    assert _behind_other_words(num_along, others[:1], 1, 0)[0] == COPIED[num_along + 1]
    drafted = _behind_other_words(num_along, others, num_left, num_met)
    assert drafted and [*drafted] == COPIED[num_along + num_left + num_met :][: len(drafted)]


def test_words_of_its_own_are_no_copy() -> None:
    """Neither while nothing of the text comes again, nor behind too many of them."""
    assert not _behind_other_words(20, [900, 901], 2, 0)
    assert _behind_other_words(20, [*range(900, 900 + MAX_OTHERS - 1)], MAX_OTHERS - 1, 1)
    assert not _behind_other_words(20, [*range(900, 900 + MAX_OTHERS)], MAX_OTHERS, 1)


def _num_steps(answer: Sequence[int]) -> int:
    """So many passes a copy takes whose drafts are all tried."""
    drafter, num_steps = _drafter([*COPIED, 1]), 0
    while len(drafter.answer) < len(answer):
        draft, rest = drafter.propose(4), answer[len(drafter.answer) :]
        pairs = zip(draft.tokens if draft is not None else (), rest, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        drafter.follow(rest[: num_right + 1])
        num_steps += 1
    return num_steps


def test_a_copy_with_every_sixth_token_replaced_takes_two_steps_for_six() -> None:
    """One behind the other word, and the rest; at the beginning three tokens have to match."""
    answer = [900 + place if place % 6 == 5 else token for place, token in enumerate(COPIED)]
    assert _num_steps(answer) <= 3 + 2 * len(answer) // 6


def test_a_text_that_is_left_at_another_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the text that a copy went along with, three tokens have to match again."""
    monkeypatch.setattr(Alignment, "guess", lambda _: None)
    with pytest.raises(AssertionError):
        test_a_copy_with_every_sixth_token_replaced_takes_two_steps_for_six()
    with pytest.raises((AssertionError, IndexError)):
        _behind_other_words(9, [900], 1, 0)[0]


def test_other_words_that_end_a_copy_say_nothing_of_matches() -> None:
    """Texts that never go on behind another word become unlikely to, and as likely as before where tokens match."""
    drafter = _drafter([*range(100, 400)])
    matched, led = [], []
    for place in range(100, 300, 10):
        drafter.follow([1000 + place, *range(place, place + 3)])
        matched.append(_fared(drafter.propose(1)))
        drafter.follow([place + 3, 2000 + place])
        led.append(_fared(drafter.propose(1)))
    assert led[-1] < 0.9 * led[0]
    assert matched[-1] > matched[0]


def test_a_text_that_is_gone_is_drafted_from_no_more() -> None:
    """At once, also in an answer that began before, and went along with it."""
    record = _record([6, 7, 8, 20, 21, 22])
    drafter = TextDrafter([1], TextIndex([1]), records=[(record, 0)])
    drafter.follow([6, 7, 8])
    assert drafter.propose(4) is not None
    drafter.follow([30])
    draft = drafter.propose(4)
    assert draft is not None and (draft.source, draft.tokens[0]) == ("records", 21)
    record.drop()
    assert drafter.propose(4) is None


def test_the_last_draft_of_an_answer_is_learned_from_though_nobody_asks_again() -> None:
    """What it was worth counts for its reader's next answers; what was said since is no less a part of the answer."""
    fared = Acceptance()
    drafter = TextDrafter(COPIED, TextIndex(COPIED), acceptance=fared)
    drafter.follow(COPIED[:5])
    draft = drafter.propose(4)
    assert draft is not None
    drafter.follow([*draft.tokens, 7])
    assert fared.shift(draft.source) > 0
    assert list(drafter.answer) == [*COPIED[:5], *draft.tokens, 7]
    drafter.follow(range(1000, 1200))
    assert drafter.propose(4) is None and len(drafter.answer) == 210
    drafter.follow(COPIED[:5])
    again = drafter.propose(4)
    assert again is not None and again.tokens == draft.tokens


def test_a_search_that_believes_hashes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is drafted then did not stand behind the answer's end."""
    _follows_the_longest_matches([1, 2, 3, 0, 2, 1], [], [], [1, 2, 3], 4)
    monkeypatch.setattr(TextIndex, "ends_of", lambda *_: [4])
    with pytest.raises(AssertionError):
        _follows_the_longest_matches([1, 2, 3, 0, 2, 1], [], [], [1, 2, 3], 4)
