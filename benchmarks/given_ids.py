"""Recorded calls under the ids that this server gave them: a client sends back the id that it was given, a recording
has those of the server that it was recorded with, which counted them. It knows the fields of ids and no server.
"""

from collections.abc import Sequence
from typing import Any

ID_FIELDS = frozenset({"id", "call_id", "tool_call_id", "tool_use_id"})


class GivenIds:
    """The ids of one conversation's calls, as they were recorded and as they were given."""

    def __init__(self) -> None:
        self._given: dict[str, str | None] = {}

    def give(self, recorded: Sequence[str], given: Sequence[str]) -> None:
        """An answer's calls. One that was recorded under the id of another is left as it was recorded."""
        for old, new in zip(recorded, given, strict=False):
            if not _plain(old):
                continue
            self._given[_plain(old)] = None if _plain(old) in self._given else new

    def __bool__(self) -> bool:
        return any(self._given.values())

    def in_body(self, body: Any) -> Any:
        """A recorded body with them, in calls and results; some clients take out all but letters and digits."""
        if isinstance(body, list):
            return [self.in_body(each) for each in body]
        if not isinstance(body, dict):
            return body
        return {
            key: (self._given.get(_plain(value)) or value)
            if key in ID_FIELDS and isinstance(value, str)
            else self.in_body(value)
            for key, value in body.items()
        }


def _plain(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))
