"""Splits a model's text into reasoning, content and tool calls as it arrives; knows tags, not tokens or wire formats.

The splitter reads character by character, so the cuts of the text cannot matter. No character is lost: `pieces` is the
whole text, and what is in no channel and no call is one of

- a tag of the format;
- line ends right after an opening thinking tag and on either side of a closing one, where templates put them;
- white space that fills the whole gap between two tags or calls, or between the last one and the end.

Unusual text is decided like this:

- An opening thinking tag counts at the beginning of a line; inside a line it is prose about the tag, so content.
- A closing thinking tag without an opening one is a tag if only white space precedes it, else content: the text before
  it was already sent.
- The client receives a call once its arguments begin behind the name of an offered tool; from there on the text is the
  call's, up to the closing tag or the end (decision 0032). Unreadable text goes into the arguments unchanged, which are
  not JSON then; nor are arguments that the end cut. Forms whose calls end with their arguments find the end of such a
  call (`broken.py`), so that it swallows neither the next call nor text behind it.
- Before that point, and in forms that are read only whole, a call that is unfinished at the end, cannot be parsed, or
  breaks halfway is text, verbatim. Tags inside it are not read again, so that a call quoted inside a broken call's
  argument is never run; reading continues with the tag that may begin where the call broke.
- A call inside reasoning counts if only white space and calls follow up to a natural end of the turn (models forget to
  close their thinking); otherwise it is reasoning.
"""

from collections.abc import Callable, Sequence

from kvserve.core import OutputDelta, ToolSpec
from kvserve.output import harmony
from kvserve.output.attempt import NOTHING, CallAttempt, CallReading, Following, Found, reading_of
from kvserve.output.formats import OutputFormat
from kvserve.output.harmony import Channel, ChannelOpened
from kvserve.output.record import PieceKind, Record, TextPiece, random_call_id
from kvserve.output.tag_table import Handlers, TagTable, TagTables
from kvserve.output.tool_parsers.derived import closing_text
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import END, SPACE, NotACall, ParsedCall
from kvserve.output.tool_parsers.json_text import write_json


