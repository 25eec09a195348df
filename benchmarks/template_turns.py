"""An assistant's turn as the model's own template writes it: what a model of the family writes itself.

It is cut out of what transformers renders: behind the header that prompts end with, up to the token that ends an
answer. It judges nothing.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.template_cases import answer, result, user
from benchmarks.template_model import Model
from benchmarks.template_reference import Conversation, NotRendered, Reference, Rendered, Spelling, Wire, without_tools
from kvserve.core import ToolCallBlock
from kvserve.prompt.call_words import CallWords

RESULT = "kwresult"
_ASKED = "Do it."
UNENDED = NotRendered("no token that ends an answer stands behind it")


@dataclass(frozen=True, slots=True)
class NativeTurn:
    """`text` stands behind a prompt whose end is `tail`; `opens_reasoning`: the prompt ends inside thinking."""

    text: str
    tail: str
    opens_reasoning: bool


def native_turn(
    model: Model, reference: Reference, said: Wire, tools: Sequence[Wire], *, thinking: bool = False
) -> NativeTurn | NotRendered:
    """The turn that says `said` right behind a user's question, in history: results or another question follow. A
    template that ends an answer with another token in history than the model does is asked for the last answer. Calls
    that it asks for in words are the text of an answer, as the model writes them."""
    if said.get("tool_calls") and model.in_words is not None:
        said = {**said, "content": (said.get("content") or "") + _in_words(model.in_words, said)}
        said.pop("tool_calls")
    behind = tuple(result(call["id"], RESULT) for call in said.get("tool_calls") or ()) or (user(RESULT),)
    turn = _turn(model, reference, said, behind, tools, thinking=thinking)
    is_open = turn == UNENDED and not said.get("tool_calls")
    return _turn(model, reference, said, (), tools, thinking=thinking) if is_open else turn


def _in_words(words: CallWords, said: Wire) -> str:
    calls = [(call["id"], call["function"]) for call in said["tool_calls"]]
    return words.calls([ToolCallBlock(id, function["name"], function["arguments"]) for id, function in calls])


def _turn(
    model: Model, reference: Reference, said: Wire, behind: tuple[Wire, ...], tools: Sequence[Wire], *, thinking: bool
) -> NativeTurn | NotRendered:
    asked = Conversation((user(_ASKED),), tuple(tools), thinking=thinking)
    whole = replace(asked, messages=(*asked.messages, said, *behind))
    told = reference.rendered(whole, tail=False)
    if isinstance(told, NotRendered) and "drops the tool" in told.reason:
        asked, whole = without_tools(asked), without_tools(whole)
        told = reference.rendered(whole, tail=False)
    if isinstance(told, NotRendered):
        return told
    ended, prompt = (_plain(reference, asked, told.spelling, tail=tail) for tail in (False, True))
    if ended is None or prompt is None:
        return NotRendered("transformers writes no prompt for it")
    base = prompt[: min(common(model, ended, prompt), common(model, told.text, prompt))]
    if _ASKED not in base:
        return NotRendered("transformers changes what stands before an answer")
    return _cut(model, told, base, prompt)


def _plain(reference: Reference, said: Conversation, spelling: Spelling, *, tail: bool) -> str | None:
    text = reference.text(said, spelling, tail=tail)
    return text if isinstance(text, str) else None


def _cut(model: Model, told: Rendered, base: str, prompt: str) -> NativeTurn | NotRendered:
    """Behind the part of the tail that stands in history too, in whole tokens."""
    own, tail = told.text[len(base) :], prompt[len(base) :]
    place = common(model, own, tail)
    text, encode = own[place:], model.tokenizer.encode
    ids = encode(text)
    end = next((n for n, token in enumerate(ids) if token in model.tokenizer.stop_token_ids), None)
    if end is not None:
        text = model.tokenizer.decode(ids[:end])
    elif RESULT in text:
        return UNENDED
    opens = place == len(tail) and model.output_format.thinking is not None and opens_thinking(model, tail)
    return NativeTurn(text, tail, opens)


def common(model: Model, one: str, other: str) -> int:
    """How many characters both begin with alike, no token of the other one cut."""
    pairs = enumerate(zip(one, other, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    while place and any(is_inside(token, other, place) for token in _added(model)):
        place -= 1
    return place


def _added(model: Model) -> frozenset[str]:
    return frozenset(token.content for token in model.tokenizer.backend.get_added_tokens_decoder().values())


def is_inside(token: str, text: str, place: int) -> bool:
    """Whether a cut at this place would cut this token."""
    start = text.find(token, max(0, place - len(token) + 1))
    return 0 <= start < place < start + len(token)


def opens_thinking(model: Model, text: str) -> bool:
    """Whether a prompt ends inside thinking."""
    tags = model.output_format.thinking
    return tags is not None and text.rstrip().endswith(tags.opening)


# --- odd tokens ------------------------------------------------------------------------------------------------------


def odd_ids(model: Model, text: str, seed: int) -> tuple[int, ...]:
    """The ids of a text as a model may write it: its control tokens whole, words cut where the tokenizer would not."""
    draw = random.Random(seed)
    tokens = sorted(_added(model), key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", text):
        if part in tokens:
            ids += model.tokenizer.encode(part)
            continue
        start = 0
        while start < len(part):
            end = start + draw.randint(1, 9)
            while end < len(part) and not (part[end - 1].isascii() and part[end].isascii()):
                end += 1
            ids += model.tokenizer.encode(part[start:end])
            start = end
    assert model.tokenizer.decode(ids) == text
    return tuple(ids)


def spoken(text: str | None, *calls: Wire, reasoning: str | None = None) -> Wire:
    """An assistant's message."""
    return answer(text, *calls, reasoning=reasoning)
