"""The telemetry that came first: bounded, kept over a restart as long as it is used, and nothing longer than that."""

from collections.abc import Callable

from kvserve.sessions.journal import Kind
from kvserve.sessions.journaled_store import ROW_LIFE_SECONDS
from kvserve.sessions.telemetry_values import MAX_CHARACTERS, TelemetryValues


class Noted:
    """A journal that holds what it is told."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.num_puts = 0

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        assert kind == "telemetry"
        self.rows[key] = body()
        self.num_puts += 1

    def drop(self, kind: Kind, key: bytes) -> None:
        del self.rows[key]


def test_the_first_stays() -> None:
    """Under each key its own."""
    values = TelemetryValues()
    assert [values.first("a", text) for text in ("1", "2", "1")] == ["1", "1", "1"]
    assert values.first("b", "2") == "2"
    values.clear()
    assert values.first("a", "2") == "2"


def test_a_long_text_is_no_telemetry() -> None:
    """It is said as it was sent, and not kept."""
    values = TelemetryValues()
    for text in ("x" * MAX_CHARACTERS, "y" * MAX_CHARACTERS):
        assert values.first("a", text) == text


def test_the_longest_unused_go_first() -> None:
    """With their rows."""
    journal = Noted()
    values = TelemetryValues(2, journal)
    for key in ("a", "b", "a", "c"):
        values.first(key, f"{key}1", until=10.0)
    assert [values.first(key, f"{key}2") for key in ("a", "c")] == ["a1", "c1"]
    assert set(journal.rows) == {b"a", b"c"}
    assert values.first("b", "b2") == "b2"


def test_what_is_written_down_is_read_again() -> None:
    """A row is written at first and then now and then; what may not be written down has none."""
    journal = Noted()
    values = TelemetryValues(journal=journal)
    for seconds in range(10):
        values.first("a", f"a{seconds}", until=1_000.0 + seconds)
    values.first("b", "b0", until=None)
    assert journal.num_puts == 1 and set(journal.rows) == {b"a"}
    values.first("a", "a", until=1_001.0 + ROW_LIFE_SECONDS)
    assert journal.num_puts == 2
    again = TelemetryValues(journal=journal)
    again.load({"telemetry": list(journal.rows.items())})
    assert (again.first("a", "new"), again.first("b", "new")) == ("a0", "new")
    again.put_all()
    assert journal.num_puts == 3
    again.expire(2_000.0 + ROW_LIFE_SECONDS)
    assert not journal.rows and again.first("a", "newer") == "newer"
