"""Whose words are drafted from, what is kept of them and for how long."""

import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import NOBODY
from kvserve.core.keeping import Scope
from kvserve.drafting.kept_text import KeptText, TextOwner
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.drafting.text_index import TextIndex
from kvserve.drafting.texts import DraftTexts, num_common
from tests.laws import num_examples

PLENTY = 1 << 30
ANN, BOB = TextOwner("ann.-", "one"), TextOwner("bob.-", "one")
NO_ONE = str(NOBODY)


def _tokens(drafter: TextDrafter) -> list[int]:
    """Drafted behind the answer so far."""
    draft = drafter.propose(8)
    return list(draft.tokens) if draft is not None else []


def _say(texts: DraftTexts, owner: TextOwner, prompt: Sequence[int], answer: Sequence[int]) -> None:
    drafter = texts.begin(owner, prompt)
    drafter.follow(answer)
    texts.end(drafter)


def _known(texts: DraftTexts) -> list[list[int]]:
    return [list(text.index.tokens) for text in texts._used]


@st.composite
def _doings(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """What readers do, one after another: each has tokens of its own behind words that all of them say."""
    doings: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 12))):
        reader = draw(st.integers(0, 3))
        words = st.lists(st.integers(10 * reader, 10 * reader + 1), max_size=12)
        session = draw(st.sampled_from([None, "a", "b"]))
        doings.append((reader, session, draw(st.lists(st.just(99), max_size=4)) + draw(words), draw(words)))
    return doings


READERS = (("ann.-", ""), ("bob.-", ""), ("bob.-", "team"), (NO_ONE, ""))


def _strange_drafts(doings: list[tuple[Any, ...]]) -> list[int]:
    """Drafted tokens that are another reader's."""
    texts, strange = DraftTexts(PLENTY), []
    for number, session, prompt, answer in doings:
        principal, partition = READERS[number]
        drafter = texts.begin(TextOwner(principal, session, partition), prompt)
        for token in (99, 99, 99, *answer):
            strange += [each for each in _tokens(drafter) if each != 99 and each // 10 != number]
            drafter.follow([token])
        texts.end(drafter)
    return strange


@settings(max_examples=num_examples(60), deadline=None)
@given(doings=_doings())
def test_nobody_is_drafted_from_anothers_words(doings: list[tuple[Any, ...]]) -> None:
    """Whatever all of them said before, in whichever sessions; a partition of KV is a border too."""
    assert not _strange_drafts(doings)


def test_an_index_that_readers_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with one shelf for all, what Ann wrote is drafted for Bob."""
    said = [(0, "a", [99, 99, 99, 0, 1, 0], [0]), (1, "a", [10, 11], [10])]
    assert not _strange_drafts(said)
    monkeypatch.setattr(TextOwner, "reader", property(lambda _: ("", "", None)))
    assert _strange_drafts(said)


@pytest.mark.parametrize(
    ("first", "second", "is_drafted"),
    [
        (ANN, TextOwner("ann.-", "two"), True),
        (ANN, TextOwner("ann.-"), True),
        (ANN, BOB, False),
        (ANN, TextOwner("ann.-", "one", "elsewhere"), False),
        (TextOwner(NO_ONE, "one"), TextOwner(NO_ONE, "one"), True),
        (TextOwner(NO_ONE, "one"), TextOwner(NO_ONE, "two"), False),
        (TextOwner(NO_ONE, "one", is_one_client=False), TextOwner(NO_ONE, "one", is_one_client=False), False),
        (TextOwner(NO_ONE), TextOwner(NO_ONE), False),
    ],
)
def test_a_readers_other_texts_are_drafted_from(first: TextOwner, second: TextOwner, is_drafted: bool) -> None:
    """A principal's, whatever the session; who is nobody may be two people, but within a session of one client."""
    texts = DraftTexts(PLENTY)
    _say(texts, first, [1, 2, 3], [4, 5, 6])
    drafter = texts.begin(second, [7, 1, 2, 3])
    assert _tokens(drafter) == ([4, 5, 6] if is_drafted else [])


def test_an_answer_that_is_asked_for_again_is_drafted() -> None:
    """It stays beside what comes in its stead, for the same reader: from nobody nothing goes on to another."""
    prompt, answer = [*range(100, 400)], [*range(500, 520)]
    for owner, expected in ((ANN, answer[:8]), (TextOwner(NO_ONE), [])):
        texts = DraftTexts(PLENTY)
        _say(texts, owner, prompt, answer)
        assert _tokens(texts.begin(owner, prompt)) == expected
        assert _known(texts) == [prompt + answer, prompt]


def test_words_that_a_client_sent_once_leave_no_text_behind() -> None:
    """A carrier message stands before an answer and is gone from the next prompt, where the answer is: one text."""
    history, carrier = [*range(100, 400)], [*range(900, 960)]
    texts = DraftTexts(PLENTY)
    for turn in range(3):
        answer = [*range(1_000 + 100 * turn, 1_040 + 100 * turn)]
        _say(texts, ANN, history + carrier, answer)
        history += [*answer, 7, 7, 7]
        assert len(_known(texts)) == 1


def test_what_a_prompt_leaves_out_of_its_text_is_drafted_for_the_same_reader_alone() -> None:
    """A thought that the template dropped; from nobody without a session nothing goes on to another."""
    thought, answer = [*range(500, 540)], [*range(700, 720)]
    for owner, expected in ((ANN, [*range(510, 518)]), (TextOwner(NO_ONE), [])):
        texts = DraftTexts(PLENTY)
        _say(texts, owner, [*range(100, 200)], [*thought, *answer])
        drafter = texts.begin(owner, [*range(100, 200), *answer, 7, 7])
        assert len(_known(texts)) == 1
        drafter.follow(thought[5:10])
        assert _tokens(drafter) == expected


@settings(max_examples=num_examples(60), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=6),
    answer=st.lists(st.integers(0, 2), max_size=20),
)
def test_rewinding_equals_indexing_anew(prompts: list[list[int]], answer: list[int]) -> None:
    """After any prompts of a session, the last one's conversation is looked up as if it had been the only one."""
    owner = TextOwner(NO_ONE)  # nothing but the conversation is drafted from
    texts, fresh = DraftTexts(PLENTY), DraftTexts(PLENTY)
    for prompt in prompts[:-1]:
        _say(texts, owner, prompt, answer)
    drafters = texts.begin(owner, prompts[-1]), fresh.begin(owner, prompts[-1])
    for token in (*answer, 0):
        assert drafters[0].propose(8) == drafters[1].propose(8)
        for drafter in drafters:
            drafter.follow([token])


