"""The texts that drafts are made from: of each reader the conversations that its models read and wrote, within a budget
of bytes. It knows tokens and whose they are; nobody is drafted from another's.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from weakref import WeakSet

import numpy as np

from kvserve.core.keeping import Scope
from kvserve.drafting.acceptance import Acceptance
from kvserve.drafting.kept_text import NO_WORDS, KeptText, TextOwner
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.drafting.text_index import MAX_MATCH_TOKENS, Ngram, TextIndex

MAX_RECORDS = 8
"""So many other texts of a reader are looked into, those used last: each costs every draft a look."""

MAX_COMPARED = 64
"""A prompt goes on from one of so many texts of its session, those used last."""

MAX_UNDONE_TOKENS = 8_192
"""More than that is indexed anew faster than it is taken out of a copy."""

ENDING_TOKENS = 16
"""So much of an answer's end shows that it is the same answer."""


class _ReaderTexts:
    """What is kept of one reader: texts, least recently used first, and how its drafts fared."""

    def __init__(self) -> None:
        self.texts: OrderedDict[KeptText, None] = OrderedDict()
        self.acceptance = Acceptance()


class DraftTexts:
    """The kept texts of one model's tokens. What was used least recently leaves first.

    Safe for several threads; the lock is never held while a text is compared or indexed. Two requests may go on from
    one text at once: the second finds that it was replaced, and has a text of its own.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._shelves: dict[tuple[str, str, str | None], _ReaderTexts] = {}
        self._used: OrderedDict[KeptText, None] = OrderedDict()  # of all readers, least recently used first
        self._num_kept_bytes = 0
        self._running: WeakSet[TextDrafter] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """What is kept, and what the drafters of running answers hold beside it."""
        with self._lock:
            return self._num_bytes()

    def begin(
        self, owner: TextOwner, prompt: Sequence[int], prediction: Sequence[int] = (), *, keep: bool = True
    ) -> TextDrafter:
        """The drafter of an answer to this prompt. What of the prompt is not in the index of its conversation is added
        to it; where nothing may be kept there is neither, and no look at anything but the prompt."""
        tokens = array("i", prompt)
        if not keep:
            return self._with(TextDrafter(tokens, TextIndex(tokens), prediction))
        with self._lock:
            there = self._there(owner)
        found = _found(there, tokens)
        grown = _grown(found, tokens)
        goes_on = found if found is not None and found.is_within(grown) else None
        offcut = goes_on.offcut() if goes_on is not None else NO_WORDS
        with self._lock:
            text = self._put(owner, goes_on, grown, offcut)
            shelf = self._shelves[owner.reader]
            others = [each for each in islice(reversed(shelf.texts), MAX_RECORDS + 1) if each is not text]
        if not owner.is_one_reader:
            return self._with(TextDrafter(tokens, grown, prediction, text=text))
        # what follows the last token that a record has in common with the prompt is the first that is said there alone
        records = [(each, max(0, num_common(each.index.tokens, tokens) - 1)) for each in others[:MAX_RECORDS]]
        return self._with(
            TextDrafter(
                tokens,
                grown,
                prediction,
                text=text,
                offcut=text.offcut,
                records=records,
                acceptance=shelf.acceptance,
            )
        )

    def end(self, drafter: TextDrafter) -> None:
        """The answer is over: what it said is kept, unless its text was forgotten, left or was gone on from since it
        began. The client sends it again with its next request."""
        text, index = drafter.text, drafter.conversation
        if text is None or text.index is not index:
            return
        grown = index.extended(drafter.answer)
        with self._lock:
            if text.index is index:
                self._replace(text, grown, text.offcut)
                self._make_room()

    def forget(self, scope: Scope) -> int:
        """Drop the texts of those who are meant, and of a principal how its drafts fared; returns how many bytes."""
        with self._lock:
            gone = [text for text in self._used if scope.covers(text.owner.principal, text.owner.session)]
            num_bytes = sum(map(self._drop, gone))
            for reader in [reader for reader in self._shelves if scope.covers(reader[1], None)]:
                self._shelves[reader].acceptance = Acceptance()
            return num_bytes

    def clear(self) -> None:
        """Drop all texts."""
        self.forget(Scope())

    def _with(self, drafter: TextDrafter) -> TextDrafter:
        with self._lock:
            self._running.add(drafter)
            self._make_room()
        return drafter

    def _there(self, owner: TextOwner) -> list[tuple[KeptText, TextIndex]]:
        """The texts that a prompt of this owner may go on from, last used first."""
        shelf = self._shelves.get(owner.reader)
        of_owner = (text for text in reversed(shelf.texts) if text.owner == owner) if shelf is not None else ()
        return [(text, text.index) for text in islice(of_owner, MAX_COMPARED)]

    def _put(self, owner: TextOwner, goes_on: "_Found | None", index: TextIndex, offcut: TextIndex) -> KeptText:
        """The text that the prompt goes on from with its new index; a new one where there is none, or another request
        was faster."""
        if goes_on is None or goes_on.text.index is not goes_on.index:
            text, offcut = KeptText(owner), NO_WORDS
        else:
            text = goes_on.text
        self._replace(text, index, offcut if len(offcut) else text.offcut)
        return text

    def _replace(self, text: KeptText, index: TextIndex, offcut: TextIndex) -> None:
        self._num_kept_bytes -= text.num_bytes if text in self._used else 0
        text.index, text.offcut = index, offcut
        self._num_kept_bytes += text.num_bytes
        for texts in (self._used, self._shelves.setdefault(text.owner.reader, _ReaderTexts()).texts):
            texts[text] = None
            texts.move_to_end(text)

    def _drop(self, text: KeptText) -> int:
        """Returns how many bytes it held."""
        num_bytes = text.num_bytes
        self._num_kept_bytes -= num_bytes
        del self._used[text]
        shelf = self._shelves[text.owner.reader]
        del shelf.texts[text]
        if not shelf.texts:
            del self._shelves[text.owner.reader]
        text.drop()
        return num_bytes

    def _make_room(self) -> None:
        while self._used and self._num_bytes() > self._max_bytes:
            self._drop(next(iter(self._used)))

    def _num_bytes(self) -> int:
        return self._num_kept_bytes + sum(drafter.num_bytes for drafter in self._running)


@dataclass(frozen=True, slots=True)
class _Found:
    """A text as it was, and how many tokens a prompt has in common with it."""

    text: KeptText
    index: TextIndex
    num_common: int

    def offcut(self) -> TextIndex:
        """What the prompt leaves out, with what stands before it; empty where that is next to nothing."""
        if len(self.index) - self.num_common < ENDING_TOKENS:
            return NO_WORDS
        return TextIndex(self.index.tokens[max(0, self.num_common - MAX_MATCH_TOKENS) :])

    def is_within(self, index: TextIndex) -> bool:
        """Whether all of the text is in this index of the prompt but for a few tokens at its end, or for words that the
        client sent last time only: then its end, which the model wrote, is further on there."""
        if len(self.index) - self.num_common < min(ENDING_TOKENS, self.num_common):
            return True
        ending = self.index.tokens[-ENDING_TOKENS:]
        if len(ending) < ENDING_TOKENS:
            return False
        first = max(self.num_common, len(ending) - 1)
        ends = index.ends_of(Ngram.at_end(ending), first)
        return any(index.tokens[end + 1 - len(ending) : end + 1] == ending for end in ends)


def _found(there: Sequence[tuple[KeptText, TextIndex]], tokens: array[int]) -> _Found | None:
    """The text that has most in common with the prompt."""
    compared = (_Found(text, index, num_common(index.tokens, tokens)) for text, index in there)
    return max(compared, key=lambda each: each.num_common, default=None)


def _grown(found: _Found | None, tokens: array[int]) -> TextIndex:
    """The index of the prompt; what of it was indexed is copied, unless too much would have to be undone."""
    if found is None or len(found.index) - found.num_common > MAX_UNDONE_TOKENS:
        return TextIndex(tokens)
    kept = found.index if found.num_common == len(found.index) else found.index.cut(found.num_common)
    return kept.extended(tokens[found.num_common :]) if found.num_common < len(tokens) else kept


def num_common(tokens: array[int], others: array[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    num = min(len(tokens), len(others))
    differs = np.frombuffer(tokens, np.int32)[:num] != np.frombuffer(others, np.int32)[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num
