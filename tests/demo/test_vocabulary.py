"""The trained tokenizers: any text comes back exactly, control tokens are single, prompts have a realistic length."""

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from kvserve.demo.build import FAMILIES
from kvserve.demo.vocabulary import QWEN, passages, train
from tests.models import tiny_model

families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def tokenizer_of(family: str) -> TokenizerWrapper:
    return load_tokenizer(tiny_model(family))


@given(text=st.text())
@example(text="<|im_start|>user\n<think>\r\n\t\u200b\u202e\ufeff e\u0301 \U0001f680\x00 </tool_call>  ")
def test_any_text_comes_back(text: str) -> None:
    """decode(encode(text)) is the text, whatever Unicode it holds; nothing is normalised."""
    tokenizer = train(QWEN, 1500).tokenizer
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@families
def test_text_comes_back_through_mlx_lm(family: str) -> None:
    """The tokenizer that mlx-lm loads from the folder round-trips mixed text, at once and token by token."""
    tokenizer = tokenizer_of(family)
    text = 'Grüße, 世界! 🙂 {"path": "a\\n b"}\n\tfor i in range(3): pass  # κόσμε'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@families
def test_each_control_token_is_one_id(family: str) -> None:
    """Every control token is one id even inside text, and only the hidden ones vanish from decoded text."""
    tokenizer, control = tokenizer_of(family), FAMILIES[family].control
    for token in control.all:
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False)
        assert len(ids) == 3
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == ("ab" if token in control.hidden else f"a{token}b")


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama"])
def test_encode_adds_the_first_token_as_the_real_ones_do(family: str) -> None:
    """Encoding with special tokens puts BOS in front, although the chat template writes it as well."""
    tokenizer = tokenizer_of(family)
    plain = tokenizer.encode("text", add_special_tokens=False)
    assert tokenizer.encode("text") == [tokenizer.bos_token_id, *plain]


def test_embedding_rows_are_padded() -> None:
    """The model has a few more rows than the tokenizer has tokens, in whole multiples of 64."""
    vocabulary = train(QWEN, 1500)
    assert vocabulary.num_rows % 64 == 0
    assert 0 <= vocabulary.num_rows - vocabulary.tokenizer.get_vocab_size() < 64


def test_training_text_is_seeded_and_of_a_useful_size() -> None:
    """The training text is the same each time, differs by seed, and has 60 to 150 kB."""
    text = "".join(passages())
    assert text == "".join(passages())
    assert text != "".join(passages(seed=1))
    assert 60_000 < len(text.encode()) < 150_000


def test_english_and_code_cost_about_half_a_token_per_character() -> None:
    """Ordinary text is neither single bytes nor whole sentences: recorded agent prompts keep a realistic length."""
    tokenizer = train(QWEN, 1500).tokenizer
    text = (
        "You are an assistant with tools. Read the file before you edit it.\n\n## Rules\n- `path`: string, required\n"
    )
    assert 1.7 < len(text) / len(tokenizer.encode(text).ids) < 3.0
