"""Turns a prompt's text into model tokens: it tokenises only new text, and the model's own turns keep their ids.

    text -> pieces that begin with a message's opener or end -> ids by piece, remembered
                                                             -> a turn the model wrote: its emitted ids

It knows a tokenizer and one model's layout of turns; a reader that is handed in compares texts. Two laws: without
writings the ids are those of the whole text; with them the ids have the text's meaning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.core import ImageSpan, MessageStart, Written
from kvserve.prompt.behind_thinking import own_end, reads_as
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.control import ControlTokens, shown
from kvserve.prompt.cuts import Cutter, Piece
from kvserve.prompt.emitted import Emitted, closing_text, names_alike
from kvserve.prompt.headless import Headless, Spoken, begins_alike, find_headless
from kvserve.prompt.images_text import Runs, encode_marked
from kvserve.prompt.memo import Memo
from kvserve.prompt.piece_tokens import PieceTokens, joined_ids, joined_images, joined_starts
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.token_replay import (
    MessageParts,
    ReadsMessages,
    RememberingReader,
    ReplayPlaces,
    Unit,
    behind_header,
    find_units,
)
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.turn_layout import TurnLayout, learn_layout

MEMO_BYTES = 128 * 2**20
_WORD = "said"
_MAX_END_PIECES = 3


@dataclass(frozen=True, slots=True)
class Stitched:
    """A prompt as model tokens.

    `tail_ids` becomes the answer's `Written.prefix_ids`: the ids from the start of the message that the model
    continues, or of those that the template itself wrote before it. `num_replayed_turns` turns have the ids that the
    model emitted; `num_tokenised_chars` characters were new. `images` are the runs of ids of images.
    """

    ids: tuple[int, ...]
    message_starts: tuple[MessageStart, ...]
    tail_ids: tuple[int, ...]
    num_replayed_turns: int
    num_tokenised_chars: int
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class _Replay:
    """The `tokens` that the model emitted replace the pieces from their own up to `stop`; `lead` stands before them,
    `closing` follows. `is_whole`: they are all of the turn, and not what stands behind thinking that was dropped."""

    stop: int
    tokens: PieceTokens
    closing: str = ""
    lead: str = ""
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class _RestOfTurn:
    """What stands for a turn without its thinking; None where the model wrote it in other words."""

    written: Written
    replay: _Replay | None


class Stitcher:
    """Makes one model's prompts. Every method may be called from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: MessageMarkers,
        layout: TurnLayout,
        max_bytes: int = MEMO_BYTES,
        control: ControlTokens | None = None,
    ) -> None:
        """`max_bytes` bounds what is remembered of earlier prompts; `control` marked the prompts' texts."""
        self._tokenizer = tokenizer
        self._encode = (control or ControlTokens(tokenizer, ())).encode
        self._markers = markers
        self._wanted = layout.openers | layout.ends
        self._cutter = Cutter(tokenizer, {*self._wanted, layout.result_end})
        # Only a turn that is cut off exactly at its end can be replaced.
        if layout.result_end not in self._cutter.tokens:
            layout = replace(layout, result_header="")
        self._layout = layout if self._wanted <= self._cutter.tokens else replace(layout, header="", result_header="")
        self._cut_ids = {tokenizer.token_id(token) for token in self._cutter.tokens}
        self._starts_are_local = self._cut_ids.isdisjoint(markers.user_header[1:])
        self._shared: dict[int, int] = {}
        self._known: Memo[PieceTokens] = Memo(max_bytes * 3 // 8)
        self._said: Memo[MessageParts] = Memo(max_bytes // 4)
        self._emitted: Memo[Emitted] = Memo(max_bytes // 4)
        self._behind: Memo[_RestOfTurn] = Memo(max_bytes // 8)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, markers: MessageMarkers, max_bytes: int = MEMO_BYTES
    ) -> "Stitcher":
        """The stitcher of a model, with its template's turn layout."""
        return cls(tokenizer, markers, learn_layout(tokenizer, template, markers), max_bytes, template.control)

    def clear(self) -> None:
        """Forget earlier prompts."""
        for memo in (self._known, self._said, self._emitted, self._behind):
            memo.clear()

    @property
    def layout(self) -> TurnLayout:
        """The template's layout of a turn, as far as it is used."""
        return self._layout

    @property
    def turn_end(self) -> int | None:
        """The token that prompts have behind an answer; None without one."""
        return self._tokenizer.token_id(self._layout.end) if self._layout.end else None

    @property
    def replays(self) -> bool:
        """Whether emitted ids are used: the template's turns are distinguishable and end in a token."""
        return bool(self._layout.header)

    @property
    def unreplayed(self) -> str | None:
        """Why emitted ids are not used; None if they are."""
        if self.replays:
            return None
        if not self._markers.openers:
            return "no token is known that begins a message in its chat template"
        uncut = sorted(self._wanted - self._cutter.tokens)
        if uncut:
            return f"a text cannot be cut at {', '.join(uncut)} without changing tokens"
        return "its chat template's answers do not begin with a header of their own and end with a token"

    def tokens(
        self, prompt: PromptText, writings: Sequence[Written | None] = (), says: ReadsMessages | None = None
    ) -> Stitched:
        """The prompt's ids. `writings`: what the model wrote for each assistant message, in order.

        A written turn keeps its ids if `says` reads the same message in the text; without `says` none does.
        """
        if prompt.adds_special_tokens or not self._cutter.tokens:
            return self._whole(prompt)
        pieces = self._cutter.cut(prompt.text)
        units = find_units(pieces, self._layout)
        is_open = bool(units) and units[-1].index == len(pieces) - 1
        tail = units[-1].index if is_open else _last_opener(pieces, self._layout)
        answers = units[:-1] if is_open and not prompt.continues else units
        if is_open and not prompt.continues:
            tail = self._with_own_messages(pieces, tail)
            answers = [unit for unit in answers if unit.index < tail]
        replays = {} if says is None else self._replays(pieces, answers, writings, says, continues=prompt.continues)
        return self._joined(pieces, replays, tail, prompt.runs)

    def _with_own_messages(self, pieces: Sequence[Piece], tail: int) -> int:
        """The piece that begins the template's own messages before the answer's header, which history has not; `tail`
        where there are none."""
        longest = max(map(len, self._layout.own_messages), default=0)
        found, first, text = tail, tail - 1, ""
        while first > 0 and len(text) < longest:
            text = "".join(pieces[first]) + text
            if text in self._layout.own_messages:
                found = first
            first -= 1
        return found

    def _whole(self, prompt: PromptText) -> Stitched:
        first = prompt.adds_special_tokens
        marked = encode_marked(self._encode, prompt.text, prompt.runs, adds_special_tokens=first)
        starts = self._markers.message_starts(marked.ids)
        tail_ids = marked.ids[starts[-1].offset :] if starts else ()
        return Stitched(marked.ids, starts, tail_ids, 0, len(prompt.text), marked.images)

    def _joined(self, pieces: Sequence[Piece], replays: Mapping[int, _Replay], tail: int, runs: Runs) -> Stitched:
        """The ids of the pieces and replays in order; `tail` is the piece that begins the tail."""
        rows: list[PieceTokens] = []
        num_new_chars = num_rows_before_tail = index = 0
        while index < len(pieces):
            replay = replays.get(index)
            stop = index + 1 if replay is None else replay.stop
            if index <= tail < stop:
                num_rows_before_tail = len(rows)
            texts = ["".join(pieces[index])] if replay is None else [replay.lead, replay.closing]
            for place, text in enumerate(texts):
                if replay is not None and place:
                    rows.append(replay.tokens)
                if text:
                    tokens = self._known.get(text)
                    if tokens is None:
                        tokens = self._tokenised(text, runs)
                        num_new_chars += len(text)
                    rows.append(tokens)
            index = stop
        ids = joined_ids(rows)
        starts = tuple(joined_starts(rows)) if self._starts_are_local else self._markers.message_starts(ids)
        tail_ids = joined_ids(rows[num_rows_before_tail:])
        num_whole = sum(replay.is_whole for replay in replays.values())
        return Stitched(ids, starts, tail_ids, num_whole, num_new_chars, tuple(joined_images(rows)))

    def _tokenised(self, text: str, runs: Runs) -> PieceTokens:
        """The ids of one piece, remembered by its text, which includes marks of images and of a client's words."""
        marked = encode_marked(self._encode, text, runs)
        tokens = replace(self._with_starts(marked.ids), images=marked.images)
        self._known.put(text, tokens, tokens.num_bytes(text))
        return tokens

    def _with_starts(self, ids: tuple[int, ...]) -> PieceTokens:
        shared = tuple(map(self._shared.setdefault, ids, ids))
        return PieceTokens(shared, self._markers.message_starts(ids))

    # --- turns that the model wrote -----------------------------------------------------------------------------------

    def _replays(
        self,
        pieces: Sequence[Piece],
        units: Sequence[Unit],
        writings: Sequence[Written | None],
        says: ReadsMessages,
        *,
        continues: bool,
    ) -> dict[int, _Replay]:
        """The turns whose text equals what the model wrote, by the piece that begins each."""
        replays: dict[int, _Replay] = {}
        if not units or not any(writings):
            return replays
        reader = RememberingReader(says, self._said)
        places = ReplayPlaces.of(units, len(writings), reader)
        unit = done = 0
        for message, written in enumerate(writings):
            emitted = self._read(written, says) if written is not None else None
            if emitted is None or emitted.said is None:
                continue
            span = places.find(message, emitted.said, unit)
            is_next = span is not None and span.start == unit
            found = None if is_next else self._headless(units, unit, emitted, reader, continues=continues)
            if found is not None and (span is None or found.unit < span.start):
                piece = units[found.unit].index
                if not self._ends(pieces, piece + 1, emitted):
                    continue
                replays[piece] = _Replay(piece + 1, emitted.tokens, lead=found.lead)
                unit, done = found.unit + 1, piece + 1
                continue
            if span is None:
                bare = places.find(message, ("", *emitted.said[1:]), unit) if emitted.said[0] else None
                if bare is None or not (places.is_aligned or bare.start == unit):  # else it may be a later answer's
                    continue
                if behind := self._behind_thinking(pieces, units[bare.start], emitted, reader):
                    replays[units[bare.start].index] = behind
                    unit, done = bare.start + 1, behind.stop
                continue
            start, stop = units[span.start].index, units[span.stop - 1].index + 1
            # The model continues right behind an unfinished turn: there white space counts, too.
            if continues and span.stop == len(units) and not self._is_text(emitted, pieces[start:stop]):
                continue
            if not self._ends(pieces, stop, emitted):
                continue
            if not begins_alike(units[span.start], emitted.text, emitted.tail, reader):
                continue
            if not names_alike(emitted, units[span.start : span.stop], says):
                continue
            closing = closing_text(emitted, units[span.stop - 1], says, self._layout.reasoning_tags)
            if closing is None:
                continue
            first, lead = self._before(pieces, start, done)
            replays[first] = _Replay(stop, emitted.tokens, closing, lead)
            unit, done = span.stop, stop
        return replays

    def _is_text(self, emitted: Emitted, turn: Sequence[Piece]) -> bool:
        """Whether this is its text, but for the template's own messages before it."""
        return emitted.text.removesuffix(shown(_text(turn))) in ("", *self._layout.own_messages)

    def _ends(self, pieces: Sequence[Piece], stop: int, emitted: Emitted) -> bool:
        """Whether an end that the model wrote is said by the piece behind the turn: a template may end it otherwise."""
        return not emitted.has_ended or (stop < len(pieces) and pieces[stop][0] == self._layout.end)

    def _before(self, pieces: Sequence[Piece], start: int, done: int) -> tuple[int, str]:
        """The piece from which on other text stands before the answer at `start` than history has, and that text: how a
        prompt ends a result behind which nothing stands."""
        num_pieces = min(start - done, _MAX_END_PIECES if self._layout.result_ends else 0)
        for first in range(start - 1, start - num_pieces - 1, -1):
            before = _text(pieces[first:start])
            for ended, kept in self._layout.result_ends:
                if before.endswith(kept):
                    return first, before.removesuffix(kept) + ended
        return start, ""

    def _headless(
        self, units: Sequence[Unit], at_or_after: int, emitted: Emitted, says: RememberingReader, *, continues: bool
    ) -> Headless | None:
        """Where the answer stands behind a result with which it is one piece, but for one that is to be continued."""
        if not self._layout.result_tails or emitted.written.opens_reasoning:
            return None
        answer = emitted.text.removeprefix(emitted.tail)
        spoken = Spoken(emitted.tail, answer, says(answer))
        found = find_headless(units, at_or_after, spoken, self._layout, says)
        if found is None or (continues and found.unit == len(units) - 1):
            return None
        unit = replace(units[found.unit], text=found.text)
        return found if names_alike(replace(emitted, said=spoken.said), [unit], says) else None

    def _behind_thinking(
        self, pieces: Sequence[Piece], unit: Unit, emitted: Emitted, says: ReadsMessages
    ) -> _Replay | None:
        """What the model wrote behind thinking that its template drops, where the turn ends with the very text."""
        text = "".join(pieces[unit.index])
        key = (says.key, id(emitted.written), text)
        known = self._behind.get(key)
        if known is not None and known.written is emitted.written:
            return known.replay
        words = text.rstrip()
        ids = own_end(self._tokenizer, emitted.tokens.ids, emitted.text, words[len(unit.header) :])
        said, replay = self._tokenizer.decode(ids), None
        lead = words.removesuffix(said.rstrip())
        closing = text[len(lead) + len(said) :]
        is_same_text = (
            bool(said) and text == lead + said + closing and reads_as(self._tokenizer, self._encode, lead, ids, closing)
        )
        if is_same_text and emitted.said is not None and says(said) == ("", *emitted.said[1:]):
            replay = _Replay(unit.index + 1, self._with_starts(ids), closing, lead, is_whole=False)
        num_bytes = 2 * emitted.tokens.num_bytes(emitted.text) + 4 * len(text)
        self._behind.put(key, _RestOfTurn(emitted.written, replay), num_bytes)
        return replay

    def _read(self, written: Written, says: ReadsMessages) -> Emitted:
        """The content of a turn's emitted ids, remembered by the object's identity; the object is kept."""
        key = (says.key, id(written))
        known = self._emitted.get(key)
        if known is not None and known.written is written:
            return known
        # Where the template's end is no stop token, the model writes it; the prompt's next piece says it.
        has_ended = written.ids[-1:] == (self.turn_end,)
        ids = written.prefix_ids + (written.ids[:-1] if has_ended else written.ids)
        text = self._tokenizer.decode(ids)
        behind = behind_header(text, self._layout)
        said = None
        if behind is not None and self._ends_in_words(ids):
            said = says(behind.removeprefix(self._closed_thinking(written, says)))
        tail = self._tokenizer.decode(written.prefix_ids)
        emitted = Emitted(written, text, tail, said, self._with_starts(ids), has_ended)
        self._emitted.put(key, emitted, 2 * emitted.tokens.num_bytes(text))
        return emitted

    def _closed_thinking(self, written: Written, says: ReadsMessages) -> str:
        """What the template itself thought before the answer, in the prompt's tail, which history does not have; ""
        where it thought nothing, and where the model goes on with it."""
        tail = behind_header(self._tokenizer.decode(written.prefix_ids), self._layout)
        if tail is None or tail not in self._layout.tails:
            return ""
        return tail if says(tail)[0] and says(f"{tail}{_WORD}")[1] == _WORD else ""

    def _ends_in_words(self, ids: tuple[int, ...]) -> bool:
        """Whether the template's end may follow: an answer can also be cut between two of its messages.

        It reads the ids, since an answer may spell such tokens out as text.
        """
        last = next((index for index in range(len(ids) - 1, 0, -1) if ids[index] in self._cut_ids), 0)
        if not last:
            return True
        token, text = self._tokenizer.decode(ids[last : last + 1]), self._tokenizer.decode(ids[last:])
        said = text.removeprefix(token) if token in self._layout.ends else behind_header(text, self._layout)
        return said is not None and bool(said.strip())


def _last_opener(pieces: Sequence[Piece], layout: TurnLayout) -> int:
    """The last piece that begins a message, 0 without one."""
    return next((index for index in range(len(pieces) - 1, 0, -1) if pieces[index][0] in layout.openers), 0)


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(token + body for token, body in pieces)
