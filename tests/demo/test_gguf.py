"""A GGUF file's weights, tokenizer and template are those that mlx-lm and transformers load from what it became."""

import json
from pathlib import Path
from typing import get_args

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvserve.demo.gguf import Precision, read_gguf, write_model
from kvserve.demo.gguf_tokenizer import write_tokenizer
from kvserve.errors import ModelLoadError
from tests.demo.gguf_files import TEXTS, Array, Shape, metadata_of, reference_tokenizer, shapes_of, write_gguf
from tests.laws import num_examples

SHAPE = Shape()
MLX_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.1.attn_norm": "model.layers.1.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
    "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return reference_tokenizer()


@pytest.fixture(scope="module")
def source(
    reference: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Array]]:
    """A file, and what its tensors say."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    metadata = metadata_of(reference, SHAPE)
    return path, write_gguf(path, metadata, shapes_of(SHAPE, metadata["llama.vocab_size"]))


def converted(path: Path, folder: Path, precision: Precision, shard_bytes: int = 2**27) -> Path:
    arrays, metadata = read_gguf(path)
    folder.mkdir(exist_ok=True)
    write_tokenizer(metadata, folder)
    write_model(arrays, metadata, folder, precision, lambda _done, _total: None, shard_bytes)
    return folder


@pytest.fixture(scope="module")
def folder(source: tuple[Path, dict[str, Array]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source[0], tmp_path_factory.mktemp("four"), "4-bit")


def numbers_of(folder: Path) -> dict[str, Array]:
    """Each weight of the model that mlx-lm loads, written out in float32."""
    model, _ = mlx_lm.utils.load_model(folder)
    weights = dict(tree_flatten(model.parameters()))
    modules = dict(model.named_modules())
    written = {}
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".")
        if part != "weight":
            continue
        if f"{layer}.scales" in weights:
            scales, biases = (weights[f"{layer}.{each}"].astype(mx.float32) for each in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, modules[layer].group_size, modules[layer].bits)
        written[layer] = np.array(weight)
    return written


@pytest.mark.parametrize("precision", get_args(Precision))
def test_the_weights_are_the_files_to_the_bit(
    source: tuple[Path, dict[str, Array]], folder: Path, tmp_path: Path, precision: Precision
) -> None:
    """All of them, in both precisions, in one file of weights or in several."""
    path, says = source
    made = folder if precision == "4-bit" else converted(path, tmp_path, precision, shard_bytes=20_000)
    assert (len(list(made.glob("model*.safetensors"))) == 1) == (precision == "4-bit")
    numbers = numbers_of(made)
    assert len(numbers) == len(says)
    for name, expected in says.items():
        layer = name.removesuffix(".weight")
        if layer in MLX_NAMES:
            np.testing.assert_array_equal(numbers[MLX_NAMES[layer]], expected, name)
    sizes = sorted(array.tobytes() for array in numbers.values())
    assert sizes == sorted(array.tobytes() for array in says.values())


def test_the_configuration_says_what_the_file_says(folder: Path) -> None:
    """Pairs of neighbours are rotated, embeddings have 8 bits among 4, and they are the output's weights too."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert (config["rope_traditional"], config["tie_word_embeddings"], config["rope_theta"]) == (True, True, 100000.0)
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["max_position_embeddings"]) == (
        2,
        2,
        256,
    )
    eight = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": eight}


def test_memory_is_bounded_by_a_file_of_weights(
    source: tuple[Path, dict[str, Array]], reference: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Beside what the file has, one file of weights at a time is in memory, not the model in float32."""
    shape = Shape(hidden=128, layers=12, feed_forward=128)
    metadata = metadata_of(reference, shape)
    says = write_gguf(tmp_path / "m.gguf", metadata, shapes_of(shape, metadata["llama.vocab_size"]))
    whole = sum(array.nbytes for array in says.values())
    shard = whole // 20
    arrays, metadata = read_gguf(tmp_path / "m.gguf")
    held = sum(array.nbytes for array in arrays.values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    (tmp_path / "made").mkdir()
    write_model(arrays, metadata, tmp_path / "made", "float32", lambda _done, _total: None, shard)
    assert mx.get_peak_memory() - before < 3 * shard < whole - held
    assert mx.get_active_memory() <= before - held // 2  # and what the file had is let go


def test_what_is_no_llama_is_refused(source: tuple[Path, dict[str, Array]], tmp_path: Path) -> None:
    """A file cut short, another architecture, a tensor that a llama has not."""
    (tmp_path / "cut.gguf").write_bytes(source[0].read_bytes()[:200])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        read_gguf(tmp_path / "cut.gguf")
    write_gguf(tmp_path / "other.gguf", {"general.architecture": "gpt2"}, {"output.weight": ((4,), 0)})
    with pytest.raises(ModelLoadError, match="'gpt2'"):
        read_gguf(tmp_path / "other.gguf")
    write_gguf(tmp_path / "odd.gguf", {"general.architecture": "llama"}, {"blk.0.attn_sinks.weight": ((4,), 0)})
    arrays, metadata = read_gguf(tmp_path / "odd.gguf")
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_sinks"):
        write_model(arrays, metadata, tmp_path, "4-bit", lambda _done, _total: None)


# --- tokenizer and template -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@settings(max_examples=num_examples(20))
@given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", " the", "2024", "\n\n  ", "3.14"]))))
@example([TEXTS[0]])
@example(["<|im_start|>user\n1234567 dogs'll<|im_end|>\n", "é́🙂"])
def test_texts_have_the_tokens_that_transformers_gives_them(
    reference: PreTrainedTokenizerFast, loaded: PreTrainedTokenizerFast, pieces: list[str]
) -> None:
    """Digits apart, bytes of what is no word, control tokens as one; and the way back."""
    text = "".join(pieces)
    ids = reference.encode(text)
    assert loaded.encode(text) == ids
    assert loaded.decode(ids) == reference.decode(ids)
    assert loaded.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


def test_digits_stay_apart_whatever_the_vocabulary_could_merge(
    reference: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The model was taught each digit by itself."""
    metadata = metadata_of(reference, SHAPE)
    for name, value in (("tokens", "20"), ("token_type", 1), ("merges", "2 0")):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], value]
    write_gguf(tmp_path / "m.gguf", metadata, {"output_norm.weight": ((4,), 0)})
    write_tokenizer(read_gguf(tmp_path / "m.gguf")[1], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids("20") == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2020")) == ["2", "0", "2", "0"]


def test_the_template_writes_what_transformers_writes(
    reference: PreTrainedTokenizerFast, loaded: PreTrainedTokenizerFast
) -> None:
    """The same prompt, and the tokens that open and end it."""
    messages = [{"role": "user", "content": "Two and 2?"}, {"role": "assistant", "content": "Four."}]
    for adds in (True, False):
        asked = {"conversation": messages, "add_generation_prompt": adds, "tokenize": False}
        assert loaded.apply_chat_template(**asked) == reference.apply_chat_template(**asked)
    named = [(each.bos_token, each.eos_token, each.pad_token, each.unk_token) for each in (loaded, reference)]
    assert named[0] == named[1] and loaded.all_special_ids == reference.all_special_ids


def test_a_kind_of_tokenizer_that_is_not_known_is_refused(reference: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A guess would read every prompt a little wrong."""
    for key, value in (("tokenizer.ggml.pre", "llama-bpe"), ("tokenizer.ggml.model", "llama")):
        with pytest.raises(ModelLoadError, match=value):
            write_tokenizer({**metadata_of(reference, SHAPE), key: value}, tmp_path)
