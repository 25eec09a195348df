"""Which prompts are refused before a model sees them, on a served model without weights."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.model_free import ModelFree
from kvserve.core import RequestId
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import parse_chat
from kvserve.protocols.openai_completions import parse_completion
from kvserve.requests.prompt_of_turn import prompt_of, shared_beginning
from kvserve.requests.serve import count_tokens, preview
from kvserve.requests.served_model import ServedModel
from tests.models import tiny_model

LAST = "<|im_end|>"


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ModelFree(tiny_model("qwen3"), is_cuttable=True).served


def completion(served: ServedModel, prompt: Any) -> object:
    asked = parse_completion({"prompt": prompt}, {}, served.defaults, RequestId("raw"))
    return prompt_of(asked.turn, None, served)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_token_that_the_model_has_no_row_for_is_refused(served: ServedModel, as_text: bool) -> None:
    """In a raw prompt as text too: MLX would read whatever lies behind the embeddings."""
    ids = served.tokenizer.encode(f"So {LAST}")
    smaller = replace(served, vocab_size=ids[-1])
    prompt = f"So {LAST}" if as_text else list(ids)
    assert completion(served, prompt) is not None
    with pytest.raises(BadRequest, match="which the model does not have") as refused:
        completion(smaller, prompt)
    assert refused.value.param == "prompt" and LAST in str(refused.value)
    assert completion(smaller, "So" if as_text else list(ids[:1])) is not None
    with pytest.raises(BadRequest, match=f"token {10**9}"):
        completion(served, [10**9])


def test_a_template_that_writes_such_a_token_is_refused(served: ServedModel) -> None:
    """Weights that were never enlarged for the tokens of their template: no answer, nothing computed ahead, and no
    count of what would be refused."""
    turn = parse_chat({"messages": [{"role": "user", "content": "Hi"}]}, {}, served.defaults, RequestId("chat")).turn
    smaller = replace(served, vocab_size=served.tokenizer.encode(LAST)[0])
    reading = served.conversations.read(turn)
    assert prompt_of(turn, reading, served).tokens.ids
    assert count_tokens(turn, served) == len(prompt_of(turn, reading, served).tokens)
    words = set()
    for refused in (
        lambda: prompt_of(turn, reading, smaller),
        lambda: shared_beginning([turn], smaller),
        lambda: count_tokens(turn, smaller),
        lambda: preview(turn, smaller),
    ):
        with pytest.raises(BadRequest, match="which the model does not have") as raised:
            refused()
        words.add((str(raised.value), raised.value.param))
    assert len(words) == 1
