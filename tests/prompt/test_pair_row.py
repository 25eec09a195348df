"""Forms of calls whose arguments are keys and values, derived from templates: which are, that they read back what the
template writes, hold and replay."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

from kvserve.app.learned_template import read_calls
from kvserve.core import JSON_SPELLING, CallRow, JsonObject, PairParts, Spelling, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output.answer import AnswerReader
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.output.tool_parsers.arguments import JSON_TYPES, PYTHON_SPELLING, read_argument
from kvserve.output.tool_parsers.form import CallForm
from kvserve.output.tool_parsers.pairs import ends_of
from kvserve.prompt.call_row import NoRow, find_call_row
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.pair_row import typed_tools
from tests.calls import calls_of
from tests.laws import num_examples, sampled, sampled_cells
from tests.output.test_grammar import Setup, byte_tokenizer
from tests.output.tool_parsers.test_calls import JSON, TEXTS
from tests.prompt.call_forms import (
    ANY,
    CALLS,
    HEAD,
    PAIR,
    PAIRED,
    PAIRS,
    READ,
    TAIL,
    TOLD,
    VALUE,
    VARIABLES,
    as_written,
    check_goes_out_as_written,
    conversation,
    found_row,
    rendered,
    source_of,
)  # fmt: skip
from tests.prompt.test_call_row import TOOLS, family_of, read
from tests.prompt.test_tool_words import PRIVATE
from tests.prompt.turns import Talk, in_odd_tokens, num_common
from tests.prompt.vocabularies import tokens_in

every_form = pytest.mark.parametrize("name", sampled(PAIRED, {"told", "own_lines", "minimax_m2"}))


def written(name: str, *calls: tuple[str, JsonObject]) -> str:
    """These calls as the template itself writes them."""
    prompt = family_of(name).template.write(conversation(calls), TOOLS, thinking=False)
    return as_written(prompt.shown, PAIRED[name], calls)


def half_key_of(name: str) -> str:
    """What stands between a value and the next key."""
    pairs = PAIRED[name].pairs
    assert pairs is not None
    return f"{pairs.closing}{pairs.between}{pairs.opening}"


def test_the_parts_of_pairs_are_what_the_template_writes() -> None:
    """Each where it stands, with the white space around it."""
    assert found_row("invoked") == CallRow(
        ('<calls>\n<invoke name="',), ('">\n',), ('</invoke>\n<invoke name="',), ("</invoke>\n</calls>",),
        pairs=PairParts('<arg name="', '">', "</arg>\n"),
    )  # fmt: skip
    assert found_row("told") == CallRow(
        ("<|calls|><|call|>",), (), ("<|end_call|><|call|>",), ("<|end_call|><|end_calls|>",),
        pairs=PairParts('<arg name="', '" as="text">', "</arg>", "", '" as="json">'),
    )  # fmt: skip
    assert found_row("own_lines") == CallRow(
        ("<call>\n<fn=",), (">\n",), ("</fn>\n</call>\n<call>\n<fn=",), ("</fn>\n</call>",),
        pairs=PairParts("<arg=", ">\n", "\n</arg>\n"),
    )  # fmt: skip
    joined = found_row("joined")
    assert isinstance(joined, CallRow) and joined.pairs == PairParts("[KEY]", ": ", "[END_VALUE]", ",\n")


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("invoked", VALUE, "{{ v if v is string else v | tojson | upper }}", "every call as the row says"),
        ("invoked", VALUE, "{{ v if v is string else v or '-' }}", "no words for true, false and null"),
        ("invoked", VALUE, "{{ v if v is string or v is none else v | lower }}", "every call as the row says"),
        ("invoked", VALUE, "{{ v | trim if v is string else v | tojson }}", "every call as the row says"),
        ("invoked", "</arg>\n", "\n", "on either side of an argument's value"),
        ("invoked", "{{ k }}", "key", "neither one JSON object nor pairs"),
        ("told", "<|end_call|>", "", "nothing ends a call"),
        ("joined", "[CALL]", "{{ '{' }}", "no tag stands before a call"),
        ("told", f'" as="{TOLD}">', "{{ '=' if v is string }}", "nothing stands between a key and a number"),
        ("told", f'" as="{TOLD}">', "{{ '=' if v is string else ' ' }}", "nothing stands between a key and a number"),
    ],
)
def test_pairs_that_do_not_read_back_are_not_derived(name: str, old: str, new: str, reason: str) -> None:
    """A template that alters, hides or does not mark values has no row, and the reason says what it does."""
    assert old in PAIRS[name]
    found = find_call_row(CompiledTemplate(PAIRS[name].replace(old, new), VARIABLES), read_calls)
    assert isinstance(found, NoRow) and reason in found.reason, found


def test_a_form_that_is_read_as_no_json_stops_no_start() -> None:
    """Where the tag of a key begins the one that ends a call, and a value's is found in it: the reason is said."""
    pair = f"{PAIR}@_{{{{ k }}}}@/_\n@b{VALUE}@/b\n{{% endfor %}}"
    source = f"{HEAD}{CALLS}<call>{{{{ c.name }}}}\n{pair}@_bb{{% endfor %}}{TAIL}"
    found = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(found, NoRow) and "not read as it writes them" in found.reason, found


