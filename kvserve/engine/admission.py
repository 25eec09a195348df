"""Who may enter: rows are admitted by number, by the bytes of KV that they hold at their peak, padding included, and by
the kept KV that they would be restored from, beside what other rows use. `Budget` is arithmetic; `Admission` looks at
the rows and belongs to the engine thread. It runs no model.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.engine.decode import DecodePool
from kvserve.engine.kv_buffers import num_slots
from kvserve.engine.kv_size import KvSize
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import ANSWER_ALLOWANCE_TOKENS, Row, admitted_tokens, tokens_of
from kvserve.errors import MemoryExhausted


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on the rows that compute at the same time."""

    max_rows: int
    max_bytes: float
    sizes: KvSize

    def reserved_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that a row is counted with."""
        return num_prompt_tokens + min(max_tokens, ANSWER_ALLOWANCE_TOKENS)

    def peak_bytes(self, num_tokens: int) -> float:
        """The most that a row of this length takes alone: its own bytes, and what of them is there twice for a
        moment."""
        return self.at_peak(self.sizes.peak(num_tokens))

    def at_peak(self, num_bytes: float) -> float:
        """What rows of so many bytes take while one of them joins, leaves or grows."""
        return num_bytes + self.sizes.copied(num_bytes)

    def answer_bytes(self, num_prompt_tokens: int, num_tokens: int) -> float:
        """Bytes that a row of this length needs beyond what its prompt holds, with a state to be kept."""
        return self.sizes.fixed + max(0, self.sizes.peak(num_tokens) - self.sizes.peak(num_prompt_tokens))

    def most_tokens(self, at_most: int) -> int:
        """The longest row that may run alone, of at most so many tokens."""
        return bisect_right(range(at_most + 1), self.max_bytes, key=self.peak_bytes) - 1

    def can_ever_hold(self, num_tokens: int) -> bool:
        """False for a row that does not fit even alone."""
        return self.peak_bytes(num_tokens) <= self.max_bytes

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises MemoryExhausted for a row that does not fit even alone."""
        num_tokens = self.reserved_tokens(num_prompt_tokens, max_tokens)
        if not self.can_ever_hold(num_tokens):
            raise MemoryExhausted(
                f"This request needs about {_size(self.peak_bytes(num_tokens))} of KV memory at its peak; "
                f"{_size(self.max_bytes)} may be used (MAX_BATCH_BYTES).",
                retry_after_seconds=60,
            )

    def held_bytes(self, reserved: Sequence[int], padding_bytes: float) -> float:
        """What rows with these reservations take at their peak, with the padding of their batches."""
        return self.at_peak(sum(self.sizes.peak(tokens) for tokens in reserved) + padding_bytes)

    def can_hold(self, num_tokens: int, reserved: Sequence[int], padding_bytes: float) -> bool:
        """True if a row fits beside the rows with these reservations and the padding of their batches."""
        if len(reserved) >= self.max_rows:
            return False
        return self.held_bytes([*reserved, num_tokens], padding_bytes) <= self.max_bytes or not reserved

    def padding_left(self, reserved: Sequence[int], padding_bytes: float) -> float:
        """How much more padding the batches of these rows may have."""
        return max(0.0, (self.max_bytes - self.held_bytes(reserved, padding_bytes)) / self.at_peak(1.0))


class Admission:
    """Admits one model's rows."""

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
        """Note on a row that enters how much of the kept KV it may use, and how much it takes over."""
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

    def outgrown(self) -> Row | None:
        """The newest of the rows that decode, where these hold more than all rows may."""
        return max(self._pool.rows(), key=lambda each: each.submitted_at) if self.is_outgrown() else None

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
        """How much of the kept KV of a row would move out of the tree to it."""
        partition = row.request.partition
        return self._cache.kv_moves.planned_bytes(
            row, restorable_bytes, lambda: self._cache.kept_tokens(tokens_of(row), [partition])[1]
        )

    def _peak_bytes(self, rows: Sequence[Row]) -> float:
        return self._budget.held_bytes(self._all_reserved(rows), self._padding_bytes(rows))

    def _padding_bytes(self, rows: Sequence[Row]) -> float:
        """What rows take beyond their KV and the room for it, those that come again as if they decoded: else one that
        has outgrown the memory would enter, and be put back, without end."""
        decoding = set(self._pool.rows())
        again = [row for row in rows if row.was_put_back and row not in decoding] if len(rows) > 1 else []
        return self._pool.padding_bytes() + sum(map(self._pool.bytes_besides, again))

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


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
