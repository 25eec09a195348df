"""What the benchmark of draft models makes of a target: a led one that says what its first layers say. The servers are
tried by the benchmark itself.
"""

from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

from benchmarks.decode_rate import Arrived
from benchmarks.drafted_by_model import (
    Counts,
    DraftPair,
    Measured,
    Restarted,
    figures,
    first_layers,
    read_weights,
    silenced,
    write_variant,
)
from benchmarks.speculation_asked import Pair, Prompt, Told
from tests.models import tiny_model

NUM_KEPT = 1
"""Of two."""
TOKENS = mx.array([[301, 302, 303, 304, 305]])


def _logits(folder: Path) -> mx.array:
    model, _ = load_model(folder)
    return model(TOKENS)


def test_a_silenced_target_says_what_its_first_layers_say(tmp_path: Path) -> None:
    model = tiny_model("llama")
    weights = read_weights(model)
    few = write_variant(model, tmp_path / "few", first_layers(weights, NUM_KEPT), NUM_KEPT)
    led = write_variant(model, tmp_path / "led", silenced(weights, NUM_KEPT))
    assert mx.allclose(_logits(few), _logits(led), atol=1e-5)
    assert not mx.allclose(_logits(few), _logits(model), atol=1e-2), "the others would say nothing anyway"


def test_what_is_found_behind_a_kill_counts_beside_what_the_target_found() -> None:
    told = Told("x" * 101, "stop", Arrived(tuple((number / 10, 1) for number in range(101)), 101))
    answers = (Pair((Prompt("prose", "a", "s", "u"),), (told,), (told,)),)
    drafts, again = Counts(50, 40, 0, 0, True), Restarted(100, 90)
    rows = figures([Measured(DraftPair("led", Path("a"), Path("b"), is_led=True), answers, drafts, again)])
    assert [(row.value, row.is_missed) for row in rows if "SIGKILL" in row.name] == [(0.9, True)]
    assert rows[0].absolute == "50 tokens drafted by it, 80% accepted; it is used"
