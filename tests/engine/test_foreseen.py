"""What a model takes in memory, told from its config: against hand calculations for public models, and against MLX's
own count for tiny ones."""

import functools
import gc
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvserve.demo.families import FAMILIES as ALL_FAMILIES
from kvserve.demo.vision_families import VISION_FAMILIES
from kvserve.engine.foreseen import DTYPES, Fit, Foreseen, Weights, fit, foreseen, foreseen_in
from kvserve.engine.memory import KV_SHARE
from kvserve.engine.model import load
from kvserve.engine.text_load import is_for_mlx_lm, load_text
from kvserve.errors import ModelLoadError
from kvserve.settings.model_config import read_config
from tests.engine.public_configs import PUBLIC
from tests.laws import sampled
from tests.models import tiny_model

HALF = 2
"""Bytes of a number in bfloat16."""

PACKED = (4 + 2 * 16 / 64) / 8
"""Bytes of a number in 4 bits with a scale and a bias in 16 bits for each 64."""

BY_HAND: dict[str, tuple[float, int, int]] = {
    # keys and values x layers x heads x width
    "Llama-3.1-8B": (
        HALF * (2 * 128256 * 4096 + 4096 + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)),
        2 * 32 * 8 * 128 * HALF,
        0,
    ),
    "Qwen2.5-14B": (HALF * 14_770_033_664, 2 * 48 * 8 * 128 * HALF, 0),
    "Qwen3-4B-4bit": (
        PACKED * (151936 * 2560 + 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728))
        + HALF * (2560 + 36 * (2 * 2560 + 2 * 128)),
        2 * 36 * 8 * 128 * HALF,
        0,
    ),
    "Qwen3-30B-A3B": (HALF * 30_532_122_624, 2 * 48 * 4 * 128 * HALF, 0),
    # one layer in six reads all, the others 1024 tokens
    "gemma-3-12b": (HALF * 11_766_034_176, 2 * 8 * 8 * 256 * HALF, 2 * 40 * 8 * 256 * HALF * 1024),
    "gpt-oss-20b": (HALF * 20_914_757_184, 2 * 12 * 8 * 64 * HALF, 2 * 12 * 8 * 64 * HALF * 128),
    # a latent of 512 and a rotated key of 64, once for all heads
    "DeepSeek-V3": (HALF * 671_026_419_200, 61 * (512 + 64) * HALF, 0),
    # 12 layers of attention; 36 with the last three inputs of a convolution, and a state in float32
    "Qwen3-Next-80B-A3B": (
        HALF * 79_674_391_296,
        2 * 12 * 2 * 256 * HALF,
        36 * (3 * (2 * 16 * 128 + 32 * 128) * HALF + 32 * 128 * 128 * 4),
    ),
}
"""Bytes of weights, of KV per token, and of what a conversation has whatever its length."""


@pytest.mark.parametrize("name", sampled(PUBLIC, ("Qwen3-4B-4bit", "Qwen3-Next-80B-A3B")))
def test_a_config_tells_what_a_hand_calculation_does(name: str) -> None:
    """Dense, windows, states, a latent, experts, 4 bits; nothing of the weights is ever computed."""
    before = mx.get_active_memory()
    found = foreseen(PUBLIC[name])
    weight_bytes, per_token, fixed = BY_HAND[name]
    assert (found.sizes.per_token, found.sizes.fixed) == (per_token, fixed)
    assert found.weight_bytes == pytest.approx(weight_bytes, rel=1e-3)
    assert found.weights_from == "shapes" and found.is_dtype_known
    assert mx.get_active_memory() - before < 2**24


PARTS_BY_HAND: dict[str, tuple[float, float, float]] = {
    # of two ranks each has half of the layers, and all of embeddings and head
    "Llama-3.1-8B": ((BY_HAND["Llama-3.1-8B"][0] + HALF * 2 * 128256 * 4096) / 2, 0.5, 1.0),
    # a latent is whole on every rank
    "DeepSeek-V3": (BY_HAND["DeepSeek-V3"][0] / 2, 1.0, 1.0),
    "gpt-oss-20b": (BY_HAND["gpt-oss-20b"][0] / 2, 0.5, 0.5),
    # no shard(): each has half of the layers whole
    "Qwen3-Next-80B-A3B": (BY_HAND["Qwen3-Next-80B-A3B"][0] / 2, 0.5, 0.5),
}
"""Bytes of weights on each of two ranks, and which share of the KV it has."""


