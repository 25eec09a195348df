"""A row that goes from server to server: whole at its own place, and nothing anywhere else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.sessions import shared_row
from kvserve.sessions.message_rows import dump
from kvserve.sessions.seen import Conflicts
from kvserve.sessions.shared_row import (
    SIGNATURE_BYTES,
    SharedRow,
    StrangeRow,
    UnsignedRow,
    packed,
    secret_key,
    unpacked,
)
from kvserve.sessions.tool_layouts import AddedTools, ToolLayout
from tests.laws import num_examples
from tests.sessions.samples import assistant, call, user, written

SECRET, PLACE = secret_key("the servers' secret"), "kvs1:space:principal:r:session:chain"
DIGESTS = [bytes([number]) * 32 for number in range(4)]
LAYOUT = ToolLayout((DIGESTS[0], DIGESTS[1]), (AddedTools(DIGESTS[3], (DIGESTS[2],)),))
ANSWER = assistant("Done.", call('{"a":  1}'), thinking="Hm, \ud800.")
ROW = SharedRow(DIGESTS[0], None, written(ANSWER), (LAYOUT,))


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        SharedRow(DIGESTS[1]),
        SharedRow(DIGESTS[1], user("As it was.")),
        replace(ROW, message=assistant("Done. ")),
        replace(ROW, conflicts=Conflicts(is_doubtful=True), told_at_us=5),
        replace(ROW, conflicts=Conflicts(is_contested=True)),
    ],
)
def test_a_row_is_what_it_was(row: SharedRow) -> None:
    """With all that the model wrote, where tools stood, and what is unknown."""
    assert unpacked(packed(row, SECRET, PLACE), SECRET, PLACE, row.field) == row


@settings(max_examples=num_examples(60), deadline=None)
@given(st.data())
def test_an_altered_row_is_none(data: st.DataObject) -> None:
    """Any bit, any cut, bytes behind it; the unaltered one is read."""
    whole = packed(ROW, SECRET, PLACE)
    assert unpacked(whole, SECRET, PLACE, ROW.field) == ROW
    altered = bytearray(whole)
    if data.draw(st.booleans()):
        altered[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        altered = altered[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(UnsignedRow):
        unpacked(bytes(altered), SECRET, PLACE, ROW.field)


@pytest.mark.parametrize(
    ("secret", "place", "field"),
    [
        (secret_key("another one's secret"), PLACE, ROW.field),
        (SECRET, PLACE.replace("session", "another"), ROW.field),
        (SECRET, PLACE, SharedRow(DIGESTS[1]).field),
    ],
    ids=["secret", "session", "field"],
)
def test_a_row_of_another_place_is_none(secret: bytes, place: str, field: str) -> None:
    """Whose it is, where it stands and what it says are signed."""
    with pytest.raises(UnsignedRow):
        unpacked(packed(ROW, SECRET, PLACE), secret, place, field)


@pytest.mark.parametrize(
    "layout",
    [
        ToolLayout((DIGESTS[0], DIGESTS[0])),
        ToolLayout((DIGESTS[0],), (AddedTools(DIGESTS[3], (DIGESTS[0],)),)),
        ToolLayout((), (AddedTools(DIGESTS[3], (DIGESTS[0],)),)),
        ToolLayout((b"short",)),
    ],
)
def test_a_layout_that_would_leave_a_tool_without_a_place_is_none(layout: ToolLayout) -> None:
    """Even where it is signed."""
    row = replace(ROW, layouts=(layout,))
    with pytest.raises(StrangeRow):
        unpacked(packed(row, SECRET, PLACE), SECRET, PLACE, row.field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        dump({"meaning": "00"}),
        b"[" * 100_000,
        dump({"meaning": 32 * "00", "layouts": [{}]}),
    ],
)
def test_what_is_signed_and_no_row_is_none(body: bytes) -> None:
    """A faulty program may sign too, and is no liar."""
    signed = shared_row._signature(body, SECRET, PLACE, "field") + body
    with pytest.raises(StrangeRow) as raised:
        unpacked(signed, SECRET, PLACE, "field")
    assert not isinstance(raised.value, UnsignedRow)


def test_a_row_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is signed."""
    whole = packed(ROW, SECRET, PLACE)
    assert len(whole) > SIGNATURE_BYTES
    monkeypatch.setattr(shared_row, "MAX_ROW_BYTES", len(whole) - 1)
    with pytest.raises(StrangeRow):
        unpacked(whole, SECRET, PLACE, ROW.field)
