"""Every family as stock mlx-lm sees it: it loads, has the cache classes of its architecture, and reads its prompt."""

import functools
import re
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from kvserve.demo.build import FAMILIES, TINY
from tests.laws import TWO_KINDS, sampled, sampled_cells
from tests.models import DEEP, tiny_model

HYBRID = ["ArraysCache", "ArraysCache", "ArraysCache", "KVCache"]
WINDOWED = ["RotatingKVCache", "KVCache", "RotatingKVCache", "KVCache"]
DENSE = ["KVCache"] * 4
CACHE_CLASSES = {
    "qwen3": DENSE,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID,
    "qwen3_next": HYBRID,
    "gemma3": WINDOWED,
    "gemma4": WINDOWED,
    "gpt_oss": WINDOWED,
    "glm4_moe_lite": DENSE,
    "llama": DENSE,
}
TOOL_PARSERS = {
    "qwen3": "json_tools",
    "qwen3_5": "qwen3_coder",
    "qwen3_5_moe": "qwen3_coder",
    "qwen3_next": "json_tools",
    "gemma3": None,
    "gemma4": "gemma4",
    "gpt_oss": None,
    "glm4_moe_lite": "glm47",
    "llama": None,
}
THINK_MARKS = {
    "qwen3": "<think>",
    "qwen3_5": "<think>",
    "qwen3_5_moe": "<think>",
    "qwen3_next": "<think>",
    "gemma3": None,
    "gemma4": "<|channel>thought",
    "gpt_oss": None,
    "glm4_moe_lite": "<think>",
    "llama": None,
}
families = pytest.mark.parametrize("family", FAMILIES)
at_both_depths = pytest.mark.parametrize(
    "family", [*FAMILIES, *sampled([DEEP + name for name in FAMILIES], [DEEP + name for name in TWO_KINDS])]
)
"""The tests' models, and the demo's own that people start."""


@functools.cache
def loaded(family: str) -> tuple[Any, Any]:
    return mlx_lm.load(str(tiny_model(family)))


def greedy(model: Any, prompt: list[int], num_tokens: int = 24, cache: list[Any] | None = None) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # gpt_oss writes today's date: these tests see the same one every day.
    dated = re.sub(r"(?<=Current date: )\d{4}-\d\d-\d\d", "2026-01-01", rendered)
    return tokenizer.encode(dated, add_special_tokens=False)


def last_logits(model: Any, prompt: list[int], cache: list[Any]) -> mx.array:
    logits = model(mx.array(prompt)[None], cache=cache)[0, -1]
    mx.eval(logits)
    return logits


@families
def test_cache_classes_are_those_of_the_architecture(family: str) -> None:
    """The caches that mlx-lm makes are the family's own, with a window small enough to fill in a test; models of two
    layers have the last two of the demo's four."""
    demo, _ = mlx_lm.utils.load_model(tiny_model(family, scale=TINY), lazy=True)
    for model, expected in ((demo, CACHE_CLASSES[family]), (loaded(family)[0], CACHE_CLASSES[family][2:])):
        caches = make_prompt_cache(model)
        assert [type(cache).__name__ for cache in caches] == expected
        assert {cache.max_size for cache in caches if hasattr(cache, "max_size")} <= {64}


@families
def test_mlx_lm_infers_the_parser_and_the_thinking_marks_of_the_real_family(family: str) -> None:
    """The template and the vocabulary lead mlx-lm to the same tool parser and thinking marks as the real model's."""
    tokenizer = loaded(family)[1]
    parser = tokenizer.tool_parser
    assert (parser and parser.__module__.rpartition(".")[2]) == TOOL_PARSERS[family]
    assert tokenizer.think_start == THINK_MARKS[family]


@sampled_cells(lambda family: family in ("qwen3", "qwen3_5", "deep-qwen3_5"))
@at_both_depths
def test_greedy_text_varies_repeats_and_depends_on_the_prompt(family: str) -> None:
    """Greedy decoding is deterministic, is not one token over and over, and differs when only an early word differs."""
    model, tokenizer = loaded(family)
    filler = " and then the clerk reads the list of names aloud again, slowly" * 8
    first, second = (prompt_ids(tokenizer, word + filler) for word in ("The ferry", "My uncle"))
    text = greedy(model, first)
    assert len(first) > 100
    assert text == greedy(model, first)
    assert len(set(text)) > 8
    assert text != greedy(model, second)


@sampled_cells(lambda family: family in ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "deep-qwen3_5"))
@at_both_depths
def test_the_state_of_every_layer_reaches_the_output(family: str) -> None:
    """Replacing the cached state of any one layer by that of another prompt changes the next logits visibly."""
    model, tokenizer = loaded(family)
    tail = tokenizer.encode(" What is in the file?", add_special_tokens=False)
    prompt = prompt_ids(tokenizer, "This file is read by the server when it starts.")
    middle = len(prompt) - 12
    prompts = [prompt, [*prompt[:middle], *tail[:1] * 4, *prompt[middle + 4 :]]]
    assert len(prompts[0]) == len(prompts[1])

    def states() -> list[list[Any]]:
        caches = [make_prompt_cache(model) for _ in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            last_logits(model, prompt, cache)
        return caches

    expected = last_logits(model, tail, states()[0])
    for layer in range(len(model.layers)):
        own, other = states()
        own[layer] = other[layer]
        difference = mx.abs(last_logits(model, tail, own) - expected).max().item()
        assert difference > 0.05, f"layer {layer}: {difference}"


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss"])
def test_a_window_fills_and_can_no_longer_be_trimmed(family: str) -> None:
    """After more tokens than the window has, the rotating caches refuse to be trimmed, as on the real models."""
    model, tokenizer = loaded(family)
    caches = make_prompt_cache(model)
    greedy(model, prompt_ids(tokenizer, "word " * 100), num_tokens=2, cache=caches)
    rotating = [cache for cache in caches if hasattr(cache, "max_size")]
    assert rotating
    assert not any(cache.is_trimmable() for cache in rotating)


@families
def test_control_tokens_are_never_said(family: str) -> None:
    """Without an answer length, neither greedy text nor the next-token distribution gives room to a control token."""
    model, tokenizer = loaded(family)
    logits = last_logits(model, prompt_ids(tokenizer, "Why?"), make_prompt_cache(model))
    probabilities = mx.softmax(logits)
    control = [tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[family].control.all]
    assert probabilities[mx.array(control)].max().item() < 1e-6


@families
def test_end_tokens_are_known_to_mlx_lm(family: str) -> None:
    """The ids that end an answer arrive in the tokenizer that mlx-lm loads, the usual one as its EOS token."""
    tokenizer, control = loaded(family)[1], FAMILIES[family].control
    assert tokenizer.eos_token == control.ends[0]
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids(token) for token in control.ends}


def test_answers_end_by_themselves_when_a_length_is_given() -> None:
    """With an answer length the greedy answers to several questions end with the token that ends a turn."""
    model, tokenizer = mlx_lm.load(str(tiny_model("qwen3", answer_tokens=20)))
    for question in ("Who are you?", "List the files", "Why?"):
        steps = generate_step(mx.array(prompt_ids(tokenizer, question)), model, max_tokens=400)
        assert any(int(token) == tokenizer.eos_token_id for token, _ in steps)


@families
def test_the_context_length_is_in_the_configuration(family: str) -> None:
    """The configuration says 131072 tokens, in `text_config` where the real family keeps it there."""
    config = mlx_lm.utils.load_config(tiny_model(family))
    assert config.get("text_config", config)["max_position_embeddings"] == 131072
