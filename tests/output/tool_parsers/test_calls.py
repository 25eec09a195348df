"""The law of the three written forms, parse(render(call)) == call, and what each of them refuses."""

import json
import re
from types import ModuleType

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.form import NotACall, ParsedCall
from tests.laws import num_examples
from tests.models import tiny_model

FORMS = (glm, qwen_coder, hermes)

# What the bare-text forms cannot say inside a string: exactly the sequence that ends a value. JSON has no such thing.
UNSAYABLE: dict[ModuleType, str] = {
    glm: r"</arg_value>[ \t\r\n]*(<arg_key>[^<>\r\n]+</arg_key>[ \t\r\n]*<arg_value>|</tool_call>)",
    qwen_coder: r"</parameter>[ \t\r\n]*(<parameter=[^<>\r\n]+>|</function>[ \t\r\n]*</tool_call>)",
    hermes: r"(?!)",
}

NASTY = (
    "</tool_call>", "<tool_call>", "</parameter>", "</function>", "<parameter=a>", "<function=f>", "</arg_value>",
    "<arg_key>", "</arg_key>", "<think>", "</think>", '"', "'", "\\", "\n", "\r\n", "\t", " ", "{", "}", "[", "]", ",",
    ":", "null", "true", "5", "-0.5", "1e5", "naïve", "Жук", "漢字", "🐟", "\u2028", "\x00", "a", "echo hi",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(NASTY) | st.text(max_size=4), max_size=8).map("".join)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_\-.]{0,12}", fullmatch=True)
KEYS = st.from_regex(r"[^<>\r\n]{1,12}", fullmatch=True)
BY_TYPE: dict[str, st.SearchStrategy[object]] = {
    "string": TEXTS,
    "integer": st.integers(),
    "number": NUMBERS,
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(TEXTS, JSON, max_size=3),
}


@st.composite
def typed_calls(draw: st.DrawFn) -> tuple[ParsedCall, ToolSpec]:
    """A call and the tool whose schema gives the type of each of its arguments."""
    types = draw(st.dictionaries(KEYS, st.sampled_from(sorted(BY_TYPE)), max_size=4))
    arguments = {key: draw(BY_TYPE[name]) for key, name in types.items()}
    name = draw(NAMES)
    schema = {"type": "object", "properties": {key: {"type": name} for key, name in types.items()}}
    return ParsedCall(name, arguments), ToolSpec(name, None, schema)


def strings_of(call: ParsedCall) -> list[str]:
    return [value for value in call.arguments.values() if isinstance(value, str)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
@given(typed_calls())
@settings(max_examples=num_examples(30))
@example((ParsedCall("f", {"a": "x</tool_call>y</parameter></function>"}), ToolSpec("f", None, {})))
@example((ParsedCall("f", {"a": "</arg_value>", "b": " </parameter>\n"}), ToolSpec("f", None, {})))
@example((ParsedCall("f", {"a": "\n\nx\n", "b": ""}), ToolSpec("f", None, {})))
@example((ParsedCall("f", {"a": "</arg_value>\n<arg_key>", "b": "</parameter><parameter="}), ToolSpec("f", None, {})))
@example(
    (
        ParsedCall("f", {"a": "</arg_value><arg_key>b</arg_key>", "b": "</parameter> <parameter=a\n"}),
        ToolSpec("f", None, {}),
    )
)
@example((ParsedCall("f", {}), ToolSpec("f", None, {})))
def test_a_rendered_call_is_read_back_exactly(form: ModuleType, case: tuple[ParsedCall, ToolSpec]) -> None:
    """parse(render(call)) == call for any typed arguments; only a string with the value's own end in it is excluded."""
    call, tool = case
    assume(not any(re.search(UNSAYABLE[form], text) for text in strings_of(call)))
    assert form.parse(form.render(call, [tool]), [tool]) == [call]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
@given(st.dictionaries(KEYS, JSON, max_size=3))
@settings(max_examples=num_examples(25))
def test_without_a_schema_only_strings_that_read_as_json_change(form: ModuleType, arguments: dict[str, object]) -> None:
    """For an unknown tool the law holds too, unless a string looks like another JSON value."""
    call = ParsedCall("f", {"first": 1, **arguments})
    assume(not any(re.search(UNSAYABLE[form], text) for text in strings_of(call)))
    assume(form is hermes or not any(reads_as_json(text) for text in strings_of(call)))
    assert form.parse(form.render(call, []), []) == [call]


def reads_as_json(text: str) -> bool:
    try:
        return not isinstance(json.loads(text, strict=False), str)
    except ValueError:
        return False


@pytest.mark.parametrize("form", (glm, qwen_coder))
def test_the_excluded_strings_really_are_ambiguous(form: ModuleType) -> None:
    """A value with its own end inside is written like two values: the exclusion of the law is no convenience."""
    end = "</arg_value></tool_call>" if form is glm else "\n</parameter>\n</function>\n</tool_call>"
    text = form.render(ParsedCall("f", {"a": f"x{end}"}), [])
    with pytest.raises(NotACall, match="text after the call"):
        form.parse(text, [])


def tool(**properties: object) -> list[ToolSpec]:
    return [ToolSpec("f", None, {"type": "object", "properties": properties})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/properties/other"}, "5", "5"),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "True", "True"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({}, "5", 5),
        ({}, " 5", " 5"),
        ({}, "007", "007"),
        ({}, "NaN", "NaN"),
        ({}, '"5"', '"5"'),
        ({}, "hello", "hello"),
    ],
)
@pytest.mark.parametrize("form", (glm, qwen_coder))
def test_bare_text_is_typed_by_the_schema(form: ModuleType, schema: object, text: str, value: object) -> None:
    """A string stays one where the schema says so; other types and untyped values are JSON where they are JSON."""
    rendered = form.render(ParsedCall("f", {"a": text}), [])
    [call] = form.parse(rendered, tool(a=schema, other={"type": "string"}))
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


