"""How a text goes on that an answer went along with and left: behind a token that was replaced, and where the answer
meets it again a few tokens on. It knows tokens of texts that are looked into, not whose they are.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvserve.core.drafting import DraftSource
from kvserve.drafting.kept_text import KeptText
from kvserve.drafting.text_index import MAX_MATCH_TOKENS, TextIndex

MAX_OTHERS: Final = 8
"""An answer that says so many tokens of its own has left the text."""

MAX_MOVED: Final = 4
"""So far from where it would be, had each token been replaced, the text is met again: words come and go."""


class Text(NamedTuple):
    """A text that is looked into. `record`: who keeps it, where others replace its index or drop it meanwhile."""

    source: DraftSource
    indexed: TextIndex
    record: KeptText | None = None

    @property
    def is_there(self) -> bool:
        """Whether it may be drafted from still."""
        return self.record is None or self.record.index is self.indexed


class Resumption(NamedTuple):
    """Where the text may go on: `num_matched` tokens before `next` are the answer's last ones, none where one token was
    replaced; `is_moved`: more or fewer tokens came than were left out."""

    next: int
    num_matched: int
    is_moved: bool


@dataclass(slots=True, eq=False)
class Alignment:
    """An answer along a text: `next` is where the text goes on, had it not been left; `num_along` tokens were its,
    `others` were said instead since, none while the answer goes along."""

    text: Text
    next: int
    num_along: int
    others: list[int] = field(default_factory=list)
    _guessed: int | None = None  # where the newest draft went on

    @property
    def is_over(self) -> bool:
        """Whether the text was left for good, or is gone."""
        return len(self.others) > MAX_OTHERS or not self.text.is_there

    def follow(self, token: int) -> None:
        """The answer's next token."""
        tokens = self.text.indexed.tokens
        place = self._guessed if self.others else self.next
        self._guessed = None
        if place is not None and place < len(tokens) and tokens[place] == token:
            self.next, self.num_along = place + 1, min(MAX_MATCH_TOKENS, self.num_along + 1)
            self.others.clear()
        else:
            self.others.append(token)

    def guess(self) -> Resumption | None:
        """Where the text goes on behind the other tokens: where two of it came again or one, the nearest such place;
        behind a single one in its place. None while the answer goes along, and where nothing of it came."""
        if not self.others or self.is_over:
            return None
        found = self._met(2) or self._met(1)
        if found is None and len(self.others) == 1:
            found = Resumption(self.next + 1, 0, is_moved=False)
        if found is None or found.next >= len(self.text.indexed.tokens):
            return None
        self._guessed = found.next
        return found

    def _met(self, num_tokens: int) -> Resumption | None:
        tokens, last = self.text.indexed.tokens, self.others[-num_tokens:]
        if len(last) < num_tokens:
            return None
        straight = self.next + len(self.others)
        for moved in range(MAX_MOVED + 1):
            for place in (straight + moved, straight - moved):
                begin = place - num_tokens
                if begin >= self.next and tokens[begin:place].tolist() == last:
                    return Resumption(place, num_tokens, is_moved=moved > 0)
        return None
