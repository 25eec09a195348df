"""What a client changes in a conversation that the server itself led reaches the model, on the path without a model.

The answers are the server's own, so their thinking, the text of their calls and their very tokens are remembered and
could come back; the texts hold everywhere what rules are made for. Judge is a server that knows nothing of it.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pytest

from benchmarks.model_free import ModelFree
from benchmarks.recordings import Reply, Request
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.core import RequestId
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.serve import preview
from tests.laws import THREE_KINDS, sampled, sampled_cells
from tests.models import tiny_model

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "glm4_moe_lite")

LOG = (
    "Stats: runtime 1m5s • tokens 3k\nCurrent time is 10:15\ncch=abc1;\n<total_tokens>500 tokens left</total_tokens>\n"
    'x-anthropic-billing-header: cc_version=1; cch=abc1;\n  "message_id": "77",\nToday\'s date is 2026-11-20.\n'
    "<system-reminder>\nDo it.\n</system-reminder>\nif x:\n    y = 'a  b'\n"
)
"""A file in which every form stands that rules know, each as part of somebody's own content."""

THOUGHTS = ("I think of the one.", "I think of the two.")

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "enum": ["a", "b"]},
                "n": {"type": "number"},
                "flags": {"type": "array"},
                "sub": {"type": "object"},
            },
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "wait", "description": "Wait.", "parameters": {}}}
FIRST_CALL = {"path": "é.txt", "n": 1, "flags": [1, 2, True], "sub": {"x": 1, "y": 0.1}}
CALLS = ({"path": "left.txt", "n": 2}, {"path": "right.txt", "n": 2})

