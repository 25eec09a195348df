"""How memory is shared out on the machines that people have."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.engine.memory import MIN_REST_BYTES, WantedMemory, overdrawn, plan_memory

GIB = 2**30
MIB = 2**20

MACHINES = {8: (16 / 3, 2.3), 16: (32 / 3, 4.6), 32: (64 / 3, 16.0), 64: (48.0, 16.0)}
"""Memory in GiB, what Metal recommends of it at most, and weights that people run there: 4B, 8B and 30B-A3B in 4
bits."""

TABLE = {
    8: (1.90, 194, 97, 97, 97, 194),
    16: (3.79, 388, 194, 194, 194, 388),
    32: (3.33, 341, 171, 171, 171, 341),
    64: (20.0, 1024, 512, 512, 512, 2048),
}
"""GiB of KV; MiB of the queue of writes, reading ahead, records, image features and freed buffers: as in decision
0044."""


@pytest.mark.parametrize("machine", MACHINES)
def test_the_budgets_of_common_machines_are_those_of_the_record(machine: int) -> None:
    """Everything scales with what the weights leave, up to the caps."""
    recommended, weights = MACHINES[machine]
    plan = plan_memory(int(recommended * GIB), int(weights * GIB))
    side = (plan.write_queue_bytes, plan.read_ahead_bytes, plan.records_bytes, plan.image_feature_bytes)
    found = (round(plan.kv_bytes / GIB, 2), *(round(each / MIB) for each in (*side, plan.buffer_bytes)))
    assert found == TABLE[machine]
    assert plan.batch_bytes == plan.pool_bytes == plan.kv_bytes


@given(st.integers(4, 512), st.floats(0.0, 0.9))
def test_all_together_fit_into_the_memory_with_headroom(gib: int, share: float) -> None:
    """Weights and all accounts leave at least an eighth of what the weights leave, on any machine."""
    memory_bytes = gib * GIB
    weight_bytes = int(memory_bytes * share)
    if memory_bytes - weight_bytes < MIN_REST_BYTES:
        return
    plan = plan_memory(memory_bytes, weight_bytes)
    assert weight_bytes + plan.total_bytes <= memory_bytes - (memory_bytes - weight_bytes) / 8


def test_what_the_operator_sets_is_taken_and_changes_nothing_else() -> None:
    """Each number by itself; KV has the larger of its two."""
    auto = plan_memory(16 * GIB, 4 * GIB)
    plan = plan_memory(16 * GIB, 4 * GIB, WantedMemory(kv_bytes=GIB, records_bytes=7))
    assert (plan.kv_bytes, plan.batch_bytes, plan.records_bytes) == (GIB, auto.batch_bytes, 7)
    assert plan.pool_bytes == auto.batch_bytes
    assert plan.write_queue_bytes == auto.write_queue_bytes


def test_where_nothing_is_drafted_there_is_no_memory_for_it() -> None:
    """All else has what it had."""
    plan = plan_memory(16 * GIB, 4 * GIB)
    assert plan.draft_bytes > 0
    without = plan_memory(16 * GIB, 4 * GIB, WantedMemory(has_drafts=False))
    assert without == replace(plan, draft_bytes=0) and without.total_bytes == plan.total_bytes - plan.draft_bytes


def test_budgets_that_are_more_than_the_machine_has_are_told() -> None:
    """Those that the machine chooses never are, where the weights leave anything."""
    assert overdrawn(16 * GIB, 4 * GIB, plan_memory(16 * GIB, 4 * GIB)) == ()
    [note] = overdrawn(16 * GIB, 4 * GIB, plan_memory(16 * GIB, 4 * GIB, WantedMemory(kv_bytes=20 * GIB)))
    assert "16.0 GiB" in note and "PROMPT_CACHE_MAX_BYTES" in note


def test_weights_that_leave_nothing_are_served_with_little() -> None:
    """A model as large as the machine was asked for all the same."""
    plan = plan_memory(8 * GIB, 9 * GIB)
    assert plan.kv_bytes == MIN_REST_BYTES * 5 // 8
    assert 0 < plan.total_bytes < MIN_REST_BYTES
