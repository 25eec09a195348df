"""A message of a conversation as servers hand it to one another: how the model read it, what it wrote there, where
tools stood. Signed with a secret of theirs for its one place; what is not is no row. It knows no network and no rules.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core import Message, Written
from kvserve.sessions.message_rows import (
    digest_of,
    dump,
    flag,
    items,
    message_of,
    message_row,
    number,
    parse,
    written_of,
    written_row,
)
from kvserve.sessions.seen import Conflicts
from kvserve.sessions.tool_layouts import MAX_LAYOUTS, ToolLayout, layout_of, layout_row
from kvserve.sessions.written_messages import said_digest

SIGNATURE_BYTES = 32
DIGEST_BYTES = 32
MAX_ROW_BYTES = 4 * 2**20
"""A longer row is neither sent nor read: what it says is computed again."""

FORMAT = b"kvserve shared row 2\0"


class StrangeRow(Exception):
    """What is there is no row of this place."""


class UnsignedRow(StrangeRow):
    """It was altered, or was written by somebody without the secret."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """`message` is as the model read it; None: what the model wrote, or else what the client sent, in which no rule
    found anything. `layouts`, the newest first, hold from this message on. `conflicts`: what its server does not know
    of this place, whatever other rows say. `told_at_us`: when, in microseconds since the epoch."""

    meaning: bytes
    message: Message | None = None
    written: Written | None = None
    layouts: tuple[ToolLayout, ...] = ()
    conflicts: Conflicts = Conflicts()
    told_at_us: int = 0

    @property
    def field(self) -> str:
        """One for each meaning and each answer at a place: who reads two of them knows that there is a doubt. One for
        each doubt too, so that a server that has none takes no other's away."""
        said = b"" if self.written is None else said_digest(self.written)
        doubts = bytes([self.conflicts.is_doubtful, self.conflicts.is_contested])
        return hashlib.sha256(self.meaning + doubts + said).hexdigest()[:32]


def secret_key(secret: str) -> bytes:
    """The key that rows of this form are signed with, of servers that have this secret in common. Where they are is
    named by it too (`RecordKeys.of`), so that a server with rows of another form meets none of these."""
    return hashlib.sha256(FORMAT + secret.encode("utf-8")).digest()


def packed(row: SharedRow, secret: bytes, place: str) -> bytes:
    """A row as bytes, its signature for this place first. Raises ValueError for what cannot be written."""
    body = dump(
        {
            "meaning": row.meaning.hex(),
            "message": None if row.message is None else message_row(row.message),
            "written": None if row.written is None else written_row(row.written),
            "layouts": [layout_row(layout) for layout in row.layouts],
            "is_doubtful": row.conflicts.is_doubtful,
            "is_contested": row.conflicts.is_contested,
            "told_at_us": row.told_at_us,
        }
    )
    return _signature(body, secret, place, row.field) + body


def unpacked(data: bytes, secret: bytes, place: str, field: str) -> SharedRow:
    """The row that stands at this place. Raises StrangeRow; UnsignedRow where that is nobody's who
    has the secret."""
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if len(data) > MAX_ROW_BYTES or not hmac.compare_digest(signature, _signature(body, secret, place, field)):
        raise UnsignedRow("it is not signed for this place")
    try:
        row = parse(body)
        found = SharedRow(
            _digest(row.get("meaning")),
            None if row.get("message") is None else message_of(row["message"]),
            None if row.get("written") is None else written_of(row["written"]),
            tuple(map(_layout, items(row.get("layouts")))),
            Conflicts(flag(row.get("is_doubtful")), flag(row.get("is_contested"))),
            number(row.get("told_at_us")),
        )
    except (ValueError, RecursionError) as error:
        raise StrangeRow("it cannot be read") from error
    if found.field != field or len(found.layouts) > MAX_LAYOUTS:
        raise StrangeRow("it is another row")
    return found


def _signature(body: bytes, secret: bytes, place: str, field: str) -> bytes:
    return hmac.digest(secret, FORMAT + f"{place}\0{field}\0".encode("ascii", "backslashreplace") + body, "sha256")


def _digest(value: object) -> bytes:
    digest = digest_of(value)
    if len(digest) != DIGEST_BYTES:
        raise ValueError("no digest")
    return digest


def _layout(row: object) -> ToolLayout:
    """Raises ValueError, also where a tool stands twice: another one would have no place."""
    layout = layout_of(row)
    if not layout.front or len(set(layout.tools)) != len(layout.tools) or not all(map(_is_digest, _digests(layout))):
        raise ValueError("no layout")
    return layout


def _digests(layout: ToolLayout) -> Sequence[bytes]:
    return (*layout.tools, *(each.place for each in layout.added))


def _is_digest(value: bytes) -> bool:
    return len(value) == DIGEST_BYTES
