"""Calls as they come: what goes out when, that the pieces are the whole, and what is left where the text breaks off."""

import json
import re
from collections.abc import Sequence
from types import ModuleType

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvserve.core import ContentDelta, OutputDelta, ToolCallEnd, ToolCallPiece, ToolCallStart, ToolSpec
from kvserve.output import harmony
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers import arguments as arguments_module
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.form import ParsedCall
from kvserve.output.tool_parsers.json_text import read_json, write_json
from tests.calls import calls_of
from tests.laws import num_examples
from tests.output.tool_parsers.test_calls import UNSAYABLE, strings_of, typed_calls

TAGS = select_format("auto", "", ["<think>", "</think>"], None)
HARMONY = select_format("auto", "", ["<|channel|>", "<|message|>"], None)
FORMS = (hermes, glm, qwen_coder, harmony)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WRITE = ToolSpec("write", None, {"type": "object", "properties": {"path": STRING, "n": INTEGER, "text": STRING}})


def format_of(form: ModuleType) -> OutputFormat:
    return HARMONY if form is harmony else TAGS


def splitter(tools: Sequence[ToolSpec], form: ModuleType = hermes, *, in_reasoning: bool = False) -> Splitter:
    return Splitter(format_of(form), starts_in_reasoning=in_reasoning, tools=tuple(tools), new_call_id=lambda: "c")


def steps(text: str, tools: Sequence[ToolSpec], form: ModuleType = hermes) -> list[list[OutputDelta]]:
    """The deltas of each character."""
    reader = splitter(tools, form)
    return [reader.feed(char) for char in text]


def finished(
    text: str, tools: Sequence[ToolSpec] = (WRITE,), form: ModuleType = hermes, *, cut: bool = False
) -> tuple[str, list[ToolCallEnd]]:
    """Content and calls of a text that ends like this, one character at a time."""
    reader = splitter(tools, form)
    deltas = [delta for char in text for delta in reader.feed(char)] + reader.finish(cut=cut)
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)), calls_of(deltas)


def said(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ToolCallPiece))


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
@given(typed_calls(), st.data())
@settings(max_examples=num_examples(20))
@example((ParsedCall("f", {"a": "x</arg_value></parameter>\n<", "b": ""}), ToolSpec("f", None, {})), None)
def test_the_pieces_are_the_arguments_of_the_whole_call(
    form: ModuleType, case: tuple[ParsedCall, ToolSpec], data: st.DataObject | None
) -> None:
    """However a call is cut, its pieces joined are, byte for byte, the JSON of the call that the whole text is read as;
    cut after any character, what went out is a beginning of that, and what is left is it or no JSON object."""
    call, tool = case
    assume(not any(re.search(UNSAYABLE.get(form, "(?!)"), text) for text in strings_of(call)))
    text = form.render(call, [tool])
    expected = write_json(dict(call.arguments))
    content, [end] = finished(text, [tool], form)
    assert (content, end.is_cut, end.call.name, end.call.arguments) == ("", False, call.name, expected)
    num_chars = len(text) // 2 if data is None else data.draw(st.integers(1, len(text)))
    begun = [delta for each in steps(text[:num_chars], [tool], form) for delta in each]
    assert expected.startswith(said(begun))
    for cut in (True, False):
        content, calls = finished(text[:num_chars], [tool], form, cut=cut)
        if not calls:
            assert not begun and content == text[:num_chars]
        elif calls[0].is_cut:
            assert content == "" and not is_object(calls[0].call.arguments)
            assert calls[0].call.arguments.startswith(said(begun))
        else:
            assert content == "" and calls[0].call.arguments == expected


def is_object(arguments: str) -> bool:
    """Whether a client may take arguments for those of a whole call."""
    try:
        return isinstance(read_json(arguments), dict)
    except ValueError:
        return False