# --- reading ----------------------------------------------------------------------------------------------------------

NAMES = ("zero", "one", "two")
KEYS = st.text("abcXYZ019_.- é", min_size=1, max_size=6).filter(lambda key: key == key.strip())
WORDS = (
    "</arg>", "</parameter>", "</invoke>", "</calls>", '<arg name="', '<invoke name="', "<calls>", "</fn>", "</call>",
    "[END_VALUE]", "[KEY]", "<tool_call>", '"', "\n", "    ", "null", "true", "{", "5", " x ",
)  # fmt: skip
ODD = st.lists(st.sampled_from(WORDS), max_size=4).map("".join) | TEXTS


def _tags(text: str) -> list[str]:
    """The tags of a text, between which any white space may stand."""
    return [part for part in re.split(r"\s*\n\s*|(?<=[>\]])(?=[<\[])", text) if part]


def _ends(name: str) -> re.Pattern[str]:
    """What ends a value: a whole next key, or what ends a call with the first tag behind it."""
    row = PAIRED[name]
    assert row.pairs is not None
    leads = (row.pairs.value, row.pairs.other_value or row.pairs.value)
    before = r"\s*".join(map(re.escape, _tags(half_key_of(name))))
    ends = [rf"{before}[^<>\r\n]*?{re.escape(lead.removesuffix('\n'))}" for lead in leads]
    for rest in (row.closing, row.between or ()):
        behind = "".join(map(str, rest))[len(row.call_end.rstrip()) :]
        ends.append(r"\s*".join(map(re.escape, [*_tags(row.pairs.closing + row.call_end), *_tags(behind)[:1]])))
    return re.compile("|".join(ends))


def _is_sayable(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether no value holds its own end, alone or with the beginning of what follows it."""
    row, ends = PAIRED[name], _ends(name)
    assert row.pairs is not None
    tails = (f"{half_key_of(name)}k{row.pairs.value}", f"{row.pairs.closing}{''.join(map(str, row.closing))}")
    for value in arguments.values():
        said = value if isinstance(value, str) else row.pairs.spelling.written(value)
        if any(found.start() < len(said) for tail in tails for found in [ends.search(said + tail)] if found):
            return False
    return not set(PRIVATE) & set(json.dumps(arguments, ensure_ascii=False))


def _own_words(name: str) -> st.SearchStrategy[str]:
    """Texts of the form's own parts and their halves."""
    row = PAIRED[name]
    assert row.pairs is not None
    said = "".join(map(str, (*row.opening, *row.middle, *row.closing, *(row.between or ()))))
    parts = (
        *row.pairs.closing.split(),
        row.pairs.opening,
        row.pairs.value,
        row.pairs.between,
        row.call_end,
        *_tags(said),
    )
    halves = (half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 :]))
    words = sorted({*parts, *halves, half_key_of(name), "a", " ", "\n"} - {""})
    return st.lists(st.sampled_from(words), max_size=6).map("".join)


@pytest.mark.parametrize("name", sampled(PAIRED, {"joined", "own_lines", "minimax_m2", "deepseek_v3_2"}))
def test_pairs_are_read_as_the_template_writes_them(name: str) -> None:
    """Any arguments of the types that a tool has, several calls, cut anywhere: the same values and no other text."""
    own = _own_words(name)
    values = ODD | own | st.lists(own, max_size=2) | JSON | st.none() | st.booleans()
    arguments = st.dictionaries(KEYS, values, max_size=3).filter(lambda said: _is_sayable(name, said))

    @settings(max_examples=num_examples(10), deadline=None)
    @given(st.lists(arguments, min_size=1, max_size=3), st.data())
    def check(said: list[JsonObject], data: st.DataObject) -> None:
        calls = list(zip(NAMES, said, strict=False))
        tools = tuple(tool for tool_name, each in calls for tool in typed_tools([tool_name], each))
        text = written(name, *calls)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found, content = read(family_of(name).output_format, pieces, tools)
        assert [(tool, json.loads(text)) for tool, text in found] == calls
        assert [json.dumps(each) for _, each in calls] == [json.dumps(json.loads(text)) for _, text in found]
        assert content == ""

    check()


