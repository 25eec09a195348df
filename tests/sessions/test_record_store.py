"""Which earlier request a new one is compared with, and that records stay within their bytes."""

import dataclasses

from kvserve.core import RequestId
from kvserve.sessions.seen import PathNode
from kvserve.sessions.turn_state import record_bytes
from kvserve.sessions.turns import TurnStore
from tests.integrity import check_integrity
from tests.sessions.samples import chains_of, record_of, steps_of, user


def remembered(store: TurnStore, letters: str, name: str, session: str | None = None, num_tokens: int = 4) -> PathNode:
    leaf = store.extend(store.find(chains_of(letters)), steps_of(letters))
    store.remember(record_of(leaf, name, session, num_tokens))
    return leaf


def compared_with(store: TurnStore, letters: str, session: str | None = None) -> RequestId | None:
    record = store.record_for(store.find(chains_of(letters)), session)
    return None if record is None else record.request_id


def test_the_request_before_is_the_newest_one_through_the_same_message() -> None:
    """A branch that went on later is nearer to what shares its beginning; each line has its own newest one."""
    store = TurnStore()
    remembered(store, "ab", "r1")
    remembered(store, "abcd", "r2")
    remembered(store, "abxy", "r3")
    assert compared_with(store, "abcde") == "r2"
    assert compared_with(store, "abxyz") == "r3"
    assert compared_with(store, "abq") == "r3"
    remembered(store, "abcdef", "r4")
    assert compared_with(store, "abq") == "r4"


def test_a_passed_request_makes_room() -> None:
    """Fifty turns of one conversation keep one record, the newest."""
    store = TurnStore()
    for turn in range(1, 51):
        remembered(store, "s" * turn, f"r{turn}")
    assert store.totals().num_records == 1 and compared_with(store, "ss") == "r50"
    check_integrity(store)


def test_a_message_without_a_request_of_its_own_has_the_nearest_before() -> None:
    """Extended but not recorded (an aborted answer): the last recorded request on the way is taken."""
    store = TurnStore()
    remembered(store, "ab", "r1")
    store.extend(None, steps_of("abcd"))
    assert compared_with(store, "abcd") == "r1"


def test_a_new_beginning_is_compared_with_its_session() -> None:
    """An edited system prompt shares no message: what the session did last is what it differs from."""
    store = TurnStore()
    remembered(store, "ab", "r1", "mine")
    remembered(store, "xy", "r2", "other")
    assert compared_with(store, "qb", "mine") == "r1"
    assert compared_with(store, "qb", "unknown") is None and compared_with(store, "qb") is None


def test_bytes_are_bounded_and_the_oldest_request_goes() -> None:
    """Three records of 4,000 tokens each in 40 kB: the first is gone, for its session too; nodes stay."""
    store = TurnStore(max_record_bytes=40_000)
    for name in "abc":
        remembered(store, name, name, session=name, num_tokens=4_000)
    assert [compared_with(store, name, name) for name in "abc"] == [None, "b", "c"]
    assert store.totals().num_nodes == 3
    remembered(store, "d", "d", num_tokens=20_000)
    assert store.totals().num_records == 0 and store.totals().num_record_bytes == 0
    check_integrity(store)


def test_a_record_leaves_with_its_leaf() -> None:
    """Evicting a path forgets its record: nothing holds messages beyond the store's bounds."""
    store = TurnStore(max_nodes=2)
    leaf = remembered(store, "ab", "r1", "s")
    remembered(store, "xy", "r2")
    assert store.totals().num_records == 1 and store.record_for(leaf, "s") is None
    store.remember(record_of(leaf, "late"))
    assert store.totals().num_records == 1
    check_integrity(store)


def test_messages_outside_the_path_weigh_too() -> None:
    """A carrier that only the record knows counts in its bytes; what the path holds counts there."""
    leaf = TurnStore().extend(None, steps_of("ab", ["x" * 50_000, "b"]))
    record = record_of(leaf)
    carrier = user("c" * 30_000)
    with_carrier = dataclasses.replace(record, messages=(*record.messages, carrier))
    assert record_bytes(record) < 2_000
    assert 30_000 < record_bytes(with_carrier) - record_bytes(record) < 31_000
