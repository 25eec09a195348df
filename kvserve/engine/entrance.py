"""Whether the next row may enter: by number, by the memory of all rows at their peak, and by what it would be restored
from beside what others stand on. Belongs to the engine thread; it computes nothing.
"""

from collections.abc import Sequence

from kvserve.engine.admission import Budget
from kvserve.engine.decode import DecodePool
from kvserve.engine.kv_buffers import num_slots
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.row_outline import admitted_tokens, tokens_of
from kvserve.engine.rows import Row


class Entrance:
    """The door to one model's rows."""

    def __init__(self, budget: Budget, cache: PrefixCache, pool: DecodePool) -> None:
        self._budget = budget
        self._cache = cache
        self._pool = pool

    def has_place(self, running: Sequence[Row]) -> bool:
        """Whether one more may run, as far as their number goes."""
        return len(running) < self._budget.max_rows

    def admits(self, row: Row, running: Sequence[Row], num_waiting: int) -> bool:
        """Whether a row may enter beside those that run. Says where it waits for memory."""
        if not self.has_place(running):
            return False
        if self._fits(row, running):
            return True
        self._cache.kv_room.memory.press("running_rows", f"{num_waiting} requests wait for it.")
        return False

    def measure(self, row: Row, running: Sequence[Row]) -> None:
        """Say on a row that enters how much of what is kept it may stand on, and how much it takes over."""
        row.restorable_bytes = self._cache.kv_room.restorable_bytes(self._peak_bytes([*running, row]))
        row.moved_bytes = self._moved_bytes(row, row.restorable_bytes)

    def answer_bytes(self, row: Row) -> float:
        """Bytes that a row needs beyond what its prompt holds."""
        return self._budget.answer_bytes(len(row.request.prompt), self._reserved(row))

    def missing_bytes(self, row: Row, behind: Sequence[Row]) -> float:
        """How much must be free before a row begins beside all that is counted: room for its answer. What is counted
        of rows that wait `behind` it is not missing yet."""
        return self.answer_bytes(row) - self._budget.at_peak(self.arriving_bytes(behind))

    def arriving_bytes(self, rows: Sequence[Row]) -> float:
        """What rows hold, or will hold, that have not begun: their whole prompts."""
        return sum(max(0, self._budget.sizes.peak(row.num_tokens) - row.moved_bytes) for row in rows)

    def is_outgrown(self) -> bool:
        """Whether rows that decode hold more than all rows may."""
        return self._budget.at_peak(self._pool.held_bytes()) > self._budget.max_bytes

    def padding_left(self, running: Sequence[Row]) -> float:
        """How much more padding the batches of these rows may have."""
        return self._budget.padding_left(self._all_reserved(running), self._padding_bytes(running))

    def _fits(self, row: Row, running: Sequence[Row]) -> bool:
        """Alone a row enters all the same, and is restored from what fits."""
        *reserved, own = self._all_reserved([*running, row])
        if not self._budget.can_hold(own, reserved, self._padding_bytes([*running, row])):
            return False
        if not reserved:
            return True
        prompt, partition, room = row.request.prompt, row.request.partition, self._cache.kv_room
        peak_bytes = self._peak_bytes([*running, row])
        if room.can_restore(peak_bytes, len(prompt), lambda: self._cache.kept_tokens(prompt, [partition])[0]):
            return True
        return self._moved_bytes(row, room.restorable_bytes(peak_bytes)) > 0

    def _moved_bytes(self, row: Row, restorable_bytes: float) -> float:
        """How much of what is kept of a row would leave the tree for it."""
        partition = row.request.partition
        return self._cache.moving.planned_bytes(
            row, restorable_bytes, lambda: self._cache.kept_tokens(tokens_of(row), [partition])[1]
        )

    def _peak_bytes(self, rows: Sequence[Row]) -> float:
        return self._budget.held_bytes(self._all_reserved(rows), self._padding_bytes(rows))

    def _padding_bytes(self, rows: Sequence[Row]) -> float:
        """What rows take beyond their KV and the room for it, those that come again as if they decoded: else one that
        has outgrown the memory would enter, and be put back, without end."""
        decoding = set(self._pool.rows())
        num_again = sum(row.was_put_back and row not in decoding for row in rows) if len(rows) > 1 else 0
        return self._pool.padding_bytes() + num_again * self._pool.state_bytes

    def _all_reserved(self, rows: Sequence[Row]) -> list[int]:
        """Of one that comes again and does not decode yet the room that its buffers get by themselves."""
        decoding = set(self._pool.rows())
        reserved = {row: self._reserved(row) for row in rows}
        grown = {row: num_slots(row.num_tokens) for row in rows if row.num_tokens > admitted_tokens(row)}
        return [reserved[row] if row in decoding else grown.get(row, reserved[row]) for row in rows]

    def _reserved(self, row: Row) -> int:
        """Tokens that a row is counted with: those that it has, where an answer is longer than its allowance."""
        reserved = self._budget.reserved_tokens(len(row.request.prompt), row.request.max_tokens)
        return max(reserved, row.num_tokens)