@every_form
def test_what_edit_tools_send_is_not_altered(name: str) -> None:
    """Indentation, line ends, empty text, the form's own tags, what looks like JSON: to the byte."""
    pairs = PAIRED[name].pairs
    assert pairs is not None
    for value in (
        "    return 1\n", "\n\nx\n\n", "", " ", "\n", "null", "True", "5", '{"a": 1}', f"a {pairs.closing} b",
        f"x{pairs.opening}y{pairs.value}z", PAIRED[name].call_end, "he said \"hi\" \\n 'x'", "<think>hm</think>",
    ):  # fmt: skip
        text = written(name, ("read_file", {"path": value, "lines": 3}), ("read_file", {"path": value}))
        found, content = read(family_of(name).output_format, [text])
        assert [json.loads(each) for _, each in found] == [{"path": value, "lines": 3}, {"path": value}], value
        assert content == ""


def test_the_schema_decides_what_a_bare_word_is() -> None:
    """`null` is text for a string, nothing for a value that may be null; where the form says it, the form decides."""
    of = {"text": {"type": "string"}, "either": {"type": ["string", "null"]}, "count": {"type": "integer"}}
    tools = (ToolSpec("any", "", {"type": "object", "properties": of}),)
    text = written("invoked", ("any", {"text": "null", "either": None, "count": 5, "free": "5"}))
    [(_, arguments)], _ = read(family_of("invoked").output_format, [text], tools)
    assert json.loads(arguments) == {"text": "null", "either": None, "count": 5, "free": 5}
    said: JsonObject = {"text": "null", "either": "null", "count": "5", "free": "5"}
    [(_, arguments)], _ = read(family_of("told").output_format, [written("told", ("any", said))], tools)
    assert json.loads(arguments) == said


SPELT = {
    VALUE: JSON_SPELLING,
    "{{ v if v is string else v | string }}": PYTHON_SPELLING,
    "{{ v if v is string else v | tojson if v is mapping or v is iterable else v }}": replace(
        PYTHON_SPELLING, is_python=False
    ),
    "{{ 'nil' if v is none else v if v is string else v | tojson }}": Spelling(null="nil"),
}


@pytest.mark.parametrize("value", SPELT)
def test_the_template_decides_how_what_is_no_string_is_spelt(value: str) -> None:
    """Null is its word for null, and any other word is text where a text is allowed; so are its lists and objects."""
    source, spelling = PAIRS["own_lines"].replace(VALUE, value), SPELT[value]
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow) and row.pairs is not None and row.pairs.spelling == spelling
    output_format = select_format("auto", source, (), None, row)
    texts = [word for word in ("null", "None", "nil", "true", "True") if word not in (spelling.null, spelling.true)]
    others = [None, True, 5, [True, None, "it's <b>"], {"a": {"b": False}}]
    said = {f"key{index}": each for index, each in enumerate([*texts, *others])}
    for types in (["string", "null", "boolean", "number", "array", "object"], None):
        schema = {"properties": {key: {"type": types} for key in said}} if types else {}
        tools = (ToolSpec("any", "", schema),)
        [(_, arguments)], content = read(output_format, [rendered(source, [("any", said)])], tools)
        assert json.loads(arguments) == said and content == ""
    assert [read_argument(text, JSON_TYPES, spelling) for text in texts] == texts  # as where a call is read whole


def test_a_value_that_is_no_text_is_read_in_any_spelling() -> None:
    """What a model writes of a count or an object, in JSON or as its template shows it, can be nothing else."""
    types: dict[str, object] = {"flag": "boolean", "none": "null", "list": "array", "object": "object"}
    tools = (ToolSpec("any", "", {"properties": {key: {"type": kind} for key, kind in types.items()}}),)
    json_spelt = {"flag": "true", "none": "null", "list": '[true, "a"]', "object": '{"a": null}'}
    shown = {"flag": "True", "none": "None", "list": "[True, 'a']", "object": "{'a': None}"}
    for texts in (json_spelt, shown):
        [(_, arguments)], _ = read(family_of("shown").output_format, [written("shown", ("any", texts))], tools)
        assert json.loads(arguments) == {"flag": True, "none": None, "list": [True, "a"], "object": {"a": None}}


@every_form
def test_a_string_goes_out_as_it_is_written(name: str) -> None:
    """The name with the first key, each piece of the value as it comes."""
    text = written(name, ("read_file", {"path": "abcdef", "lines": 3}))
    check_goes_out_as_written(family_of(name).output_format, text)


