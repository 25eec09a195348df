"""Forced calls whose strings stand between marks: what the template writes and nothing else, read back to the byte."""

import json
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from kvserve.app.learned_template import unheld_calls
from kvserve.core import JsonObject, ToolCallBlock, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.call_words import CallWords
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from tests.laws import IS_FULL, num_examples, sampled
from tests.output.schemas import schemas
from tests.output.test_grammar import BROKEN, Setup, byte_tokenizer
from tests.prompt.call_forms import ANY, READ, source_of
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.test_call_row import read
from tests.prompt.test_marked_row import JSON, MARKED, REAL, WORDS, format_of, row_of, written
from tests.prompt.turns import Family, Talk, in_odd_tokens, num_common
from tests.prompt.vocabularies import tokens_in

REQUIRED = ToolChoice("required")
SETUPS = ("own", "own, tokens", "quoted")
every_setup = pytest.mark.parametrize("name", sampled(SETUPS, {"own, tokens", "quoted"}))
one_setup = pytest.mark.parametrize("name", sampled(SETUPS, {"quoted"}))
"""Where the schema decides and not the form."""


@cache
def setup(name: str) -> Setup:
    """A form; with `tokens` its tags and marks are such."""
    form, _, tokens = name.partition(", ")
    tags = ("<|call>", "<call|>", "<|s|>", "<|calls|>", "<|calls_end|>") if tokens else ()
    return Setup(byte_tokenizer(tags), format_of(form))


def said(name: str, *calls: tuple[str, JsonObject]) -> str:
    return written(name.partition(",")[0], *calls)


def calls_in(name: str, text: str, tools: Sequence[ToolSpec]) -> list[tuple[str, object]]:
    """The calls of an answer that says nothing else."""
    found, content = read(format_of(name.partition(",")[0]), [text], tuple(tools))
    assert content == "", (text, content)
    return [(called, json.loads(arguments)) for called, arguments in found]


def closed(properties: Mapping[str, object], *required: str, is_strict: bool = True) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return ToolSpec("choose", "Chooses.", schema, strict=is_strict)


@every_setup
def test_forced_calls_are_marked_as_the_template_writes_them(name: str) -> None:
    """What the template writes is accepted; another tool, type, key or form is not, nor text."""
    case = setup(name)
    grammar = case.grammar(REQUIRED, tools=(READ, ANY))
    good = said(name, ("read_file", {"path": 'a"\n</tool_call> it is', "lines": 3}))
    assert case.accepts(grammar, good)
    assert case.accepts(grammar, said(name, ("any", {"b": [1], "c": "x", "d": None})))
    assert case.accepts(grammar, said(name, ("any", {})))
    mark = "'" if name == "quoted" else "<|s|>"
    for odd in (
        good.replace("path", "part"),
        good.replace("read_file", "remove"),
        good.replace(mark, ""),
        f"So {good}",
    ):
        assert not case.accepts(grammar, odd), odd
    assert not case.accepts(grammar, '<tool_call>\n{"name": "any", "arguments": {}}\n</tool_call>')
    several = said(name, ("read_file", {"path": "a"}), ("any", {}), ("any", {"b": [1]}))
    one = case.grammar(REQUIRED, tools=(READ, ANY), parallel=False)
    assert case.accepts(grammar, several) and not case.accepts(one, several) and case.accepts(one, good)
    named = case.grammar(ToolChoice("function", "any"), tools=(READ, ANY))
    assert case.accepts(named, said(name, ("any", {}))) and not case.accepts(named, good)


CHOOSE = closed(
    {
        "a_way": {"enum": ["up", 2, None, ["x", {"y": "z"}]]},
        "list": {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1, "maxItems": 3},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "options": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}, "names": {"type": "array", "items": {"type": "string"}}},
            "required": ["deep"],
            "additionalProperties": False,
        },
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "list",
)
TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
CHOOSE = ToolSpec("choose", "", {**CHOOSE.parameters, "$defs": {"tree": TREE}}, strict=True)