@pytest.mark.parametrize("name", sampled(PARTS_BY_HAND, ("Llama-3.1-8B", "Qwen3-Next-80B-A3B")))
def test_a_rank_holds_its_part(name: str) -> None:
    """By mlx-lm's own way to divide it."""
    found, (weight_bytes, share, share_fixed) = foreseen(PUBLIC[name], num_ranks=2), PARTS_BY_HAND[name]
    _, per_token, fixed = BY_HAND[name]
    assert found.num_ranks == 2
    assert (found.sizes.per_token, found.sizes.fixed) == (share * per_token, share_fixed * fixed)
    assert found.weight_bytes == pytest.approx(weight_bytes, rel=0.1)


def test_of_unlike_parts_the_largest_counts() -> None:
    """One layer has the keys, the other one the state: either rank must have room for what it may be."""
    config = read_config(tiny_model("qwen3_next"))
    whole, part = foreseen(config), foreseen(config, num_ranks=2)
    assert (part.sizes.per_token, part.sizes.fixed) == (whole.sizes.per_token, whole.sizes.fixed)
    assert [each.kind for each in whole.caches] == ["state", "every token"]
    assert [each.kind for each in part.caches] == ["every token"]
    assert whole.weight_bytes / 2 < part.weight_bytes < whole.weight_bytes


def test_the_page_has_these_figures() -> None:
    """The table of docs/command.md, in GiB for 10,000 tokens and MiB whatever the length."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "command.md").read_text("utf-8")
    for name, (_, per_token, fixed) in BY_HAND.items():
        states = rf" {fixed / 2**20:.0f} MiB \(.*\)" if fixed else ""
        row = rf"^\| {re.escape(name.removesuffix('-4bit'))} \| {10_000 * per_token / 2**30:.1f} GiB \|{states} \|$"
        assert re.search(row, page, re.MULTILINE), row


FAMILIES = ("qwen3", "gemma3", "qwen3_5", "gpt_oss", "glm4_moe_lite")
"""Dense, windows, states, windows with experts, a latent."""


@pytest.mark.parametrize("family", sampled(FAMILIES, ("gemma3",)))
def test_it_is_what_mlx_counts_once_weights_and_a_row_are_there(family: str) -> None:
    """Within a tenth, for each of both; a row of one token more than 511, so that windows are full and turn."""
    folder = tiny_model(family)
    found = foreseen_in(folder)
    gc.collect()
    empty = mx.get_active_memory()
    module, _ = load_text(folder, read_config(folder))
    gc.collect()
    loaded = mx.get_active_memory()
    caches = make_prompt_cache(module)
    for num_tokens in (511, 1):
        module(mx.zeros((1, num_tokens), dtype=mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    gc.collect()
    assert found.weight_bytes == pytest.approx(loaded - empty, rel=0.1)
    assert found.sizes.held(512) == pytest.approx(mx.get_active_memory() - loaded, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("family", (*ALL_FAMILIES, *VISION_FAMILIES))
def test_it_is_what_a_start_finds_out(family: str) -> None:
    """By passes over the real weights, of every family, those that see and those that only mlx-vlm has among them."""
    folder = tiny_model(family)
    found, loaded = foreseen_in(folder), load(folder, 4096)
    assert (found.sizes.per_token, found.sizes.fixed) == (loaded.sizes.per_token, loaded.sizes.fixed)
    assert found.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.1)


def test_without_files_weights_are_counted_by_shapes(tmp_path: Path) -> None:
    """As many bytes as the files of the same model have, less their headers."""
    folder = tiny_model("qwen3")
    config = read_config(folder)
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    of_files, of_shapes = foreseen_in(folder), foreseen_in(tmp_path)
    assert (of_files.weights_from, of_shapes.weights_from) == ("files", "shapes")
    assert of_shapes.weight_bytes == pytest.approx(of_files.weight_bytes, rel=0.02)
    assert of_shapes.sizes == of_files.sizes


def test_numbers_are_those_of_the_files_whatever_the_config_says(tmp_path: Path) -> None:
    """A config that names no type, or another one, does not halve the KV of weights in float32."""
    folder = tiny_model("qwen3")
    config = read_config(folder)
    for said in ({}, {"dtype": "bfloat16"}):
        own = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")} | said
        (tmp_path / "config.json").write_text(json.dumps(own), "utf-8")
        if not (tmp_path / "model.safetensors").exists():
            (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        assert foreseen_in(tmp_path).sizes == foreseen_in(folder).sizes
    unsaid = foreseen({name: value for name, value in config.items() if name != "dtype"})
    assert not unsaid.is_dtype_known and unsaid.dtype in DTYPES


class GrowingPairs:
    """A cache of a class that nobody knows: a row for every second token, and eight bytes besides."""

    def __init__(self) -> None:
        self.state: Any = []

    def hold(self, num_tokens: int) -> None:
        self.state = [mx.zeros((1, 1, num_tokens // 2, 16), mx.float16), mx.zeros((2,), mx.float32)]


class Pairing:
    """A model with such a cache."""

    layers = ()

    def make_cache(self) -> list[GrowingPairs]:
        return [GrowingPairs()]

    def __call__(self, tokens: mx.array, cache: list[GrowingPairs]) -> mx.array:
        cache[0].hold(tokens.shape[1])
        return tokens


def test_a_cache_of_an_unknown_class_is_known_by_how_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes per token and bytes that stay are told apart by two lengths."""
    monkeypatch.setattr("kvserve.engine.foreseen._twin", lambda *_: Pairing())
    monkeypatch.setattr("kvserve.engine.foreseen._weight_bytes", lambda *_: 0)
    found = foreseen({"model_type": "pairing"})
    assert (found.sizes.per_token, found.sizes.fixed) == (16.0, 8)
    assert [(each.kind, each.num_caches) for each in found.caches] == [("other", 1)]


