"""What is compiled once for all lengths chooses at each length what it would choose uncompiled."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from kvserve.engine import shapeless
from kvserve.engine.text_load import load_text

NUM_CHOSEN = 8
LENGTHS = (12, 19, 40, 133)
ROOT = Path(__file__).parents[2]

on_a_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on Metal a partition is a whole sort")


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests run uncompiled, users do not. What is compiled here fuses nothing, so no C++ compiler is called."""
    monkeypatch.setattr(mx, "compile", shapeless.as_mlx_compiles)
    mx.enable_compile()
    yield
    if os.environ.get("MLX_DISABLE_COMPILE"):
        mx.disable_compile()


def begin_to_load(folder: Path) -> None:
    """As far as a folder without weights goes."""
    with pytest.raises(FileNotFoundError):
        load_text(folder, {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8})


@on_a_cpu
def test_hy_v4_reads_the_tokens_of_its_largest_scores_at_every_length(tmp_path: Path) -> None:
    """Whatever length the process has seen first."""
    from mlx_vlm.models.hy_v4.indexer import _partition_scores

    _partition_scores.cache_clear()
    begin_to_load(tmp_path)
    for length in LENGTHS:
        keys = mx.random.normal((1, 1, length, 16), key=mx.random.key(length))
        query = mx.random.normal((1, 2, 1, 16), key=mx.random.key(0))
        chosen = _partition_scores(NUM_CHOSEN, False)(query, keys, mx.ones((1, 1, 2)), None)[0, 0, 0, -NUM_CHOSEN:]
        scores = mx.maximum(query @ keys.swapaxes(-1, -2), 0).sum(axis=1)[0, 0]
        largest = mx.sort(scores)[-NUM_CHOSEN:]
        assert mx.allclose(mx.sort(scores[chosen]), largest, rtol=1e-4).item(), length
    _partition_scores.cache_clear()


@on_a_cpu
def test_a_compiled_partition_is_seen_to_keep_its_first_length() -> None:
    """The control: once this fails MLX has mended it, and nothing is left to be done here."""
    assert shapeless.keeps_the_first_length()
    mx.disable_compile()
    assert not shapeless.keeps_the_first_length()


@on_a_cpu
def test_only_what_partitions_at_all_lengths_stays_uncompiled(tmp_path: Path) -> None:
    """Everything else goes to MLX, with all that it was called with."""

    def chosen(rows: mx.array) -> mx.array:
        return mx.argpartition(rows, kth=-1)

    def doubled(rows: mx.array) -> mx.array:
        return rows + rows

    begin_to_load(tmp_path)
    assert partial(mx.compile, shapeless=True)(chosen) is chosen
    assert mx.compile(chosen) is not chosen
    assert mx.compile(doubled, None, None, shapeless=True) is not doubled


def test_where_nothing_comes_out_wrong_mlx_compiles_as_it_did(tmp_path: Path) -> None:
    """Uncompiled, as on Metal."""
    mx.disable_compile()
    begin_to_load(tmp_path)
    assert mx.compile is shapeless.as_mlx_compiles


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles on a CPU with g++")
def test_hy_v4_is_kept_and_exact_where_it_is_compiled() -> None:
    """As a user's server has it; this process computes uncompiled."""
    environment = {name: value for name, value in os.environ.items() if name != "MLX_DISABLE_COMPILE"}
    command = [sys.executable, "-m", "benchmarks.families", "--library", "mlx-vlm", "hy_v4"]
    found = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert "| hy_v4 | mlx-vlm | batched | cut anywhere | yes |" in found.stdout, found.stdout + found.stderr
