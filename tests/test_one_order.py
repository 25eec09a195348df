"""One conversation in two protocols is one prompt: the model reads the same tokens, whichever way it came."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.model_free import ModelFree
from benchmarks.recordings import MESSAGES, Request, read_corpus, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.canonical import rules
from kvserve.canonical.rule import Rule
from kvserve.core import GenerationRequest, RequestId, Turn
from kvserve.protocols.anthropic_messages import parse_messages
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.serve import serve_turn
from tests.laws import IS_FULL, TWO_KINDS, num_examples, sampled
from tests.models import tiny_model

NUM_CONVERSATIONS_PER_FILE = num_examples(1)
MAX_BODY_CHARS = 120_000 if IS_FULL else 60_000
SHARED = shared_folder()
pytestmark = pytest.mark.skipif(SHARED is None, reason="needs the recorded conversations")


@pytest.fixture(scope="module", params=sampled(TWO_KINDS, ("qwen3_5",)))
def model(request: pytest.FixtureRequest) -> ModelFree:
    """The server's path of a request around an engine that computes nothing."""
    return ModelFree(tiny_model(request.param), is_cuttable=CONVENTIONS[request.param].is_cuttable)


def prompt_ids(model: ModelFree, turn: Turn, patch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """The model tokens that the engine would be asked to go on from, in a server that knows nothing."""
    model.forget()
    asked: list[GenerationRequest] = []
    real = model.engine.submit
    patch.setattr(model.engine, "submit", lambda request: asked.append(request) or real(request))
    serve_turn(turn, model.served)
    patch.undo()
    return asked[0].prompt.ids


def as_messages(chat: dict[str, Any]) -> dict[str, Any]:
    """The body of /v1/messages that says what a chat body says."""
    messages: list[Any] = []
    system: Any = None
    for message in chat["messages"]:
        role, content = message["role"], _blocks(message.get("content"))
        if role in ("system", "developer"):
            if not messages and system is None:
                system = content
            else:
                messages.append({"role": "system", "content": content})
        elif role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": content}
            if messages and messages[-1]["role"] == "user" and _is_result(messages[-1]["content"]):
                messages[-1]["content"].append(result)
            else:
                messages.append({"role": "user", "content": [result]})
        elif role == "assistant":
            messages.append({"role": role, "content": list(_answer(message, content))})
        else:
            messages.append({"role": role, "content": content})
    tools = [
        {
            "name": tool["function"]["name"],
            **({"description": said} if (said := tool["function"].get("description")) else {}),
            "input_schema": tool["function"].get("parameters") or {"type": "object", "properties": {}},
            **({"strict": strict} if (strict := tool["function"].get("strict")) is not None else {}),
        }
        for tool in chat.get("tools") or []
    ]
    body = {"model": chat["model"], "max_tokens": 9, "messages": messages, "tools": tools}
    return body if system is None else {**body, "system": system}


def _answer(message: dict[str, Any], content: Any) -> Iterator[dict[str, Any]]:
    if thinking := next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key)), None):
        yield {"type": "thinking", "thinking": thinking, "signature": ""}
    if content:
        yield from content if isinstance(content, list) else [{"type": "text", "text": content}]
    for call in message.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        yield {"type": "tool_use", "id": call.get("id") or "", "name": call["function"]["name"], "input": arguments}


def _is_result(content: Any) -> bool:
    return isinstance(content, list) and content[0]["type"] == "tool_result"


def _blocks(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": part["text"]} for part in content if part["type"] == "text"]
    return content or ""


def _requests() -> list[tuple[str, Request]]:
    """The longest request of each recording, and of some conversations of each file of the corpus."""
    assert SHARED is not None
    chosen: list[tuple[str, Request]] = []
    seen: dict[str, int] = {}
    for talk in [*read_recordings(SHARED), *(read_corpus(SHARED) if IS_FULL else [])]:
        seen[talk.client] = seen.get(talk.client, 0) + 1
        fitting = [request for request in talk.requests if len(str(request.body)) <= MAX_BODY_CHARS]
        if fitting and seen[talk.client] <= NUM_CONVERSATIONS_PER_FILE:
            chosen.append((talk.client, max(fitting, key=lambda request: len(str(request.body)))))
    return chosen


@pytest.mark.long
def test_both_protocols_render_to_the_same_tokens(model: ModelFree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded clients and the corpus: chat as messages, messages as chat; without tools the prompt is another one."""
    defaults = model.served.defaults
    for client, request in _requests():
        if "tool_reference" in json.dumps(request.body):
            continue  # a chat has no place for a tool that comes later
        chat = {
            key: request.chat[key] for key in ("model", "messages", "tools", "enable_thinking") if key in request.chat
        }
        if request.path == MESSAGES:
            messages = {**request.body, "output_config": {}, "context_management": {}}
        else:
            messages = {**as_messages(chat), "thinking": {"type": "enabled"}}  # the server's default in the other one
            chat.pop("enable_thinking", None)
        asked = parse_chat(chat, {}, defaults, RequestId("r1")).turn
        other = parse_messages(messages, {}, defaults, RequestId("r2")).turn
        ids = prompt_ids(model, asked, monkeypatch)
        assert ids == prompt_ids(model, other, monkeypatch), client
        if messages.get("tools"):
            without = parse_messages({**messages, "tools": []}, {}, defaults, RequestId("r3")).turn
            assert ids != prompt_ids(model, without, monkeypatch)


EDITED = "Always answer in English.\n", "Always answer in English. Be brief.\n"


def rules_read(model: ModelFree) -> list[tuple[bool, bool]]:
    """Of each request of a recorded session in which CLAUDE.md was edited: whether the model reads its old text, and
    whether it reads the new one."""
    assert SHARED is not None
    [talk] = [talk for talk in read_recordings(SHARED) if talk.client == "claude-code-2.1.119"]
    model.forget()
    texts = []
    for number, request in enumerate(talk.requests):
        running = model.start(json.dumps(request.body).encode(), request, number)
        texts.append(running._submitted.prompt.text)
        model.end(running)
    old, new = EDITED
    return [(old in text, new in text) for text in texts]


def test_an_edited_project_file_reaches_the_model(model: ModelFree) -> None:
    """From request 09 of the Claude Code session on the model reads the new text, in its place."""
    assert rules_read(model) == [(True, False)] * 8 + [(False, True)] * 3


@pytest.mark.long
@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_a_rule_that_took_its_text_for_volatile_would_hide_the_edit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with such a rule in the table the model goes on reading what it read before."""

    def planted(rule: Rule) -> Rule:
        if rule.name != "project_instructions" or rule.form is None:
            return rule
        volatile = {rule.name: re.compile(r"(?<=# Project rules\n)[^#]*")}
        return replace(rule, policy="history", form=replace(rule.form, volatile=volatile))

    monkeypatch.setattr(rules, "RULES", tuple(map(planted, rules.RULES)))
    blinded = ModelFree(tiny_model(family), is_cuttable=CONVENTIONS[family].is_cuttable)
    assert rules_read(blinded) == [(True, False)] * 11