def test_only_what_is_new_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's next request sends its history again: none of it is hashed twice, nor where it goes on otherwise."""
    hashed: list[int] = []
    index_from = TextIndex._index_from

    def counted(self: TextIndex, begin: int) -> None:
        hashed.append(len(self.tokens) - begin)
        index_from(self, begin)

    texts, history = DraftTexts(PLENTY), [*range(5_000)]
    _say(texts, ANN, history, [*range(6_000, 6_100)])
    monkeypatch.setattr(TextIndex, "_index_from", counted)
    history += [*range(6_000, 6_100), 1, 2, 3]
    texts.begin(ANN, history)
    assert sum(hashed) < 3 + 100  # and the few tokens before the answer
    hashed.clear()
    texts.begin(ANN, [*history[:5_050], 7, 8])
    assert sum(hashed) < 2 + 100
    assert len(_known(texts)) == 2


def test_a_sub_agents_prompt_is_a_text_beside_its_parents() -> None:
    """Though both begin alike, the parent's stays whole; so does a text that two answers go on from."""
    texts, shared = DraftTexts(PLENTY), [*range(200)]
    _say(texts, ANN, [*shared, *range(300, 500)], [1, 2])
    texts.begin(ANN, [*shared, 600, 601])
    assert sorted(map(len, _known(texts))) == [202, 402]
    first, second = (texts.begin(ANN, [*shared, 600, 601]) for _ in range(2))
    for drafter, said in ((first, [7, 7]), (second, [8, 8])):
        drafter.follow(said)
        texts.end(drafter)
    assert sorted(map(len, _known(texts))) == [202 + 2, 402]  # the second comes with its client's next request


def test_who_wants_nothing_kept_leaves_nothing_and_sees_its_own_words_alone() -> None:
    """It is drafted from its prompt and the prediction."""
    texts = DraftTexts(PLENTY)
    _say(texts, ANN, [1, 2, 3], [4, 5, 6])
    kept = texts.num_bytes
    drafter = texts.begin(ANN, [1, 2, 3, 9, 1, 2, 3], [7, 8], keep=False)
    assert _tokens(drafter) == [7, 8]
    drafter.follow([9])
    drafter.follow([1, 2, 3])
    assert 4 not in _tokens(drafter)
    assert texts.num_bytes > kept
    texts.end(drafter)
    del drafter
    assert texts.num_bytes == kept and len(_known(texts)) == 1


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (Scope(principal="ann.-"), [[3, 3, 3]]),
        (Scope(session="one"), [[2, 2, 2]]),
        (Scope(principal="ann.-", session="one"), [[2, 2, 2], [3, 3, 3]]),
        (Scope(), []),
        (Scope(principal="somebody.-"), [[1, 1, 1], [2, 2, 2], [3, 3, 3]]),
    ],
)
def test_who_is_forgotten_leaves_nothing(scope: Scope, left: list[list[int]]) -> None:
    """Neither texts nor bytes, and no answer that is under way brings them back or is drafted from them."""
    texts = DraftTexts(PLENTY)
    owners = (ANN, TextOwner("ann.-", "two"), BOB)
    drafters = [texts.begin(owner, [number] * 3) for number, owner in enumerate(owners, 1)]
    other = texts.begin(TextOwner("ann.-", "three"), [0])
    before = texts._num_kept_bytes
    assert texts.forget(scope) == before - texts._num_kept_bytes
    for drafter in drafters:
        drafter.follow([8])
        texts.end(drafter)
    texts.forget(Scope(session="three"))
    assert sorted(known[:3] for known in _known(texts)) == left
    other.follow([1, 1, 1])
    assert (_tokens(other) == []) == ([1, 1, 1] not in left)
    del drafters, other, drafter
    assert left or texts.num_bytes == 0


