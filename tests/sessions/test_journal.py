"""A journal that can be taken away while somebody writes to it."""

from collections.abc import Callable

from kvserve.sessions.journal import JournalSwitch, Kind


class Written:
    """A journal that notes what it is told."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bytes]] = []

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        self.changes.append(("put", key))

    def drop(self, kind: Kind, key: bytes) -> None:
        self.changes.append(("drop", key))


class Detached(JournalSwitch):
    """A switch that another thread detaches right after each look at where it leads."""

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name == "to":
            self.to = None
        return found


def test_a_change_ends_well_though_the_journal_is_taken_away_meanwhile() -> None:
    """`Stores.detach` runs beside requests that note their turns: none of them may fail by it."""
    written = Written()
    Detached(written).put("node", b"a", bytes)
    Detached(written).drop("node", b"b")
    assert written.changes == [("put", b"a"), ("drop", b"b")]
    Detached(None).put("node", b"c", bytes)
    Detached(None).drop("node", b"c")