@every_form
def test_white_space_between_tags_says_nothing(name: str) -> None:
    """More of it, or none: models vary it."""
    text = written(name, ("read_file", {"path": "a b", "lines": 3}), ("any", {}))
    called = [("read_file", '{"path": "a b", "lines": 3}'), ("any", "{}")]
    for other in (text.replace(">\n<", "><"), text.replace(">\n<", ">\n\n  <"), text.replace("><", ">\n<")):
        assert read(family_of(name).output_format, [other]) == (called, ""), other


@every_form
def test_what_only_looks_like_a_call_in_pairs_stays_text(name: str) -> None:
    """A tool that is not offered, an opening alone, prose; to the letter."""
    text = written(name, ("read_file", {"path": "abcdef"}))
    opening = str(PAIRED[name].opening[0])
    for odd in (
        text.replace("read_file", "remove_file"),
        written(name, ("remove_file", {})),
        f"So {opening} opens it.",
        f"{opening}read_file",
        f"{opening}read_file and more",
    ):
        assert read(family_of(name).output_format, [odd]) == ([], odd)


@every_form
def test_a_tool_that_is_not_offered_takes_no_neighbour_in_pairs(name: str) -> None:
    """Beside one that is offered it is called, as in other forms, where one text holds both; else it is text, whole."""
    other: tuple[str, JsonObject] = ("remove_file", {"path": "a"})
    for calls in ([other, ("read_file", {"path": "b"}), ("remove_file", {}), other], [other, ("read_file", {})]):
        found, content = read(family_of(name).output_format, [written(name, *calls)])
        if PAIRED[name].closing != (PAIRED[name].call_end,):
            assert [(tool, json.loads(each)) for tool, each in found] == calls and content == ""
        else:
            assert [tool for tool, _ in found] == ["read_file"] and content.count("remove_file") == len(calls) - 1


@every_form
def test_what_closes_calls_in_pairs_may_be_missing(name: str) -> None:
    """Cut behind the tags that end the call, it is whole; text before and behind calls stays."""
    text = written(name, ("read_file", {"path": "a"}))
    end = text.rindex(PAIRED[name].call_end.strip()) + len(PAIRED[name].call_end.strip())
    called = [("read_file", '{"path": "a"}')]
    for size in range(end, len(text) + 1):
        assert read(family_of(name).output_format, [text[:size]])[0] == called
    assert read(family_of(name).output_format, [f"I look.\n{text} and more"]) == (called, "I look.\n and more")


def test_the_last_of_the_tags_that_end_a_call_may_be_missing() -> None:
    """As in Qwen-coder's form: where several end each call, the end of the turn says the same as the last one."""
    output_format = family_of("own_lines").output_format
    text = written("own_lines", ("read_file", {"path": "a"}))
    assert text.endswith("</fn>\n</call>")
    for end in ("</call>", "\n</call>", "call>"):
        assert read(output_format, [text.removesuffix(end)]) == ([("read_file", '{"path": "a"}')], "")
    [(_, arguments)], _ = read(output_format, [text.removesuffix("</fn>\n</call>")])
    assert arguments == '{"path": "a\\n</arg>\\n'


@every_form
def test_prose_behind_a_call_without_its_last_tag_is_no_value(name: str) -> None:
    """If nothing ends the call in the rest of the turn. A value that holds these tags is whole, wherever it ends."""
    row = PAIRED[name]
    assert row.pairs is not None
    text = written(name, ("read_file", {"path": "a"}))
    if name == "joined":
        assert text.endswith(")[END_CALL]")  # one tag: what lacks it is no end
        return
    lacking = text[: text.rindex("<")].rstrip()
    for behind in ("\nI look at <b>.", " So.\n", f"{lacking.partition('read_file')[2]} twice"):
        found, content = read(family_of(name).output_format, [*lacking, *behind])
        assert found == [("read_file", '{"path": "a"}')] and content == behind
    end = lacking[lacking.rindex(row.pairs.closing.strip()) :]
    value = f"x{end} and\n{end} y"
    said = written(name, ("read_file", {"path": value, "lines": 3}))
    [(_, arguments)], content = read(family_of(name).output_format, [*said])
    assert json.loads(arguments) == {"path": value, "lines": 3} and content == ""


@every_form
def test_a_call_that_is_cut_in_its_first_key_is_not_lost(name: str) -> None:
    """The first one or another: it has begun with what opens the key."""
    said: tuple[str, JsonObject] = ("read_file", {"path": "a"})
    for calls in ([said], [("any", {"b": "c"}), said]):
        text = written(name, *calls)
        text = text[: text.rindex("path") + 2]
        for pieces in ([text], [*text]):
            splitter = Splitter(family_of(name).output_format, starts_in_reasoning=False, tools=TOOLS)
            events = [event for piece in pieces for event in splitter.feed(piece)] + splitter.finish(cut=True)
            ends = calls_of(events)
            assert [end.call.name for end in ends] == [tool for tool, _ in calls]
            assert ends[-1].is_cut and ends[-1].call.arguments == '{"pa'