GARBAGE = st.lists(
    st.sampled_from(
        ['"a"', '"b"', '"', ":", ",", "{", "}", "[", "]", "true", "nul", "abc", " ", "\\", "</tool_", "<", "é"]
    ),
    max_size=14,
).map("".join)


@given(GARBAGE, st.sampled_from(["", "}</tool_call>", "}}</tool_call>", "</tool_call>"]), st.booleans())
@settings(max_examples=num_examples(200))
@example('"a": "say "hi" there"', "}}</tool_call>", False)
@example('"a": true, "a": true', "}}</tool_call>", False)
def test_what_breaks_behind_the_beginning_is_in_the_arguments(garbage: str, end: str, cut: bool) -> None:
    """Whatever follows the beginning of a call's arguments: every letter of it is in them, in order; a call that the
    server takes for whole has an object's JSON, any other one has none."""
    content, [call] = finished('<tool_call>{"name": "write", "arguments": {' + garbage + end, cut=cut)
    assert content == ""
    assert _letters(call.call.arguments) == _letters(garbage + end)
    if is_object(call.call.arguments):
        assert call.call.arguments == write_json(read_json(call.call.arguments))
        assert not call.is_cut


def _letters(text: str) -> str:
    """Those that are no closing tag's; the beginning of one may stand at the end of a whole call."""
    said = text.replace("</tool_call>", "").removesuffix("</tool_")
    return "".join(char for char in said if char.isalpha())


# --- what goes out when ----------------------------------------------------------------------------------------------

