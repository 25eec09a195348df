"""Clients of Anthropic's API and of Responses that play an agent against a real server: how each sends answers back.

A `Talk` keeps a history in the items of its protocol. What differs between clients of one protocol (what becomes of
thinking, of ids, of arguments, what else a request brings) is a function of its `Wire`. Requests take turns in being
streamed, and of a stream it is what clients put together that goes into the history.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvserve.protocols.anthropic_answers import whole_message
from tests.agents import TOOL, common_length, model_text, seen_prompts
from tests.anthropic_serving import MESSAGES_PATH, events_of
from tests.protocols.responses_wire import put_together
from tests.serving import AppUnderTest, writing
from tests.web.test_responses import events_of as events_of_responses

RESPONSES_PATH = "/v1/responses"
SYSTEM = "You look at places and say what is there. " * 2
GREEDY: Mapping[str, Any] = {"temperature": 0, "repetition_penalty": 1}
FUNCTION: Mapping[str, Any] = TOOL["function"]  # type: ignore[assignment]

type Item = dict[str, Any]
"""A message of `/v1/messages`, or an item of `/v1/responses`."""


@dataclass(frozen=True)
class Asked:
    """One answered request: what the model saw, how much of it was known, prompt and completion together, and why."""

    body: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    num_cached_tokens: int
    num_tokens: int
    explanation: Mapping[str, Any]


@dataclass(frozen=True)
class Wire:
    """How a client speaks. `echo` is an answer as it stands in the next request, given the number of its turn; `past`
    is the history as it stands in a request; `fields` is what else a request brings, given thinking and its number."""

    name: str
    path: str
    echo: Callable[[Mapping[str, Any], int], list[Item]]
    fields: Callable[[bool, int], dict[str, Any]]
    past: Callable[[Sequence[Item]], list[Item]] = list
    headers: Mapping[str, str] = field(default_factory=dict)
    loses_thinking: bool = False
    keeps_names: bool = False
    """Whether only what is new is sent, behind the name of the last response."""

    @property
    def is_anthropic(self) -> bool:
        return self.path == MESSAGES_PATH


@dataclass
class Talk:
    """One client's conversation with a server."""

    app: AppUnderTest
    family: str
    wire: Wire
    thinking: bool
    history: list[Item]
    extra: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Asked] = field(default_factory=list)

    def ask(self, thought: str, said: str, place: str | None = None) -> Asked:
        """Send the history, have this written, and take the answer into the history."""
        text = model_text(self.family, thought if self.thinking else "", said, place)
        with writing(self.app, text, ends=False) as script:
            asked = self._send({**self._body(), **GREEDY, **script, **self.extra})
        self.turns.append(asked)
        if self.wire.keeps_names:
            self.history.clear()
        self.history += self.wire.echo(asked.body, len(self.turns))
        return asked

    def say(self, text: str) -> None:
        """The user's next words."""
        part = {"type": "text" if self.wire.is_anthropic else "input_text", "text": text}
        self.history.append({"role": "user", "content": [part]})

    def answer_calls(self, text: str) -> None:
        """A result for every call of the last answer."""
        answer = self.turns[-1].body
        if self.wire.is_anthropic:
            ids = [block["id"] for block in self.history[-1]["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one, "content": text, "is_error": False} for one in ids]
            self.history.append({"role": "user", "content": results})
            return
        sent = self.history or answer["output"]
        calls = [item["call_id"] for item in sent if item.get("type") == "function_call"]
        done = {item["call_id"] for item in sent if item.get("type") == "function_call_output"}
        for call_id in calls:
            if call_id not in done:
                self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def _body(self) -> dict[str, Any]:
        fields = self.wire.fields(self.thinking, len(self.turns))
        past = self.wire.past(self.history)
        if self.wire.is_anthropic:
            tool = {"name": FUNCTION["name"], "description": FUNCTION["description"]}
            tools = [{**tool, "input_schema": FUNCTION["parameters"]}]
            return {"model": "claude", "messages": past, "tools": tools, "max_tokens": 1000, **fields}
        if self.wire.keeps_names and self.turns:
            fields["previous_response_id"] = self.turns[-1].body["id"]
        tools = [{"type": "function", **FUNCTION}]
        return {"model": "gpt", "input": past, "tools": tools, "max_output_tokens": 1000, **fields}

    def _send(self, body: dict[str, Any]) -> Asked:
        is_streamed = len(self.turns) % 2 == 1
        with seen_prompts() as prompts:
            response = self.app.post(self.wire.path, {**body, "stream": is_streamed}, self.wire.headers)
        assert response.status == 200, response.body
        answer: Any = response.json if not is_streamed else None
        if is_streamed and self.wire.is_anthropic:
            answer = whole_message(events_of(response))
        elif is_streamed:
            events = events_of_responses(response.body)
            answer = events[-1]["response"]
            assert put_together(events) == answer["output"]
        [prompt_ids] = prompts
        usage = answer["usage"]
        if self.wire.is_anthropic:
            num_cached = usage["cache_read_input_tokens"]
            num_prompt = num_cached + usage["input_tokens"] + usage["cache_creation_input_tokens"]
        else:
            num_cached, num_prompt = usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        assert num_prompt == len(prompt_ids)
        explanation = self.app.get(f"/v1/cache/explain/{answer['id']}").json
        return Asked(answer, prompt_ids, num_cached, num_prompt + usage["output_tokens"], explanation)

    def reusable(self, turn: int) -> int:
        """Tokens of a request that were in the one before, its answer included; read off the prompts alone."""
        before, now = self.turns[turn - 1], self.turns[turn]
        shared = common_length(before.prompt_ids, now.prompt_ids)
        return before.num_tokens if shared == len(before.prompt_ids) else shared


# --- clients of Anthropic's API --------------------------------------------------------------------------------------


def _claude_fields(thinking: bool, turn: int) -> dict[str, Any]:
    """As Claude Code: a billing line that is another one in each request, marks, and no wish to read the thinking."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.119; cc_entrypoint=cli; cch={turn:05x};"
    system = [
        {"type": "text", "text": billing},
        {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
    ]
    switch = {"type": "adaptive", "display": "omitted"} if thinking else {"type": "disabled"}
    return {
        "system": system,
        "thinking": switch,
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "11111111-2222"})},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]} if thinking else {},
        **({"output_config": {"effort": "medium"}} if thinking else {}),
    }


def _claude_past(history: Sequence[Item]) -> list[Item]:
    """The newest message is a list of blocks with a mark, older ones of a single text are strings."""
    past = [dict(message) for message in history]
    for message in past[:-1]:
        blocks = message["content"]
        if not isinstance(blocks, str) and [block["type"] for block in blocks] == ["text"]:
            message["content"] = blocks[0]["text"]
    *front, last = past[-1]["content"]
    past[-1]["content"] = [*front, {**last, "cache_control": {"type": "ephemeral"}}]
    return past


def _pi_fields(thinking: bool, turn: int) -> dict[str, Any]:
    """As PI: the system prompt as a string, and a budget for thinking."""
    switch = {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
    return {"system": SYSTEM, "thinking": switch}


def _blocks(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """The blocks as they came."""
    return [{"role": "assistant", "content": [dict(block) for block in answer["content"]]}]


def _without_thinking(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """No thinking, ids of the client's own, arguments in another order."""
    kept = [dict(block) for block in answer["content"] if block["type"] != "thinking"]
    for index, block in enumerate(kept):
        if block["type"] == "tool_use":
            block["id"] = f"own{turn}x{index}"
            block["input"] = dict(sorted(block["input"].items()))
    return [{"role": "assistant", "content": kept}]


def _unsigned(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """The thinking without what it was signed with."""
    kept = [
        {"type": "thinking", "thinking": block["thinking"], "signature": ""} if block["type"] == "thinking" else block
        for block in answer["content"]
    ]
    return [{"role": "assistant", "content": kept}]


CLAUDE_HEADERS = {"anthropic-version": "2023-06-01", "x-claude-code-session-id": "11111111-2222"}
ANTHROPIC_WIRES = (
    Wire("Claude Code", MESSAGES_PATH, _blocks, _claude_fields, _claude_past, CLAUDE_HEADERS),
    Wire("PI", MESSAGES_PATH, _blocks, _pi_fields),
    Wire("unsigned", MESSAGES_PATH, _unsigned, _pi_fields),
    Wire("stripped", MESSAGES_PATH, _without_thinking, _pi_fields, loses_thinking=True),
)


# --- clients of Responses --------------------------------------------------------------------------------------------


def _codex_fields(thinking: bool, turn: int) -> dict[str, Any]:
    """As Codex: nothing is stored, and reasoning comes sealed."""
    return {
        "instructions": SYSTEM,
        "reasoning": {"effort": "medium", "summary": "auto"} if thinking else {"effort": "none"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
    }


def _stored_fields(thinking: bool, turn: int) -> dict[str, Any]:
    """Responses are stored, and reasoning is in clear."""
    return {"instructions": SYSTEM, "reasoning": {"effort": "medium" if thinking else "none"}}


def _whole_items(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """The items as they came, with their ids."""
    return [dict(item) for item in answer["output"]]


def _sealed_items(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """No ids; of the reasoning only what is sealed."""
    kept: list[Item] = []
    for item in answer["output"]:
        bare = {name: value for name, value in item.items() if name not in ("id", "status")}
        kept.append({**bare, "summary": [], "content": None} if item["type"] == "reasoning" else bare)
    return kept


def _bare_items(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """No reasoning, no ids but calls' own ones, arguments serialised anew."""
    kept: list[Item] = []
    for index, item in enumerate(answer["output"]):
        bare = {name: value for name, value in item.items() if name not in ("id", "status")}
        if item["type"] == "function_call":
            bare["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
            bare["call_id"] = f"own{turn}x{index}"
        if item["type"] != "reasoning":
            kept.append(bare)
    return kept


def _named_items(answer: Mapping[str, Any], turn: int) -> list[Item]:
    """Each item is only named, but for calls."""
    named = [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
    return [
        dict(item) if item["type"] == "function_call" else name
        for item, name in zip(answer["output"], named, strict=True)
    ]


def _nothing(answer: Mapping[str, Any], turn: int) -> list[Item]:
    return []


RESPONSES_WIRES = (
    Wire("Codex", RESPONSES_PATH, _whole_items, _codex_fields),
    Wire("sealed", RESPONSES_PATH, _sealed_items, _codex_fields),
    Wire("SDK", RESPONSES_PATH, _whole_items, _stored_fields),
    Wire("named items", RESPONSES_PATH, _named_items, _stored_fields),
    Wire("named response", RESPONSES_PATH, _nothing, _stored_fields, keeps_names=True),
    Wire("bare", RESPONSES_PATH, _bare_items, _codex_fields, loses_thinking=True),
)