class Splitter:
    """One answer's splitter: `feed` its text in any pieces, then `finish` once."""

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        starts_in_reasoning: bool,
        tools: tuple[ToolSpec, ...],
        new_call_id: Callable[[], str] = random_call_id,
        allow_calls: bool = True,
    ) -> None:
        """`starts_in_reasoning`: the prompt ended inside opened thinking. Without `allow_calls` calls are text."""
        self._format = output_format
        self._tools = tools
        self._names = frozenset(tool.name for tool in tools)
        self._new_call_id = new_call_id
        self._allow_calls = allow_calls
        self._record = Record()
        self._reasoning = starts_in_reasoning
        self._held = ""
        self._space: list[str] = []
        self._segment_empty = self._line_blank = True
        self._after_thinking = starts_in_reasoning and output_format.channels == "tags"
        self._something_said = False
        self._tag_seen = starts_in_reasoning
        self._stray_close: str | None = None
        self._attempt: CallAttempt | None = None
        self._behind = NOTHING
        self.closing: str | None = None
        """What the template writes behind the first call's arguments to close the call; nothing in most forms."""
        self._suspended: list[tuple[str, list[ParsedCall]]] = []
        self._tables = TagTables.of(output_format, self._handlers(), allow_calls=allow_calls)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, for counting reasoning tokens."""
        return self._reasoning

    @property
    def pieces(self) -> tuple[TextPiece, ...]:
        """The pieces so far; after `finish` all of the text."""
        return self._record.pieces

    def written_from(self, start: int) -> Sequence[tuple[PieceKind, str]]:
        """The entries of the record from this number on."""
        return self._record.written_from(start)

    def feed(self, text: str) -> list[OutputDelta]:
        """The deltas that are certain after `text`."""
        position = 0
        while position < len(text):
            if self._can_run():
                run = self._table().plain.match(text, position)
                if run is not None:
                    self._write_run(run.group())
                    position = run.end()
                    continue
            self._step(text[position])
            position += 1
        if self._attempt is not None:
            self._send_arguments(self._attempt)
        return self._record.take_deltas()

    def finish(self, *, cut: bool) -> list[OutputDelta]:
        """The remaining deltas. `cut`: the length limit ended the text, so an open call is not complete."""
        while self._attempt is not None:
            self._finish_attempt(self._attempt, cut)
        if self._behind.tags and self._held:
            self._close_calls(self._held)
        else:
            self._write_all(self._held)
        self._held = ""
        if self._suspended and not cut:
            self._accept_suspended()
        self._release_suspended()
        drops = self._segment_empty and self._tag_seen
        self._record.write("space" if drops else self._channel(), self._take_space())
        return self._record.take_deltas()

    # --- tags -----------------------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return Handlers(
            call=self._on_call,
            following=self._on_following,
            stray_close=self._on_stray_close,
            header=self._on_header,
            message_end=self._on_message_end,
            silent=self._boundary,
            think_open=self._on_think_open,
            think_close=self._on_think_close,
        )

    def _table(self) -> TagTable:
        return self._tables.get(self._reasoning, self._behind.tags)

    def _on_think_open(self, tag: str) -> None:
        thinking = self._format.thinking
        if thinking is None or not (thinking.anywhere or self._line_blank):
            self._write_all(tag)
            return
        self._boundary(tag)
        self._reasoning = self._after_thinking = True

    def _on_think_close(self, tag: str) -> None:
        if self._reasoning:
            self._release_suspended()
            self._record.write("space", self._take_space())
        elif self._something_said:
            self._write_all(tag)
            return
        self._boundary(tag)
        self._reasoning, self._after_thinking = False, True

    def _on_message_end(self, tag: str) -> None:
        self._boundary(tag)
        self._reasoning = False

    def _on_stray_close(self, tag: str) -> None:
        if self._stray_close == tag and self._segment_empty:
            self._boundary(tag)
        else:
            self._write_all(tag)
        self._stray_close = None

    def _on_header(self, tag: str) -> None:
        if tag == harmony.RECIPIENT and (self._tag_seen or self._something_said or self._space):
            self._write_all(tag)
            return
        draft = self._draft()
        scan = harmony.scan_message(tag, self._allow_calls, draft)
        self._attempt = CallAttempt(tag, [CallReading(scan, draft, harmony.ENDS)], None)

    def _on_call(self, tag: str) -> None:
        forms = [form for form in self._format.tool_forms if form.open_tag == tag]
        if forms[0].at_start and (self._tag_seen or self._something_said):
            self._write_all(tag)
            return
        drafts = [self._draft() for _ in forms]
        readings = [
            reading_of(form, form.scan(self._tools, draft), self._tools, draft)
            for form, draft in zip(forms, drafts, strict=True)
        ]
        self._attempt = CallAttempt(tag, readings, forms[0].stray_close, forms[0])

    def _on_following(self, tag: str) -> None:
        self._attempt = self._behind.attempt(tag, self._tools, self._draft())
        if self._attempt is None:
            self._close_calls(tag)

    def _close_calls(self, source: str) -> None:
        """Take `source` as the end of the calls before it; calls without an opening tag may still follow."""
        behind = self._behind.closed()
        if self._suspended:
            self._suspended.append((source, []))
        else:
            self._boundary(source)
        self._behind = behind

    def _draft(self) -> CallDraft:
        """A draft for a call that may be sent before it is whole; inside tagged reasoning it may not be sent early."""
        is_thought = self._reasoning and self._format.channels == "tags"
        return CallDraft() if is_thought else CallDraft(self._names)

    def _boundary(self, tag: str) -> None:
        """Record a tag; white space that fills the gap from the last tag to it is formatting."""
        self._record.write("space", self._take_space())
        self._record.write("tag", tag)
        self._start_segment()

    def _start_segment(self) -> None:
        self._segment_empty = self._line_blank = self._tag_seen = True
        self._behind = NOTHING
        self._after_thinking = False

    # --- calls ----------------------------------------------------------------------------------------------------

    def _step_attempt(self, attempt: CallAttempt, char: str) -> None:
        closing = self._format.thinking.closing if self._reasoning and self._format.thinking else None
        try:
            found = attempt.feed(char)
        except NotACall as error:
            self._attempt = None
            if num_closing := error.num_closing if attempt.is_following else 0:
                self._close_calls(attempt.text()[:num_closing])
                self._step_all(attempt.text()[num_closing:])
            else:
                self._give_back(attempt.text())
            return
        if found is not None:
            self._attempt = None
            self._accept(attempt, found)
        elif attempt.call_id is None and (draft := attempt.draft) is not None:
            self._begin_call(attempt, draft)
        elif closing is not None and attempt.ends_with(closing):
            self._attempt = None
            self._write_all(attempt.text().removesuffix(closing))
            self._on_think_close(closing)

    def _begin_call(self, attempt: CallAttempt, draft: CallDraft) -> None:
        self._record.write("space", self._take_space())
        self._reasoning = False
        for name, arguments in draft.before:
            self._record.add_call(self._new_call_id(), name, arguments)
        attempt.begin(self._record.begin_call(self._new_call_id(), str(draft.name)))

    def _send_arguments(self, attempt: CallAttempt) -> None:
        """Send the new arguments of a call that has begun."""
        if attempt.call_id is not None and attempt.draft is not None:
            self._record.write_arguments(attempt.draft.take())

    def _end_call(self, attempt: CallAttempt, *, is_cut: bool) -> None:
        self._send_arguments(attempt)
        self._record.end_call(attempt.text(), is_cut=is_cut)
        self._start_segment()
        self._something_said = True
        self._stray_close = attempt.stray_close

    def _accept(self, attempt: CallAttempt, found: Found) -> None:
        is_call = attempt.call_id is not None or (found and isinstance(found, list))
        if attempt.call_id is not None:
            self._end_call(attempt, is_cut=False)
        elif isinstance(found, ChannelOpened):
            self._boundary(attempt.text())
            self._reasoning = found.channel == "reasoning"
        elif attempt.is_following and not found:
            self._close_calls(attempt.text())
        elif self._reasoning and self._format.channels == "tags":
            self._suspended.append((attempt.text(), found))
        elif not found:
            self._boundary(attempt.text())
        else:
            self._accept_call(attempt.text(), found)
            self._reasoning = False
            self._stray_close = attempt.stray_close
        if is_call:
            self._behind = Following.of(attempt.form)
            if self.closing is None:
                self.closing = closing_text(attempt.closing, attempt.call_id or "")
        self._step_all(attempt.rest)

    def _accept_call(self, source: str, calls: list[ParsedCall]) -> None:
        self._record.write("space", self._take_space())
        for call in calls:
            own = source if call is calls[-1] else ""
            self._record.add_call(self._new_call_id(), call.name, write_json(dict(call.arguments)), own)
        self._start_segment()
        self._something_said = True

    def _accept_suspended(self) -> None:
        suspended, self._suspended = self._suspended, []
        for source, calls in suspended:
            if calls:
                self._accept_call(source, calls)
            else:
                self._record.write("space", source)

    def _release_suspended(self) -> None:
        suspended, self._suspended = self._suspended, []
        for source, _ in suspended:
            self._write_all(source)

    def _finish_attempt(self, attempt: CallAttempt, cut: bool) -> None:
        self._attempt = None
        if attempt.call_id is not None:
            self._end_call(attempt, is_cut=not attempt.finish(cut=cut))
            self._behind = Following.of(attempt.form)
            self._step_all(attempt.rest)
            return
        try:
            found = None if cut and not attempt.is_following else attempt.feed(END)
        except NotACall:
            found = [] if attempt.is_following and not attempt.in_other_call else None
        if found is None:
            self._write_all(attempt.text())
        else:
            self._accept(attempt, found)

    def _give_back(self, source: str) -> None:
        """Writes a broken attempt as text, except for its end if a tag may begin there."""
        self._behind = NOTHING
        table = self._table()
        sizes = range(min(table.max_tag_chars, len(source) - 1), 0, -1)
        size = next((size for size in sizes if source[-size:] in table.beginnings or source[-size:] in table.tags), 0)
        self._write_all(source[: len(source) - size])
        self._step_all(source[len(source) - size :])

    # --- text -----------------------------------------------------------------------------------------------------

    def _step_all(self, text: str) -> None:
        for char in text:
            self._step(char)

    def _step(self, char: str) -> None:
        if self._attempt is not None:
            self._step_attempt(self._attempt, char)
            return
        self._held += char
        while self._held:
            table = self._table()
            handle = table.tags.get(self._held)
            if handle is not None:
                tag, self._held = self._held, ""
                handle(tag)
                return
            if self._held in table.beginnings:
                return
            first, self._held = self._held[0], self._held[1:]
            self._write(first)

    def _can_run(self) -> bool:
        """Whether text up to the next possible tag or line end can be sent at once."""
        return not (self._segment_empty or self._held or self._attempt is not None or self._suspended)

    def _write_all(self, text: str) -> None:
        for char in text:
            self._write(char)

    def _write(self, char: str) -> None:
        if self._suspended:
            if char in SPACE:
                self._suspended.append((char, []))
                return
            self._release_suspended()
        if self._is_open_space(char):
            self._space.append(char)
        else:
            self._write_run(char)

    def _is_open_space(self, char: str) -> bool:
        """Whether white space is formatting if a tag follows: any before a segment's text, line ends in thinking."""
        if self._reasoning and self._format.channels == "tags":
            return char == "\n"
        return self._segment_empty and char in SPACE

    def _write_run(self, text: str) -> None:
        space = self._take_space()
        if self._segment_empty and self._after_thinking:
            kept = space.lstrip("\n")
            self._record.write("space", space[: len(space) - len(kept)])
            space = kept
        self._record.write(self._channel(), space)
        self._record.write(self._channel(), text)
        self._segment_empty, self._behind = False, NOTHING
        if text == "\n":
            self._line_blank = True
        elif not SPACE.issuperset(text):
            self._line_blank = False
        self._something_said |= not self._reasoning

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _channel(self) -> Channel:
        return "reasoning" if self._reasoning else "content"
