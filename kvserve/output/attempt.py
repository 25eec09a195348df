"""Holds text that may be a call while the call forms read it, and reads what may follow a call. It decides nothing
about the answer.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvserve.core import CallParts, ToolSpec
from kvserve.output.harmony import ChannelOpened
from kvserve.output.tool_parsers.chains import text_before
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import END, CallForm, FindsEnd, NotACall, ParsedCall, Scan

type Found = ChannelOpened | list[ParsedCall]
type Broken = Callable[[str], FindsEnd]
"""Finds the end of arguments that begin with this text and are not JSON."""


@dataclass(slots=True)
class CallReading:
    """One way to read the text: a scan, its certain results, and the tags that end such a call."""

    scan: Generator[None, str, Found]
    draft: CallDraft
    close_tags: tuple[str, ...]
    broken: Broken | None = None
    end: FindsEnd | None = None
    """Finds the end of a broken call."""

    def send(self, char: str) -> None:
        """Raises StopIteration with what was found, NotACall."""
        self.draft.hold(char)
        self.scan.send(char)

    def go_on_as_written(self, arguments: str) -> None:
        """Take the text after `arguments`, which is not JSON, into them unchanged, up to their end or the next closing
        tag. Raises StopIteration if they end here."""
        if self.broken is not None:
            self.end = self.broken(arguments)
            self.scan = _to_end_of_broken(self.draft, self.end)
            next(self.scan)
            return
        held = self.draft.held
        size = max((size for size in range(1, len(held) + 1) if self._may_close(held[-size:])), default=0)
        self.draft.write(held[: len(held) - size])
        self.scan = _as_written(self.draft, self.close_tags)
        next(self.scan)
        for char in held[len(held) - size :]:
            self.send(char)

    def _may_close(self, text: str) -> bool:
        return any(tag != text and tag.startswith(text) for tag in self.close_tags)


def _as_written(draft: CallDraft, close_tags: Sequence[str]) -> Scan:
    yield from text_before([(tag,) for tag in close_tags], draft.write)
    return []


def _to_end_of_broken(draft: CallDraft, end: FindsEnd) -> Generator[None, str, Found]:
    num_behind = end.at_once()
    while num_behind is None:
        num_behind = end.add((yield))
    draft.end_as_written(num_behind)
    return []


class CallAttempt:
    """The source of a possible call (or harmony header) so far, and the readings that still accept it.

    Once the client has received the call's beginning, one reading is left, and the text is a call whatever follows.
    """

    def __init__(
        self,
        tag: str,
        readings: Sequence[CallReading],
        stray_close: str | None,
        form: CallForm | None = None,
        *,
        is_following: bool = False,
    ) -> None:
        """`form`: its `follow` reads the text behind the call; `is_following`: this attempt is such text."""
        self.tag = tag
        self.form = form
        self.is_following = is_following
        self.source = [tag]
        self.stray_close = stray_close
        self.call_id: str | None = None
        self.rest = ""
        """The text read behind the call's end."""
        self.closing: CallParts = ()
        """What the model's template writes behind the call."""
        self._arguments_start = 0
        self._readings = list(readings)
        for reading in readings:
            next(reading.scan)

    @property
    def draft(self) -> CallDraft | None:
        """The call as far as it was written; None while it is uncertain."""
        if len(self._readings) != 1 or not self._readings[0].draft.is_open:
            return None
        return self._readings[0].draft

    @property
    def in_other_call(self) -> bool:
        """Whether the arguments of a tool that is not offered have begun."""
        return any(reading.draft.is_other for reading in self._readings)

    def begin(self, call_id: str) -> None:
        """Note that the client receives the call; the last character opened its arguments."""
        self.call_id = call_id
        self._arguments_start = len(self.source) - 1

    def feed(self, char: str) -> Found | None:
        """The result, or None while the text is unfinished. Raises NotACall when no reading is left."""
        if char != END:  # what stands behind a call is counted in characters
            self.source.append(char)
        alive: list[CallReading] = []
        error = NotACall()
        for reading in self._readings:
            try:
                self._send(reading, char)
            except StopIteration as done:
                found: Found = done.value
                self._take_from(reading)
                return found
            except NotACall as raised:
                error = raised
            else:
                alive.append(reading)
        certain = next((reading for reading in alive if reading.broken is not None and reading.draft.is_open), None)
        self._readings = alive if certain is None else [certain]
        if not alive:
            raise error
        return None

    def _send(self, reading: CallReading, char: str) -> None:
        try:
            reading.send(char)
        except NotACall:
            if self.call_id is None:
                raise
            reading.go_on_as_written("".join(self.source[self._arguments_start :]))

    def _take_from(self, reading: CallReading) -> None:
        """Take the finished reading's closing parts, and its text that belongs to what follows."""
        self.closing = reading.draft.closing
        if num_behind := reading.draft.num_behind:
            self.rest = "".join(self.source[-num_behind:])
            del self.source[-num_behind:]

    def finish(self, *, cut: bool) -> bool:
        """End a call that the client received, and return whether it is complete. Text held back goes into its
        arguments.

        `cut`: a limit ended the text, so a broken call is not taken as complete.
        """
        [reading] = self._readings
        num_behind = None
        if reading.end is not None:
            num_behind = reading.end.finish(cut=cut)
        else:
            try:
                reading.send(END)
            except StopIteration:
                self._take_from(reading)
                return not (cut and reading.draft.num_behind)
            except NotACall:
                if reading.broken is not None and not cut:
                    num_behind = reading.broken("".join(self.source[self._arguments_start :])).unfinished()
        reading.draft.end_as_written(num_behind or 0)
        self._take_from(reading)
        return num_behind is not None

    def text(self) -> str:
        """The source so far."""
        return "".join(self.source)

    def ends_with(self, tag: str) -> bool:
        """Whether the source ends with `tag`; looks at no more than that many of the last characters."""
        return self.source[-1] == tag[-1] and "".join(self.source[-len(tag) :]).endswith(tag)


# --- behind a call ---------------------------------------------------------------------------------------------------


def reading_of(form: CallForm, scan: Scan, tools: Sequence[ToolSpec], draft: CallDraft) -> CallReading:
    """One way to read a call of the form."""
    broken = form.broken
    if broken is None:
        return CallReading(scan, draft, form.close_tags)
    return CallReading(scan, draft, form.close_tags, lambda text: broken(text, tools))


@dataclass(frozen=True, slots=True)
class Following:
    """Reads the text behind a call of `form`, from one of `tags` on; `is_closed`: the call is closed already."""

    form: CallForm | None = None
    is_closed: bool = False
    tags: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: CallForm | None, *, is_closed: bool = False) -> "Following":
        """What may follow a call of the form."""
        now = form.closed if is_closed and form is not None else form
        return cls(form, is_closed, now.follow_tags) if now is not None and now.follow_tags else NOTHING

    def closed(self) -> "Following":
        """What may follow the closed call."""
        return Following.of(self.form, is_closed=True) if not self.is_closed else self

    def attempt(self, tag: str, tools: Sequence[ToolSpec], draft: CallDraft) -> CallAttempt | None:
        """The attempt that begins with the tag; None if the tag alone closes the calls."""
        form = self.form
        now = form.closed if form is not None and self.is_closed else form
        assert form is not None and now is not None and now.follow is not None, "only then this tag is looked for"
        scan = now.follow(tag, tools, draft)
        if scan is None:
            return None
        reading = reading_of(form, scan, tools, draft)
        return CallAttempt(tag, [reading], form.stray_close, form, is_following=True)


NOTHING = Following()