F_OF_X = ParsedCall("f", {"a": "x"})


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (hermes, '<tool_call>{"name":"f"}</tool_call>', [ParsedCall("f", {})]),
        (hermes, '<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', [ParsedCall("f", {"a": 1})]),
        (hermes, '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', [ParsedCall("f", {"a": 1})]),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', [ParsedCall("f", {"a": "x\ny"})]),
        (hermes, '<tool_call>[{"name":"f"},{"name":"g"}]</tool_call>', [ParsedCall("f", {}), ParsedCall("g", {})]),
        (glm, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", [F_OF_X]),
        (qwen_coder, "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", [F_OF_X]),
        (qwen_coder, "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>", [F_OF_X]),
    ],
)  # fmt: skip
def test_usual_variants_are_read(form: ModuleType, text: str, calls: list[ParsedCall]) -> None:
    """Spellings that the models of a family use beside the template's own."""
    assert form.parse(text, []) == calls


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (hermes, "<tool_call>f</tool_call>"),
        (hermes, '<tool_call>{"name":"f"'),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":1,}}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":1,"a":2}}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":{},"why":"dropped?"}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":[1]}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":1e999}}</tool_call>'),
        (hermes, '<tool_call>{"name":"f","arguments":{"a":' + "[" * 200 + "]" * 200 + "}}</tool_call>"),
        (hermes, '<tool_call>{"name":"","arguments":{}}</tool_call>'),
        (hermes, "<tool_call>[]</tool_call>"),
        (hermes, '{"name":"f"}'),
        (glm, "<tool_call>other</tool_call>"),
        (glm, "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        (glm, "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>"),
        (glm, "<tool_call>two words<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"),
        (
            glm,
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>"
            "</tool_call>",
        ),
        (qwen_coder, "<tool_call><function=f><parameter=a>x</function></tool_call>"),
        (qwen_coder, "<tool_call><function=></function></tool_call>"),
        (qwen_coder, "<tool_call><function=f>"),
        (qwen_coder, "<function name='f'></function>"),
    ],
)
def test_what_is_not_this_form_is_refused(form: ModuleType, text: str) -> None:
    """A typed error, never a guess that would drop something the model wrote."""
    with pytest.raises(NotACall):
        form.parse(text, tool(a={"type": "string"}))


def test_recursive_schemas_end() -> None:
    """A schema that refers to itself in many branches is typed in bounded time."""
    branch = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in "abcdefgh"]}
    schema = {"properties": {"x": branch}, "$defs": {name: branch for name in "abcdefgh"}}
    text = glm.render(ParsedCall("f", {"x": "5"}), [])
    assert glm.parse(text, [ToolSpec("f", None, schema)]) == [ParsedCall("f", {"x": 5})]


ARGUMENTS = {"path": 'a "b"\n<c>', "n": 5, "deep": {"x": [None, "ж"]}}


@pytest.mark.parametrize(("family", "form"), [("qwen3", hermes), ("qwen3_5", qwen_coder), ("glm4_moe_lite", glm)])
def test_the_families_templates_write_what_is_read(family: str, form: ModuleType) -> None:
    """A call that a family's chat template renders from history is read back as that call, in the stream as well."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(family))
    function = {"name": "f", "arguments": ARGUMENTS}
    assistant = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    messages = [{"role": "user", "content": "hi"}, assistant]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    source = text[text.rindex("<tool_call>") : text.rindex("</tool_call>") + len("</tool_call>")]
    assert form.parse(source, tool(path={"type": "string"})) == [ParsedCall("f", ARGUMENTS)]
