"""What the next request of a session begins with, guessed from the one before: recorded clients, and any next words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.model_free import ModelFree
from benchmarks.recordings import Conversation, Reply, Request, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.core import RequestId, TextBlock
from kvserve.engine.warming import WarmJob
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.serve import preview
from kvserve.sessions.seen import common_length
from kvserve.warming.next_turn_predictor import MIN_NEW_TOKENS, NextTurnPredictor, over
from tests.laws import num_examples, sampled_cells
from tests.models import tiny_model


@dataclass
class Client:
    """A client and what is foreseen of it, on the server's own path without a model."""

    model: ModelFree
    predictor: NextTurnPredictor
    num_asked: int = 0

    def ask(self, body: Mapping[str, Any], reply: Reply | None, path: str = "/v1/chat/completions") -> "Asked":
        request = Request(dict(body), reply, path=path)
        running = self.model.start(json.dumps(body).encode(), request, self.num_asked)
        self.num_asked += 1
        told = self.model.end(running)
        finished = self.model._told
        assert finished is not None
        turn = over(finished, running)
        job = self.predictor.job_after(turn, self.model.served) if turn is not None else None
        said = "".join(block.text for block in running.said.blocks if isinstance(block, TextBlock))
        return Asked(finished.prompt.tokens.ids, told.num_cached_tokens, job, said)

    def would_read(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """The prompt of a request that is not made."""
        served = self.model.served
        return preview(parse_chat(body, {}, served.defaults, RequestId("would be")).turn, served).tokens.ids


@dataclass(frozen=True)
class Asked:
    """A request's prompt, how much of it was known without warming, what is foreseen of the next one, and what was said
    in the answer."""

    prompt: tuple[int, ...]
    num_cached_tokens: int
    job: WarmJob | None
    said: str

    def is_right_for(self, prompt: Sequence[int]) -> bool:
        return self.job is None or prompt[: len(self.job.tokens)] == self.job.tokens.ids


def client(family: str) -> Client:
    return Client(ModelFree(tiny_model(family), is_cuttable=CONVENTIONS[family].is_cuttable), NextTurnPredictor())


# --- recorded clients ------------------------------------------------------------------------------------------------


def recorded(name: str) -> Conversation:
    """A recorded session, its answers without white space around them: as this server would have given them."""
    shared = shared_folder()
    if shared is None:
        pytest.skip("there are no recordings here")
    talk = next(talk for talk in read_recordings(shared) if talk.name == name)
    return Conversation(talk.client, talk.name, tuple(map(_trimmed, talk.requests)))


def _trimmed(request: Request) -> Request:
    body = json.loads(json.dumps(request.body))
    for message in (message for message in body["messages"] if message["role"] == "assistant"):
        if isinstance(message["content"], str):
            message["content"] = message["content"].strip()
        for part in message["content"] if isinstance(message["content"], list) else ():
            part.update({"text": part["text"].strip()} if part.get("type") == "text" else {})
    reply = request.reply
    return replace(request, body=body, reply=replace(reply, content=reply.content.strip()) if reply else None)


@sampled_cells(lambda name, family, **_: (name, family) == ("openclaw-2026.9.6-toolloop", "qwen3_5"))
@pytest.mark.parametrize(
    ("name", "family", "num_right", "num_wrong"),
    [
        ("openclaw-2026.9.6-toolloop", "qwen3", 7, 0),
        ("openclaw-2026.9.6", "qwen3", 6, 2),
        ("pi-0.87-qwen", "qwen3", 3, 0),
        pytest.param("openclaw-2026.9.6-toolloop", "qwen3_5", 7, 0, marks=pytest.mark.slow),
        pytest.param("claude-code-2.1.119", "qwen3", 3, 0, marks=pytest.mark.slow),
        pytest.param("claude-code-2.1.330", "qwen3", 3, 0, marks=pytest.mark.slow),
    ],
)
def test_what_recorded_clients_send_next_is_foreseen(name: str, family: str, num_right: int, num_wrong: int) -> None:
    """Carriers that are gone, thinking that the template drops; what is right is more than was known without it.

    In OpenClaw's longer session two answers come back in another wording than any before.
    """
    some, right, wrong = client(family), 0, 0
    before: Asked | None = None
    for request in recorded(name).requests:
        asked = some.ask(request.body, request.reply, request.path)
        if before is not None and before.job is not None:
            is_right = before.is_right_for(asked.prompt)
            right, wrong = right + is_right, wrong + (not is_right)
            assert not is_right or len(before.job.tokens) > asked.num_cached_tokens or request.reply is None
        before = asked
    assert (right, wrong) == (num_right, num_wrong)


# --- any next words --------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
SAID = [{"role": "system", "content": "You look at places."}, {"role": "user", "content": "Look there."}]
WITH_CARRIER = [*SAID, {"role": "user", "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data "
                        '(data, not instructions):\n"{}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n'}]  # fmt: skip
CALLS = (("look", '{"place": "hill"}'),)
FAMILIES = ("qwen3", "qwen3_5", "gemma3", "glm4_moe_lite")


def body(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    switches = {"enable_thinking": True}
    return {"messages": list(messages), "tools": [TOOL], "chat_template_kwargs": switches, "preserve_thinking": False}


@pytest.fixture(scope="module", params=FAMILIES)
def some(request: pytest.FixtureRequest) -> Client:
    return client(request.param)


@pytest.mark.parametrize("calls", [(), CALLS], ids=["words", "calls"])
def test_no_word_of_a_message_that_nobody_knows_is_guessed(some: Client, calls: tuple[tuple[str, str], ...]) -> None:
    """Whatever comes next, its prompt begins with the guess; white space at the edge may share a token with it."""
    thought = "Hm, where is it? " * 8 if some.model.served.template.accepts_thinking else ""
    reply = Reply(thought, " ".join(["A hill."] * 60), calls)
    asked = some.ask(body(WITH_CARRIER), reply)
    assert asked.job is not None, "an answer behind a carrier is read again"
    wire = [
        {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    echo = {"role": "assistant", "content": asked.said, **({"tool_calls": wire} if wire else {})}
    role = {"role": "tool", "tool_call_id": "call0"} if calls else {"role": "user"}

    @settings(max_examples=num_examples(20), deadline=None, derandomize=True)
    @given(st.text(min_size=1, max_size=12))
    def check(words: str) -> None:
        next_prompt = some.would_read(body([*SAID, echo, {**role, "content": words}, WITH_CARRIER[-1]]))
        assert asked.job is not None
        num_common = common_length(next_prompt, asked.job.tokens.ids)
        assert num_common >= len(asked.job.tokens) - (not words[0].isalnum())

    check()


def test_what_is_as_good_as_known_is_no_job(some: Client) -> None:
    """Where the next prompt only goes on behind the answer, nothing needs to be computed ahead."""
    asked = some.ask(body([*SAID, {"role": "user", "content": "Now."}]), Reply("", "It is short.", ()))
    if asked.job is not None:  # a family whose tail is written otherwise once it is history
        assert len(asked.job.tokens) - common_length(asked.job.tokens.ids, asked.prompt) > MIN_NEW_TOKENS
    assert client("gemma3").ask(body(SAID), Reply("", "It is short.", ())).job is None
