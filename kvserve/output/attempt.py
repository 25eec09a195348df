"""Text that may turn out to be a call: holds it and asks the forms; knows nothing of what follows from the answer."""

from collections.abc import Generator, Sequence

from kvserve.output.harmony import ChannelOpened
from kvserve.output.tool_parsers.form import NotACall, ParsedCall

type Found = ChannelOpened | list[ParsedCall]


class Attempt:
    """The source of a possible call (or harmony header) so far, and the scans that still accept it."""

    def __init__(self, tag: str, scans: Sequence[Generator[None, str, Found]], stray_close: str | None) -> None:
        self.tag = tag
        self.source = [tag]
        self.stray_close = stray_close
        self._scans = list(scans)
        for scan in scans:
            next(scan)

    def feed(self, char: str) -> Found | None:
        """What was found, or None while it is open. Raises NotACall when no scan is left."""
        self.source.append(char)
        alive: list[Generator[None, str, Found]] = []
        for scan in self._scans:
            try:
                scan.send(char)
            except StopIteration as done:
                found: Found = done.value
                return found
            except NotACall:
                continue
            alive.append(scan)
        self._scans = alive
        if not alive:
            raise NotACall
        return None

    def text(self) -> str:
        """The source so far."""
        return "".join(self.source)

    def ends_with(self, tag: str) -> bool:
        """Whether the source ends with `tag`; looks at no more than that many of the last characters."""
        return self.source[-1] == tag[-1] and "".join(self.source[-len(tag) :]).endswith(tag)
