"""A call on its way: its name and its arguments' text as far as they are certain. It knows no form and no stream."""

from collections.abc import Collection, Sequence

from kvserve.core import CallParts


class Draft:
    """What a scan is certain of while it reads a call, for the client that wants it before the call is finished.

    Only a call of a tool that is `offered` is ever opened; until then, and for others, nothing is written. The text is
    the JSON that a whole call's arguments are sent as. Its last bracket is written last of all, so whatever breaks off
    before is no JSON value.
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
        """Calls, name and arguments, that stand before this one and are certain with it."""
        self.num_behind = 0
        """How many of the last characters that were read belong to what follows the call."""
        self.closing: CallParts = ()
        """What the model's template writes behind the arguments."""

    @property
    def is_open(self) -> bool:
        """Whether it is certain that this is a call, and of which tool."""
        return self.name is not None

    @property
    def arguments(self) -> str:
        """The arguments' text so far."""
        return "".join(self._written)

    @property
    def held(self) -> str:
        """The characters of the source that nothing was written for yet."""
        return "".join(self._held)

    def open(self, name: str) -> None:
        """A call of `name` has begun, if such a tool is offered."""
        if name in self._offered:
            self.name = name

    def hold(self, char: str) -> None:
        """A character of the source comes, which the scan has not read yet."""
        if self.name is not None:
            self._held.append(char)

    def write(self, text: str, *, num_ahead: int = 0) -> None:
        """What was held means `text`, but for its last `num_ahead` characters."""
        if self.name is not None:
            self._written.append(text)
            self._held = self._held[-num_ahead:] if num_ahead else []

    def end_as_written(self, num_behind: int) -> None:
        """What was held is the end of the call as it stands, but for the last `num_behind` characters."""
        self.write(self.held[: max(0, len(self._held) - num_behind)])
        self.num_behind = num_behind

    def take(self) -> str:
        """What was written since the last call."""
        new = "".join(self._written[self._num_taken :])
        self._num_taken = len(self._written)
        return new
