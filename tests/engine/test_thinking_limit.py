"""A row whose thinking is limited, with real tokenizers: one with thinking tags as tokens, one without."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import ThinkingLimit
from kvserve.engine.logits_processors import ThinkingLimiter
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.laws import IS_FULL, num_examples
from tests.models import tiny_model

PROMPT = [300, 301, 302]
TAGS = {
    "qwen3": ("<think>", "</think>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "text": ("((", "))"),
}
"""Tags that are a token each, several, and text."""

limits = pytest.mark.parametrize("kind", TAGS)


def tokenizer_of(kind: str) -> Tokenizer:
    return load_tokenizer(tiny_model("gpt_oss" if kind == "text" else kind))


TOKENIZERS = {kind: tokenizer_of(kind) for kind in TAGS}


def limited(kind: str, max_num_tokens: int, *, is_open: bool, anywhere: bool = True) -> ThinkingLimiter:
    opening, closing = TAGS[kind]
    tokenizer = TOKENIZERS[kind]
    closing_ids = tokenizer.encode(closing)
    limit = ThinkingLimit(max_num_tokens, opening, closing, closing_ids, anywhere, is_open, tokenizer.decode)
    return ThinkingLimiter(limit, len(PROMPT))


def written(kind: str, limiter: ThinkingLimiter, wanted: Sequence[int], barred: Sequence[int] = ()) -> list[int]:
    """What a model writes that wants these tokens, one step after the other, where the limiter lets it; after tokens
    that it was made to write it goes on with the next one that it wanted."""
    answer: list[int] = []
    for token in wanted:
        for _ in range(400):
            logits = mx.zeros((1, TOKENIZERS[kind].vocab_size))
            logits[0, token] = 1
            if len(answer) in barred:
                logits[0, TOKENIZERS[kind].encode(TAGS[kind][1])[0]] = -mx.inf
            drawn = int(mx.argmax(limiter(mx.array([*PROMPT, *answer]), logits)).item())
            answer.append(drawn)
            if drawn == token:
                break
    return answer


def words(kind: str, count: int) -> list[int]:
    """As many tokens of text."""
    [word] = TOKENIZERS[kind].encode("a")
    return [word] * count


@limits
@pytest.mark.parametrize("is_open", [True, False], ids=["opened", "opens itself"])
@given(st.integers(0, 80), st.integers(0, 200))
@settings(max_examples=num_examples(25) if IS_FULL else 12, deadline=None)
def test_thinking_is_ended_at_its_limit(kind: str, is_open: bool, limit: int, thought: int) -> None:
    """It has as many tokens as the model wants, at most the limit, the one that opens it included; then its end
    follows, and everything is free."""
    opening, closing = (list(TOKENIZERS[kind].encode(tag)) for tag in TAGS[kind])
    head, said, text = [] if is_open else opening, words(kind, thought), words(kind, 90)
    answer = written(kind, limited(kind, limit, is_open=is_open), [*head, *said, *closing, *text])
    limit = limit if is_open else max(0, limit - 1)
    if thought <= limit:
        assert answer == [*head, *said, *closing, *text]
    else:
        assert answer == [*head, *words(kind, limit), *closing, *words(kind, thought - limit), *closing, *text]


@limits
def test_thinking_that_is_opened_again_is_ended_at_once(kind: str) -> None:
    """The limit is that of the answer's thinking, however many pieces it has; text between them does not count."""
    opening, closing = (list(TOKENIZERS[kind].encode(tag)) for tag in TAGS[kind])
    first = [*opening, *words(kind, 4), *closing, *words(kind, 90)]
    limit = 4 + len(closing) + 3  # of each piece the first token counts that opens it, and not the last that ends it
    answer = written(kind, limited(kind, limit, is_open=False), [*first, *opening, *words(kind, 5)])
    assert answer == [*first, *opening, *words(kind, 2), *closing, *words(kind, 3)]


@pytest.mark.parametrize("before", ["", "\n", " \n  "])
def test_an_opening_tag_of_several_tokens_counts_where_a_line_begins(before: str) -> None:
    """Its first token alone looks like text, which is no reason to take the rest of it for prose."""
    opening, closing, tokenizer = "<think>", "</think>", TOKENIZERS["gpt_oss"]
    closing_ids = tokenizer.encode(closing)
    limit = ThinkingLimit(3, opening, closing, closing_ids, False, False, tokenizer.decode)
    opened = tokenizer.encode(before + opening)
    assert len(tokenizer.encode(opening)) > 1
    answer = written("gpt_oss", ThinkingLimiter(limit, len(PROMPT)), [*opened, *words("gpt_oss", 20)])
    assert [*answer[len(opened) : len(opened) + 2 + len(closing_ids)]] == [*words("gpt_oss", 2), *closing_ids]


def test_an_opening_tag_in_prose_opens_nothing() -> None:
    """Unless it counts anywhere, only a line's beginning opens thinking, as the splitter reads it."""
    for before, opens in (("", True), ("Well.\n", True), ("Well.\n  ", True), ("Well. ", False), ("a " * 100, False)):
        wanted = [*TOKENIZERS["qwen3"].encode(f"{before}<think>"), *words("qwen3", 8)]
        answer = written("qwen3", limited("qwen3", 3, is_open=False, anywhere=False), wanted)
        assert (answer != wanted) == opens, before
    again = [*TOKENIZERS["qwen3"].encode("It is <think> here.\n<think>"), *words("qwen3", 8)]
    assert written("qwen3", limited("qwen3", 3, is_open=False, anywhere=False), again) != again


def test_what_a_grammar_bars_is_waited_for() -> None:
    """A closing tag that may not stand here now is forced where it may."""
    wanted = words("qwen3", 9)
    answer = written("qwen3", limited("qwen3", 3, is_open=True), wanted, barred=(3, 4))
    closing = list(TOKENIZERS["qwen3"].encode("</think>"))
    assert answer == [*words("qwen3", 5), *closing, *words("qwen3", 4)]


def test_a_reset_counts_from_the_start() -> None:
    """A row that enters its batch again goes on where it was."""
    limiter = limited("qwen3", 5, is_open=True)
    before = written("qwen3", limiter, words("qwen3", 9))
    limiter.reset()
    assert written("qwen3", limiter, words("qwen3", 9)) == before
