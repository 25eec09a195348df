"""A model's fingerprint changes with everything its KV depends on, and with nothing else."""

from pathlib import Path
from typing import Any

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, KVCache

from kvserve.engine import fingerprint
from kvserve.engine.fingerprint import kv_fingerprint, libraries_of, model_fingerprint
from kvserve.engine.leaf_forms import LeafForm, LeafKind
from kvserve.engine.model import KvSize, LoadedModel
from kvserve.engine.quantised import KvSettings
from tests.models import tiny_model

FILES = {Path("config.json"): b"a" * 32, Path("model.safetensors"): b"b" * 32}


def test_files_and_their_names_count() -> None:
    """Another digest, another name, one file more or less, or two that changed places: each is another model."""
    config, weights = FILES
    others = [
        {**FILES, weights: b"c" * 32},
        {config: FILES[config]},
        {**FILES, Path("added.json"): b"a" * 32},
        {config: FILES[config], Path("renamed.safetensors"): FILES[weights]},
        {config: FILES[weights], weights: FILES[config]},
    ]
    assert len({model_fingerprint(files, {}) for files in [FILES, *others]}) == len(others) + 1
    assert model_fingerprint(dict(reversed(FILES.items())), {}) == model_fingerprint(FILES, {})


@pytest.mark.parametrize("library", ["mlx", "mlx-lm", "tokenizers", "transformers", "mlx-vlm"])
def test_another_release_of_a_library_is_another_model(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each that computes with it; mlx-vlm's only where there is something to see with."""
    text, seeing = tiny_model("qwen3"), tiny_model("qwen3_5_vl")
    before = [model_fingerprint(FILES, libraries_of(folder)) for folder in (text, seeing)]
    release = fingerprint.version
    monkeypatch.setattr(fingerprint, "version", lambda name: "99.0" if name == library else release(name))
    after = [model_fingerprint(FILES, libraries_of(folder)) for folder in (text, seeing)]
    assert [was != now for was, now in zip(before, after, strict=True)] == [library != "mlx-vlm", True]


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


def test_where_kv_was_cut_counts_where_it_matters() -> None:
    """What was cut elsewhere is other KV; where a cut makes no difference there is nothing to tell."""
    assert len({kv_fingerprint("a", KvSettings(), cut_tokens) for cut_tokens in (1, 128, 256)}) == 3
    assert kv_fingerprint("a", KvSettings(), 1) == kv_fingerprint("a", KvSettings())


def test_how_leaves_are_kept_counts_where_it_is_another_way() -> None:
    """What was kept as a whole copy has no rows to be put together; models of which nothing changed keep their name."""
    names = [kv_fingerprint("a", KvSettings(), 1, leaves) for leaves in ((), ("Pool 4",), ("Pool 128", "Pool 4"))]
    assert len(set(names)) == 3 and names[0] == kv_fingerprint("a", KvSettings())


def test_what_is_not_kept_any_more_counts_too() -> None:
    """A state on disk has it: what is restored behind it would be read from it. What never was kept does not."""

    class Layers(Module):
        def make_cache(self) -> list[Any]:
            return [KVCache(), KVCache(), ArraysCache(1)]

    def leaves(*kinds: LeafKind) -> tuple[str, ...]:
        model = LoadedModel(Layers(), {}, 8, 8, 1, 1, KvSize(0, 1), leaf_forms=tuple(LeafForm(kind) for kind in kinds))
        return model.own_leaves

    assert leaves("cut", "memo", "whole") == ("KVCache 0",)
    assert leaves("cut", "whole", "whole") == leaves("cut", "none", "whole") == leaves("cut", "cut", "window") == ()