@every_setup
def test_a_marked_value_obeys_its_schema(name: str) -> None:
    """At any depth: one of an enumeration, a text or null, a list of some length, an object, a tree."""
    case = setup(name)
    grammar = case.grammar(REQUIRED, tools=(CHOOSE,))
    least: JsonObject = {"list": [1]}
    for good in (
        least, {"list": ["it's", 'a "b"', -3]}, {"a_way": "up", **least}, {"a_way": 2, **least},
        {"a_way": None, **least},
        {"a_way": ["x", {"y": "z"}], **least}, {**least, "maybe": "null"}, {**least, "maybe": None},
        {**least, "options": {"deep": True}}, {**least, "options": {"deep": False, "names": ["a, b", ""]}},
        {**least, "pair": [5, "x"]}, {**least, "tree": [[], [[]]]},
    ):  # fmt: skip
        text = said(name, ("choose", good))
        assert case.accepts(grammar, text), text
        assert calls_in(name, text, (CHOOSE,)) == [("choose", good)]
    for bad in (
        {}, {"list": []}, {"list": [1, 2, 3, 4]}, {"list": [1.5]}, {"list": [None]}, {"list": "a"},
        {"a_way": "down", **least}, {"a_way": "2", **least}, {"a_way": ["x", {"y": "w"}], **least},
        {**least, "maybe": 5}, {**least, "maybe": ["a"]}, {**least, "options": {}},
        {**least, "options": {"deep": 1}}, {**least, "options": {"deep": True, "other": 1}},
        {**least, "options": {"deep": True, "names": [True]}}, {**least, "pair": [5]}, {**least, "pair": [5, "y"]},
        {**least, "pair": [5, "x", 1]}, {**least, "tree": [1]}, {**least, "tree": []} | {"more": 1},
    ):  # fmt: skip
        assert not case.accepts(grammar, said(name, ("choose", bad))), bad


@every_setup
def test_a_forced_marked_text_ends_where_it_is_read_to_end(name: str) -> None:
    """Marks, commas, brackets and other tools' names are text; the next key, another call or the end, in any white
    space, cannot be written."""
    case = setup(name)
    texts: JsonObject = {"a": {"type": "string"}, "b": {"type": "string"}}
    read_file: JsonObject = {"lines": {"type": "integer"}, "path": {"type": "string"}}
    tools = (ToolSpec("read_file", "", {"properties": read_file}), ToolSpec("any", "", {"properties": texts}))
    grammar = case.grammar(REQUIRED, tools=tools)
    code = "print('a', end='')\nf('b')]\nopen('c'), g('d'), any='x'\n\\' \\\\ {\"a\": [']']} <call> 'lines=3', 'x'"
    own_code = "<|s|> <|s|>} <|s|>, <|s|><|s|>a:b" if name == "own" else "a}, b:c"
    for text in (code, own_code, "", "'", "''", "\\", "\n"):
        good = said(name, ("read_file", {"lines": 3, "path": text}), ("any", {"a": text, "b": "'"}))
        assert case.accepts(grammar, good), text
        assert calls_in(name, good, tools) == [
            ("read_file", {"lines": 3, "path": text}),
            ("any", {"a": text, "b": "'"}),
        ]
    ends = (
        "', lines=",
        "' ,\n lines=",
        "', path=",
        "'), read_file(",
        "') , any(",
        "')]<|calls_end|>",
        "') ] <|calls_end|>",
    )
    own_ends = ("<|s|>,lines:", "<|s|> ,\n other :", "<|s|>}<call|>", "<|s|> } <call|>")
    for end in ends if name == "quoted" else own_ends:
        text = said(name, ("read_file", {"path": "a@b"}))
        spelt = case.tokenizer.encode(text.partition("@")[0], add_special_tokens=False)
        pieces = [piece for char in end for piece in case.tokenizer.encode(char, add_special_tokens=False)]
        matcher = LLMatcher(case.guide, grammar.lark, log_level=0)  # type: ignore[union-attr]
        whole = [*spelt, *pieces, *case.tokenizer.encode(text.partition("@")[2], add_special_tokens=False)]
        assert matcher.try_consume_tokens(whole) < len(whole) or not matcher.is_accepting(), end