def test_how_drafts_fared_is_forgotten_too() -> None:
    """With the principal; another's state was never the same."""
    texts = DraftTexts(PLENTY)
    drafters = [texts.begin(owner, [1]) for owner in (ANN, TextOwner("ann.-", "two"), BOB, TextOwner(NO_ONE))]
    ann, again, bob, nobody = (drafter._fared for drafter in drafters)
    assert ann is again and ann is not bob and nobody not in (ann, bob)
    texts.forget(Scope(session="two"))
    assert texts.begin(ANN, [1])._fared is ann
    texts.forget(Scope(principal="ann.-"))
    assert texts.begin(ANN, [1])._fared is not ann


def test_what_was_used_least_recently_leaves_first() -> None:
    """Within the budget, and never more than that, whoever's it is."""
    texts = DraftTexts(100_000)
    for number in range(20):
        owner = TextOwner(f"{number % 3}.-", str(number))
        _say(texts, owner, [number] * 1_000, [1])
        texts.begin(TextOwner("0.-", "0"), [0] * 1_000)
        assert texts.num_bytes <= 100_000
    known = [tokens[0] for tokens in _known(texts)]
    assert known == [*range(20 - len(known) + 1, 20), 0] and len(known) > 3
    assert not texts._shelves.keys() - {text.owner.reader for text in texts._used}
    assert texts._num_kept_bytes == sum(text.num_bytes for text in texts._used)


def test_a_text_larger_than_the_budget_is_drafted_from_and_not_kept() -> None:
    """The answer is faster all the same."""
    texts = DraftTexts(1_000)
    drafter = texts.begin(ANN, [*range(1_000), 5, 6, 7])
    assert _tokens(drafter)[:3] == [8, 9, 10]
    assert not _known(texts) and texts.num_bytes == drafter.num_bytes
    texts.end(drafter)
    assert not _known(texts)


def test_bytes_are_those_that_are_held() -> None:
    """Within a tenth of what the interpreter says was allocated."""
    texts = DraftTexts(PLENTY)
    _say(texts, ANN, [1, 2, 3], [4])
    before = texts.num_bytes
    tracemalloc.start()
    for number in range(5):
        _say(texts, TextOwner("bob.-", str(number)), range(20_000), range(500))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts.num_bytes - before == pytest.approx(held, rel=0.1)


@settings(max_examples=num_examples(40), deadline=None)
@given(first=st.lists(st.integers(0, 1), max_size=9), second=st.lists(st.integers(0, 1), max_size=9))
def test_what_two_texts_have_in_common_is_counted(first: list[int], second: list[int]) -> None:
    """Up to the first token that differs."""
    same = [one == other for one, other in zip(first, second, strict=False)]
    expected = same.index(False) if False in same else len(same)
    assert num_common(TextIndex(first).tokens, TextIndex(second).tokens) == expected


def test_many_threads_begin_end_and_forget_while_answers_are_drafted() -> None:
    """Nobody sees another's words, nothing raises, and the account is right at the end."""
    texts, failures = DraftTexts(300_000), []

    def lead(number: int) -> None:
        owner = TextOwner(f"{number % 2}.-", str(number))
        mine = range(1_000 * (number % 2), 1_000 * (number % 2) + 50)
        history = [*mine] * 3
        try:
            for turn in range(20):
                drafter = texts.begin(owner, history, keep=turn % 7 > 0)
                for token in mine[:20]:
                    draft = drafter.propose(8)
                    assert draft is None or {*draft.tokens} <= {*mine}
                    drafter.follow([token])
                texts.end(drafter)
                history = [*history[: -5 if turn % 5 == 0 else None], *mine[:20]]
                if turn % 11 == 0:
                    texts.forget(Scope(session=str(number)))
        except Exception as error:  # noqa: BLE001  # another thread's assertion is this test's
            failures.append(error)

    threads = [threading.Thread(target=lead, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert texts.num_bytes == texts._num_kept_bytes == sum(text.num_bytes for text in texts._used) <= 300_000


def test_a_dropped_text_holds_nothing() -> None:
    """Whoever still has it finds it empty."""
    text = KeptText(ANN, TextIndex([1] * 100), TextIndex([2] * 100))
    text.drop()
    assert len(text.index) == len(text.offcut) == 0