@every_form
def test_a_second_key_that_breaks_off_goes_out_as_written(name: str) -> None:
    """Behind the first argument, which is whole."""
    text = written(name, ("read_file", {"path": "a", "lines": 3}))
    splitter = Splitter(family_of(name).output_format, starts_in_reasoning=False, tools=TOOLS)
    events = [*splitter.feed(text[: text.rindex("lines") + 2]), *splitter.finish(cut=False)]
    [end] = calls_of(events)
    assert end.is_cut and end.call.arguments == '{"path": "a", "li'


@every_form
def test_a_value_may_hold_what_stands_before_a_key(name: str) -> None:
    """No key follows there, so that it is the value's own; nothing of it is sent and taken back."""
    half, pairs = half_key_of(name), PAIRED[name].pairs
    assert pairs is not None
    lead = pairs.value.strip()[:-1]
    values = (half, f"{half}a", f"x{half}{lead}", f"{half}a\n{half}b{lead}\n", f"{half}{half}a <b>{pairs.value}")
    said = [
        (tool, {"path": value, **more})
        for value in values
        for tool, more in (("read_file", {"lines": 3}), ("read_file", {}), ("any", {"b": value}))
    ]
    text = written(name, *said)
    for pieces in ([text], [*text]):
        found, content = read(family_of(name).output_format, pieces)
        assert [(tool, json.loads(each)) for tool, each in found] == said and content == ""


@every_form
def test_a_turn_that_ends_behind_half_a_key_loses_nothing(name: str) -> None:
    """Where a key could still come the value is whole; where none can the value goes on."""
    half = half_key_of(name)
    text = written(name, ("read_file", {"path": f"ab{half}cd <e> fg"}))
    for end, written_out in (("ab", "ab"), ("cd", "ab"), ("fg", f"ab{half}cd <e> fg")):
        cut = text[: text.index(end, text.index("path") + len("path")) + len(end)]
        splitter = Splitter(family_of(name).output_format, starts_in_reasoning=False, tools=TOOLS)
        events = [*splitter.feed(cut), *splitter.finish(cut=True)]
        [ended] = calls_of(events)
        key = ', "cd' if end == "cd" else ""
        value = json.dumps(written_out, ensure_ascii=False)[: None if key else -1]
        assert ended.is_cut and ended.call.arguments == f'{{"path": {value}{key}'


@every_form
def test_an_unfinished_value_goes_out_as_written(name: str) -> None:
    """A call that the end cuts is no whole call, and nothing of it is lost."""
    text = written(name, ("read_file", {"path": "abcdef"}))
    splitter = Splitter(family_of(name).output_format, starts_in_reasoning=False, tools=TOOLS)
    events = [*splitter.feed(text[: text.index("def")]), *splitter.finish(cut=True)]
    [end] = calls_of(events)
    assert end.is_cut and end.call.arguments == '{"path": "abc'


# --- tags in what is no string ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled([name for name in PAIRED if name in ("shown", "seed_oss")], {"shown"}))
def test_tags_in_what_python_shows_of_a_value_are_words(name: str) -> None:
    """Of lists and objects the prompt has what transformers writes, to the letter, with no token of the form in it."""
    of, pairs = family_of(name), PAIRED[name].pairs
    assert pairs is not None
    tag = pairs.closing.strip()
    said: JsonObject = {"a": [tag, f"it's {tag} \\ufdd1 \\{tag}\n"], "b": {f'"{tag}"': {tag: None}}}
    made = {"type": "function", "function": {"name": "any", "arguments": said}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [made]}]
    prompts = [
        of.template.write(conversation([("any", each)]), TOOLS, thinking=False) for each in (said, {"a": [1], "b": {}})
    ]
    judged = compile_template(source_of(name)).render(messages=messages, add_generation_prompt=True, **VARIABLES)
    assert as_written(prompts[0].shown, PAIRED[name], [("any", said)]).strip() in judged
    token = of.tokenizer.token_id(tag)
    with_tags, without = (of.template.control.encode(prompt.text).count(token) for prompt in prompts)
    assert with_tags == without > 0


# --- grammars ---------------------------------------------------------------------------------------------------------

