"""Holds a call that is being read: its name and its arguments as far as they are certain. It knows no form."""

from collections.abc import Collection, Sequence

from kvserve.core import CallParts


class CallDraft:
    """The certain part of a call that a scan reads, for clients that receive it before the call is finished.

    Only calls of `offered` tools are opened; nothing is written before, or for other tools. The text is the JSON of a
    whole call's arguments. Its last bracket is written last, so that text that breaks off is not a JSON value.
    """

    def __init__(self, offered: Collection[str] = ()) -> None:
        self._offered = offered
        self._written: list[str] = []
        self._num_taken = 0
        self._held: list[str] = []
        self.name: str | None = None
        self.is_other = False
        """Whether the arguments of a tool that is not offered have begun."""
        self.before: Sequence[tuple[str, str]] = ()
        """Earlier calls (name, arguments) that become certain with this one."""
        self.num_behind = 0
        """How many of the last characters belong to what follows the call."""
        self.closing: CallParts = ()
        """What the model's template writes behind the arguments."""

    @property
    def is_open(self) -> bool:
        """Whether the call and its tool are certain."""
        return self.name is not None

    @property
    def arguments(self) -> str:
        """The arguments' text so far."""
        return "".join(self._written)

    @property
    def held(self) -> str:
        """The characters of the source that are not written yet."""
        return "".join(self._held)

    def open(self, name: str) -> None:
        """Open a call of `name` if that tool is offered."""
        if name in self._offered:
            self.name = name

    def hold(self, char: str) -> None:
        """Hold a character of the source that the scan is about to read."""
        if self.name is not None:
            self._held.append(char)

    def hold_again(self, text: str) -> None:
        """Hold these last characters of the source, for which nothing is written yet."""
        if self.name is not None:
            self._held = [*text]

    def write(self, text: str, *, num_ahead: int = 0) -> None:
        """Write `text` for the held characters, except the last `num_ahead`."""
        if self.name is not None:
            self._written.append(text)
            self._held = self._held[-num_ahead:] if num_ahead else []

    def write_before(self, text: str) -> None:
        """Write `text` before the held characters, which stay held."""
        if self.name is not None:
            self._written.append(text)

    def end_as_written(self, num_behind: int) -> None:
        """Write the held characters unchanged as the call's end, except the last `num_behind`."""
        self.write(self.held[: max(0, len(self._held) - num_behind)])
        self.num_behind = num_behind

    def take(self) -> str:
        """The text written since the last `take`."""
        new = "".join(self._written[self._num_taken :])
        self._num_taken = len(self._written)
        return new
