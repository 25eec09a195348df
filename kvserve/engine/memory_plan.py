"""How a machine's memory is shared out between a model's weights and all that grows with work: arithmetic, no arrays.

A share is one of what the weights leave, up to a cap; what an operator sets is taken as it is. The rest is headroom:
for what a chunk of prefill computes with, and for everybody else on the machine.
"""

import os
from dataclasses import dataclass

import mlx.core as mx

MIN_REST_BYTES = 2**29
"""So much is shared out where weights leave less, or nothing: a model that large has been asked for all the same."""

KV_SHARE = 5 / 8
"""KV of running rows, of rows that may come back, and copies on their way from one to the other. A row that takes half
of it can be kept beside itself."""

WRITE_QUEUE_SHARE, WRITE_QUEUE_CAP = 1 / 16, 2**30
READ_AHEAD_SHARE, READ_AHEAD_CAP = 1 / 32, 2**29
RECORDS_SHARE, RECORDS_CAP = 1 / 32, 2**29
IMAGE_FEATURES_SHARE, IMAGE_FEATURES_CAP = 1 / 32, 2**29
BUFFERS_SHARE, BUFFERS_CAP = 1 / 16, 2**31
"""Freed buffers that MLX holds for the next step: a chunk of prefill needs the same sizes again."""


@dataclass(frozen=True, slots=True)
class WantedMemory:
    """What the operator decides; None leaves it to the machine."""

    kv_bytes: int | None = None
    batch_bytes: int | None = None
    records_bytes: int | None = None
    image_feature_bytes: int | None = None
    write_queue_bytes: int | None = None
    read_ahead_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that each account may hold. `kv_bytes` is for what is kept, running rows counted first; `batch_bytes` for
    the rows that run, at their peak."""

    kv_bytes: int
    batch_bytes: int
    write_queue_bytes: int
    read_ahead_bytes: int
    records_bytes: int
    image_feature_bytes: int
    buffer_bytes: int

    @property
    def pool_bytes(self) -> int:
        """The most that all KV in memory takes: of running rows, kept, and on its way."""
        return max(self.kv_bytes, self.batch_bytes)

    @property
    def total_bytes(self) -> int:
        """All accounts together."""
        beside = self.write_queue_bytes + self.read_ahead_bytes + self.records_bytes + self.image_feature_bytes
        return self.pool_bytes + beside + self.buffer_bytes


def plan_memory(memory_bytes: int, weight_bytes: int, wanted: WantedMemory = WantedMemory()) -> MemoryPlan:
    """The budgets of a model with so many bytes of weights where MLX may use `memory_bytes`."""
    rest = max(MIN_REST_BYTES, memory_bytes - weight_bytes)
    kv_bytes = int(rest * KV_SHARE)
    return MemoryPlan(
        kv_bytes=wanted.kv_bytes or kv_bytes,
        batch_bytes=wanted.batch_bytes or kv_bytes,
        write_queue_bytes=wanted.write_queue_bytes or _share(rest, WRITE_QUEUE_SHARE, WRITE_QUEUE_CAP),
        read_ahead_bytes=wanted.read_ahead_bytes or _share(rest, READ_AHEAD_SHARE, READ_AHEAD_CAP),
        records_bytes=wanted.records_bytes or _share(rest, RECORDS_SHARE, RECORDS_CAP),
        image_feature_bytes=wanted.image_feature_bytes or _share(rest, IMAGE_FEATURES_SHARE, IMAGE_FEATURES_CAP),
        buffer_bytes=_share(rest, BUFFERS_SHARE, BUFFERS_CAP),
    )


def overdrawn(memory_bytes: int, weight_bytes: int, plan: MemoryPlan) -> tuple[str, ...]:
    """What a person should know where weights and budgets together are more than MLX may use."""
    needed = weight_bytes + plan.total_bytes
    if needed <= memory_bytes:
        return ()
    return (
        f"Weights ({weight_bytes / 2**30:.1f} GiB) and all budgets may take {needed / 2**30:.1f} GiB of "
        f"{memory_bytes / 2**30:.1f} GiB: lower PROMPT_CACHE_MAX_BYTES or MAX_BATCH_BYTES, or take a smaller model.",
    )


def _share(rest: int, share: float, cap: int) -> int:
    return min(cap, int(rest * share))


def memory_bytes() -> int:
    """Memory that MLX may use: the GPU's recommended working set or, on a CPU, the machine's memory."""
    working_set = mx.device_info().get("max_recommended_working_set_size")
    return int(working_set) if working_set else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