CHOICE = ToolSpec(
    "choose",
    "Chooses.",
    {
        "type": "object",
        "properties": {
            "way": {"enum": ["up", 2, None]},
            "text": {"type": ["string", "null"]},
            "list": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
    strict=True,
)


def setup(name: str, *, tags_are_tokens: bool) -> Setup:
    tokens = tokens_in(source_of(name)) if tags_are_tokens else ()
    return Setup(byte_tokenizer(tokens), family_of(name).output_format)


@sampled_cells(lambda tokens, name: tokens is (name == "told"))
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_forced_calls_are_pairs_as_the_template_writes_them(name: str, tokens: bool) -> None:
    """What the template writes is accepted; another tool, type, key or form is not."""
    case = setup(name, tags_are_tokens=tokens)
    grammar = case.grammar(ToolChoice("required"), tools=(*TOOLS, CHOICE))
    good = written(name, ("read_file", {"path": 'a"\n</tool_call>', "lines": 3}))
    assert case.accepts(grammar, good)
    assert case.accepts(grammar, written(name, ("any", {"b": [1], "c": "x", "d": None})))
    assert case.accepts(grammar, written(name, ("any", {})))
    for odd in (good.replace("3", "three"), good.replace("lines", "line"), good.replace("read_file", "remove")):
        assert not case.accepts(grammar, odd)
    assert not case.accepts(grammar, f"So {good}")
    assert not case.accepts(grammar, '<tool_call>\n{"name": "any", "arguments": {}}\n</tool_call>')
    several = written(name, ("read_file", {"path": "a"}), ("any", {}), ("any", {"b": [1]}))
    one = case.grammar(ToolChoice("required"), tools=TOOLS, parallel=False)
    assert case.accepts(grammar, several) and not case.accepts(one, several) and case.accepts(one, good)


@every_form
def test_a_forced_value_has_a_type_of_its_schema(name: str) -> None:
    """One of an enumeration, a text or null, a list of numbers; each as the template writes it."""
    case = setup(name, tags_are_tokens=False)
    grammar = case.grammar(ToolChoice("required"), tools=(CHOICE,))
    for good in (
        {"text": "a"}, {"text": None}, {"way": "up", "text": "a"}, {"way": 2, "text": "a"},
        {"way": None, "text": "", "list": [1, 2]}, {"text": "a", "list": []},
    ):  # fmt: skip
        assert case.accepts(grammar, written(name, ("choose", good))), good
    for bad in ({}, {"way": "down", "text": "a"}, {"text": "a", "list": ["b"]}, {"text": "a", "list": "b"}):
        assert not case.accepts(grammar, written(name, ("choose", bad))), bad


@sampled_cells(lambda tokens, name: tokens is (name == "told"))
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_a_forced_text_ends_where_it_is_read_to_end(name: str, tokens: bool) -> None:
    """It may hold what closes a value, or ends a call, alone; what the reader takes for its end cannot be written."""
    case, row = setup(name, tags_are_tokens=tokens), PAIRED[name]
    assert row.pairs is not None
    grammar = case.grammar(ToolChoice("required"), tools=(READ,))
    own = (f"a{row.pairs.closing}b", f"a{row.pairs.closing}", row.pairs.opening, row.call_end)
    for value in () if tokens else own:  # as tokens these are no text
        text = written(name, ("read_file", {"path": value, "lines": 3}))
        assert case.accepts(grammar, text), value
        [(_, arguments)], _ = read(family_of(name).output_format, [text])
        assert json.loads(arguments) == {"path": value, "lines": 3}
    for end in ends_of(row):
        if len(end) > 1:
            said = written(name, ("read_file", {"path": "a<here>b", "lines": 3}))
            texts = [said.replace("<here>", f"{end[0]}{gap}{gap.join(end[1:])}") for gap in (" ", "\n \n", "\t")]
            assert not tokens or case.accepts(grammar, said)
            assert tokens or not any(case.accepts(grammar, text) for text in texts)


def test_the_grammar_of_many_arguments_grows_with_their_number() -> None:
    """Each is written once, also where something stands between two of them."""
    sizes = []
    for number in (40, 80):
        keys = {f"key{index:03}": {"type": "string"} for index in range(number)}
        tool = ToolSpec("many", "", {"type": "object", "properties": keys, "additionalProperties": False}, strict=True)
        promise = setup("joined", tags_are_tokens=False).grammar(ToolChoice("required"), tools=(tool,))
        assert promise is not None
        sizes.append(len(promise.lark))
    assert sizes[1] < 2.2 * sizes[0]


def test_a_forced_key_ends_where_either_kind_of_value_begins() -> None:
    """A text and a number may begin differently: a key holds the beginning of neither, as it would be read to end."""
    source = PAIRS["told"].replace(f'" as="{TOLD}">', "{{ '|text]' if v is string else ']' }}")
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow)
    case = Setup(byte_tokenizer(()), select_format("auto", "", (), None, row))
    grammar = case.grammar(ToolChoice("required"), tools=(ANY,))
    assert case.accepts(grammar, rendered(source, [("any", {"a": 5, "b": "x"})]))
    assert not case.accepts(grammar, rendered(source, [("any", {"a]b": "x"})]))


@pytest.mark.parametrize(
    ("closing", "opening", "half"), [("[END_VALUE]", "[KEY]", "[END_VALUE],[KEY]"), ("|", "|", "|")]
)
def test_a_forced_key_is_none_that_its_reader_divides(closing: str, opening: str, half: str) -> None:
    """Of two openings before a value the last one counts, so that what a key has before it would be the value's. Where
    the two are alike the beginning of a key is enough."""
    source = PAIRS["joined"].replace("[END_VALUE]", closing).replace("[KEY]", opening)
    source = source if closing != opening else source.replace("{{ ',\n' if not loop.last }}", "")
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow)
    case = Setup(byte_tokenizer(()), select_format("auto", "", (), None, row))
    grammar = case.grammar(ToolChoice("required"), tools=(ANY,))
    for key in ("b", f"b{opening[:-1]}c", f"b{closing[1:]}c"):
        said: list[tuple[str, JsonObject]] = [("any", {"a": "x", key: "y"})]
        text = rendered(source, said)
        found, _ = read(case.format, [text])
        assert case.accepts(grammar, text) and [(name, json.loads(each)) for name, each in found] == said
    key = f"{half}c" if closing == opening else f"b{half}c"
    assert not case.accepts(grammar, rendered(source, [("any", {"a": "x", key: "y"})]))
    properties = {"a": {"type": "string"}, key: {"type": "string"}}
    strict = ToolSpec(
        "any", "", {"type": "object", "properties": properties, "additionalProperties": False}, strict=True
    )
    with pytest.raises(BadRequest, match="cannot write"):
        case.grammar(ToolChoice("required"), tools=(strict,))


