"""Where in a text the last few tokens stood before: n-grams in a hash table with chains from the newest to the oldest,
as in LZ77 (zlib's deflate.c). It knows tokens of one text and nothing of whose they are.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

NGRAM_TOKENS = 3
"""A shorter match says little of what comes next."""

MAX_MATCH_TOKENS = 32
"""A longer match is not told from one of this length."""

MAX_CHAIN = 512
"""So many n-grams of one slot are looked at, the newest (as zlib's `max_chain`): a text may have been made to fill one,
and every draft looks while the device waits."""

SLICE_TOKENS = 65_536
"""So many tokens are indexed at a time, so that no other thread waits long for the interpreter's lock."""

_MIN_SLOT_BITS = 6
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_MASK = 0xFFFFFFFF


class Ngram(NamedTuple):
    """Three tokens that stand behind one another, with what is the same of them for all indexes."""

    first: int
    second: int
    third: int
    hashed: int

    @classmethod
    def at_end(cls, tokens: Sequence[int]) -> Self:
        """The last ones of a text, which has as many at least."""
        first, second, third = tokens[-NGRAM_TOKENS:]
        return cls(first, second, third, _hashed(first, second, third))


def _hashed(first: int, second: int, third: int) -> int:
    """32 bits; a slot is the highest of them."""
    return (first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]) & _MASK


class TextIndex:
    """Tokens of a text, and for each of its n-grams where the same stood before.

    `tokens`, `_older` and `_heads` are arrays of 32-bit ints: 12 to 16 bytes a token. `_heads[slot]` is where the
    newest n-gram of a slot ends, `_older[i]` where the one of its slot before that which ends at i does, -1 for none. A
    hash proves nothing: the n-gram is compared.

    Who shares an index changes it no more: `extended` and `cut` give another one. `append` and
    `extend` are for the only holder.
    """

    __slots__ = ("_heads", "_older", "_shift", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._older = array("i")
        self._heads, self._shift = _no_heads(0)
        self._add(array("i", tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return sum(map(sys.getsizeof, (self.tokens, self._older, self._heads)))

    def extended(self, tokens: Sequence[int]) -> "TextIndex":
        """The index of this text with these tokens behind it; what is indexed already is copied."""
        other = TextIndex.__new__(TextIndex)
        other.tokens, other._older = self.tokens[:], self._older[:]
        other._heads, other._shift = self._heads[:], self._shift
        other._add(array("i", tokens))
        return other

    def cut(self, num_tokens: int) -> "TextIndex":
        """The index of the first tokens of this text."""
        other = self.extended(())
        first = max(num_tokens, NGRAM_TOKENS - 1)
        for end in reversed(range(first, len(self))):  # the newest is its slot's head
            other._heads[self._slot(*self.tokens[end - 2 : end + 1])] = self._older[end]
        del other.tokens[num_tokens:], other._older[num_tokens:]
        return other

    def append(self, token: int) -> None:
        """Add one token."""
        tokens = self.tokens
        tokens.append(token)
        if len(tokens) > len(self._heads):
            self._index_anew()
            return
        if len(tokens) < NGRAM_TOKENS:
            self._older.append(-1)
            return
        slot = self._slot(tokens[-3], tokens[-2], token)
        self._older.append(self._heads[slot])
        self._heads[slot] = len(tokens) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Add several; many cost less than one by one."""
        self._add(array("i", tokens))

    def ends_of(self, ngram: Ngram, start: int = 0, stop: int | None = None, most: int = MAX_CHAIN) -> list[int]:
        """Where this n-gram ends in [start, stop), at most `most` places, newest first: among the `MAX_CHAIN` newest of
        its slot."""
        end = self._heads[ngram.hashed >> self._shift]
        found: list[int] = []
        if end < start:  # as most often: every draft looks into several texts
            return found
        tokens, older = self.tokens, self._older
        first, second, third, _ = ngram
        for _ in range(MAX_CHAIN):
            is_there = tokens[end] == third and tokens[end - 1] == second and tokens[end - 2] == first
            if is_there and (stop is None or end < stop):
                found.append(end)
            end = older[end]
            if end < start or len(found) == most:
                break
        return found

    def _slot(self, first: int, second: int, third: int) -> int:
        return _hashed(first, second, third) >> self._shift

    def _add(self, new: array[int]) -> None:
        if len(self.tokens) + len(new) > len(self._heads):
            self.tokens.extend(new)
            self._index_anew()
            return
        for start in range(0, len(new), SLICE_TOKENS):
            begin = len(self.tokens)
            self.tokens.extend(new[start : start + SLICE_TOKENS])
            self._index_from(begin)

    def _index_anew(self) -> None:
        """Into a larger table."""
        whole, self.tokens, self._older = self.tokens, array("i"), array("i")
        self._heads, self._shift = _no_heads(len(whole))
        self._add(whole)

    def _index_from(self, begin: int) -> None:
        """Index the n-grams that end at `begin` or behind it: those of one slot in order, each with the one before."""
        first = max(begin, NGRAM_TOKENS - 1)
        older = np.full(len(self.tokens) - begin, -1, np.int32)
        if first < len(self.tokens):
            heads = np.frombuffer(self._heads, np.int32)
            slots = self._slots(first)
            order = np.argsort(slots, kind="stable")
            of_slot, ends = slots[order], (order + first).astype(np.int32)
            is_first = np.empty(len(order), bool)
            is_first[0] = True
            np.not_equal(of_slot[1:], of_slot[:-1], out=is_first[1:])
            before = np.empty(len(order), np.int32)
            before[1:] = ends[:-1]
            before[is_first] = heads[of_slot[is_first]]
            older[ends - begin] = before
            is_last = np.append(is_first[1:], True)
            heads[of_slot[is_last]] = ends[is_last]
        self._older.frombytes(older.tobytes())

    def _slots(self, first: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        words = np.frombuffer(self.tokens, np.int32)[first - NGRAM_TOKENS + 1 :].astype(np.uint32)
        num = len(words) - NGRAM_TOKENS + 1
        mixed = np.zeros(num, np.uint32)
        for offset, factor in enumerate(_FACTORS):
            mixed += words[offset : offset + num] * np.uint32(factor)
        return mixed >> np.uint32(self._shift)


def _no_heads(num_tokens: int) -> tuple[array[int], int]:
    """An empty table with room for so many tokens, and the shift that makes slots of it from 32 bits."""
    bits = max(_MIN_SLOT_BITS, (num_tokens - 1).bit_length())
    return array("i", [-1]) * (1 << bits), 32 - bits
