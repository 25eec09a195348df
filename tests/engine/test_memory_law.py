"""The law of memory: whatever rows do, MLX's peak beyond the weights, and what the ledger counts besides, stay within
the budgets. Each pass is a process of its own (`memory_pass.py`), on a model with 128 KiB of KV a token: a few hundred
tokens are as much as the budgets.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.memory_pass import MIB, WORKS, Pass, Seen, most_tokens

SLACK_BYTES = 32 * MIB
"""What a chunk of prefill computes with is in no account."""

PROCESS_SLACK_BYTES = 64 * MIB


def measured(wanted: Pass) -> Seen:
    """A pass in a process of its own. A row that failed is no pass."""
    command = [sys.executable, "-m", "tests.engine.memory_pass", json.dumps(asdict(wanted))]
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = Seen(**json.loads(done.stdout.splitlines()[-1]))
    assert not seen.num_failed, seen
    return seen


def is_within(seen: Seen) -> bool:
    """Whether a pass kept the law."""
    return max(seen.peak_bytes, seen.both_bytes) <= 1.1 * seen.budget_bytes + SLACK_BYTES


def assert_law(wanted: Pass) -> Seen:
    """A pass keeps the law, and so does its process with all accounts."""
    seen = measured(wanted)
    print(wanted, {name: round(value / MIB, 1) for name, value in asdict(seen).items() if name.endswith("bytes")})
    assert is_within(seen), (wanted, seen)
    allowed = 1.25 * seen.budget_bytes + PROCESS_SLACK_BYTES
    assert seen.process_bytes <= allowed, (wanted, seen)
    return seen


@pytest.mark.long
def test_eight_rows_and_their_next_turns_stay_within_the_budgets() -> None:
    """Rows of eight lengths that are admitted as memory allows, kept, written, and restored when they go on."""
    seen = assert_law(Pass("eight", 64 * MIB, 64 * MIB, disk="on"))
    assert seen.num_cached_tokens > 0


def assert_found_again(seen: Seen, num_bytes: int) -> None:
    """The second turn of a row that just fits computes what is new."""
    assert seen.num_cached_tokens >= most_tokens(num_bytes) - 24, seen


def test_a_row_that_just_fits_is_found_again_within_the_budgets() -> None:
    """It takes most of the memory for KV: what is kept of it moves in at its end, and out for its next turn."""
    assert_found_again(assert_law(Pass("fits", 64 * MIB, 64 * MIB)), 64 * MIB)


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "disk"), list(product([name for name in WORKS if name != "mixed"], ("", "on", "ephemeral")))
)
def test_every_work_stays_within_the_budgets(work: str, disk: str) -> None:
    """Prompts and answers that just fit, long answers, many conversations in turns; without a disk, with one, and where
    RAM is only lent. What the same work takes that keeps nothing is what rows themselves take."""
    wanted = Pass(work, 128 * MIB, 128 * MIB, disk=disk)
    kept, plain = assert_law(wanted), measured(Pass(work, 128 * MIB, 128 * MIB, disk=disk, keeps=False))
    if work == "fits":
        assert_found_again(kept, 128 * MIB)
    assert kept.peak_bytes - plain.peak_bytes + kept.host_bytes <= 1.1 * kept.budget_bytes + SLACK_BYTES


@pytest.mark.long
@pytest.mark.parametrize("disk", ["", "on"])
def test_another_model_takes_the_place_of_the_first_within_the_budgets(disk: str) -> None:
    """What the first one had is given back before the other one computes."""
    assert_law(Pass("restores", 128 * MIB, 128 * MIB, disk=disk, num_engines=2))


@pytest.mark.long
def test_a_ledger_that_forgets_running_rows_breaks_the_law() -> None:
    """Negative control: budgets hold because everything is counted. (What is kept has a second bound, the tree's.)"""
    wanted = Pass("mixed", 320 * MIB, 320 * MIB)
    assert_law(wanted)
    assert not is_within(measured(replace(wanted, forgets="live")))


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kv=st.integers(64, 192),
    batch=st.integers(64, 192),
    side=st.integers(4, 32),
    disk=st.sampled_from(["", "on", "ephemeral"]),
    seed=st.integers(0, 1000),
)
def test_any_traffic_stays_within_any_budgets(kv: int, batch: int, side: int, disk: str, seed: int) -> None:
    """Rows and turns of random lengths, and budgets that are no multiple of anything."""
    assert_law(Pass("mixed", kv * MIB, batch * MIB, side * MIB, disk, seed=seed))
