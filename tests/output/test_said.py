"""What turns say: which differences are none, and which are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import ToolSpec
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.said import GeneratedMessage, MessageReader

LOOK = ToolSpec("look", None, {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}})
HERMES = select_format("auto", "<tool_call>", [], None)
CODER = select_format("auto", "<tool_call><function=", [], None)
GLM = select_format("auto", "<tool_call><arg_key>", [], None)
HARMONY = select_format("auto", "", ["<|channel|>", "<|message|>"], None)
FORMATS = (HERMES, CODER, GLM, HARMONY)


def said(output_format: OutputFormat, text: str, tools: tuple[ToolSpec, ...] = (LOOK,)) -> GeneratedMessage:
    return MessageReader.under(output_format, tools)(text)


CALLS = {
    "hermes": (HERMES, '<tool_call>\n{"name": "look", "arguments": {"q": "x  y", "n": 1}}\n</tool_call>'),
    "coder": (
        CODER,
        "<tool_call>\n<function=look>\n<parameter=q>\nx  y\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>look<arg_key>q</arg_key><arg_value>x  y</arg_value><arg_key>n</arg_key><arg_value>1</arg_value>"
        "</tool_call>",
    ),
    "harmony": (HARMONY, ' to=functions.look<|channel|>commentary json<|message|>{"q": "x  y", "n": 1}<|call|>'),
}


@pytest.mark.parametrize("form", CALLS)
def test_a_call_is_its_name_and_its_arguments(form: str) -> None:
    """Every form gives the same call; text and reasoning are empty."""
    assert said(*CALLS[form]) == GeneratedMessage("", "", (("look", '{"n": 1, "q": "x  y"}'),))


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("hermes", '{"q": "x  y", "n": 1}', '{"n":1,"q":"x  y"}'),
        ("hermes", '{"name": "look", "arguments"', '{"name":"look","parameters"'),
        ("hermes", "x  y", r"x\u0020 y"),
        ("coder", "<function=look>\n", "<function=look>"),
        ("glm", "</arg_key><arg_value>", "</arg_key>\n<arg_value>"),
        ("harmony", '{"q": "x  y", "n": 1}', '{ "q":"x  y","n":1}\n'),
        ("harmony", "<|call|>", ""),
        ("harmony", " to=functions.look<|channel|>commentary", "<|channel|>commentary to=functions.look"),
    ],
)
def test_spelling_says_nothing(form: str, before: str, after: str) -> None:
    """The spacing and the order of JSON, and white space between the tags of a call."""
    output_format, text = CALLS[form]
    assert before in text
    assert said(output_format, text.replace(before, after)) == said(output_format, text)


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize(("before", "after"), [("x  y", "x y"), ("x  y", "x  y "), ("look", "lok"), ("1", "2")])
def test_every_character_of_a_call_counts(form: str, before: str, after: str) -> None:
    """White space in a string, a letter of the name, a digit: another call."""
    output_format, text = CALLS[form]
    assert said(output_format, text.replace(before, after)) != said(output_format, text)


def test_types_differ() -> None:
    """1, 1.0, true and "1" are four arguments."""
    texts = [f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in ("1", "1.0", "true", '"1"')]
    assert len({said(HERMES, text) for text in texts}) == 4


def test_a_string_that_reads_like_json_is_a_string() -> None:
    """The tool's schema decides: spaces in a string argument are meaning, in an array they are not."""
    text = "<tool_call>look<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"
    assert said(GLM, text.format("q", "[1,2]")) != said(GLM, text.format("q", "[1, 2]"))
    assert said(GLM, text.format("other", "[1,2]")) == said(GLM, text.format("other", "[1, 2]"))


def test_without_tools_a_call_is_text() -> None:
    """Then its spacing is the text's own."""
    output_format, text = CALLS["hermes"]
    assert said(output_format, text, ()) == GeneratedMessage("", text, ())
    assert said(output_format, text.replace('"x  y", ', '"x  y",'), ()) != said(output_format, text, ())


@pytest.mark.parametrize("output_format", FORMATS[:3])
def test_empty_thinking_is_none(output_format: OutputFormat) -> None:
    """An empty think block, a bare closing tag and nothing at all say the same."""
    texts = ("<think>\n\n</think>\n\nyes", "</think>yes", "yes", "\n yes \n")
    assert {said(output_format, text) for text in texts} == {GeneratedMessage("", "yes", ())}
    assert said(output_format, "<think>\nno\n</think>\n\nyes") == GeneratedMessage("no", "yes", ())


def test_channels_are_reasoning_and_content() -> None:
    """Several messages of one answer are read together."""
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|> yes"
    assert said(HARMONY, text) == GeneratedMessage("hm", "yes", ())


@given(st.text(max_size=30), st.text(max_size=30))
def test_text_is_what_it_is(first: str, second: str) -> None:
    """Two plain texts say the same only if they differ in white space at their edges."""
    if not any(char in first + second for char in "<"):
        assert (said(HERMES, first) == said(HERMES, second)) == (first.strip() == second.strip())


def test_readers_of_equal_tools_have_equal_keys() -> None:
    """The key differs with any name or schema; what describes a tool does not matter to a reader."""
    other = ToolSpec("look", None, {"type": "object", "properties": {"q": {"type": "integer"}}})
    same = ToolSpec("look", "described", json.loads(json.dumps(LOOK.parameters)))
    keys = {MessageReader.under(HERMES, tools).key for tools in ((), (LOOK,), (other,), (LOOK, other))}
    assert len(keys) == 4
    assert MessageReader.under(HERMES, (same,)).key == MessageReader.under(HERMES, (LOOK,)).key