type Body = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How the client behaves: whether it echoes thinking, gives every call one id, and leaves once and asks again."""

    name: str
    thinks: bool = True
    one_id: bool = False
    leaves: bool = False


STYLES = (Style("kept"), Style("stripped", thinks=False), Style("one id", one_id=True), Style("aborted", leaves=True))


def _call(arguments: object, call_id: str) -> Body:
    text = json.dumps(arguments, separators=(",", ":"), ensure_ascii=True)
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": text}}


def led(model: ModelFree, style: Style) -> Body:
    """A conversation that the server answered up to its last request, whose body this is. It has a session of its own,
    so that all that could be put back may be."""
    model.forget()
    messages: list[Body] = [
        {"role": "system", "content": f"You look at files.\n{LOG}"},
        {"role": "user", "content": f"What is in it?\n```\n{LOG}```\nAnd cch=abc2; what is that?"},
    ]
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    body: Body = {"messages": messages, "tools": [TOOL, OTHER_TOOL], "session_id": "one", **thinks}
    asked = 0

    def ask(said: str, thought: str, *calls: object) -> None:
        nonlocal asked
        reply = Reply(thought, said, tuple(("look", json.dumps(call, ensure_ascii=False)) for call in calls))
        if style.leaves:
            model.serve(Request(copy.deepcopy(body), None), asked)
        model.serve(Request(copy.deepcopy(body), reply), asked + 100)
        echoed: Body = {"role": "assistant", "content": said or None}
        if style.thinks and model.served.template.accepts_thinking:
            echoed["reasoning_content"] = thought
        if calls:
            ids = ["c" if style.one_id else f"c{asked}x{number}" for number in range(len(calls))]
            echoed["tool_calls"] = [_call(call, call_id) for call, call_id in zip(calls, ids, strict=True)]
        messages.append(echoed)
        asked += 1

    def results(*texts: str) -> None:
        calls = messages[-1]["tool_calls"]
        messages.extend(
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        )

    ask("First `a  b`.", THOUGHTS[0], FIRST_CALL)
    results(LOG)
    ask("", THOUGHTS[1], *CALLS)
    results("left = 1", "right = 2")
    ask("Done.", THOUGHTS[0])
    messages.append({"role": "user", "content": "Thank you."})
    ask("Done.", THOUGHTS[1])
    messages.append({"role": "user", "content": "And now?"})
    return body


def _in(index: int, old: str, new: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        content = body["messages"][index]["content"]
        assert old in content
        body["messages"][index]["content"] = content.replace(old, new, 1)

    return change


def _argument(message: int, call: int, key: str, value: object) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        function = body["messages"][message]["tool_calls"][call]["function"]
        function["arguments"] = json.dumps({**json.loads(function["arguments"]), key: value})

    return change


def _raw_arguments(message: int, text: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        body["messages"][message]["tool_calls"][0]["function"]["arguments"] = text

    return change


def _swap(one: int, other: int, *, with_ids: bool) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        messages = body["messages"]
        if with_ids:
            messages[one], messages[other] = messages[other], messages[one]
        else:
            first, second = messages[one]["content"], messages[other]["content"]
            messages[one]["content"], messages[other]["content"] = second, first

    return change


def _schema(change_tool: Callable[[Body], None]) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        body["tools"] = copy.deepcopy(body["tools"])
        change_tool(body["tools"][0]["function"])

    return change


def _reordered_keys(function: Body) -> None:
    function["parameters"] = dict(reversed(function["parameters"].items()))


def _dropped(index: int) -> Callable[[Body], None]:
    return lambda body: body["messages"].pop(index)


def _given(**fields: Any) -> Callable[[Body], None]:
    return lambda body: body.update(fields)


def _every_place(old: str, new: str) -> dict[str, Callable[[Body], None]]:
    """The same edit where the system, the user and a tool said it."""
    return {f"{old!r} of {who}": _in(index, old, new) for who, index in (("system", 0), ("user", 1), ("tool", 3))}


CHANGES: dict[str, Callable[[Body], None]] = {
    **_every_place("runtime 1m5s", "runtime 9m5s"),
    **_every_place("tokens 3k", "tokens 4k"),
    **_every_place("10:15", "10:16"),
    **_every_place("cch=abc1", "cch=abc9"),
    **_every_place(">500 tokens", ">501 tokens"),
    **_every_place('"77"', '"78"'),
    **_every_place("2026-11-20", "2026-11-21"),
    **_every_place("Do it.", "Undo it."),
    **_every_place("    y", "  y"),
    **_every_place("'a  b'", "'a b'"),
    "the user's own cch": _in(1, "cch=abc2", "cch=abc3"),
    "an argument's text": _argument(2, 0, "path", "e.txt"),
    "an argument's text in another normal form": _argument(2, 0, "path", "e\u0301.txt"),
    "a number becomes a text": _argument(2, 0, "n", "1"),
    "a number becomes true": _argument(2, 0, "n", True),
    "a number becomes another": _argument(2, 0, "n", 1.5),
    "the order of a list": _argument(2, 0, "flags", [2, 1, True]),
    "true in a list becomes 1": _argument(2, 0, "flags", [1, 2, 1]),
    "the last digit of a number": _raw_arguments(
        2, '{"path":"é.txt","n":1,"flags":[1,2,true],"sub":{"x":1,"y":0.10000000000000000001}}'
    ),
    "a key named twice": _raw_arguments(
        2, '{"path":"b.txt","path":"é.txt","n":1,"flags":[1,2,true],"sub":{"x":1,"y":0.1}}'
    ),
    "an argument more": _argument(2, 0, "sub", {"x": 1, "y": 0.1, "z": None}),
    "arguments that are no JSON": _raw_arguments(2, '{"path": '),
    "the second of two calls": _argument(4, 1, "path", "middle.txt"),
    "results of two calls swapped": _swap(5, 6, with_ids=False),
    "results of two calls in another order": _swap(5, 6, with_ids=True),
    "results of two turns swapped": _swap(3, 5, with_ids=False),
    "white space inside an answer": _in(2, "`a  b`", "`a b`"),
    "a word of an answer": _in(7, "Done", "Gone"),
    "a message is gone": _dropped(6),
    "an answer is gone": _dropped(7),
    "a schema's enum": _schema(lambda function: function["parameters"]["properties"]["path"]["enum"].reverse()),
    "a schema's keys in another order": _schema(_reordered_keys),
    "a tool's description": _schema(lambda function: function.update(description="Look at a pile.")),
    "no tools": lambda body: body.pop("tools"),
    "the thinking switch": _given(chat_template_kwargs={"enable_thinking": False}),
}

THOUGHT_CHANGES: dict[str, Callable[[Body], None]] = {
    "a word of the thinking": lambda body: body["messages"][2].update(reasoning_content="I think of the ten."),
    "two turns' thinking swapped": lambda body: (
        body["messages"][2].update(reasoning_content=THOUGHTS[1]),
        body["messages"][4].update(reasoning_content=THOUGHTS[0]),
    ),
    "thinking in the running loop": lambda body: body["messages"][9].update(reasoning_content="None."),
}


def model_of(family: str) -> ModelFree:
    return ModelFree(tiny_model(family), is_cuttable=CONVENTIONS[family].is_cuttable)


@pytest.fixture(scope="module", params=sampled(FAMILIES, THREE_KINDS))
def models(request: pytest.FixtureRequest) -> tuple[str, ModelFree, ModelFree]:
    """A family and two servers of one model of it: one that leads conversations, one that knows of none."""
    return request.param, model_of(request.param), model_of(request.param)


@pytest.fixture(scope="module", params=STYLES, ids=lambda style: style.name)
def style(request: pytest.FixtureRequest) -> Style:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def before(models: tuple[str, ModelFree, ModelFree], style: Style) -> tuple[Body, str]:
    """A conversation that the first of the models has led, up to its last request, and what the model would read of it.
    Nothing changes by reading."""
    _, old, _ = models
    body = led(old, style)
    return body, said(read(old, body), less_thinking=not style.thinks)


def read(model: ModelFree, body: Body) -> str:
    """What the model would read of this request now, from its very tokens."""
    turn = parse_chat(body, {}, model.served.defaults, RequestId("blind")).turn
    return model.served.tokenizer.decode(preview(turn, model.served).tokens.ids)


def said(text: str, *, less_thinking: bool) -> str:
    """What a prompt says: JSON's spacing, empty thinking in history and the white space around thinking aside, but not
    that inside of texts. GLM writes empty thinking as its closing tag alone."""
    for thought in THOUGHTS if less_thinking else ():
        text = text.replace(thought, "")
    text = re.sub(r"(?:<think>\s*|(?<=<\|assistant\|>))</think>\s*(?=\S)", "", text)
    return re.sub(r"(?<=[,:{}\[\]>]) +|\s+(?=[<{])", "", text).replace("\n\n", "\n")


def is_shown(old: ModelFree, change: str) -> bool:
    """Whether the template writes the change at all: some write arguments as the values that they parse to, some know
    no thinking, and some drop it."""
    if change in THOUGHT_CHANGES:
        return bool(old.served.template.accepts_preserve_thinking)
    return {
        "the thinking switch": old.served.template.accepts_thinking,
        "a number becomes a text": old.served.output_format.name not in ("glm", "qwen_coder"),
    }.get(change, True)


OF_CALLS = ("argument", "calls", "results")


def is_in_every_run(models: str, style: Style, change: str) -> bool:
    """Each change where layers hold states, where they can be cut too (of a value that a rule knows one place), and
    each way to behave; the rest is the same once more. Where all calls have one id it is calls and their results that
    could be mixed up."""
    return (
        (models, style.name) == ("qwen3_5", "kept")
        or ((models, style.name) == ("qwen3", "stripped") and not change.endswith((" of system", " of tool")))
        or ((models, style.name) == ("gemma3", "one id") and any(word in change for word in OF_CALLS))
        or (models, style.name, change) == ("qwen3", "aborted", "a message is gone")
    )


@sampled_cells(is_in_every_run)
@pytest.mark.parametrize("change", {**CHANGES, **THOUGHT_CHANGES})
def test_a_change_reaches_the_model(
    models: tuple[str, ModelFree, ModelFree], style: Style, before: tuple[Body, str], change: str
) -> None:
    """The model reads what it reads on a server that never saw the conversation, and not what was there before."""
    _, old, new = models
    if change in THOUGHT_CHANGES and not style.thinks:
        pytest.skip("a client that strips thinking changes none")
    less_thinking = not style.thinks
    body, unchanged = copy.deepcopy(before)
    {**CHANGES, **THOUGHT_CHANGES}[change](body)
    new.forget()
    remembering, fresh = (said(read(model, body), less_thinking=less_thinking) for model in (old, new))
    assert remembering == fresh
    assert (remembering != unchanged) == is_shown(old, change)


def _num_common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@sampled_cells(
    lambda models, style: (models, style.name) in (("qwen3_5", "stripped"), ("qwen3", "stripped"), ("gemma3", "one id"))
)
def test_a_tool_more_reaches_the_model_where_it_comes(
    models: tuple[str, ModelFree, ModelFree], style: Style, before: tuple[Body, str]
) -> None:
    """It is described behind what the model has read, which stays as it was."""
    _, old, _ = models
    body, unchanged = copy.deepcopy(before)
    body["tools"].append({**OTHER_TOOL, "function": {"name": "go", "description": "Walk to a hill."}})
    remembering = said(read(old, body), less_thinking=not style.thinks)
    ahead = _num_common(remembering, unchanged)
    behind = _num_common(remembering[ahead:][::-1], unchanged[ahead:][::-1])
    assert ahead + behind == len(unchanged), "something else changed too"
    assert "Walk to a hill." in remembering[ahead : len(remembering) - behind]


@sampled_cells(lambda models, change, **_: models == "qwen3_5" and "user" in change)
@pytest.mark.parametrize(
    ("change", "rule"), [("'10:15' of user", "current_time"), ("'10:15' of system", "current_time")]
)
def test_a_policy_that_hides_a_change_is_seen(
    models: tuple[str, ModelFree, ModelFree], monkeypatch: pytest.MonkeyPatch, change: str, rule: str
) -> None:
    """The control: under an operator's policy that puts the old time back, the comparison finds it."""
    monkeypatch.setenv("CACHE_RULE_POLICIES", f"{rule}=always")
    family, _, new = models
    old = model_of(family)
    body = led(old, STYLES[0])
    CHANGES[change](body)
    new.forget()
    assert said(read(old, body), less_thinking=False) != said(read(new, body), less_thinking=False)
