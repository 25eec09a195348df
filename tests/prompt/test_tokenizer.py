"""Loading tokenizers from model folders, good and broken, and using one from several threads."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from kvserve.errors import ModelLoadError
from kvserve.prompt.tokenizer import load_tokenizer, without_surrogates
from tests.models import tiny_model
from tests.prompt.samples import FAMILIES, byte_level_backend, family_tokenizer, tokenizer_of

END_OF_TURN = {
    "qwen3": {"<|im_end|>", "<|endoftext|>"},
    "gemma3": {"<end_of_turn>"},
    "gemma4": {"<turn|>"},
    "gpt_oss": {"<|return|>", "<|call|>"},
    "glm4_moe_lite": {"<|user|>", "<|observation|>"},
    "llama": {"<|eot_id|>"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model's folder without its weights."""
    for file in tiny_model("qwen3").iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path / file.name)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_load(family: str) -> None:
    """Each family's folder gives a tokenizer with a template, stop tokens and a lossless round trip."""
    tokenizer = family_tokenizer(family)
    text = "def f():\n    return '東京 🫠'  # größe\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template and tokenizer.stop_token_ids
    stops = {tokenizer.decode([i]) for i in tokenizer.stop_token_ids}
    assert END_OF_TURN.get(family, set()) <= stops


def test_a_channel_end_of_gpt_oss_is_no_stop() -> None:
    """<|end|> only closes a channel; stopping there would cut every answer after its reasoning."""
    tokenizer = family_tokenizer("gpt_oss")
    assert tokenizer.token_id("<|end|>") not in tokenizer.stop_token_ids


def test_a_call_of_gemma_ends_where_its_result_would_begin(tmp_path: Path) -> None:
    """`<|tool_response>` begins what no model writes: it ends a turn in folders too whose configuration names no end,
    where a model would go on with a result of its own. In another template the word is none."""
    for file in tiny_model("gemma4").iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path / file.name)
    (tmp_path / "generation_config.json").write_text("{}")
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {key: value for key, value in config.get("text_config", {}).items() if key != "eos_token_id"}
    whole = {key: value for key, value in config.items() if key not in ("eos_token_id", "text_config")}
    (tmp_path / "config.json").write_text(json.dumps(whole | ({"text_config": nested} if nested else {})))
    tokenizer = load_tokenizer(tmp_path)
    assert {tokenizer.token_id("<turn|>"), tokenizer.token_id("<|tool_response>")} <= tokenizer.stop_token_ids
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<turn|>{% endfor %}")
    assert tokenizer.token_id("<|tool_response>") not in load_tokenizer(tmp_path).stop_token_ids


def test_stop_tokens_come_from_every_file(folder: Path) -> None:
    """The ids in config.json, also nested, and generation_config.json count beside the tokenizer's own."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9, "text_config": {"eos_token_id": 10}}))
    tokenizer = load_tokenizer(folder)
    assert {7, 8, 9, 10, tokenizer.token_id("<|im_end|>")} <= tokenizer.stop_token_ids


def test_padding_and_truncation_in_the_file_are_switched_off(folder: Path) -> None:
    """A tokenizer.json that pads and truncates does neither: a prompt is never cut silently."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).encode("one two three four five six") == family_tokenizer("qwen3").encode(
        "one two three four five six"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0", "trunc', "tokenizer.json cannot be read"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "None such"}}', "tokenizer.json"),
        ("tokenizer.json", "[]", "tokenizer.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("generation_config.json", "nonsense", "generation_config.json cannot be read"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str | None, said: str) -> None:
    """A missing or broken file stops the start with its name and what to do."""
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_tokenizer(folder)
    assert "ownload the model again" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A path that is no folder is an error that says what MODEL_PATH must be."""
    with pytest.raises(ModelLoadError, match="is not a folder"):
        load_tokenizer(tmp_path / "absent")


def test_threads_share_one_tokenizer() -> None:
    """Concurrent encoding and decoding gives what one thread gives."""
    tokenizer = family_tokenizer("qwen3")
    texts = [f"text {i} " * (i % 40) for i in range(200)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone
        assert list(pool.map(tokenizer.decode, alone)) == texts


@given(text=st.text(max_size=40))
def test_any_text_can_be_encoded(text: str) -> None:
    """Whatever JSON can carry is encoded; lone surrogates become U+FFFD, one for one."""
    tokenizer = tokenizer_of(byte_level_backend())
    broken = text + "\ud800" + text
    clean = without_surrogates(broken)
    assert len(clean) == len(broken) and clean == text + "\ufffd" + text
    assert tokenizer.decode(tokenizer.encode(broken)) == clean


@pytest.mark.parametrize("model_type", ["mimo", "nanbeige", "imaginary9"])
def test_an_architecture_that_transformers_does_not_know_has_a_tokenizer(tmp_path: Path, model_type: str) -> None:
    """mlx-lm knows more architectures than transformers; the tokenizer does not depend on that."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert load_tokenizer(folder).encode("hello") == load_tokenizer(tiny_model("llama")).encode("hello")


@pytest.mark.parametrize(
    ("tokenizer_class", "model_type"),
    [
        ("GPT2Tokenizer", "granite"),
        ("GPT2Tokenizer", "minimax_m2"),
        ("GPT2Tokenizer", "llama"),
        ("Qwen2Tokenizer", "x"),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, tokenizer_class: str, model_type: str) -> None:
    """Granite, MiniMax, OLMo and SmolLM name GPT-2's class, which splits texts by rules that are not theirs, and others
    Qwen's: the rules of tokenizer.json are those that the model learnt with, and those of transformers where it knows
    the class to be wrong."""
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = "Hello, hello hello! def f(x):\n    return x + 1<|im_end|>\n"
    loaded = load_tokenizer(tmp_path)
    as_written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert list(loaded.encode(text)) == as_written.encode(text, add_special_tokens=False).ids
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.stop_token_ids == {loaded.token_id("<|im_end|>")}
    if model_type in ("granite", "minimax_m2"):
        stock = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        assert list(loaded.encode(text)) == stock(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "GemmaTokenizer"])
def test_an_end_that_only_a_class_has_stops_nothing(tmp_path: Path, tokenizer_class: str) -> None:
    """A folder that names no end of text gets that of its class, which the file need not have: its id was one behind
    all others, and llguidance refused every grammar."""
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    loaded = load_tokenizer(tmp_path)
    assert loaded.stop_token_ids == {loaded.token_id("<|im_end|>")}


def test_the_template_of_a_processor_is_the_models(folder: Path) -> None:
    """Folders of models that see may have their template in chat_template.json alone: without it their prompts were
    labelled plain text. One that the tokenizer has itself goes before."""
    source = (folder / "chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(folder).chat_template == source
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    assert load_tokenizer(folder).chat_template == source
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"chat_template\.json cannot be read"):
        load_tokenizer(folder)


def test_every_id_of_a_text_is_below_the_vocabularys_size(folder: Path) -> None:
    """Ids may leave gaps: a token far behind the others counts with its id."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["\u0100far"] = 50_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).vocab_size == 50_001
