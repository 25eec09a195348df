"""Which prompts are refused before a model sees them, on a served model without weights."""

import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.model_free import ModelFree
from kvserve.core import GenerationRequest, RequestId
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import parse_chat
from kvserve.protocols.openai_completions import parse_completion
from kvserve.requests.prompt_of_turn import prompt_of, shared_beginning
from kvserve.requests.serve import count_tokens, preview, serve_turn
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


def asked_of(served: ServedModel, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> GenerationRequest:
    """What the engine is asked for."""
    seen: list[GenerationRequest] = []
    submit = served.engine.submit
    monkeypatch.setattr(served.engine, "submit", lambda request: (seen.append(request), submit(request))[1])
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    serve_turn(parse_chat(body, {}, served.defaults, RequestId("chat")).turn, served)
    return seen[0]


def test_the_end_of_thinking_is_written_in_tokens_that_the_model_has(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In letters where the tag's own token has no row: a forced one would be read past the end of the logits, and a
    promised form would wait behind it for ever. A model that has it writes the token."""
    [closing] = served.tokenizer.encode("</think>")
    fields = {"reasoning": {"max_tokens": 4}, "response_format": {"type": "json_object"}}
    whole = asked_of(served.with_rows(served.vocab_size), monkeypatch, **fields)
    assert whole.thinking_limit is not None and whole.thinking_limit.closing_ids == (closing,)
    smaller = served.with_rows(closing)
    cut = asked_of(smaller, monkeypatch, **fields)
    assert cut.thinking_limit is not None and cut.grammar is not None
    ids = cut.thinking_limit.closing_ids
    assert max(ids) < closing and served.tokenizer.decode(ids) == "</think>"
    assert closing not in cut.grammar.after and "</think>" not in re.sub('"[^"]*"', "", cut.grammar.lark)


def test_thinking_without_an_end_that_the_model_can_write_is_not_limited(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even the letters of the tag have no row; the answer's notes say so."""
    unwritable = replace(served, closing_ids=())
    request = asked_of(unwritable, monkeypatch, reasoning={"max_tokens": 4})
    assert request.thinking_limit is None
