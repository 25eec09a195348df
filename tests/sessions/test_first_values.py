"""A set of tools keeps its first order, a kind of telemetry its first text; anything else is as it was sent."""

from collections.abc import Callable

import pytest

from kvserve.core import ToolSpec
from kvserve.sessions.first_values import MAX_CHARACTERS, TelemetryValues, ToolOrders
from kvserve.sessions.journal import ROW_LIFE_SECONDS, Kind
from tests.sessions.samples import Notebook


def tool(name: str, **parameters: object) -> ToolSpec:
    return ToolSpec(name, f"does {name}", parameters)


A, B, C = tool("a", type="object"), tool("b"), tool("c")


def test_another_order_is_the_first_one() -> None:
    """Shuffled tools come back as they first stood, also with their keys in another order."""
    orders = ToolOrders(4)
    first = (tool("a", x=1, y=2), B, C)
    assert orders.as_seen(b"d", first) == first
    again = orders.as_seen(b"d", [C, tool("a", y=2, x=1), B])
    assert again == first and list(again[0].parameters) == ["x", "y"]


@pytest.mark.parametrize(
    "other",
    [(C, B), (A, B, C, C), (tool("a", type="string"), B, C), (ToolSpec("a", None, {"type": "object"}), B, C)],
)
def test_another_set_is_as_it_was_sent_even_under_the_same_digest(other: tuple[ToolSpec, ...]) -> None:
    """The digest is not believed: a tool gone, doubled or changed is another set with an order of its own."""
    orders = ToolOrders(4)
    orders.as_seen(b"d", (A, B, C))
    assert orders.as_seen(b"d", other) == other
    assert orders.as_seen(b"d", (B, A, C)) == (A, B, C)


@pytest.mark.parametrize(("one", "other"), [(True, 1), (1, 1.0), (0, False)])
def test_schemas_that_python_calls_equal_are_not(one: object, other: object) -> None:
    """true became 1 in a schema: the model reads the new one."""
    orders = ToolOrders(4)
    orders.as_seen(b"d", (tool("a", default=one), B))
    seen = orders.as_seen(b"d", (B, tool("a", default=other)))
    assert [spec.name for spec in seen] == ["b", "a"] and seen[1].parameters["default"] is other


def test_sets_are_bounded_and_the_oldest_use_goes() -> None:
    """A set that is in use stays."""
    orders = ToolOrders(2)
    orders.as_seen(b"1", (A, B))
    orders.as_seen(b"2", (B, C))
    orders.as_seen(b"1", (B, A))
    orders.as_seen(b"3", (A, C))
    assert orders.as_seen(b"1", (B, A)) == (A, B)
    assert orders.as_seen(b"2", (C, B)) == (C, B)


def test_bytes_are_bounded_too() -> None:
    """A few enormous sets push the older ones out; the newest stays, however large."""
    orders = ToolOrders(100, max_bytes=50_000)
    for name in "123":
        orders.as_seen(name.encode(), (tool(name, text="x" * 10_000), A))
    assert orders.as_seen(b"1", (A, tool("1", text="x" * 10_000)))[0] == A
    assert orders.as_seen(b"3", (A, tool("3", text="x" * 10_000)))[0] != A
    big = (tool("big", text="x" * 100_000), A)
    orders.as_seen(b"b", big)
    assert orders.as_seen(b"b", big[::-1]) == big and len(orders) == 1


def test_a_set_is_written_down_once_an_hour() -> None:
    """Not at every request: its row says until when it is kept, and is renewed when that is an hour short."""
    notebook = Notebook()
    orders = ToolOrders(4, journal=notebook)
    orders.as_seen(b"d", (A, B))
    assert not notebook.bodies
    written = []
    for until in (10_000.0, 10_100.0, 13_700.0):
        orders.as_seen(b"d", (B, A), until)
        written.append(dict(notebook.bodies))
    assert written[0] == written[1] != written[2] and len(written[2]) == 1
    again = ToolOrders(4)
    again.load(notebook.rows())
    assert again.as_seen(b"d", (B, A)) == (A, B)
    orders.expire(13_000.0)
    assert notebook.bodies
    orders.expire(14_000.0)
    assert not notebook.bodies and orders._num_bytes == 0


def test_no_tools_are_a_set() -> None:
    """An empty set is empty."""
    assert ToolOrders(2).as_seen(b"0", ()) == ()


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


def test_the_first_telemetry_stays() -> None:
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


def test_the_longest_unused_telemetry_goes_first() -> None:
    """With their rows."""
    journal = Noted()
    values = TelemetryValues(2, journal)
    for key in ("a", "b", "a", "c"):
        values.first(key, f"{key}1", until=10.0)
    assert [values.first(key, f"{key}2") for key in ("a", "c")] == ["a1", "c1"]
    assert set(journal.rows) == {b"a", b"c"}
    assert values.first("b", "b2") == "b2"


def test_telemetry_that_is_written_down_is_read_again() -> None:
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
