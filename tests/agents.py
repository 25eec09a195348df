"""A client that plays an agent against a real server: it keeps a history, and echoes answers the way clients do.

`Conversation.ask` has a real model write a given text (thinking, words, calls) and puts the answer into the history as
the client's style wants it. What the model saw of a request is read from the engine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvserve.core import GenerationRequest
from kvserve.engine.worker import Engine
from tests.serving import CHAT_PATH, AppUnderTest, writing

TELLING = (
    "explicitly requested configuration description and nothing otherwise available: requested configuration "
    "directory, available information description, background configuration workspace, explicitly requested directory "
    "information otherwise available configuration description."
)
"""An answer long enough to show that whoever sends it back was given it (`identity/owner.py`), in long words that are a
token each: the model of a test writes thirty instead of two hundred."""

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "depth": {"type": "integer"}}},
    },
}
CARRIER = {
    "role": "user",
    "content": [
        {
            "type": "text",
            "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
            '"{\\"now\\": 1}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n',
        }
    ],
}

CALLS: Mapping[str, str] = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"place": "PLACE", "depth": 3}}\n</tool_call>',
    "qwen3_5": (
        "<tool_call>\n<function=look>\n<parameter=place>\nPLACE\n</parameter>\n"
        "<parameter=depth>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm4_moe_lite": (
        "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>PLACE</arg_value>\n"
        "<arg_key>depth</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "gemma3": '<tool_call>\n{"name": "look", "arguments": {"place": "PLACE", "depth": 3}}\n</tool_call>',
}
"""How a family calls; gemma3's template knows no tools, so they are described in words and it calls as it is told."""

THINKS = frozenset({"qwen3", "qwen3_5", "glm4_moe_lite"})
OPENED = frozenset({"qwen3_5", "glm4_moe_lite"})
"""Families whose prompt ends inside thinking."""


def model_text(family: str, thought: str, said: str, place: str | None) -> str:
    """What a model of the family writes, its stop token included."""
    opening = "" if family in OPENED or not thought else "<think>\n"
    closing = f"{thought}\n</think>\n\n" if thought else ""
    call = CALLS[family].replace("PLACE", place) if place is not None else ""
    ends = {"gemma3": "<end_of_turn>", "glm4_moe_lite": "<|observation|>" if call else "<|user|>"}
    return opening + closing + "\n".join([said, *([call] if call else [])]) + ends.get(family, "<|im_end|>")


@dataclass(frozen=True, slots=True)
class EchoStyle:
    """How a client sends an answer back: the field its thinking goes into (None: stripped), whether ids of calls are
    its own, whether arguments are serialised anew, whether every request ends with a message that is gone later."""

    name: str
    thinking_field: str | None = "reasoning_content"
    own_ids: bool = False
    compact: bool = False
    carries: bool = False

    def echo(self, message: Mapping[str, Any], turn: int) -> dict[str, Any]:
        """The answer as it stands in the next request."""
        echoed: dict[str, Any] = {"role": "assistant", "content": message.get("content") or None}
        if self.thinking_field is not None and message.get("reasoning_content"):
            echoed[self.thinking_field] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            echoed["tool_calls"] = [self._call(call, f"own{turn}x{index}") for index, call in enumerate(calls)]
        return echoed

    def _call(self, call: Mapping[str, Any], own_id: str) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.compact:
            arguments = json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=True)
        function = {"name": call["function"]["name"], "arguments": arguments}
        return {"id": own_id if self.own_ids else call["id"], "type": "function", "function": function}


STYLES = (
    EchoStyle("kept"),
    EchoStyle("renamed", "reasoning", compact=True),
    EchoStyle("stripped", None, own_ids=True, compact=True),
    EchoStyle("carried", None, carries=True),
)


@dataclass
class Asked:
    """One answered request."""

    body: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    usage: Mapping[str, Any]
    explanation: Mapping[str, Any]

    @property
    def num_cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def num_tokens(self) -> int:
        """Prompt and completion, its stop token included."""
        return int(self.usage["prompt_tokens"] + self.usage["completion_tokens"])


@dataclass
class Conversation:
    """One client's conversation with a server."""

    app: AppUnderTest
    family: str
    style: EchoStyle
    thinking: bool
    messages: list[dict[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Asked] = field(default_factory=list)

    def ask(self, thought: str, said: str, place: str | None = None, **fields: Any) -> Asked:
        """Send the history, have this written, and take the answer into the history."""
        text = model_text(self.family, thought if self.thinking else "", said, place)
        with writing(self.app, text, ends=False) as script:
            asked = send(self.app, self.request(**script, **fields))
        self.turns.append(asked)
        self.messages.append(self.style.echo(asked.body["choices"][0]["message"], len(self.turns)))
        return asked

    def request(self, **fields: Any) -> dict[str, Any]:
        """The body of the next request."""
        sent = [*self.messages, *([CARRIER] if self.style.carries else [])]
        tools = {"tools": [TOOL]} if self.family in CALLS else {}
        plain = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 1000}
        switch = {"chat_template_kwargs": {"enable_thinking": self.thinking}}
        return {"messages": sent, **tools, **plain, **switch, **self.fields, **fields}

    def say(self, text: str) -> None:
        """The user's next words."""
        self.messages.append({"role": "user", "content": text})

    def answer_calls(self, text: str) -> None:
        """A result for every call of the last answer."""
        for call in self.messages[-1].get("tool_calls", []):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def send(app: AppUnderTest, body: Mapping[str, Any]) -> Asked:
    """One request, with what the model saw of it."""
    with seen_prompts() as prompts:
        response = app.post(CHAT_PATH, body)
    assert response.status == 200, response.body
    answer = response.json
    explanation = app.get(f"/v1/cache/explain/{answer['id']}").json
    [prompt_ids] = prompts
    return Asked(answer, prompt_ids, answer["usage"], explanation)


@contextmanager
def seen_prompts() -> Iterator[list[tuple[int, ...]]]:
    """The model tokens of every request that reaches the engine meanwhile."""
    prompts: list[tuple[int, ...]] = []
    submit = Engine.submit

    def noted(engine: Engine, request: GenerationRequest) -> Any:
        prompts.append(request.prompt.ids)
        return submit(engine, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "submit", noted)
        yield prompts


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
