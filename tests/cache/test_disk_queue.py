"""Bytes on their way between RAM and the disk: what is counted, and who may read on."""

import pytest

from kvserve.cache import disk_queue
from kvserve.cache.disk_blob import Blob
from kvserve.cache.disk_queue import ReadAhead, WriteQueue
from kvserve.cache.disk_records import Load, Write


class Named:
    """As much of an index entry as these two ask for."""

    def __init__(self, name: str, num_bytes: int = 0) -> None:
        self.name = name
        self.num_bytes = num_bytes


def write(name: str, num_bytes: int) -> Write:
    return Write(Named(name), "", (), num_bytes)  # type: ignore[arg-type]


def load(*sizes: int) -> Load:
    return Load(tuple(Named(str(number), size) for number, size in enumerate(sizes)))  # type: ignore[arg-type]


def read_next(ahead: ReadAhead, each: Load) -> None:
    """As the disk thread does."""
    blob: Blob | None = None
    num_bytes = each.entries[each.num_read].num_bytes
    each.num_read += 1
    ahead.arrived(each, blob, num_bytes)


def test_only_what_ram_has_nowhere_else_counts_as_the_queues_own() -> None:
    """A view of what is kept is no memory of the queue's until that leaves, also while it is being written."""
    queue = WriteQueue(100)
    view, copy = write("view", 40), write("copy", 30)
    queue.put(view)
    queue.put(copy, is_own=True)
    assert (queue.num_bytes, queue.num_own_bytes) == (70, 30) and queue.has_room(30) and not queue.has_room(31)
    first = queue.take()
    queue.evicted_from_ram({view.entry, copy.entry, write("view", 1).entry})
    assert (queue.num_bytes, queue.num_own_bytes) == (70, 70)
    queue.done(first)
    assert (queue.num_bytes, queue.num_own_bytes) == (30, 30) and queue
    queue.clear()
    assert (queue.num_bytes, queue.num_own_bytes) == (0, 0) and not queue


def test_a_payload_larger_than_the_queue_waits_in_it_alone() -> None:
    """It must be written some time; nothing more is taken meanwhile."""
    queue = WriteQueue(100)
    assert queue.has_room(500)
    queue.put(write("large", 500))
    assert not queue.has_room(1)


def test_reading_ahead_is_bounded_over_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has not taken yet keeps the others from being read for; what is taken, or not wanted any more, does
    not."""
    monkeypatch.setattr(disk_queue, "STUCK_SECONDS", 1000.0)
    ahead, first, second = ReadAhead(100), load(60, 60), load(60)
    assert ahead.next_of([first, second]) is first
    read_next(ahead, first)
    assert ahead.num_bytes == 60 and ahead.next_of([first, second]) is None
    assert ahead.taken(first) == [None] and ahead.num_bytes == 0
    assert ahead.next_of([second]) is second
    read_next(ahead, second)
    ahead.cancelled(second)
    assert ahead.num_bytes == 0 and ahead.taken(second) == []
    read_next(ahead, second) if second.num_read < len(second.entries) else ahead.arrived(second, None, 60)
    assert ahead.num_bytes == 0, "what comes for somebody who left is nobody's"


def test_whoever_takes_does_not_wait_for_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while those of whom nothing is there are read one blob each, beyond the bound."""
    monkeypatch.setattr(disk_queue, "STUCK_SECONDS", 0.0)
    ahead, idle, busy = ReadAhead(1), load(60, 60), load(60, 60)
    read_next(ahead, idle)
    assert ahead.next_of([idle, busy]) is busy
    read_next(ahead, busy)
    assert ahead.next_of([idle, busy]) is None
    ahead.taken(busy)
    assert ahead.next_of([idle, busy]) is busy
