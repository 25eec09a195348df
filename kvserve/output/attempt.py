"""Text that may turn out to be a call: holds it and asks the forms; knows nothing of what follows from the answer."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvserve.output.harmony import ChannelOpened
from kvserve.output.tool_parsers.draft import Draft
from kvserve.output.tool_parsers.form import END, NotACall, ParsedCall, Scan, ToolForm, text_before

type Found = ChannelOpened | list[ParsedCall]


@dataclass(slots=True)
class Reading:
    """One way to read the text: a scan, what it is certain of, and the tags that end such a call."""

    scan: Generator[None, str, Found]
    draft: Draft
    close_tags: tuple[str, ...]

    def send(self, char: str) -> None:
        """Raises StopIteration with what was found, NotACall."""
        self.draft.hold(char)
        self.scan.send(char)

    def go_on_as_written(self) -> None:
        """What follows cannot be read: it goes into the arguments as it stands, up to the next closing tag."""
        held = self.draft.held
        size = max((size for size in range(1, len(held) + 1) if self._may_close(held[-size:])), default=0)
        self.draft.write(held[: len(held) - size])
        self.scan = _as_written(self.draft, self.close_tags)
        next(self.scan)
        for char in held[len(held) - size :]:
            self.send(char)

    def _may_close(self, text: str) -> bool:
        return any(tag != text and tag.startswith(text) for tag in self.close_tags)


def _as_written(draft: Draft, close_tags: Sequence[str]) -> Scan:
    yield from text_before([(tag,) for tag in close_tags], draft.write)
    return []


class Attempt:
    """The source of a possible call (or harmony header) so far, and the readings that still accept it.

    Once the call has begun for the client, one reading is left, and the text is a call whatever follows.
    """

    def __init__(
        self,
        tag: str,
        readings: Sequence[Reading],
        stray_close: str | None,
        form: ToolForm | None = None,
        *,
        is_following: bool = False,
    ) -> None:
        """`form`: what a call of it may be followed by is read as its own; `is_following`: this is that already."""
        self.tag = tag
        self.form = form
        self.is_following = is_following
        self.source = [tag]
        self.stray_close = stray_close
        self.call_id: str | None = None
        self._readings = list(readings)
        for reading in readings:
            next(reading.scan)

    @property
    def draft(self) -> Draft | None:
        """The call that this certainly is, as far as it was written; None while that is not certain."""
        if len(self._readings) != 1 or not self._readings[0].draft.is_open:
            return None
        return self._readings[0].draft

    def feed(self, char: str) -> Found | None:
        """What was found, or None while it is open. Raises NotACall when no reading is left."""
        self.source.append(char)
        alive: list[Reading] = []
        for reading in self._readings:
            try:
                reading.send(char)
            except StopIteration as done:
                found: Found = done.value
                return found
            except NotACall:
                if self.call_id is None:
                    continue
                reading.go_on_as_written()
            alive.append(reading)
        self._readings = alive
        if not alive:
            raise NotACall
        return None

    def finish(self) -> bool:
        """The text is over, and the call had begun: whether its arguments are whole. What was held is one of them."""
        [reading] = self._readings
        try:
            reading.send(END)
        except StopIteration:
            return True
        except NotACall:
            reading.draft.write(reading.draft.held)
        return False

    def text(self) -> str:
        """The source so far."""
        return "".join(self.source)

    def ends_with(self, tag: str) -> bool:
        """Whether the source ends with `tag`; looks at no more than that many of the last characters."""
        return self.source[-1] == tag[-1] and "".join(self.source[-len(tag) :]).endswith(tag)
