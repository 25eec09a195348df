"""A row under a grammar, with a real tokenizer and llguidance."""

from typing import Any

import llguidance
import mlx.core as mx
import pytest

from kvserve.core import Grammar
from kvserve.engine.logits_processors import GrammarProcessor
from kvserve.errors import BadRequest, EngineFailure
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.models import tiny_model

PROMPT = [300, 301, 302]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def guide(tokenizer: Tokenizer) -> Any:
    eos = sorted(tokenizer.stop_token_ids)
    return llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size + 40, eos_token=eos)


def allowed(processor: GrammarProcessor, answer: list[int], width: int) -> set[int]:
    """The tokens that may follow an answer."""
    logits = processor(mx.array([*PROMPT, *answer]), mx.zeros((1, width)))
    return {token for token, value in enumerate(logits[0].tolist()) if value == 0}  # type: ignore[union-attr, arg-type]


def test_only_what_the_grammar_allows_is_left(tokenizer: Tokenizer, guide: Any) -> None:
    """Each next token keeps the text a prefix of an allowed one; at its end only stop tokens are left."""
    processor = GrammarProcessor(Grammar('start: "yes" | "no"'), guide, len(PROMPT))
    width = tokenizer.vocab_size + 40
    first = {tokenizer.decode([token]) for token in allowed(processor, [], width)}
    assert first and all("yes".startswith(text) or "no".startswith(text) for text in first)
    answer = list(tokenizer.encode("no"))
    for length in range(1, len(answer) + 1):
        last = allowed(processor, answer[:length], width)
    assert last == set(tokenizer.stop_token_ids)


def test_a_grammar_waits_for_the_end_of_thinking(tokenizer: Tokenizer, guide: Any) -> None:
    """Before the closing tag everything is allowed; from it on the grammar holds."""
    after = tokenizer.encode("</think>")
    processor = GrammarProcessor(Grammar('start: "ok"', after), guide, len(PROMPT))
    width = tokenizer.vocab_size + 40
    assert len(allowed(processor, [], width)) == width
    assert len(allowed(processor, [310], width)) == width
    texts = {tokenizer.decode([token]) for token in allowed(processor, [310, *after], width)}
    assert texts and all("ok".startswith(text) for text in texts)


def test_a_begun_answer_is_gone_on_with(tokenizer: Tokenizer, guide: Any) -> None:
    """What the prompt has of the answer is read first, after a reset too, wherever its tokens end; an answer that has
    begun otherwise cannot be gone on with."""
    lark = 'start: "yesterday" | "no"'
    processor = GrammarProcessor(Grammar(lark, begun="yeste"), guide, len(PROMPT))
    width = tokenizer.vocab_size + 40
    for _ in range(2):
        texts = {tokenizer.decode([token]) for token in allowed(processor, [], width)}
        assert texts and all("rday".startswith(text) for text in texts)
        assert allowed(processor, list(tokenizer.encode("rday")), width) == set(tokenizer.stop_token_ids)
        processor.reset()
    for begun in ("yesterdays", "Yes", "yes no"):
        with pytest.raises(BadRequest) as refused:
            GrammarProcessor(Grammar(lark, begun=begun), guide, len(PROMPT))
        assert refused.value.param == "messages"


def test_a_reset_tells_the_answer_from_the_start(tokenizer: Tokenizer, guide: Any) -> None:
    """A row that enters its batch again goes on where it was."""
    processor = GrammarProcessor(Grammar('start: "yes" | "no"'), guide, len(PROMPT))
    width = tokenizer.vocab_size + 40
    answer = list(tokenizer.encode("yes"))
    before = allowed(processor, answer[:1], width)
    processor.reset()
    assert allowed(processor, answer[:1], width) == before


def test_a_grammar_that_cannot_be_used_fails_the_request(guide: Any) -> None:
    """A broken grammar is an error before anything is computed."""
    with pytest.raises(EngineFailure, match="cannot be kept"):
        GrammarProcessor(Grammar("start: no_such_rule"), guide, len(PROMPT))
