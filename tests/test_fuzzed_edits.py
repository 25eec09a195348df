"""Whatever a client edits in its history reaches the model: the prompt says what that of `cache_mode: "prefix"` says,
where nothing of earlier requests is looked at.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import GenerationRequest
from kvserve.engine.worker import Engine
from tests.agents import model_text, seen_prompts
from tests.engine.visions import data_url, picture
from tests.laws import TWO_KINDS, num_examples, sampled
from tests.serving import CHAT_PATH, AppUnderTest, serving_app, writing

type Messages = list[dict[str, Any]]
type Edit = Callable[[Messages], None]

ANSWER = "It is high, and on it stands  a single tree.\nThat is all."


@pytest.fixture(scope="module", params=sampled(TWO_KINDS, ("qwen3_5",)))
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("served"), str(request.param), max_kv_size=4096) as app:
        app.family = str(request.param)  # type: ignore[attr-defined]
        yield app


def history(app: AppUnderTest) -> Messages:
    """A conversation of every kind of message; the model wrote the last answer."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"place": "hill", "depth": 2}'},
    }
    messages: Messages = [
        {"role": "system", "content": "You look at places.\n\nBe brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look at the hill."}, {"type": "text", "text": "Then say."}],
        },
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "A tree, 3 m.\n\tA crow.  "},
        {"role": "user", "content": "And the lake?\nIs it deep?"},
    ]
    body = {"messages": messages, "max_tokens": 99, "temperature": 0, "session_id": "fuzz", **QUIET}
    with writing(app, model_text(app.family, "", ANSWER, None), ends=False) as script:  # type: ignore[attr-defined]
        answer: Any = app.post(CHAT_PATH, {**body, **script}).json["choices"][0]["message"]
    assert answer["content"] == ANSWER
    return [*messages, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Thank you."}]


QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
CHARACTERS = st.sampled_from(
    [*"abcXYZ019 .,;:!?\"'`{}[]<>\\/\n\t", "\u00e9", "\u65e5", "\U0001f600", "\u200b", "\u00a0", "<|im_end|>"]
)
PLACES = st.integers(0, 10_000)


def texts(messages: Messages) -> list[tuple[dict[str, Any], str]]:
    """Every text of a conversation: the object that holds it, and under which key."""
    found: list[tuple[dict[str, Any], str]] = []
    for message in messages:
        if isinstance(message.get("content"), str):
            found.append((message, "content"))
        else:
            found += [(part, "text") for part in message.get("content") or () if part["type"] == "text"]
        found += [(call["function"], "name") for call in message.get("tool_calls", ())]
    return found


@st.composite
def edits_of_characters(draw: st.DrawFn) -> Edit:
    """One place of one text: a character in, out or another one."""
    which, place, kind, character = draw(PLACES), draw(PLACES), draw(st.integers(0, 2)), draw(CHARACTERS)

    def edit(messages: Messages) -> None:
        every = texts(messages)
        holder, key = every[which % len(every)]
        text = holder[key]
        at = place % (len(text) + 1)
        holder[key] = text[:at] + ("" if kind == 0 else character) + text[at + (kind != 1) :]

    return edit


@st.composite
def edits_of_structure(draw: st.DrawFn) -> Edit:
    """A message out, in, twice, in another place or of another role; a text in two parts, or two parts as one."""
    which, other = draw(PLACES), draw(PLACES)
    kind = draw(st.sampled_from(["out", "in", "twice", "moved", "role", "split", "joined", "empty", "named"]))

    def edit(messages: Messages) -> None:
        index, place = which % len(messages), other % len(messages)
        message = messages[index]
        match kind:
            case "out":
                del messages[index]
            case "in":
                messages.insert(index, {"role": "user", "content": "By the way, it rains."})
            case "twice":
                messages.insert(index, copy.deepcopy(message))
            case "moved":
                messages.insert(place, messages.pop(index))
            case "role":
                message["role"] = {"user": "system", "system": "user"}.get(message["role"], message["role"])
            case "split" if isinstance(message["content"], str) and message["role"] != "tool":
                at = other % (len(message["content"]) + 1)
                halves = message["content"][:at], message["content"][at:]
                message["content"] = [{"type": "text", "text": half} for half in halves]
            case "joined" if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"] if part["type"] == "text")
            case "empty":
                message["content"] = ""
            case "named":
                message["name"] = "ann"

    return edit


@st.composite
def edits_of_calls(draw: st.DrawFn) -> Edit:
    """Another value, type or key of an argument, a call more or less, results exchanged or of another call."""
    kind = draw(st.sampled_from(["value", "type", "key", "more", "less", "text", "result"]))

    def edit(messages: Messages) -> None:
        calling = next((message for message in messages if message.get("tool_calls")), None)
        if calling is None:
            return
        function = calling["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        match kind:
            case "value":
                arguments["place"] = "hall"
            case "type":
                arguments["depth"] = "2"
            case "key":
                arguments["Depth"] = arguments.pop("depth", 3)
            case "more":
                calling["tool_calls"].append({**copy.deepcopy(calling["tool_calls"][0]), "id": "call_2"})
            case "less":
                del calling["tool_calls"]
            case "text":
                arguments = {}
            case "result":
                for message in messages:
                    if message["role"] == "tool":
                        message["tool_call_id"] = "call_9"
        if kind in ("value", "type", "key", "text"):
            function["arguments"] = json.dumps(arguments)

    return edit


EDITS = st.lists(edits_of_characters() | edits_of_structure() | edits_of_calls(), min_size=1, max_size=2)


def read(app: AppUnderTest, messages: Messages, **fields: Any) -> tuple[int, str]:
    """What became of a request, and the text that stood before the model, less thinking in which nothing is thought:
    an answer in the tokens that the model wrote has it, as it stood at the end of its prompt."""
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "ttl": 0, **QUIET, **fields}
    with seen_prompts() as prompts:
        status = app.post(CHAT_PATH, body).status
    text = app.served.tokenizer.decode(prompts[-1]) if prompts else ""
    return status, re.sub(r"<think>\s*</think>\s*", "", text)


@given(EDITS)
@settings(max_examples=num_examples(4), deadline=None)
def test_an_edit_reaches_the_model(app: AppUnderTest, edits: list[Edit]) -> None:
    """Character by character; what is refused is refused in both modes."""
    messages = history(app)
    for edit in edits:
        if messages:
            edit(messages)
    known, plain = read(app, messages, session_id="fuzz"), read(app, messages, cache_mode="prefix")
    assert known == plain, "".join(unified_diff(plain[1].splitlines(True), known[1].splitlines(True)))


def test_an_edit_that_did_not_reach_it_would_be_seen(app: AppUnderTest) -> None:
    """The control: thinking that the client left out does come back, and is no part of the other prompt."""
    if app.family == "qwen3":  # type: ignore[attr-defined]
        pytest.skip("its template drops old thinking")
    talk: Messages = [{"role": "user", "content": "Look at the hill."}]
    with writing(app, model_text("qwen3_5", "Hm, a hill.", ANSWER, None), ends=False) as script:
        app.post(CHAT_PATH, {"messages": talk, "max_tokens": 99, "temperature": 0, "session_id": "control", **script})
    talk += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Thank you."}]
    assert read(app, talk, session_id="control") != read(app, talk, cache_mode="prefix")


@contextmanager
def seen_images() -> Iterator[list[list[str]]]:
    """The digests of the images in every prompt that reaches the engine meanwhile."""
    seen: list[list[str]] = []
    submit = Engine.submit

    def noted(engine: Engine, request: GenerationRequest) -> Any:
        seen.append([span.digest for span in request.prompt.images])
        return submit(engine, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "submit", noted)
        yield seen


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("sighted"), "qwen3_vl", max_kv_size=4096) as app:
        yield app


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(max_examples=num_examples(2), deadline=None)
def test_another_picture_reaches_the_model(sighted: AppUnderTest, was: list[int], now: list[int]) -> None:
    """Another one, another order, one more or less: the prompt's images are those that are sent."""

    def shown(seeds: list[int]) -> Messages:
        parts = [{"type": "image_url", "image_url": {"url": data_url(picture(seed, 56, 56))}} for seed in seeds]
        return [{"role": "user", "content": [{"type": "text", "text": "Look."}, *parts]}]

    digests = []
    for seeds, fields in (
        (was, {"session_id": "fuzz"}),
        (now, {"session_id": "fuzz"}),
        (now, {"cache_mode": "prefix"}),
    ):
        with seen_images() as images:
            body = {"messages": shown(seeds), "max_tokens": 1, "temperature": 0, **fields}
            assert sighted.post(CHAT_PATH, body).status == 200
        digests.append(images[-1])
    assert digests[1] == digests[2] and (digests[0] == digests[1]) is (was == now)