# --- drawn schemas and values -----------------------------------------------------------------------------------------

KEYS = ("a", "b c", "d", "dé")
_SCALARS: st.SearchStrategy[JsonObject] = st.sampled_from(
    [
        {"type": "string"}, {"type": "string"}, {"type": "integer", "minimum": -9}, {"type": "number"},
        {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"enum": ["x", "it's", 1, None, [True]]},
        {"const": {"a": "b"}}, {}, {"$ref": "#/$defs/here"},
    ]
)  # fmt: skip
SCHEMAS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda parts, required, more: {
                "type": "object", "properties": parts, "required": sorted(set(parts) & required),
                "additionalProperties": more,
            },
            st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
            st.frozensets(st.sampled_from(KEYS)),
            st.just(False) | inner,
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)  # fmt: skip
HERE = {"type": "array", "items": {"type": ["string", "integer"]}, "maxItems": 2}


def values_of(schema: object) -> st.SearchStrategy[object]:
    """Values that obey one of these schemas."""
    assert isinstance(schema, dict)
    if "$ref" in schema:
        return values_of(HERE)
    if "anyOf" in schema:
        return st.one_of([values_of(part) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        return st.lists(values_of(schema["items"]), min_size=schema.get("minItems", 0), max_size=schema["maxItems"])
    if schema.get("type") == "object":
        return _objects(schema)
    kinds = schema.get("type", "any")
    simple = {
        "string": WORDS, "integer": st.integers(-9, 99), "number": st.sampled_from([0, -3, 2.5, 1e21]),
        "boolean": st.booleans(), "null": st.none(), "any": JSON,
    }  # fmt: skip
    return st.one_of([simple[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _objects(schema: Mapping[str, object]) -> st.SearchStrategy[object]:
    parts, required, more = schema["properties"], schema["required"], schema["additionalProperties"]
    assert isinstance(parts, dict) and isinstance(required, list)
    known = st.fixed_dictionaries(
        {key: values_of(parts[key]) for key in required},
        optional={key: values_of(part) for key, part in parts.items() if key not in required},
    )
    others = st.dictionaries(st.sampled_from(["y", "z z"]), values_of(more), max_size=2) if more else st.just({})
    return st.tuples(known, others).map(
        lambda both: {**{key: both[0][key] for key in parts if key in both[0]}, **both[1]}
    )


def is_told(name: str, value: object, *, is_inner: bool = False) -> bool:
    """Whether the form can say the value: none of its strings holds what ends it."""
    match value:
        case str():
            text = f"{value}|".replace(" ", "").replace("\n", "")
            if name == "own, tokens" and ("<|s|>" in value or "<call|>" in value):
                return False  # as tokens these are no text
            ends = [f"<|s|>{sign}" for sign in ",:]}"] if name != "quoted" else ["',a=", "',b=", "',d="]
            return not any(end in text for end in ends)
        case list():
            return all(is_told(name, each) for each in value)
        case dict():
            return all(is_told(name, each) for each in value.values())
    return True


@every_setup
@given(parts=st.fixed_dictionaries({"a": SCHEMAS}, optional={"b": SCHEMAS, "d": SCHEMAS}), data=st.data())
@settings(max_examples=num_examples(8), deadline=None)
def test_what_the_template_writes_of_a_schema_is_held_and_read(
    name: str, parts: JsonObject, data: st.DataObject
) -> None:
    """Any schema and value: the text of the template is accepted, its keys in its order, and read back, each value;
    with another member it is not."""
    parameters = {"type": "object", "properties": parts, "required": ["a"], "additionalProperties": False}
    tool = ToolSpec("choose", "", {**parameters, "$defs": {"here": HERE}}, strict=True)
    value = data.draw(_objects(parameters))
    if not is_told(name, value):
        return
    assert isinstance(value, dict)
    case = setup(name)
    grammar = case.grammar(REQUIRED, tools=(tool,))
    text = said(name, ("choose", value))
    assert case.accepts(grammar, text), (tool.parameters, text)
    [(_, found)] = calls_in(name, text, (tool,))
    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)
    assert not case.accepts(grammar, said(name, ("choose", {**value, "zz": 1})))


WALKED = closed(
    {
        "a": {"type": "string"},
        "b": {"type": "array", "items": {"type": ["string", "boolean", "null"]}, "maxItems": 3},
        "c": {"type": ["string", "null"]},
    },
    "a",
)


def walk(case: Setup, lark: str, seed: int) -> str | None:
    """A random text that the grammar allows to the end, which marks and brackets end early; None if it got too long."""
    matcher, dice, ids = LLMatcher(case.guide, lark, log_level=0), random.Random(seed), list[int]()
    signs = ("'", '"', "<|s|>", "]", "}<call|>", ")]<|calls_end|>", ",", "', x=1", "<|s|>]x")
    signs = (*signs, *("')]<|calls_end|>", "<|s|>}<call|>", "', b=[", "<|s|>,b:[") * 2)
    hints = [case.tokenizer.encode(sign, add_special_tokens=False) for sign in signs]
    while not matcher.is_stopped() and len(ids) < 400:
        fitting = [hint for hint in hints if matcher.validate_tokens(hint) == len(hint)]
        if fitting and dice.random() < 0.6:
            chosen = dice.choice(fitting)
        else:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(case.tokenizer)) if mask[token // 8] >> token % 8 & 1]
            chosen = [dice.choice(allowed)]
        if case.tokenizer.eos_token_id in chosen:
            return str(case.tokenizer.decode(ids))
        ids += chosen
        assert matcher.consume_tokens(chosen)
    return str(case.tokenizer.decode(ids)) if matcher.is_stopped() and not matcher.is_error() else None


@every_setup
def test_whatever_is_forced_between_marks_is_the_templates_text(name: str) -> None:
    """Random walks through the grammar are read as calls and nothing else, and the template writes these calls so."""
    case = setup(name)
    grammar = case.grammar(ToolChoice("function", "choose"), tools=(WALKED, ANY))
    assert grammar is not None
    walks = [text for seed in range(num_examples(10)) if (text := walk(case, grammar.lark, seed)) is not None]
    assert len(walks) >= 3
    for text in walks:
        if any(unicodedata.category(char) == "Cn" or char == "\ufffd" for char in text):
            continue  # bytes that are no UTF-8 cannot be written again, nor what only a newer Unicode knows
        calls = calls_in(name, text, (WALKED, ANY))
        assert said(name, *((called, dict(found)) for called, found in calls)) == text  # type: ignore[call-overload]


# --- what cannot be said ----------------------------------------------------------------------------------------------


@every_setup
def test_what_no_marked_call_can_say_is_noted_or_refused(name: str) -> None:
    """As in other forms: a key that the form cannot write, the inside of a text, a keyword; a strict tool is a 400."""
    case = setup(name)
    odd: dict[str, dict[str, object]] = {
        "the key ''": {"": {"type": "string"}},
        "properties.a, as the model's form of calls leaves": {"a": {"type": "string", "pattern": "^x+$"}},
        "properties.a.items, as the model's form of calls": {
            "a": {"type": "array", "items": {"type": "string", "maxLength": 3}}
        },
        "properties.a.items.anyOf": {
            "a": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"b": {}, "c": {}},
                    "anyOf": [{"required": ["b"]}, {"required": ["c"]}],
                },
            }
        },
    }
    for reason, properties in odd.items():
        [note] = case.promise(REQUIRED, tools=(READ, closed(properties, is_strict=False))).notes
        assert note.startswith("not enforced of tool choose: ") and reason in note
        with pytest.raises(BadRequest, match="cannot be enforced"):
            case.grammar(REQUIRED, tools=(READ, closed(properties)))
    untold = "<|s|>,a:" if name != "quoted" else "x', a='"
    tool = closed({"a": {"enum": ["b", untold]}}, "a", is_strict=False)
    promise = case.promise(REQUIRED, tools=(tool,))
    assert "cannot write" in promise.notes[0]
    assert case.accepts(promise.grammar, said(name, ("choose", {"a": "b"})))


ELSEWHERE: Mapping[str, JsonObject] = {
    "through a list": {"$ref": "#/properties/d/anyOf/0"},
    "with escapes": {"$ref": "#/$defs/an%20integer"},
    "a tuple": {"type": "array", "items": [{"type": "integer"}]},
    "a name": {"$ref": "#named"},
    "beside a minimum": {"enum": [1, 5], "minimum": 3},
    "beside a constant": {"enum": ["x", 5], "const": 5},
}
"""Properties of which 5, or a list of it, is right and "x" and 1 are not."""


@one_setup
def test_what_a_marked_value_must_be_is_never_forgotten(name: str) -> None:
    """A reference that we do not find, a list's items as they were said once, what stands beside an enumeration: held,
    or noted, and refused of a strict tool."""
    case, found = setup(name), dict[str, str]()
    for reason, schema in ELSEWHERE.items():
        tool = closed({"a": schema, "d": {"anyOf": [{"type": "integer"}]}}, "a", is_strict=False)
        defs: JsonObject = {"an integer": {"type": "integer"}, "other": {"$anchor": "named", "type": "integer"}}
        draft: JsonObject = {"$schema": "http://json-schema.org/draft-07/schema#"} if reason == "a tuple" else {}
        tool = replace(tool, parameters={**tool.parameters, **draft, "$defs": defs})
        promise = case.promise(REQUIRED, tools=(tool,))
        right: object = [5] if reason == "a tuple" else 5
        assert case.accepts(promise.grammar, said(name, ("choose", {"a": right}))), reason
        if promise.notes:
            found[reason] = promise.notes[0].removeprefix("not enforced of tool choose: ")
            with pytest.raises(BadRequest, match="cannot be enforced"):
                case.grammar(REQUIRED, tools=(replace(tool, strict=True),))
        else:
            wrong: tuple[object, ...] = ("x", 1) if "enum" in schema else ("x",)
            for value in wrong:
                assert not case.accepts(promise.grammar, said(name, ("choose", {"a": value}))), (reason, value)
    assert found == {"a tuple": "properties.a.items", "a name": "properties.a.$ref"}


@every_setup
def test_an_enumeration_may_be_long(name: str) -> None:
    """Longer than the alternatives that a parser follows at once; inside of a list too, and with the empty text."""
    case = setup(name)
    tool = closed({"a": {"enum": ["", *(f"v {number}" for number in range(2500))]}})
    lists = closed({"a": {"type": "array", "items": tool.parameters["properties"]["a"]}})  # type: ignore[index]
    for each, is_list in ((tool, False), (lists, True)):
        grammar = case.grammar(REQUIRED, tools=(each,))
        for value, is_right in (("", True), ("v 7", True), ("v 777", True), ("v 2500", False)):
            text = said(name, ("choose", {"a": [value, value] if is_list else value}))
            assert case.accepts(grammar, text) is is_right, text


HIDING = {
    "quoted": ("", "x", "x'", "x')", "x')]", "x')]'", "x', y", "x', ", "x', b", "y", "'", "')", "', any", "'), c"),
    "own": ("", "x", "x<|s|>", "x<|s|>}", "x<|s|>}<call", "<|s|>}}", "<|s|>,", "<|s|>, b", "x<|s|><|s|>}", "}<call|>"),
}
"""Texts that go on like one another, a mark, and the beginning of what ends a string there."""


@every_setup
def test_no_choice_between_marks_hides_another(name: str) -> None:
    """Each of an enumeration is written, alone and before another member, and read back; a lexer does not go back."""
    case, choices = setup(name), HIDING[name.partition(",")[0]]
    if name == "own, tokens":
        choices = tuple(each for each in choices if "<|s|>" not in each and "<call|>" not in each)
    tool = closed({"a": {"enum": [*choices, 1, None]}, "b": {"enum": choices}}, "a")
    promise = case.promise(REQUIRED, tools=(tool,))
    assert not promise.notes
    for value in (*choices, 1, None):
        for members in ({"a": value}, {"a": value, "b": "x"}, {"a": "x", "b": choices[0] if value is None else value}):
            text = said(name, ("choose", members))
            is_right = members.get("b", "x") in choices
            assert case.accepts(promise.grammar, text) is is_right, text
            assert calls_in(name, text, (tool,)) == [("choose", members)], text


PIECES = {
    "quoted": ("x", "y", "'", "')", "', ", "', b=", "','", "')]", "')]<|calls_end|>", " ", "\n", '"', ","),
    "own": ("x", "<|s|>", "<|s|>}", "<|s|>,", "<|s|>,b:", "<|s|>]", "}<call|>", "<|s", "|>", ",", "}", " ", "\n", "'"),
}


@every_setup
@given(data=st.data())
@settings(max_examples=num_examples(6), deadline=None)
def test_every_choice_between_marks_is_written_or_told(name: str, data: st.DataObject) -> None:
    """Whatever they begin with and hold, of an argument, in a list and in an object; what is written is read back."""
    pieces = st.lists(st.sampled_from(PIECES[name.partition(",")[0]]), max_size=3).map("".join)
    drawn = data.draw(st.lists(pieces, min_size=2, max_size=4, unique=True))
    longer = [each + data.draw(pieces) for each in drawn]
    choices = [each for each in dict.fromkeys((*drawn, *longer)) if "tokens" not in name or is_told(name, each)]
    case, enum = setup(name), {"enum": choices}
    inside = closed({"k": enum}, "k").parameters
    ways: Sequence[tuple[object, Callable[[str], object]]] = (
        (enum, lambda each: each),
        ({"type": "array", "items": enum}, lambda each: [each, each]),
        (inside, lambda each: {"k": each}),
    )
    if name == "own" and any("<|s|>" in each for each in choices):
        ways = ways[:1]  # of such choices in lists and objects the next test says what is known
    schema, within = data.draw(st.sampled_from(ways))
    tool = closed({"a": schema, "b": {"type": "string"}}, "a", is_strict=False)
    promise = case.promise(REQUIRED, tools=(tool,))
    for choice in choices:
        if f": {choice!r}, which" in " ".join(promise.notes):
            continue
        for members in ({"a": within(choice)}, {"a": within(choice), "b": "c"}):
            text = said(name, ("choose", members))
            assert case.accepts(promise.grammar, text), text
            assert calls_in(name, text, (tool,)) == [("choose", members)], text


GOING_ON = ("x<|s|>}", "", *(f"<|s|>{end}" for end in ("}", ",", ",b:", "]", "}x", ",x", ",b:x")))


@pytest.mark.parametrize("place", ["list", "object"])
@pytest.mark.xfail(
    strict=True, reason="A choice that goes on behind a mark as the form does hides itself in a list or object."
)
def test_choices_within_that_go_on_as_the_form_does_are_written(place: str) -> None:
    """They are neither written nor told."""
    schema: object = {"type": "array", "items": {"enum": GOING_ON}}
    if place == "object":
        schema = closed({"k": {"enum": GOING_ON}}, "k").parameters
    tool = closed({"a": schema, "b": {"type": "string"}}, "a", is_strict=False)
    case = setup("own")
    promise = case.promise(REQUIRED, tools=(tool,))
    for choice in GOING_ON:
        if f": {choice!r}, which" not in " ".join(promise.notes):
            within = [choice, choice] if place == "list" else {"k": choice}
            assert case.accepts(promise.grammar, said("own", ("choose", {"a": within}))), choice


@one_setup
def test_many_choices_with_marks_in_them_are_written(name: str) -> None:
    """More than a parser follows at once."""
    case, mark = setup(name), "'" if name == "quoted" else "|s"
    for form in ("it{mark}s {number}", "{number}{mark}s")[: 2 if IS_FULL else 1]:
        choices = [form.format(mark=mark, number=number) for number in range(600)]
        grammar = case.grammar(REQUIRED, tools=(closed({"a": {"enum": ["it", "7", *choices]}}, "a"),))
        for value in (choices[7], choices[577], "it", "7"):
            assert case.accepts(grammar, said(name, ("choose", {"a": value}))), value
        assert not case.accepts(grammar, said(name, ("choose", {"a": choices[7] + "x"})))


@every_setup
def test_a_choice_that_would_be_read_as_members_is_told(name: str) -> None:
    """Also one that would be read as the same member twice, which no call has."""
    case, again = setup(name), "', b='y', b='" if name == "quoted" else "<|s|>,b:<|s|>y<|s|>,b:<|s|>"
    promise = case.promise(REQUIRED, tools=(closed({"a": {"enum": ["x", again]}, "b": {}}, "a", is_strict=False),))
    assert any(f"{again!r}, which" in note for note in promise.notes)
    assert case.accepts(promise.grammar, said(name, ("choose", {"a": "x"})))


@every_setup
def test_an_odd_character_breaks_no_grammar_between_marks(name: str) -> None:
    """A deleted one in an enumeration; one that no text holds in a key, which is noted; a key that only a
    newer Unicode knows; a mark in a key."""
    case = setup(name)
    tool = closed({"a": {"enum": ["\x7f", "b"]}, "\ud800": {"type": "string"}}, is_strict=False)
    promise = case.promise(REQUIRED, tools=(tool,))
    assert case.accepts(promise.grammar, said(name, ("choose", {"a": "\x7f"})))
    assert "properties.\ud800" in promise.notes[0]
    assert not case.accepts(case.grammar(REQUIRED, tools=(ANY,)), said(name, ("any", {"\U0001ccf0": 1})))
    long = closed({"a": {"enum": ["", "\x7f", "b"], "minLength": 1}})
    grammar = case.grammar(REQUIRED, tools=(long,))
    assert case.accepts(grammar, said(name, ("choose", {"a": "\x7f"})))
    assert not case.accepts(grammar, said(name, ("choose", {"a": ""})))
    tool = closed({"a": {"type": "string"}, "it's": {"type": "string"}})
    grammar = case.grammar(REQUIRED, tools=(tool,))
    both = {"a": "x", "it's": "y"}
    assert case.accepts(grammar, said(name, ("choose", both)))
    text = said(name, ("choose", {"a": "x', it's=y"}))
    if case.accepts(grammar, text):
        assert calls_in(name, text, (tool,)) == [("choose", {"a": "x', it's=y"})]


@one_setup
@pytest.mark.parametrize("keyword", BROKEN)
def test_a_schema_with_marked_strings_is_enforced_as_far_as_it_can_be(name: str, keyword: str) -> None:
    """A keyword that cannot be held is noted, and refused of a strict tool; other tools are held as ever."""
    case, schema = setup(name), BROKEN[keyword]
    promise = case.promise(REQUIRED, tools=(READ, ToolSpec("odd", None, schema)))
    [note] = promise.notes
    assert note.startswith("not enforced of tool odd: ") and keyword in note
    assert case.accepts(promise.grammar, said(name, ("read_file", {"path": "a"})))
    assert not case.accepts(promise.grammar, said(name, ("read_file", {"path": 5})))
    with pytest.raises(BadRequest, match="cannot be enforced"):
        case.grammar(REQUIRED, tools=(ToolSpec("odd", None, schema, strict=True),))


@given(schemas, st.sampled_from(SETUPS), st.booleans())
@settings(max_examples=num_examples(8), deadline=None)
def test_no_schema_refuses_a_marked_call_of_a_tool_that_is_not_strict(
    schema: JsonObject, name: str, is_forced: bool
) -> None:
    """There is a grammar that can be used, and it leaves the other tools as they are."""
    case = setup(name)
    odd = ToolSpec("odd", None, {"properties": {"p": schema, "<q>": schema}, "required": ["p", "<q>"]})
    grammar = case.grammar(REQUIRED if is_forced else ToolChoice(), tools=(odd, READ))
    good = said(name, ("read_file", {"path": "a"}))
    assert case.accepts(grammar, good) and not case.accepts(grammar, good.replace("path", "part"))


@every_setup
def test_marked_calls_of_strict_tools_are_held_where_the_model_may_call(name: str) -> None:
    """Beside any text; other tools' arguments are free, and so is text without calls."""
    case = setup(name)
    promise = case.promise(ToolChoice(), tools=(READ, ANY))
    assert promise.grammar is not None and promise.notes == ()
    good = said(name, ("read_file", {"path": "it's"}))
    two = said(name, ("any", {"x": [None, {"y": 1.5}], "y": "a"}), ("read_file", {"path": "a"}))
    for before in ("", "I look.\n", "<think>\nhm\n</think>\n"):
        for text in (good, two):
            assert case.accepts(promise.grammar, before + text)
            assert not case.accepts(promise.grammar, before + text.replace("path", "part"))
    for text in ("", "Hello.", "[1, 2]", "x = {}; y[0] < 3", f"{good} and <b>"):
        assert case.accepts(promise.grammar, text), text


# --- real templates and replay ----------------------------------------------------------------------------------------

STOP = "<|tool_response>"


@cache
def family_of(name: str) -> Family:
    """A template with a small vocabulary, in which what looks like a token is one, and what ends Gemma's calls a stop
    token."""
    source = MARKED.get(name) or source_of(name)
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(source))
    tokenizer = tokenizer_of(backend, source)
    stop = tokenizer.token_id(STOP)
    tokenizer = replace(tokenizer, stop_token_ids=frozenset(() if stop is None else (stop,)))
    template = ChatTemplate(tokenizer, tags=format_of(name).tags, row=row_of(name))
    markers = learn_markers(tokenizer, template)
    return Family(name, tokenizer, template, markers, Stitcher.of(tokenizer, template, markers), format_of(name))


