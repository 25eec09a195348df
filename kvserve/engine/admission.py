"""Who may enter: rows are admitted by number and by the bytes of KV that they will hold, padding included."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

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
        """The most bytes that one row holds on its way to this length."""
        return self.sizes.peak(num_tokens)

    def answer_bytes(self, num_prompt_tokens: int, num_tokens: int) -> float:
        """Bytes that a row of this length needs beyond what its prompt holds, with a state to be kept."""
        return self.sizes.fixed + max(0, self.sizes.peak(num_tokens) - self.sizes.peak(num_prompt_tokens))

    def can_ever_hold(self, num_tokens: int) -> bool:
        """False for a row that does not fit even alone."""
        return self.row_bytes(num_tokens) <= self.max_bytes

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises MemoryExhausted for a row that does not fit even alone."""
        num_tokens = self.reserved_tokens(num_prompt_tokens, max_tokens)
        if not self.can_ever_hold(num_tokens):
            raise MemoryExhausted(
                f"This request needs about {self.row_bytes(num_tokens) / 2**30:.2f} GiB of KV memory; "
                f"{self.max_bytes / 2**30:.2f} GiB may be used (MAX_BATCH_BYTES).",
                retry_after_seconds=60,
            )

    def can_hold(self, num_tokens: int, reserved: Sequence[int], padding_bytes: float) -> bool:
        """True if a row fits beside the rows with these reservations and the padding of their batches."""
        if len(reserved) >= self.max_rows:
            return False
        held = sum(self.row_bytes(tokens) for tokens in reserved) + padding_bytes
        return held + self.row_bytes(num_tokens) <= self.max_bytes or not reserved


def half_of_the_rest(weight_bytes: int) -> float:
    """Half of the memory that the weights leave; the other half is for activations and everybody else."""
    return max(2**28, (_memory_bytes() - weight_bytes) / 2)


def _memory_bytes() -> int:
    """Memory that MLX may use: the GPU's recommended working set or, on a CPU, the machine's memory."""
    working_set = mx.device_info().get("max_recommended_working_set_size")
    return int(working_set) if working_set else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
