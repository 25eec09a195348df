"""Drafts for one answer, from where its last tokens stood before: in the client's prediction, the conversation, the
answer itself, what else its reader's models read and wrote. It knows tokens and indexes, not whose they are.

After SuffixDecoding (arXiv 2411.04975): the places with the longest matches vote for the next token, those that go on
with it vote for the one behind it. Where nothing matches, the text that the last draft came from goes on behind what
was said in place of its tokens (`alignment.py`). A draft depends on the tokens and on what became of the drafts before,
and not on how the tokens came.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvserve.core.drafting import Draft
from kvserve.drafting.acceptance import ANSWER_RATE, Acceptance, Kind, base_logit, chance, led_chance, led_logit
from kvserve.drafting.alignment import Alignment, Text
from kvserve.drafting.kept_text import NO_WORDS, KeptText
from kvserve.drafting.text_index import MAX_MATCH_TOKENS, NGRAM_TOKENS, Ngram, TextIndex

MAX_PLACES = 8
"""So many places of one text are looked at, the newest."""

MAX_VOTERS = 24
MAX_ALONG = 64
"""A text that an answer goes along with is left where more tokens than these came since the last question."""

MIN_REACH = 0.05
"""A draft ends where it is less likely than this to be right so far: a wider pass would not pay."""


class _Match(NamedTuple):
    """Where the last tokens of the answer stood before: `tokens[next]` came behind them."""

    num_matched: int
    text: Text
    tokens: array[int]
    next: int


class _Searched(NamedTuple):
    """A text, and within what part of it an n-gram may end for what follows it: [start, stop), None for all."""

    text: Text
    start: int = 0
    stop: int | None = None


class _Elected(NamedTuple):
    """A token, the places that go on with it, longest matches first, what share of all that have; and how long the
    longest match is that goes on with another."""

    token: int
    voters: list[_Match]
    share: float
    num_against: int

    def chance(self, base: float, depth: int) -> float:
        num_matched = self.voters[0].num_matched + depth
        return chance(base, num_matched, self.share, len(self.voters), self.num_against)


class TextDrafter:
    """A `Drafter`. It reads indexes that nobody changes any more, and `records`: texts of which others replace the
    index or drop it meanwhile, each from where it says something else than the prompt."""

    def __init__(
        self,
        prompt: Sequence[int],
        conversation: TextIndex,
        prediction: Sequence[int] = (),
        *,
        text: KeptText | None = None,
        offcut: TextIndex = NO_WORDS,
        records: Sequence[tuple[KeptText, int]] = (),
        acceptance: Acceptance | None = None,
    ) -> None:
        """`conversation` indexes the prompt, `text` is where that is kept, None where it is not; `offcut`: what was
        said in it and is not in the prompt."""
        before = prompt[-2 * MAX_MATCH_TOKENS :]  # matches in its last half are whole, and go on in the answer
        self.text = text
        self.conversation = conversation
        self._num_before = len(before)
        self._num_both = min(MAX_MATCH_TOKENS, len(prompt))  # of the prompt's last tokens, found in the answer's index
        self._answer = TextIndex(before)
        # behind the prompt's end, where it begins; and wherever a few of its tokens come again
        self._prediction = TextIndex([*before, *prediction] if prediction else ())
        own_end = self._num_before - self._num_both, None
        prompt_end = 0, len(conversation) - self._num_both
        searched = (
            _Searched(Text("prediction", self._prediction)),
            _Searched(Text("conversation", self._answer), *own_end),
            _Searched(Text("conversation", conversation), *prompt_end),
            _Searched(Text("records", offcut)),
        )
        self._searched = [each for each in searched if each.text.indexed is self._answer or each.text.indexed.tokens]
        self._records = tuple(records)
        self._fared = Acceptance() if acceptance is None else acceptance
        self._fared_here = Acceptance(ANSWER_RATE)
        self._unread = array("i")  # what was said since the last question
        self._open: Draft | None = None
        self._open_kind: Kind = "conversation"
        self._num_followed = 0  # of the open draft
        self._along: Alignment | None = None

    @property
    def num_bytes(self) -> int:
        """What it holds beside texts that are kept."""
        own = self._answer.num_bytes + self._prediction.num_bytes + sys.getsizeof(self._unread)
        is_kept = self.text is not None and self.text.index is self.conversation
        return own if is_kept else own + self.conversation.num_bytes

    @property
    def answer(self) -> array[int]:
        """The tokens so far."""
        return self._answer.tokens[self._num_before :] + self._unread

    def follow(self, tokens: Sequence[int]) -> None:
        """Take these in as the answer's next tokens; what was drafted for them was right or not, tried or not. They are
        indexed at the next question, which may not come."""
        self._unread.extend(tokens)
        for token in tokens:
            if self._open is None:
                break
            self._compare(self._open, token)

    def _read(self) -> None:
        """Find out where the answer has gone along; of many tokens since the last question the newest say nothing of
        it."""
        for token in self._unread[:MAX_ALONG]:
            if self._along is not None:
                self._along.follow(token)
                if self._along.is_over:
                    self._along = None
            self._answer.append(token)
        if rest := self._unread[MAX_ALONG:]:
            self._along = None
            self._answer.extend(rest)
        self._unread = array("i")

    def _compare(self, draft: Draft, token: int) -> None:
        place = self._num_followed
        is_right = draft.tokens[place] == token
        for fared in (self._fared, self._fared_here):
            fared.learn(self._open_kind, draft.chances[place], is_right)
        self._num_followed = place + 1
        if not is_right or self._num_followed == len(draft.tokens):
            self._open = None

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """Nothing is learned here: `follow` compares every draft with what came, those that nobody tried too, so that a
        source which fared badly can come back."""

    def propose(self, max_num_tokens: int) -> Draft | None:
        """What followed the longest matches, or how the text goes on that the answer went along with, as far as it is
        likely at all."""
        self._read()
        if voters := self._places():
            self._go_along(voters[0])
            draft = self._voted(voters, max_num_tokens)
            self._open_kind = draft.source if draft is not None else self._open_kind
        else:
            draft = self._led(self._along, max_num_tokens) if self._along is not None else None
        self._open, self._num_followed = draft, 0
        return draft

    def _go_along(self, match: _Match) -> None:
        along = self._along
        if along is None or along.others or along.next != match.next or along.text.indexed is not match.text.indexed:
            self._along = Alignment(match.text, match.next, match.num_matched)

    def _places(self) -> list[_Match]:
        """Where the answer's last tokens stood before, the longest matches first, of equals the nearer text's."""
        tail = self._answer.tokens[-MAX_MATCH_TOKENS:]
        if len(tail) < NGRAM_TOKENS:
            return []
        found: list[_Match] = []
        ngram = Ngram.at_end(tail)
        for text, start, stop in self._searched:
            last = len(text.indexed) - 1  # something has to follow
            if ends := text.indexed.ends_of(ngram, start, last if stop is None else min(stop, last), MAX_PLACES):
                found += _matches(tail, text, ends)
        for record, start in self._records:
            index = record.index  # as it is now
            if ends := index.ends_of(ngram, start, len(index) - 1, MAX_PLACES):
                found += _matches(tail, Text("records", index, record), ends)
        found.sort(key=_by_length, reverse=True)
        return found[:MAX_VOTERS]

    def _voted(self, voters: list[_Match], max_num_tokens: int) -> Draft | None:
        tokens: list[int] = []
        chances: list[float] = []
        source, base, reached = voters[0].text.source, 0.0, 1.0
        for depth in range(max_num_tokens):
            if not voters:
                break
            elected = _elected(voters, depth)
            if depth == 0:
                source = elected.voters[0].text.source
                base = base_logit(source, self._fared, self._fared_here)
            likely = elected.chance(base, depth)
            reached *= likely
            if reached < MIN_REACH:
                break
            tokens.append(elected.token)
            chances.append(likely)
            voters = [each for each in elected.voters if each.next + depth + 1 < len(each.tokens)]
        return Draft(tuple(tokens), tuple(chances), source) if tokens else None

    def _led(self, along: Alignment, max_num_tokens: int) -> Draft | None:
        if (guess := along.guess()) is None:
            return None
        chances: list[float] = []
        source, reached = along.text.source, 1.0
        base = led_logit(source, self._fared, self._fared_here)
        tokens = along.text.indexed.tokens[guess.next : guess.next + max_num_tokens]
        for num_matched in range(guess.num_matched, guess.num_matched + len(tokens)):
            likely = led_chance(base, num_matched, along.num_along, is_moved=guess.is_moved)
            reached *= likely
            if reached < MIN_REACH:
                break
            chances.append(likely)
        self._open_kind = source, "led"
        return Draft(tuple(tokens[: len(chances)]), tuple(chances), source) if chances else None


def _by_length(place: _Match) -> int:
    return place.num_matched


def _matches(tail: array[int], text: Text, ends: Sequence[int]) -> list[_Match]:
    """The places of a text where the tail's end stands."""
    tokens = text.indexed.tokens
    return [_Match(_num_matched(tail, tokens, end), text, tokens, end + 1) for end in ends]


def _num_matched(tail: array[int], tokens: array[int], end: int) -> int:
    """How many of the tail's last tokens end there; its last n-gram does."""
    num, most = NGRAM_TOKENS, min(len(tail), end + 1)
    while num < most and tokens[end - num] == tail[-1 - num]:
        num += 1
    return num


def _elected(voters: list[_Match], depth: int) -> _Elected:
    """The token that comes `depth` tokens behind most places, each weighted with the square of its match."""
    if len(voters) == 1:
        (only,) = voters
        return _Elected(only.tokens[only.next + depth], voters, 1.0, 0)
    weights: dict[int, int] = {}
    for each in voters:
        token = each.tokens[each.next + depth]
        weights[token] = weights.get(token, 0) + (each.num_matched + depth) ** 2
    token = max(weights, key=weights.__getitem__)
    if len(weights) == 1:
        return _Elected(token, voters, 1.0, 0)
    agreeing = [each for each in voters if each.tokens[each.next + depth] == token]
    against = next(each.num_matched for each in voters if each.tokens[each.next + depth] != token)
    return _Elected(token, agreeing, weights[token] / sum(weights.values()), against + depth)