@pytest.mark.parametrize("name", [*MARKED, *sampled(REAL, ())])
def test_a_forced_marked_call_keeps_its_tokens(name: str) -> None:
    """In odd tokens, echoed by the client: what the grammar allows is the template's own form, so the next prompt
    begins with all of them."""
    of = family_of(name)
    calls = [("read_file", '{"path": "it\'s  a"}'), ("any", '{"a": [1, "b"], "b": {"c": null}, "d": true}')]
    text = CallWords(row_of(name)).calls([ToolCallBlock("", called, arguments) for called, arguments in calls])
    spelling = row_of(name).pairs.spelling  # type: ignore[union-attr]
    tokens = tokens_in(of.tokenizer.chat_template or "")
    for added in (tokens, [*tokens, *(spelling.marks or ())]) if spelling.is_own else (tokens,):
        case = Setup(byte_tokenizer(list(dict.fromkeys(added))), of.output_format)
        assert case.accepts(case.grammar(REQUIRED, tools=(READ, ANY)), text)
    assert unheld_calls(of.template, of.output_format, row_of(name)) is None
    talk = Talk(of, tools=(READ, ANY))
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(of.tokenizer, text.removesuffix(STOP)))
    assert talk.results("done") == 2
    after = talk.stitched()
    assert num_common(kept, after.ids) == len(kept) and after.num_replayed_turns == 1
