"""Faults are counted each, told once, and told again only after they were over."""

from kvserve.cache.disk_records import Faults


def test_a_kind_is_told_once() -> None:
    """With the first reason; the count goes on."""
    lines: list[str] = []
    faults = Faults(lines.append)
    for reason in ("first", "second"):
        faults.add("damaged", reason)
    faults.add("missing", "third")
    assert faults.counts() == {"damaged": 2, "missing": 1}
    assert len(lines) == 2 and "first" in lines[0] and "computed again" in lines[0] and "third" in lines[1]


def test_what_is_over_is_told_and_may_come_again() -> None:
    """Its end is told once, and never where it had not begun."""
    lines: list[str] = []
    faults = Faults(lines.append)
    faults.is_over("full", "there is room")
    assert lines == []
    for _ in range(2):
        faults.add("full", "no room")
        faults.is_over("full", "there is room")
        faults.is_over("full", "there is room")
    assert len(lines) == 4 and lines[1] == lines[3] == "there is room" and faults.counts() == {"full": 2}