HEADS = {
    hermes: '<tool_call>\n{"name": "write", "arguments": ',
    glm: "<tool_call>write<arg_key>text</arg_key><arg_value>",
    qwen_coder: "<tool_call>\n<function=write>\n<parameter=text>",
    harmony: "<|channel|>commentary to=functions.write <|constrain|>json<|message|>",
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
def test_a_call_goes_out_while_it_is_written(form: ModuleType) -> None:
    """The name as soon as the arguments begin and not before, then every letter of a text when it is written."""
    call = ParsedCall("write", {"text": "one two", "path": "a"})
    text = form.render(call, [WRITE])
    sent = steps(text, [WRITE], form)
    first = next(index for index, deltas in enumerate(sent) if deltas)
    assert text[: first + 1].rstrip("{") == HEADS[form]
    assert sent[first][0] == ToolCallStart("c", "write")
    start = text.index("one two")
    for offset in range(1, len("one two")):
        seen = said([delta for deltas in sent[: start + offset] for delta in deltas])
        assert seen == '{"text": "' + "one two"[:offset]
    assert isinstance(sent[-1][-1], ToolCallEnd)


def test_what_is_no_string_goes_out_when_it_is_whole() -> None:
    """A number or a word in a form of bare text has to be finished before its JSON is known."""
    text = "<tool_call>write<arg_key>n</arg_key><arg_value>12</arg_value><arg_key>text</arg_key><arg_value>"
    seen = [said(deltas) for deltas in steps(text, [WRITE])]
    assert [piece for piece in seen if piece] == ['{"n": ', '12, "text": "']


@pytest.mark.parametrize("value", ["[1, 2, 3]", "1", "{}"])
def test_a_long_value_is_looked_at_as_far_as_it_decides(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it can only be a string is known by its beginning; with all of it at each character a list of a million
    would take minutes. A call that the end cuts has all of it all the same."""
    asked: list[str] = []
    must_be_string = arguments_module.must_be_string
    monkeypatch.setattr(
        arguments_module, "must_be_string", lambda text, *others: asked.append(text) or must_be_string(text, *others)
    )
    long, tool = value[:-1] + value[-1] * 500, ToolSpec("write", None, {})
    _, [end] = finished(f"<tool_call>write<arg_key>n</arg_key><arg_value>{long}", [tool], cut=True)
    assert end.call.arguments == f'{{"n": "{long}'
    assert sum(map(len, asked)) < 10 * len(long)


@pytest.mark.parametrize(
    ("schema", "value", "goes_out_with"),
    [
        ({"type": ["string", "null"]}, "null", ""),
        ({"type": ["string", "null"]}, "nullable", "nulla"),
        ({}, "def f", "d"),
        ({}, "2024 is", "2024 "),
        ({}, '{"a": 1} is', ""),
        ({"anyOf": [STRING, INTEGER]}, "{x", "{"),
        ({"enum": ["r", "w"]}, "r", "r"),
        (INTEGER, "five", ""),
    ],
)
def test_a_value_that_can_only_be_a_string_is_not_waited_for(schema: object, value: str, goes_out_with: str) -> None:
    """Where the schema leaves the type open, text goes out from the character on that makes it a string."""
    tool = ToolSpec("f", None, {"type": "object", "properties": {"a": schema}})
    head = "<tool_call>f<arg_key>a</arg_key><arg_value>"
    sent = steps(head + value, [tool])
    texts = [said([delta for deltas in sent[: len(head) + size] for delta in deltas]) for size in range(len(value) + 1)]
    first = next((size for size, text in enumerate(texts) if len(text) > len('{"a": "')), None)
    assert value[:first] == goes_out_with if first is not None else not goes_out_with
    _, [end] = finished(f"{head}{value}</arg_value></tool_call>", [tool])
    expected = None if value == "null" else value
    assert json.loads(end.call.arguments) == {"a": expected}


def test_a_possible_closing_tag_waits() -> None:
    """What may end a value is held back until it is known, and then it is all there."""
    reader = splitter([WRITE])
    assert said(reader.feed(HEADS[glm] + "a</arg_value> <")) == '{"text": "a'
    assert said(reader.feed("b")) == "</arg_value> <b"
    assert said(reader.feed("</arg_value>")) == ""
    deltas = reader.feed("</tool_call>")
    assert said(deltas) == '"}' and isinstance(deltas[-1], ToolCallEnd)


@pytest.mark.parametrize("text", ['{"name": "who", "arguments": {"a": "b', "who<arg_key>a</arg_key><arg_value>b"])
def test_a_tool_that_nobody_offers_sends_nothing_early(text: str) -> None:
    """It may be prose; if it is a whole call in the end it is one."""
    assert not any(steps(f"<tool_call>{text}", [WRITE]))


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"text": "b"}, "name": "write"}',
        '{"name": "write", "arguments": "{\\"text\\": \\"b\\"}"}',
        '[{"name": "write", "arguments": {"text": "b"}}]',
    ],
)
def test_odd_spellings_come_whole(text: str) -> None:
    """A name behind its arguments, arguments inside a string and a list of calls are read once they are finished."""
    assert not any(steps(f"<tool_call>{text}", [WRITE]))
    _, [end] = finished(f"<tool_call>{text}</tool_call>")
    assert end.call.arguments == '{"text": "b"}'


def test_a_call_inside_thinking_waits() -> None:
    """It is perhaps only thought of: nothing goes out before the turn ends behind it."""
    reader = splitter([WRITE], in_reasoning=True)
    text = hermes.render(ParsedCall("write", {"text": "b"}), [WRITE])
    assert not any(reader.feed(char) for char in text)
    assert [end.call.arguments for end in calls_of(reader.finish(cut=False))] == ['{"text": "b"}']


# --- where the text breaks off ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (HEADS[hermes] + '{"text": "one', '{"text": "one'),
        (HEADS[hermes] + '{"text": "one\\u00', '{"text": "one\\u00'),
        (HEADS[hermes] + '{"text": "\\ud83d', '{"text": "\\ud83d'),
        (HEADS[hermes] + '{"text" :"a","n":12', '{"text": "a", "n": 12'),
        (HEADS[glm] + 'say "hi"\n</arg_', '{"text": "say \\"hi\\"\\n</arg_'),
        (HEADS[glm] + "a</arg_value><arg_key>n</arg_key><arg_value>12}", '{"text": "a", "n": "12}'),
        (HEADS[glm] + "a</arg_value><arg_key>}", '{"text": "a", "}'),
        (HEADS[glm] + "a</arg_value><arg_key>n</arg_key>\n<arg_", '{"text": "a", "n</arg_key>\n<arg_'),
        (HEADS[glm] + "a</arg_value><arg_key>\n</tool_call>", '{"text": "a</arg_value><arg_key>\\n</tool_call>'),
        (HEADS[qwen_coder] + "\na\n</parameter>\n<parameter=n", '{"text": "a", "n'),
        (HEADS[qwen_coder] + "\na\n", '{"text": "a\\n'),
        (HEADS[qwen_coder] + "\na\n</parameter>\n</function", '{"text": "a\\n</parameter>\\n</function'),
    ],
)
@pytest.mark.parametrize("cut", [True, False])
def test_all_that_was_written_of_a_cut_call_is_in_its_arguments(text: str, arguments: str, cut: bool) -> None:
    """The call has begun, so its text is its arguments: as far as it came, and never a JSON object."""
    content, [end] = finished(text, cut=cut)
    assert (content, end.is_cut, end.call.arguments) == ("", True, arguments)
    assert not is_object(arguments)


@pytest.mark.parametrize("text", [HEADS[hermes] + '{"text": "a"}, "why": 2}', HEADS[harmony] + '{"text": "a"}, no'])
def test_the_last_bracket_waits_for_the_end(text: str) -> None:
    """What has gone out before a call is over is no JSON object, so nobody takes it for the whole call too early."""
    form = harmony if text.startswith(HEADS[harmony]) else hermes
    sent = [
        said([delta for deltas in steps(text[:size], [WRITE], form) for delta in deltas]) for size in range(len(text))
    ]
    assert not any(map(is_object, sent)) and sent[-1].startswith('{"text": "a"')


@pytest.mark.parametrize("tail", ["}", "}}", "}}\n</tool_ca", "}\n</tool_call>", "}}</tool_call>"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_call_whose_arguments_are_whole_is_whole(tail: str, cut: bool) -> None:
    """Its own last bracket and its closing tag add nothing: a model forgets them, and the limit may cut them."""
    content, [end] = finished(HEADS[hermes] + '{"text": "a"' + tail, cut=cut)
    assert (content, end.is_cut, end.call.arguments) == ("", False, '{"text": "a"}')


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"text": "say "hi" there"}}\n', '{"text": "say "hi" there"}}\n'),
        ('{"text": "\\d"}}\n', '{"text": "\\d"}}\n'),
        ('{"n": 1, "n": 2}}\n', '{"n": 1, "n": 2}}\n'),
        ('{"n": 1e999}}\n', '{"n": 1e999}}\n'),
        ('{"n": 1}, "why": 2}\n', '{"n": 1}, "why": 2}\n'),
        ('{"n": ', '{"n": '),
        ('{"</tool_call>": 1, "</tool_call>": 2}}', '{"</tool_call>": 1, "</tool_call>": 2}}'),
    ],
)
def test_a_broken_call_ends_with_its_closing_tag(body: str, arguments: str) -> None:
    """What cannot be read stands in the arguments as the model wrote it; what follows the tag is content."""
    content, [end] = finished(f"{HEADS[hermes]}{body}</tool_call>after")
    assert (content, end.is_cut, end.call.arguments) == ("after", False, arguments)
    assert not is_object(arguments)


def test_what_is_no_key_of_a_bare_form_is_in_the_value() -> None:
    """A label that no key can be ends nothing: the value goes on, and nothing of it was sent as another one's."""
    value = "a</arg_value><arg_key>foo\nbar</arg_key>"
    content, [end] = finished(f"{HEADS[glm]}{value}</arg_value></tool_call>")
    assert (content, end.is_cut, json.loads(end.call.arguments)) == ("", False, {"text": value})
