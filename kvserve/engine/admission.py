"""Who may enter: rows are admitted by number and by the bytes of KV that they hold at their peak, padding included."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.engine.row_bytes import RowBytes
from kvserve.errors import MemoryExhausted

ANSWER_ALLOWANCE_TOKENS = 2048
"""An answer's share in a row's bytes at admission. Agents ask for 32,000 tokens and use a few hundred of them, so
reserving the whole `max_tokens` would leave most of the memory idle."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on the rows that compute at the same time."""

    max_rows: int
    max_bytes: float
    sizes: RowBytes

    def reserved_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that a row is counted with."""
        return num_prompt_tokens + min(max_tokens, ANSWER_ALLOWANCE_TOKENS)

    def row_bytes(self, num_tokens: int) -> float:
        """The most bytes that one row holds on its way to this length, without what is copied."""
        return self.sizes.peak(num_tokens)

    def peak_bytes(self, num_tokens: int) -> float:
        """The most that a row of this length takes alone: its own bytes, and what of them is there twice for a
        moment."""
        return self.at_peak(self.row_bytes(num_tokens))

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
        return self.at_peak(sum(self.row_bytes(tokens) for tokens in reserved) + padding_bytes)

    def can_hold(self, num_tokens: int, reserved: Sequence[int], padding_bytes: float) -> bool:
        """True if a row fits beside the rows with these reservations and the padding of their batches."""
        if len(reserved) >= self.max_rows:
            return False
        return self.held_bytes([*reserved, num_tokens], padding_bytes) <= self.max_bytes or not reserved

    def padding_left(self, reserved: Sequence[int], padding_bytes: float) -> float:
        """How much more padding the batches of these rows may have."""
        return max(0.0, (self.max_bytes - self.held_bytes(reserved, padding_bytes)) / self.at_peak(1.0))


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
