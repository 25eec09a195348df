"""What a family's model says in a turn, as its own template writes it: thinking, words, a call and the turn's end; or a
form that is asked for, or thinking that is cut short. With drafts of every acceptance it is what is said without, and
so is what is kept of it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from kvserve.core import Drafted
from kvserve.engine.logits_processors import ThinkingLimiter
from kvserve.prompt.tokenizer import load_tokenizer
from tests.agents import CALLS, TOOL
from tests.engine.engines import FAMILIES, request
from tests.engine.led_drafts import ACCEPTED, PROMPT, assert_kept, assert_same, decoded, with_drafts
from tests.engine.test_drafted_law import loaded
from tests.engine.test_drafted_rows import FORM, grammar_of, limit_of
from tests.laws import IS_FULL, THREE_KINDS, sampled
from tests.models import tiny_model

LED = 1e4
"""Of a logit: that token is drawn."""

THOUGHT, WORDS, PLACE = "The harbour is near.", "I look at it.", "Hamburg"
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"place": PLACE, "depth": 3}}}
ALL_ACCEPTED = tuple(ACCEPTED) if IS_FULL else ("half", "all")


class Writing:
    """A constraint of a row, which writes these tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def reset(self) -> None:
        """A row that enters again goes on by its place."""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        place = len(tokens) - len(PROMPT)
        if place >= len(self._tokens):
            return logits
        return logits + LED * (mx.arange(logits.shape[-1]) == self._tokens[place])


@cache
def turn_of(family: str) -> tuple[str, list[int]]:
    """A turn as transformers writes it in a history: its text and its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(family))
    asked = [{"role": "user", "content": "Where is it?"}]
    said: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": THOUGHT,
        "thinking": THOUGHT,
        "tool_calls": [CALL],
    }
    if family == "gemma3":  # its template knows no calls, and it writes them as it is asked to
        said["content"] = f"{WORDS}\n{CALLS[family].replace('PLACE', PLACE)}"
    elif family != "gpt_oss":  # of thinking and words beside a call it takes one
        said["content"] = WORDS
    before, whole = (
        tokenizer.apply_chat_template(turns, tools=[TOOL], tokenize=False, add_generation_prompt=is_asked)
        for turns, is_asked in ((asked, True), ([*asked, said], False))
    )
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)))
    text = whole[num_common:]
    return text, tokenizer.encode(text, add_special_tokens=False)


def check(family: str, constraints: Any, num_tokens: int, **sampling: Any) -> Sequence[int]:
    """The law, of a row with these constraints, which are made for each; what is said."""
    model = loaded(family)
    stop = sorted(load_tokenizer(tiny_model(family)).stop_token_ids)
    each = replace(request(PROMPT, num_tokens, stop=stop, **sampling), turn_end=stop[0])
    plain = decoded(model, each, constraints())
    for accepted in ALL_ACCEPTED:
        found = decoded(model, with_drafts(each, plain, accepted), constraints())
        assert_same(found, plain)
        assert_kept(model, found.left)
        led = found.end.drafting.by_source.get("conversation", Drafted())  # what a form forces is another source
        assert (led.num_accepted > 0) == (accepted != "none")
    return plain.tokens


@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_a_turn_with_a_call_is_the_one_without_drafts(family: str) -> None:
    """Through its tags and the turn's end, where a draft goes on."""
    text, tokens = turn_of(family)
    assert "look" in text and PLACE in text
    end = min(
        load_tokenizer(tiny_model(family)).stop_token_ids
    )  # of some families the next message's header is the end
    said = check(family, lambda: [Writing([*tokens, end])], len(tokens) + 20)
    assert list(said) == tokens[: len(said)] and len(said) >= len(tokens) - 2


@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_a_turn_whose_thinking_is_cut_short_is_the_one_without_drafts(family: str) -> None:
    """The limit forces its tag at the same token, and what is drafted behind it is what is said then."""
    limit = limit_of(family, 9)
    said = check(family, lambda: [ThinkingLimiter(limit, len(PROMPT))], 30)
    assert limit.closing_ids[0] in said


@pytest.mark.parametrize("family", sampled(FAMILIES, THREE_KINDS))
def test_a_form_that_is_asked_for_is_the_one_without_drafts(family: str) -> None:
    """Drawn by a seed; what the grammar forbids is not tried."""
    check(family, lambda: [grammar_of(FORM, family=family)], 40, temperature=1.0, seed=4)
