"""The newest request through every kept message: what a next request is compared with. The turn store holds the lock.
Of what is in a record this file knows only the size.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvserve.sessions.seen import PathNode, TurnRecord
from kvserve.sessions.written_messages import VALUE_BYTES, message_bytes

POINTER_BYTES = 8
OFFSET_BYTES = 36


class RecordStore:
    """Records by their leaf, at most `max_bytes`, the oldest request evicted first. A record is dropped once a newer
    request has passed its leaf, as the newer one answers whatever could be asked of it."""

    def __init__(self, max_bytes: int, gone: Callable[[PathNode], None]) -> None:
        """`gone` is called with the leaf of every record that is dropped."""
        self._max_bytes = max_bytes
        self._gone = gone
        self._by_leaf: OrderedDict[PathNode, tuple[TurnRecord, int]] = OrderedDict()
        self._newest_through: dict[PathNode, TurnRecord] = {}
        self._newest_of: dict[str, TurnRecord] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_leaf)

    def __iter__(self) -> Iterator[TurnRecord]:
        """The records, the oldest request first."""
        return iter([record for record, _ in self._by_leaf.values()])

    def put(self, record: TurnRecord) -> bool:
        """Add the newest request; its path must be kept as long as the record is. False: there is no room for it."""
        for node in record.leaf.ancestry():
            self.drop(node)
            self._newest_through[node] = record
        if record.session is not None:
            self._newest_of[record.session] = record
        size = record_bytes(record)
        self._by_leaf[record.leaf] = record, size
        self.num_bytes += size
        self.shrink(self._max_bytes)
        return record.leaf in self._by_leaf

    def shrink(self, max_bytes: int) -> None:
        """Evict the oldest records until at most `max_bytes` are left."""
        while self.num_bytes > max_bytes:
            self.drop(next(iter(self._by_leaf)))

    def drop(self, leaf: PathNode) -> None:
        """Drop the record that ends here, if there is one."""
        if leaf not in self._by_leaf:
            return
        record, size = self._by_leaf.pop(leaf)
        self.num_bytes -= size
        self._gone(leaf)
        for node in leaf.ancestry():
            if self._newest_through.get(node) is record:
                del self._newest_through[node]
        if record.session is not None and self._newest_of.get(record.session) is record:
            del self._newest_of[record.session]

    def at(self, leaf: PathNode) -> TurnRecord | None:
        """The request that ended with this message."""
        found = self._by_leaf.get(leaf)
        return found[0] if found is not None else None

    def newest(self, node: PathNode | None, session: str | None) -> TurnRecord | None:
        """The newest request that passed here, else the newest that shares the most with it, else the session's."""
        if node is not None:
            for passed in node.ancestry():
                if (record := self._newest_through.get(passed)) is not None:
                    return record
        return None if session is None else self._newest_of.get(session)

    def clear(self) -> None:
        """Drop all records."""
        self._by_leaf.clear()
        self._newest_through.clear()
        self._newest_of.clear()
        self.num_bytes = 0


def record_bytes(record: TurnRecord) -> int:
    """Bytes that a record takes beside the path of its leaf."""
    on_path = {id(node.message) for node in record.leaf.ancestry()}
    own = sum(message_bytes(message) for message in record.messages if id(message) not in on_path)
    pointers = len(record.messages) + 2 * len(record.tools) + record.leaf.index + 1
    return (
        VALUE_BYTES
        + sys.getsizeof(record.packed_ids)
        + OFFSET_BYTES * len(record.starts)
        + POINTER_BYTES * pointers
        + own
    )
