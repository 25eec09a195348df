"""Finds stop strings in a stream of text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be sent, and the stop string that ended it, if one did."""

    text: str
    stop_string: str | None = None


class StopScanner:
    """Ends a stream where the first stop string is complete, and cuts it before that string.

    Of two that end at the same character the longer one counts, so the answer does not depend on the cuts of the text.
    Only a possible beginning of a stop string is held back. Text after a match is dropped. Empty stop strings are
    ignored.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._beginnings = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._max_held = max(map(len, self._beginnings), default=0)
        self._held = ""
        self._found: str | None = None

    @property
    def looks_for_any(self) -> bool:
        """Whether there is a stop string at all."""
        return bool(self._stops)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._found

    def feed(self, text: str) -> Scanned:
        """The text that cannot belong to a stop string."""
        if self._found is not None:
            return Scanned("", self._found)
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self._found = min(matches)
            self._held = ""
            return Scanned(text[:start], self._found)
        split = self._split(text)
        self._held = text[split:]
        return Scanned(text[:split])

    def finish(self) -> Scanned:
        """The text held back; no more text follows."""
        held, self._held = self._held, ""
        return Scanned(held, self._found)

    def _split(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string."""
        sizes = range(min(self._max_held, len(text)), 0, -1)
        return len(text) - next((size for size in sizes if text[-size:] in self._beginnings), 0)
