"""Where n-grams stood before, beside a search through the whole text."""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.drafting import text_index
from kvserve.drafting.text_index import NGRAM_TOKENS, Ngram, TextIndex
from tests.laws import num_examples

TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**18), max_size=150)


def _ends(tokens: Sequence[int], ngram: Sequence[int]) -> list[int]:
    """Newest first, by a look at every place."""
    places = range(len(tokens) - 1, NGRAM_TOKENS - 2, -1)
    return [end for end in places if list(tokens[end - NGRAM_TOKENS + 1 : end + 1]) == list(ngram)]


def _finds_all(index: TextIndex, tokens: Sequence[int]) -> bool:
    ngrams = [tokens[end - 2 : end + 1] for end in range(2, len(tokens))]
    found = (index.ends_of(Ngram.at_end(ngram)) == _ends(tokens, ngram) for ngram in [*ngrams, [9, 9, 9]])
    return list(index.tokens) == list(tokens) and all(found)


def _cuts(tokens: list[int], places: list[int]) -> Iterator[list[int]]:
    bounds = [0, *sorted(min(place, len(tokens)) for place in places), len(tokens)]
    return (tokens[start:stop] for start, stop in pairwise(bounds))


@settings(max_examples=num_examples(60), deadline=None)
@given(tokens=TOKENS, places=st.lists(st.integers(0, 150), max_size=4), size=st.integers(1, 40))
def test_every_place_of_an_ngram_is_found_however_the_text_came(
    tokens: list[int], places: list[int], size: int
) -> None:
    """At once, in slices, in any cuts, token by token."""
    grown, one_by_one = TextIndex(), TextIndex()
    for piece in _cuts(tokens, places):
        grown = grown.extended(piece)
    for token in tokens:
        one_by_one.append(token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "SLICE_TOKENS", size)
        sliced = TextIndex(tokens)
    assert all(_finds_all(index, tokens) for index in (TextIndex(tokens), grown, one_by_one, sliced))


@settings(max_examples=num_examples(60), deadline=None)
@given(tokens=TOKENS, behind=TOKENS, num=st.integers(0, 150))
def test_a_text_that_is_cut_is_the_shorter_text(tokens: list[int], behind: list[int], num: int) -> None:
    """As if nothing else had been there, also for what comes behind the cut; who holds the longer one keeps it."""
    whole = TextIndex(tokens)
    cut = whole.cut(num)
    assert _finds_all(cut, tokens[:num])
    assert _finds_all(cut.extended(behind), tokens[:num] + behind)
    assert _finds_all(whole, tokens)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=NGRAM_TOKENS, max_size=80),
    start=st.integers(0, 80),
    stop=st.none() | st.integers(0, 80),
    most=st.integers(1, 9),
)
def test_the_newest_places_within_a_part_are_found(tokens: list[int], start: int, stop: int | None, most: int) -> None:
    """As many as are asked for, of those that end there."""
    ngram = tokens[-NGRAM_TOKENS:]
    within = [end for end in _ends(tokens, ngram) if start <= end and (stop is None or end < stop)]
    assert TextIndex(tokens).ends_of(Ngram.at_end(ngram), start, stop, most) == within[:most]


def test_a_hash_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all n-grams have one hash, each is found at its own places; planted, a search that believes the hash."""
    monkeypatch.setattr(text_index, "_FACTORS", (0, 0, 0))
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 4]
    assert _finds_all(TextIndex(tokens), tokens)

    def believing(self: TextIndex, *_: object) -> list[int]:
        ends = [self._heads[0]]
        while ends[-1] >= 0:
            ends.append(self._older[ends[-1]])
        return ends[:-1]

    monkeypatch.setattr(TextIndex, "ends_of", believing)
    assert not _finds_all(TextIndex(tokens), tokens)


def test_a_slot_that_a_text_was_made_to_fill_is_not_walked_to_its_end() -> None:
    """The newest places are found, and no more than so many are looked at."""
    index = TextIndex([7] * (3 * text_index.MAX_CHAIN))
    ends = index.ends_of(Ngram.at_end([7, 7, 7]))
    assert ends == list(range(len(index) - 1, len(index) - 1 - text_index.MAX_CHAIN, -1))


def test_its_bytes_are_those_that_it_holds() -> None:
    """All three arrays, sixteen bytes a token at most where a text is not small."""
    index = TextIndex(range(10_000))
    held = sum(map(sys.getsizeof, (index.tokens, index._older, index._heads)))
    assert index.num_bytes == held
    assert 12 * 10_000 < held < 16 * 10_000