def test_what_cannot_be_foreseen_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown architecture, and weights whose bytes only files tell."""
    monkeypatch.setattr("kvserve.engine.foreseen.is_for_mlx_vlm", lambda _: False)  # importing it takes seconds
    with pytest.raises(ModelLoadError, match="'nobody' is known neither"):
        foreseen({"model_type": "nobody"})
    packed = PUBLIC["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ModelLoadError, match="only its files tell"):
        foreseen(packed)
    known = foreseen(packed, Weights(12_000_000_000, "hub"))
    assert known.weight_bytes == 12_000_000_000 and known.sizes == foreseen(PUBLIC["gpt-oss-20b"]).sizes


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""As DeepSeek-V3's config has it; its files on the hub have 688.6 GB."""


@pytest.mark.parametrize("weights", [None, Weights(688_586_727_753, "hub")])
def test_weights_in_fp8_count_as_they_are_loaded(weights: Weights | None) -> None:
    """mlx-lm writes them out in 16 bits: twice what the files have."""
    found = foreseen(PUBLIC["DeepSeek-V3"] | {"quantization_config": FP8}, weights)
    assert found.weight_bytes == pytest.approx(1.22 * 2**40, rel=0.01) and found.weights_from == "written out"
    assert found.sizes == foreseen(PUBLIC["DeepSeek-V3"]).sizes


@pytest.mark.parametrize(
    "config",
    [
        PUBLIC["Llama-3.1-8B"] | {"quantization_config": FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}},
        PUBLIC["gemma-3-12b"] | {"quantization_config": FP8, "vision_config": {"model_type": "siglip_vision_model"}},
    ],
)
def test_weights_in_fp8_that_stay_packed_count_as_their_files(config: dict[str, Any]) -> None:
    """Blocks of MLX's own form, and what mlx-vlm quantises anew; without files a config does not tell."""
    assert foreseen(config, Weights(9_000_000_000, "hub")).weight_bytes == 9_000_000_000
    with pytest.raises(ModelLoadError, match="only its files tell"):
        foreseen(config)


def test_a_helper_of_mlx_lm_is_no_architecture() -> None:
    """A module without a model in it."""
    assert is_for_mlx_lm({"model_type": "llama"}) and not is_for_mlx_lm({"model_type": "cache"})


# --- on a machine -----------------------------------------------------------------------------------------------------


@functools.cache
def small_model() -> Foreseen:
    return foreseen(PUBLIC["Qwen3-4B-4bit"])


def on_machine(memory_bytes: int, max_kv_size: int = 196_608) -> Fit:
    return fit(small_model(), memory_bytes, max_kv_size)


def test_the_context_is_what_a_start_would_admit() -> None:
    """On a large machine all that the model was made for; less by MAX_KV_SIZE; on a small one what fits, and no token
    more."""
    assert (on_machine(2**36).context_tokens, on_machine(2**36).is_cut_by) == (40_960, "model")
    assert (on_machine(2**36, 8_192).context_tokens, on_machine(2**36, 8_192).is_cut_by) == (8_192, "MAX_KV_SIZE")
    small = on_machine(5 * 2**30)
    sizes, budget = small.foreseen.sizes, small.plan.batch_bytes
    assert budget == int((5 * 2**30 - small.foreseen.weight_bytes) * KV_SHARE)
    peak = [sizes.peak(num) + sizes.copied(sizes.peak(num)) for num in (small.context_tokens, small.context_tokens + 1)]
    assert small.is_cut_by == "memory" and small.leaves_room and peak[0] <= budget < peak[1]


def test_a_machine_that_is_too_small_is_told() -> None:
    """Weights that leave nothing: the budgets of a start are more than there is."""
    assert not on_machine(2**30).leaves_room