@sampled_cells(lambda tokens, name: tokens is (name == "told"))
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_pairs_of_strict_tools_are_held_where_the_model_may_call(name: str, tokens: bool) -> None:
    """Beside any text, with thinking before it; other tools' arguments are free, and so is text without calls."""
    case = setup(name, tags_are_tokens=tokens)
    promise = case.promise(ToolChoice(), tools=TOOLS)
    assert promise.grammar is not None and promise.notes == ()
    good = written(name, ("read_file", {"path": "a", "lines": 3}))
    two = written(name, ("any", {"x": [None, {"y": 1.5}]}), ("read_file", {"path": "a", "lines": 3}))
    for before in ("", "I look.\n", "<think>\nhm\n</think>\n"):
        for text in (good, two):
            assert case.accepts(promise.grammar, before + text)
            assert not case.accepts(promise.grammar, before + text.replace("3", "three"))
            assert not case.accepts(promise.grammar, before + text.replace("lines", "line"))
    for text in ("", "Hello.", "[1, 2]", "x = {}; y[0] < 3", "<think>\nhm\n</think>\n\nFine.", f"{good} and <b>"):
        assert case.accepts(promise.grammar, text), text


def test_a_form_that_no_grammar_writes_is_not_held_in_another() -> None:
    """It raises: a call in the form of Hermes models would be none to this model."""
    form = CallForm("unheard", "<call>", lambda tools, draft: iter(()))  # type: ignore[arg-type, return-value]
    case = Setup(byte_tokenizer(()), OutputFormat("unheard", None, (form,)))
    with pytest.raises(ValueError, match="no grammar writes calls of the form unheard"):
        case.grammar(ToolChoice("required"), tools=TOOLS)


# --- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(PAIRS, {"told", "own_lines"}))
def test_pairs_keep_the_tokens_that_the_model_wrote(name: str) -> None:
    """In odd tokens, echoed by the client: the next prompt begins with all of them."""
    of = family_of(name)
    talk = Talk(of, thinking=False, tools=TOOLS)
    talk.say("hi")
    text = written(name, ("read_file", {"path": "a b\n  c\n", "lines": 3}), ("any", {}))
    kept = talk.answer(in_odd_tokens(of.tokenizer, text))
    assert talk.results("done") == 2
    after = talk.stitched()
    assert num_common(kept, after.ids) == len(kept) and after.num_replayed_turns == 1


@every_form
def test_the_next_prompt_begins_with_pairs(name: str) -> None:
    """In the tokenizer's own tokens, also where turns are not found. MiniMax's template leaves out the thinking that it
    opens itself, so a turn has some."""
    of = family_of(name)
    talk = Talk(of, thinking=False, tools=TOOLS)
    talk.say("hi")
    thought = "hm\n</think>\n\n\n" if name == "minimax_m2" else ""
    text = thought + written(name, ("read_file", {"path": "a b  c", "lines": 3}))
    kept = talk.answer(of.tokenizer.encode(text))
    assert talk.results("done") == 1
    assert num_common(kept, talk.stitched().ids) == len(kept)


