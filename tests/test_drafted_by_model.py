"""What the benchmark of draft models makes of a target: a led one that says what the model says in front of it. The
servers are tried by the benchmark itself.
"""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from benchmarks.decode_rate import Arrived
from benchmarks.drafted_by_model import (
    Counts,
    DraftPair,
    Measured,
    Restarted,
    figures,
    first_layers,
    layer_of,
    prolonged,
    read_weights,
    write_variant,
)
from benchmarks.speculation_asked import Pair, Prompt, Told
from tests.models import tiny_model

NUM_LAYERS, NUM_ADDED = 2, 3
TOKENS = mx.array([[301, 302, 303, 304, 305]])


def _logits(folder: Path) -> mx.array:
    model, _ = load_model(folder)
    return model(TOKENS)


def test_a_prolonged_target_says_what_its_first_layers_say(tmp_path: Path) -> None:
    model = tiny_model("llama")
    weights = read_weights(model)
    behind = prolonged(weights, NUM_LAYERS, NUM_ADDED)
    led = write_variant(model, tmp_path / "led", behind, NUM_LAYERS + NUM_ADDED)
    assert {layer_of(name) for name in behind} == {None, *range(NUM_LAYERS + NUM_ADDED)}
    assert mx.allclose(_logits(model), _logits(led), atol=1e-5)


def test_a_model_that_is_cut_off_says_something_else(tmp_path: Path) -> None:
    """Its layers are tried alone, and those behind them did say something."""
    model = tiny_model("llama")
    few = write_variant(model, tmp_path / "few", first_layers(read_weights(model), 1), 1)
    assert not mx.allclose(_logits(model), _logits(few), atol=1e-2)


def test_what_is_found_behind_a_kill_counts_beside_what_was_there_before() -> None:
    """A draft model that rested at the end of an answer has nothing of that to lose."""
    told = Told("x" * 101, "stop", Arrived(tuple((number / 10, 1) for number in range(101)), 101))
    answers = (Pair((Prompt("prose", "a", "s", "u"),), (told,), (told,)),)
    drafts, again = Counts(50, 40, 0, 0, True), Restarted(100, 90, 95)
    rows = figures([Measured(DraftPair("led", Path("a"), Path("b"), is_led=True), answers, drafts, again)])
    assert [(row.value, row.is_missed) for row in rows if "SIGKILL" in row.name] == [(pytest.approx(90 / 95), True)]
    [*_, restarted] = rows
    assert restarted.absolute == "90 of 95 tokens found, 100 by the target"
    kept = figures(
        [Measured(DraftPair("led", Path("a"), Path("b"), is_led=True), answers, drafts, Restarted(100, 60, 60))]
    )
    assert not kept[-1].is_missed
    assert rows[0].absolute == "50 tokens drafted by it, 80% accepted; it is used"
