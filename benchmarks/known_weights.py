"""What it costs a start to know that a model's files are those that it has read before: 20 GB, in sparse files.

The first reading hashes every byte and is shown; each later one, in the same folder, only looks at the files.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from kvserve.engine.file_digest import DigestMemory
from kvserve.engine.model_digest import SETTLED_SECONDS, ModelDigest

NUM_FILES, FILE_BYTES = 4, 5 * 2**30
NUM_TENSORS = 20_000
TOKENIZER_BYTES = 11 * 2**20
READ_SECONDS = 300.0
MAX_SECONDS = 0.1


def run(rounds: int) -> list[Figure]:
    """Seconds that a start spends on a folder of which all is remembered."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as place:
        folder = Path(place, "model")
        _build(folder)
        memory = DigestMemory(Path(place, "kv"), _broken, _ignored)
        first_seconds = _first_reading(folder, memory)
        seconds = tuple(_seconds_to_know(folder, memory) for _ in range(rounds))
    name = f"a start with {NUM_FILES * FILE_BYTES / 2**30:.0f} GiB that were read before"
    return [
        Figure(
            "known_weights", name, "s", seconds, Bound("at most", MAX_SECONDS), f"first reading {first_seconds:.1f} s"
        )
    ]


def _build(folder: Path) -> None:
    folder.mkdir()
    names = [f"model-{number:05}-of-{NUM_FILES:05}.safetensors" for number in range(1, NUM_FILES + 1)]
    for name in names:
        with open(folder / name, "wb") as file:
            file.truncate(FILE_BYTES)
    tensors = {f"model.layers.{number}.weight": names[number % NUM_FILES] for number in range(NUM_TENSORS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    (folder / "tokenizer.json").write_bytes(os.urandom(TOKENIZER_BYTES))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    time.sleep(SETTLED_SECONDS)


def _first_reading(folder: Path, memory: DigestMemory) -> float:
    """Until every byte has been hashed. Raises BenchmarkError where it takes too long or nothing had to be read."""
    digest = ModelDigest(folder, memory, _broken, _ignored)
    began = time.perf_counter()
    if digest.look() is not None:
        raise BenchmarkError("A folder that was never read is known.")
    digest.begin()
    digest.confirm()
    while digest.status.state == "reading":
        if time.perf_counter() - began > READ_SECONDS:
            raise BenchmarkError(f"The first reading took longer than {READ_SECONDS:.0f} s.")
        time.sleep(0.05)
    return time.perf_counter() - began


def _seconds_to_know(folder: Path, memory: DigestMemory) -> float:
    """Everything that a start does: before the load, as it begins, and behind it. Raises BenchmarkError where the
    folder is not known."""
    digest = ModelDigest(folder, memory, _broken, _ignored)
    began = time.perf_counter()
    digest.look()
    digest.begin()
    digest.confirm()
    seconds = time.perf_counter() - began
    if digest.status.state != "known":
        raise BenchmarkError(f"The folder is not known: {digest.status.reason}.")
    return seconds


def _broken(message: str) -> None:
    raise BenchmarkError(message)


def _ignored(_: str) -> None:
    """Progress is told to nobody."""