@pytest.mark.parametrize("name", sampled(PAIRS, {"told", "own_lines"}))
def test_the_one_allowed_call_in_pairs_is_closed_as_the_template_writes_it(name: str) -> None:
    """Wherever tokens end, its tokens and what closes it are the template's text; those of a second call are not."""
    of, text = family_of(name), written(name, ("read_file", {"path": "a b  c", "lines": 3}))
    more = written(name, ("read_file", {"path": "a b  c", "lines": 3}), ("any", {}))
    for said in (text, more):
        for split in range(0, len(said), 7):
            ids = of.tokenizer.encode(said[:split]) + of.tokenizer.encode(said[split:])
            splitter = Splitter(of.output_format, starts_in_reasoning=False, tools=TOOLS)
            answer = AnswerReader(of.tokenizer.detokenizer(()), StopScanner(()), splitter, allows_many_calls=False)
            [_] = calls_of([delta for token in ids for delta in answer.feed([token])])
            kept = answer.said_tokens()
            closed = ids[: kept.num_tokens] + (of.tokenizer.encode(kept.rest) if kept.rest else ())
            assert of.tokenizer.decode(closed) == text


# --- templates that nobody wrote --------------------------------------------------------------------------------------

SPACE = st.sampled_from(["", "", "\n", " ", "\n  "])
BODIES = st.builds(
    lambda tag, call, key, value, end, gap, rest, spaces: (
        f"{tag[0]}{spaces[0]}{CALLS}{call[0]}{{{{ c.name }}}}{call[1]}{spaces[1]}{PAIR}{key}{{{{ k }}}}{value}{VALUE}"
        f"{end}{{{{ '{gap}' if not loop.last }}}}{{% endfor %}}{spaces[2]}{call[2]}{spaces[3]}{{% endfor %}}{tag[1]}"
        f"{rest}"
    ),
    st.sampled_from([("<calls>", "</calls>"), ("[CALLS]", "[/CALLS]"), ("<|calls|>", ""), ("", "")]),
    st.sampled_from(
        [("<call>", "", "</call>"), ('<do name="', '">', "</do>"), ("[CALL]", "(", ")"), ("<fn=", ">", "<end>")]
    ),
    st.sampled_from(["<key>", '<arg name="', "<arg=", "[KEY]", "- ", "§"]),
    st.sampled_from(["</key><value>", '">', ">\n", "[VALUE]", ": ", "=", "</key>\n<value>\n", f'" of="{VALUE}">']),
    st.sampled_from(["</value>", "</arg>\n", "\n</arg>\n", "[END]", ";", "\n", "¶"]),
    st.sampled_from(["", ",", "\\n", ", "]),
    st.sampled_from(["", "\n", "<done>"]),
    st.tuples(SPACE, SPACE, SPACE, SPACE),
)


PLAIN: list[tuple[str, JsonObject]] = [
    ("zero", {"a": "x\n  y", "b": [1, None, {"c": "d"}], "c": True}), ("one", {}), ("two", {"a": ""}),
]  # fmt: skip
PLAIN_TOOLS = tuple(tool for name, arguments in PLAIN for tool in typed_tools([name], arguments))


@settings(max_examples=num_examples(10), deadline=None)
@given(BODIES, st.lists(st.dictionaries(KEYS, ODD | JSON, max_size=3), min_size=1, max_size=3), st.data())
def test_what_a_template_of_pairs_writes_is_read_and_held(
    body: str, said: list[JsonObject], data: st.DataObject
) -> None:
    """Of every template whose form is believed: what it writes is read back, cut anywhere, and can be forced."""
    source = f"{HEAD}{body}{TAIL}"
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    if isinstance(row, NoRow):
        return
    calls = list(zip(NAMES, said[: None if row.between is not None else 1], strict=False))
    tools = tuple(tool for tool_name, each in calls for tool in typed_tools([tool_name], each))
    text = rendered(source, calls)
    output_format = select_format("auto", "", (), None, row)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for pieces in ([text], [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]):
        found, content = read(output_format, pieces, tools)
        assert [(tool, json.loads(each)) for tool, each in found] == calls, (row, text)
        assert not content.strip(), (row, text)
    text = rendered(source, PLAIN[: None if row.between is not None else 1]).strip()
    case = Setup(byte_tokenizer(()), output_format)
    assert case.accepts(case.grammar(ToolChoice("required"), tools=PLAIN_TOOLS), text), (row, text)
