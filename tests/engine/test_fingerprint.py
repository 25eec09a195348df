"""A model's fingerprint changes with everything its KV depends on, and with nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from kvserve.engine.fingerprint import kv_fingerprint, model_fingerprint
from kvserve.engine.quantised import KvSettings
from tests.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), copy)
    return copy


def test_a_copy_has_the_same_fingerprint(folder: Path) -> None:
    """Place and time do not count."""
    assert model_fingerprint(folder) == model_fingerprint(tiny_model("qwen3"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_every_file_counts(folder: Path, name: str) -> None:
    """One more space in a configuration, tokenizer or template is another model."""
    before = model_fingerprint(folder)
    (folder / name).write_text((folder / name).read_text() + " ")
    assert model_fingerprint(folder) != before


def test_every_tensor_counts(folder: Path) -> None:
    """A changed value in any single tensor is another model."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    before = model_fingerprint(folder)
    for name, tensor in header.items():
        if name != "__metadata__":
            changed = bytearray(data)
            changed[8 + length + tensor["data_offsets"][0]] ^= 1
            path.write_bytes(changed)
            assert model_fingerprint(folder) != before, name


def test_how_kv_is_quantised_counts() -> None:
    """Other bits, another scheme, group or start is other KV; what has no effect does not count."""
    settings = [
        KvSettings(),
        KvSettings(bits=8),
        KvSettings(bits=4),
        KvSettings(bits=8, start=100),
        KvSettings(bits=8, group_size=32),
        KvSettings(bits=8, scheme="turboquant"),
    ]
    assert len({kv_fingerprint("a", kv) for kv in settings} | {kv_fingerprint("b", settings[0])}) == 7
    assert kv_fingerprint("a", KvSettings(start=100, group_size=32)) == kv_fingerprint("a", KvSettings())
    same = [KvSettings(bits=4, scheme="turboquant", group_size=size) for size in (32, 64)]
    assert len({kv_fingerprint("a", kv) for kv in same}) == 1
