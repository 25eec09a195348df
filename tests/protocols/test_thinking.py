"""Every thinking switch, the precedence between them, and their contradictions."""

import pytest

from kvserve.core import ThinkingChoice
from kvserve.errors import BadRequest
from kvserve.protocols.thinking import LEVELS, read_thinking

OFF = ThinkingChoice(enabled=False)
ON = ThinkingChoice(enabled=True)
LOW = ThinkingChoice(enabled=True, effort="low")
SILENT = ThinkingChoice()

SWITCHES = [
    ({}, SILENT),
    ({"enable_thinking": True}, ON),
    ({"enable_thinking": False}, OFF),
    ({"enable_thinking": "false"}, OFF),
    ({"enable_thinking": None}, SILENT),
    ({"thinking": True}, ON),
    ({"thinking": False}, OFF),
    ({"thinking": "off"}, OFF),
    ({"thinking": "on"}, ON),
    ({"thinking": "None"}, OFF),
    ({"thinking": "low"}, LOW),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ThinkingChoice(True, max_num_tokens=1024)),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, ThinkingChoice(True, max_num_tokens=0)),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, OFF),
    ({"thinking": {"budget_tokens": 0}}, OFF),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, ON),
    ({"thinking": {"type": "enabled", "clear_thinking": False}}, ThinkingChoice(True, None, True)),
    ({"thinking": {}}, SILENT),
    ({"reasoning_effort": "low"}, LOW),
    ({"reasoning_effort": "none"}, OFF),
    ({"reasoning": {"enabled": False}}, OFF),
    ({"reasoning": {"enabled": True, "effort": "low"}}, LOW),
    ({"reasoning": {"effort": "low"}}, LOW),
    ({"reasoning": {"effort": "none"}}, OFF),
    ({"reasoning": {"level": "off"}}, OFF),
    ({"reasoning": {"level": "low"}}, LOW),
    ({"reasoning": {"type": "disabled"}}, OFF),
    ({"reasoning": {"type": "enabled"}}, ON),
    ({"reasoning": {"max_tokens": 100}}, ThinkingChoice(True, max_num_tokens=100)),
    ({"reasoning": {"max_tokens": None}}, SILENT),
    ({"reasoning": {"effort": "low", "max_tokens": 100}}, ThinkingChoice(True, "low", max_num_tokens=100)),
    ({"thinking_budget": 50}, ThinkingChoice(True, max_num_tokens=50)),
    ({"thinking_budget": 0}, OFF),
    ({"thinking_token_budget": 50, "enable_thinking": False}, OFF),
    ({"thinking_token_budget": 50, "enable_thinking": True}, ThinkingChoice(True, max_num_tokens=50)),
    ({"reasoning": "low"}, LOW),
    ({"preserve_thinking": True}, ThinkingChoice(preserve=True)),
    ({"preserve_thinking": False, "enable_thinking": False}, ThinkingChoice(False, None, False)),
    ({"clear_thinking": True}, ThinkingChoice(preserve=False)),
    *(({"reasoning_effort": level}, ThinkingChoice(True, level)) for level in LEVELS),
]
NESTING = [
    (),
    ("chat_template_kwargs",),
    ("extra_body",),
    ("extra_body", "chat_template_kwargs"),
    ("metadata",),
    ("extra_body", "metadata"),
]


def nest(body: dict[str, object], path: tuple[str, ...]) -> dict[str, object]:
    """`body` under the keys of `path`."""
    for key in reversed(path):
        body = {key: body}
    return body


@pytest.mark.parametrize("path", NESTING, ids=".".join)
@pytest.mark.parametrize(("body", "expected"), SWITCHES, ids=str)
def test_a_switch_means_the_same_in_every_place(
    body: dict[str, object], expected: ThinkingChoice, path: tuple[str, ...]
) -> None:
    """The whole table of switches holds at the top level and in each nested place."""
    assert read_thinking(nest(body, path)) == expected


@pytest.mark.parametrize("outer", range(len(NESTING) - 1))
def test_the_more_specific_place_counts(outer: int) -> None:
    """Of two neighbouring places the first one of the documented order decides."""
    body = nest({"enable_thinking": False, "preserve_thinking": True}, NESTING[outer])
    inner = nest({"enable_thinking": True, "preserve_thinking": False}, NESTING[outer + 1])
    assert read_thinking(merged(body, inner)) == ThinkingChoice(False, None, True)


def merged(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    """Both objects in one, nested objects too."""
    both = dict(one)
    for key, value in other.items():
        mine = both.get(key)
        both[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return both


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ({"reasoning_effort": "low", "enable_thinking": False}, OFF),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, LOW),
        ({"reasoning_effort": "low", "extra_body": {"reasoning_effort": "high"}}, LOW),
        ({"reasoning_effort": "low", "extra_body": {"preserve_thinking": True}}, ThinkingChoice(True, "low", True)),
        ({"enable_thinking": True, "thinking": "on", "reasoning": {"enabled": True}}, ON),
    ],
)
def test_a_switch_beats_a_level(body: dict[str, object], expected: ThinkingChoice) -> None:
    """A level says how much, a switch says whether, wherever they stand."""
    assert read_thinking(body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"enable_thinking": True, "thinking": "off"}, "thinking"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.effort"),
        ({"preserve_thinking": True, "clear_thinking": True}, "clear_thinking"),
        ({"metadata": {"enable_thinking": True, "thinking": False}}, "metadata.thinking"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
    ],
)
def test_a_contradiction_in_one_place_is_refused(body: dict[str, object], param: str) -> None:
    """Two fields side by side that disagree are a 400 that names the second."""
    with pytest.raises(BadRequest, match="contradicts") as caught:
        read_thinking(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"thinking": "ultra"}, "thinking"),
        ({"thinking": {"type": "banana"}}, "thinking.type"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"reasoning": [True]}, "reasoning"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"preserve_thinking": "low"}, "preserve_thinking"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
        ({"extra_body": {"thinking": 5}}, "extra_body.thinking"),
        ({"metadata": 5}, "metadata"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": True}}, "reasoning.max_tokens"),
        ({"thinking_budget": -1}, "thinking_budget"),
        (
            {"extra_body": {"chat_template_kwargs": {"thinking_token_budget": []}}},
            "extra_body.chat_template_kwargs.thinking_token_budget",
        ),
    ],
)
def test_a_mistyped_switch_is_named(body: dict[str, object], param: str) -> None:
    """Unknown words and wrong types are a 400 that names the field with its place."""
    with pytest.raises(BadRequest) as caught:
        read_thinking(body)
    assert caught.value.param == param
