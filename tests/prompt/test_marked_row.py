"""Forms of calls whose strings stand between marks, derived from templates: that they read back what is written."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, JsonObject, PairParts, Spelling, ToolCallBlock, ToolSpec
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers.own_text import read_own
from kvserve.prompt.call_row import NoRow, find_call_row
from kvserve.prompt.call_words import CallWords
from kvserve.prompt.compiled import CompiledTemplate
from tests.calls import calls_of
from tests.laws import num_examples
from tests.prompt.call_forms import ANY, CALLS, HEAD, READ, REAL_MARKED, TAIL, VARIABLES, rendered, source_of
from tests.prompt.test_call_row import read
from tests.prompt.vocabularies import TEMPLATES

ITEMS = "{% for x in v %}{{ show(x) }}{{ ',' if not loop.last }}{% endfor %}"
MEMBERS = "{% for k, x in v | dictsort %}{{ k }}:{{ show(x) }}{{ ',' if not loop.last }}{% endfor %}"
OWN = (
    "{% macro show(v) %}{% if v is string %}<|s|>{{ v }}<|s|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    f"{{% elif v is mapping %}}{{{{ '{{' }}}}{MEMBERS}{{{{ '}}' }}}}{{% elif v is iterable %}}[{ITEMS}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
QUOTED = (
    "{% macro show(v) %}{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
    "{% else %}{{ v | string }}{% endif %}{% endmacro %}"
)
MARKED = {
    "own": f"{OWN}{HEAD}{CALLS}<|call>{{{{ c.name }}}}{{{{ '{{' }}}}"
    "{% for k, v in c.arguments | dictsort %}{{ k }}:{{ show(v) }}{{ ',' if not loop.last }}{% endfor %}"
    f"{{{{ '}}' }}}}<call|>{{% endfor %}}{TAIL}",
    "quoted": f"{QUOTED}{HEAD}<|calls|>[{CALLS}{{{{ c.name }}}}("
    "{% for k, v in c.arguments.items() %}{{ k }}={{ show(v) }}{{ ', ' if not loop.last }}{% endfor %})"
    f"{{{{ ', ' if not loop.last }}}}{{% endfor %}}]<|calls_end|>{TAIL}",
}
"""Sources by what they show: values in a spelling of their own, and strings in quotes that nothing escapes."""

REAL = [name for name in TEMPLATES if name in REAL_MARKED]
TOOLS = (READ, ANY)
every_form = pytest.mark.parametrize("name", MARKED)


@cache
def row_of(name: str) -> CallRow:
    source = MARKED.get(name) or source_of(name)
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow), row.reason
    return row


@cache
def format_of(name: str) -> OutputFormat:
    return select_format("auto", MARKED.get(name) or source_of(name), (), None, row_of(name))


def written(name: str, *calls: tuple[str, JsonObject]) -> str:
    return rendered(MARKED[name], calls)


def read_back(name: str, pieces: Sequence[str], tools: Sequence[ToolSpec] = TOOLS) -> list[tuple[str, object]]:
    """The calls of an answer that says nothing else."""
    found, content = read(format_of(name), pieces, tools)
    assert content == "", content
    return [(called, json.loads(arguments)) for called, arguments in found]


def test_the_marks_of_strings_are_what_the_template_writes() -> None:
    """And around nothing else: how lists and objects are spelt is found with them."""
    own = Spelling(null="None", marks=("<|s|>", "<|s|>"), is_own=True, sorts_keys=True)
    assert row_of("own") == CallRow(
        ("<|call>",), ("{",), ("}<call|><|call>",), ("}<call|>",), pairs=PairParts("", ":", "", ",", None, own)
    )
    quoted = Spelling("True", "False", "None", is_python=True, has_json_objects=True, marks=("'", "'"))
    assert row_of("quoted") == CallRow(
        ("<|calls|>[",), ("(",), ("), ",), (")]<|calls_end|>",), pairs=PairParts("", "=", "", ", ", None, quoted)
    )


def test_the_order_of_keys_is_the_templates() -> None:
    """Alphabetical, whatever their case, if arguments are and the members of objects too; else as they were said."""
    for old, new in (("v | dictsort", "v.items()"), ("arguments | dictsort", "arguments | dictsort(true)")):
        source = MARKED["own"].replace(old, new)
        row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
        assert source != MARKED["own"] and isinstance(row, CallRow) and row.pairs is not None
        assert not row.pairs.spelling.sorts_keys
    said: list[tuple[str, JsonObject]] = [("any", {"b": 1, "A": {"d": 2, "C": 3}})]
    made = [ToolCallBlock("", name, json.dumps(arguments)) for name, arguments in said]
    for name in MARKED:
        assert CallWords(row_of(name)).calls(made) == written(name, *said)


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_a_row_is_derived_of_the_real_templates_with_marks(name: str) -> None:
    """Those of shared/templates, where it is here."""
    pairs = row_of(name).pairs
    assert pairs is not None and pairs.spelling.marks is not None


def test_one_mark_alone_derives_no_row() -> None:
    """A string that only begins with one, or a form in which nothing ends a number."""
    source = MARKED["own"].replace("{{ v }}<|s|>", "{{ v }}")
    assert isinstance(find_call_row(CompiledTemplate(source, VARIABLES), read_calls), NoRow)
    source = MARKED["quoted"].replace("{{ ', ' if not loop.last }}{% endfor %})", "{{ '\n' }}{% endfor %})")
    assert isinstance(find_call_row(CompiledTemplate(source, VARIABLES), read_calls), NoRow)


WORDS = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "'", '"', "<|s|>", "{", "}", "[", "]", "(", ")", ",", ":", "=", "\\", "<call|>", "é"]
    ),
    max_size=6,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([2.5, 1e21]) | WORDS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["a", "b c", ""]), each, max_size=2),
    max_leaves=5,
)


def _is_told(name: str, value: object) -> bool:
    """Whether the form can say the value: none of its strings holds what ends a string."""
    match value:
        case str():
            text = f"{value}|".replace(" ", "").replace("\n", "")
            own = [f"<|s|>{sign}" for sign in ",:]}"]
            return not any(end in text for end in own) if name == "own" else "',a=" not in text
        case list():
            return all(_is_told(name, each) for each in value)
        case dict():
            return all(_is_told(name, each) for each in value.values())
    return True


@every_form
@given(value=JSON, other=JSON, cuts=st.lists(st.integers(1, 99), max_size=4))
@settings(max_examples=num_examples(30), deadline=None)
def test_a_marked_value_is_read_back_whole(name: str, value: object, other: object, cuts: list[int]) -> None:
    """Any value, in any cut, beside another one and another call; with its type, of a tool that says none."""
    if not (_is_told(name, value) and _is_told(name, other)):
        return
    calls: list[tuple[str, JsonObject]] = [
        ("any", {"a": value, "b": other}),
        ("read_file", {"path": "x y", "lines": 3}),
    ]
    tool = ToolSpec("any", "", {"properties": {"a": {}, "b": {}}})
    text = written(name, *calls)
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert read_back(name, pieces, (READ, tool)) == calls


def test_code_in_quotes_is_whole() -> None:
    """A quote with a comma and a word behind it ends a string only where the tool has such an argument."""
    code = "print('a', end='')\nf('b')]\nopen('c'), g('d')"
    calls: list[tuple[str, JsonObject]] = [("read_file", {"path": code, "lines": 3})]
    assert read_back("quoted", [written("quoted", *calls)]) == calls
    said = "<|calls|>[read_file(path='a', more=1, note='b', lines=3)]<|calls_end|>"
    [(_, arguments)] = read_back("quoted", [said])
    assert arguments == {"path": "a', more=1, note='b", "lines": 3}
    open_tool = ToolSpec("read_file", "", {**READ.parameters, "additionalProperties": True})
    [(_, arguments)] = read_back("quoted", [said], (open_tool,))
    assert arguments == {"path": "a", "more": 1, "note": "b", "lines": 3}
    [(_, arguments)] = read_back("quoted", ["<|calls|>[read_file(lines=3, more=\"it's, b=2\", path='a')]<|calls_end|>"])
    assert arguments == {"lines": 3, "more": "it's, b=2", "path": "a"}


@every_form
def test_a_marked_string_goes_out_as_it_is_written(name: str) -> None:
    """Each piece as it comes, but for what may be its end."""
    text = written(name, ("read_file", {"path": "ab,'c", "lines": 3}))
    splitter = Splitter(format_of(name), starts_in_reasoning=False, tools=TOOLS)
    head, mark, rest = text.partition("ab,")
    events = splitter.feed(head + mark)
    assert [type(event).__name__ for event in events] == ["ToolCallStart", "ToolCallPiece"]
    assert events[1].text.endswith('"path": "ab,')  # type: ignore[union-attr]
    [end] = calls_of([*events, *splitter.feed(rest), *splitter.finish(cut=False)])
    assert json.loads(end.call.arguments) == {"path": "ab,'c", "lines": 3}


@every_form
def test_what_ends_a_marked_call_may_be_cut(name: str) -> None:
    """From its first tag on; before that the call is not finished, and what was written of it goes out."""
    calls: list[tuple[str, JsonObject]] = [("read_file", {"path": "a"})]
    text = written(name, *calls)
    end = text.rindex("}" if name == "own" else ")")
    for size in range(end + 1, len(text) + 1):
        assert read_back(name, [text[:size]]) == calls, text[:size]
    splitter = Splitter(format_of(name), starts_in_reasoning=False, tools=TOOLS)
    [cut] = calls_of([*splitter.feed(text[:end]), *splitter.finish(cut=True)])
    assert cut.is_cut and cut.call.arguments == '{"path": "a' + ("<|s|>" if name == "own" else "'")
    for end in (text.index("path") + 2, text.index("path") + 5):
        splitter = Splitter(format_of(name), starts_in_reasoning=False, tools=TOOLS)
        [cut] = calls_of([*splitter.feed(text[:end]), *splitter.finish(cut=True)])
        assert cut.is_cut and cut.call.arguments == '{"' + text[text.index("path") : end]
    found, content = read(format_of(name), [f"I look.\n{text} and more"])
    assert [called for called, _ in found] == ["read_file"] and content == "I look.\n and more"


@every_form
def test_a_marked_key_is_not_lost_where_its_value_is_none(name: str) -> None:
    """One that stands there already, and one behind which the turn ends: it goes out as it is written, in any cut."""
    lead = row_of(name).pairs.value  # type: ignore[union-attr]
    cases: tuple[JsonObject, ...] = ({"b": 1, "zz": 2}, {"b": "p", "zz": "q"})
    for said in cases:
        text = written(name, ("any", said))
        begun = f"{json.dumps({'b': said['b']})[:-1]}, "
        twice, value = text.replace("zz", "b"), row_of(name).pairs.spelling.written(said["zz"])  # type: ignore[union-attr]
        for pieces in ([twice], [*twice]):
            assert read(format_of(name), pieces) == ([("any", f"{begun}b{lead}{value}")], "")
        cut = text[: text.index("zz") + len(f"zz{lead}")]
        for pieces in ([cut], [*cut]):
            splitter = Splitter(format_of(name), starts_in_reasoning=False, tools=TOOLS)
            events = [event for piece in pieces for event in splitter.feed(piece)]
            [ended] = calls_of([*events, *splitter.finish(cut=True)])
            assert ended.is_cut and ended.call.arguments == f'{begun}"zz{lead}'


@every_form
def test_calls_without_arguments_and_of_other_tools(name: str) -> None:
    """No argument is an empty object; a tool that is not offered is called beside one that is, and else is text."""
    none: JsonObject = {}
    assert read_back(name, [written(name, ("any", none), ("any", none))]) == [("any", none), ("any", none)]
    alone = written(name, ("remove_file", {"path": "a"}))
    assert read(format_of(name), [alone]) == ([], alone)
    if name == "quoted":
        other: tuple[str, JsonObject] = ("remove_file", {"path": "a"})
        for calls in ([other, other, ("read_file", {"path": "b"})], [("read_file", {"lines": 3}), other]):
            assert read_back(name, [written(name, *calls)]) == calls


def test_what_a_template_spells_itself_is_read_strictly() -> None:
    """Its own words, JSON's strings too; what is broken is refused."""
    spelling = Spelling(null="None", marks=("<|s|>", "<|s|>"), is_own=True)
    text = '{a:[<|s|>b<|s|> , 1,true, None] ,"c d" : {}, :"\\n"}'
    assert read_own(text, spelling) == {"a": ["b", 1, True, None], "c d": {}, "": "\n"}
    for broken in ("{a:1,a:2}", "[1", "{a}", "[<|s|>b]", "[1] 2", "[,]", "[nil]", "[1 2]", "[" * 200 + "]" * 200):
        with pytest.raises(ValueError):
            read_own(broken, spelling)


@every_form
def test_calls_in_words_are_in_the_marked_form(name: str) -> None:
    """As for templates that have no place for them."""
    row = row_of(name)
    calls: list[tuple[str, JsonObject]] = [("read_file", {"lines": 3, "path": "it's"}), ("any", {})]
    made = [ToolCallBlock("", called, json.dumps(arguments)) for called, arguments in calls]
    assert CallWords(row).calls(made) == written(name, *calls)
