"""Laws of derived forms of calls: for templates that nobody wrote, beside broken calls, in other spellings."""

import json
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import mistral

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, CallSlot, Grammar, JsonObject, ToolChoice, ToolSpec
from kvserve.output.answer import AnswerReader
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.output.tool_parsers import derived
from kvserve.prompt.call_row import NoRow, find_call_row
from kvserve.prompt.compiled import CompiledTemplate
from tests.calls import calls_of
from tests.laws import num_examples, sampled_cells
from tests.output.test_grammar import Setup, byte_tokenizer
from tests.prompt.call_forms import (
    ANY,
    BARE_ROWS,
    BROKEN_IN_EVERY_RUN,
    CALLS,
    DERIVED,
    HEAD,
    HELD_BY_TOKENS,
    MISTRALS,
    READ,
    SMALL,
    TAIL,
    VARIABLES,
    rendered,
    source_of,
)
from tests.prompt.test_call_row import ARGUMENTS, REPLAYED, TOOLS, every_form, family_of, read, written
from tests.prompt.turns import Talk, num_common
from tests.prompt.vocabularies import tokens_in

NAME, ID, NUMBER = "{{ c.name }}", "{{ call.id }}", "{{ loop.index0 }}"


# --- templates that nobody wrote --------------------------------------------------------------------------------------


def _spaced(texts: list[str]) -> st.SearchStrategy[str]:
    space = st.sampled_from(["", "", " ", "\n", "\n  "])
    return st.tuples(space, st.sampled_from(texts), space).map("".join)


TAGGED = st.builds(
    lambda first, label, mid, end, gap, last: (
        f"<calls>{CALLS}{first}{label}{NAME}{mid}{{{{ c.arguments | tojson }}}}{end}{{{{ '{gap}' if not loop.last }}}}"
        f"{{% endfor %}}{last}"
    ),
    _spaced(["<call>", "[CALL]", "<|call|>functions.", "<call name="]),
    st.sampled_from(["", f"{NUMBER}<n>", f" {ID} <id>", f"id: {ID}\nname:", f"id={ID} "]),
    _spaced(["<args>", "[ARGS]", ">", f"[ID]{ID}[ARGS]", f":{NUMBER}<args>", ": "]),
    _spaced(["</call>", "<end>", "", "[END]"]),
    st.sampled_from(["", "\\n", " ", ", "]),
    st.sampled_from(["</calls>", "\n</calls>", ""]),
)
LISTED = st.builds(
    lambda tag, before, space, keys, behind, gap, last: (
        f'{tag}[{CALLS}{{{before}{space}"{keys[0]}": "{NAME}", {space}"{keys[1]}":{space} '
        f"{{{{ c.arguments | tojson }}}}{behind}}}{{{{ ',{gap}' if not loop.last }}}}{{% endfor %}}]{last}"
    ),
    st.sampled_from(["<calls>", "[CALLS]", "<calls>\n", "[CALLS] "]),
    st.sampled_from(["", f'"index": {NUMBER}, ', f'"id": "{ID}", ', '"type": "function", ']),
    st.sampled_from(["", " ", "\n"]),
    st.sampled_from([("name", "arguments"), ("tool", "parameters")]),
    st.sampled_from(["", f', "id": "{ID}"', ', "status": "ok"']),
    st.sampled_from(["", " ", "\\n"]),
    st.sampled_from(["", "</calls>", "\n</calls>"]),
)
BARE = st.builds(
    lambda space, key: (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        f'{CALLS}{{{space}"name": "{NAME}",{space}"{key}": {{{{ c.arguments | tojson }}}}{space}}}{{% endfor %}}'
    ),
    st.sampled_from(["", " ", "\n  "]),
    st.sampled_from(["arguments", "parameters"]),
)
BODIES = TAGGED | LISTED | BARE
COMPANY = st.lists(st.tuples(st.sampled_from(["any", "read_file"]), ARGUMENTS), min_size=1, max_size=3)


@settings(max_examples=num_examples(12), deadline=None)
@given(BODIES, COMPANY, st.data())
def test_what_a_template_writes_is_read_back(
    body: str, calls: list[tuple[str, JsonObject]], data: st.DataObject
) -> None:
    """Of every template whose form is believed, with white space wherever it likes: whole and cut anywhere."""
    source = f"{HEAD}{body}{TAIL}"
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    if isinstance(row, NoRow):
        return
    said = calls[: None if row.between is not None else 1]
    text = rendered(source, said)
    output_format = select_format("auto", "", (), None, row)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for pieces in ([text], [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]):
        found, content = read(output_format, pieces)
        assert [(name, json.loads(arguments)) for name, arguments in found] == said, (row, text)
        assert not content.strip(), (row, text)


SPACED = {
    "lines": f"{CALLS}<call>\n{NAME}\n{{{{ c.arguments | tojson }}}}\n</call>{{% endfor %}}",
    "space": f"{CALLS}[CALLS] {NAME}[ARGS]{{{{ c.arguments | tojson }}}}{{% endfor %}}",
    "index": f'<calls>[{CALLS}{{"index": {NUMBER}, "name": "{NAME}", "arguments": {{{{ c.arguments | tojson }}}}}}'
    "{{ ', ' if not loop.last }}{% endfor %}]</calls>",
    "id": f"{CALLS}<call> {ID} <name>{NAME}<args>{{{{ c.arguments | tojson }}}}</call>{{% endfor %}}",
    "labels": f"{CALLS}<call>id: {ID}\nname:{NAME}\n{{{{ c.arguments | tojson }}}}</call>{{% endfor %}}",
}


@pytest.mark.parametrize("name", SPACED)
def test_a_form_may_end_in_white_space_before_what_differs(name: str) -> None:
    """A name, an id or a number behind white space: accepted, read and forced as it is written."""
    source = f"{HEAD}{SPACED[name]}{TAIL}"
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow)
    calls: list[tuple[str, JsonObject]] = [("read_file", {"path": "a"}), ("any", {}), ("any", {"b": [1]})]
    text = rendered(source, calls)
    output_format = select_format("auto", "", (), None, row)
    assert read(output_format, list(text)) == ([(tool, json.dumps(arguments)) for tool, arguments in calls], "")
    case = Setup(byte_tokenizer(()), output_format)
    assert case.accepts(case.grammar(ToolChoice("required"), tools=TOOLS), text)
    assert not case.accepts(case.grammar(ToolChoice(), tools=TOOLS), text.replace('"a"', "5"))


def test_a_form_that_the_reader_does_not_read_is_not_believed() -> None:
    """The control of the law above: a reader that misses a call, or takes markup for text, refuses every template."""
    template = CompiledTemplate(SMALL["tags"], VARIABLES)
    assert isinstance(find_call_row(template, read_calls), CallRow)
    assert isinstance(find_call_row(template, lambda row, tools, text: ("", text, ())), NoRow)

    def leaking(row: CallRow, tools: tuple[ToolSpec, ...], text: str) -> tuple[str, str, object]:
        return "", "<|call_end|>", read_calls(row, tools, text).calls

    assert isinstance(find_call_row(template, leaking), NoRow)  # type: ignore[arg-type]


# --- beside broken calls ----------------------------------------------------------------------------------------------

BROKEN = (
    '{"path": "a",}', '{"path": "a" oops}', "{'path': 'a'}", '{path: "a"}', '{"lines": [3}', '{"path": "5" tall}',
    '{"path": tru}', '{"path": "a", "path": "b"}', '{"path": 1e999}', '{"path": "a\\q"}', '{"a": {"b": [1,]}}',
    '{"path": "a}', '{"path": "a"', '{"path": {"x": 1}', '{"lines": [1, 2}',
    '{"path": "he said "hi" to me"}', '{"path": {"a" 1}, "b": [}]}',
)  # fmt: skip
MARK: JsonObject = {"path": "zqbroken"}
PROSE = "\n\nThen I will say more."


def with_broken(name: str, calls: list[tuple[str, JsonObject]], broken: str) -> str:
    return written(name, *calls).replace(json.dumps(MARK), broken)


@sampled_cells(lambda name, **_: name in BROKEN_IN_EVERY_RUN)
@every_form
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_call_takes_no_neighbour_and_no_prose(name: str, broken: str) -> None:
    """The calls before and behind it are read, and what is said in the end; markup is no text."""
    output_format = family_of(name).output_format
    good: tuple[str, JsonObject] = ("any", {"k": 1})
    for calls in (
        [("read_file", MARK)],
        [("read_file", MARK), good],
        [good, ("read_file", MARK)],
        [good, ("read_file", MARK), good],
    ):
        if len(calls) > 1 and DERIVED[name].between is None:
            continue
        text = with_broken(name, calls, broken) + PROSE
        whole = read(output_format, [text])
        assert read(output_format, list(text)) == whole
        found, content = whole
        assert [tool for tool, _ in found] == [tool for tool, _ in calls], (text, whole)
        assert [arguments for tool, arguments in found if tool == "any"] == ['{"k": 1}'] * calls.count(good)
        assert content == PROSE, (text, whole)


@every_form
def test_a_broken_call_ends_with_its_brackets(name: str) -> None:
    """What stands on the same line behind it, and behind what closes it, is text."""
    for broken in ('{"path": "a",}', '{"path": "a" oops}', '{"a": {"b": [1,]}}', "{'path': 'a'}"):
        text = with_broken(name, [("read_file", MARK)], broken)
        end = text.index(broken) + len(broken)
        for answer in (text, text[:end]):
            found, content = read(family_of(name).output_format, list(f"{answer} and more."))
            assert [tool for tool, _ in found] == ["read_file"] and content == " and more.", (answer, found, content)


@every_form
def test_a_broken_call_that_nothing_closes_ends_with_its_line(name: str) -> None:
    """A quote or a bracket that is missing leaves it open: what is said on the next line is text all the same."""
    for broken in ('{"path": "a" oops', '{"path": "5" tall"}', '{"path": ["a" {'):
        text = with_broken(name, [("read_file", MARK)], broken)
        head = text[: text.index(broken) + len(broken)]
        found, content = read(family_of(name).output_format, [head + PROSE])
        assert [tool for tool, _ in found] == ["read_file"] and content == PROSE, (head, found, content)


@pytest.mark.parametrize("name", [n for n in DERIVED if n in ("names", "devstral_2507", "list", "mistral_nemo")])
def test_a_call_that_a_broken_one_quotes_is_not_run(name: str) -> None:
    """Inside quotes the next call is text of the arguments."""
    quoted = written(name, ("any", {})).replace('"', "'")
    broken = f'{{"path": "say "hi" {quoted} to me"}}'
    found, _ = read(family_of(name).output_format, [with_broken(name, [("read_file", MARK)], broken)])
    assert [tool for tool, _ in found] == ["read_file"]


# --- cut, and beside other tools --------------------------------------------------------------------------------------


@sampled_cells(lambda cut, name: cut is (name in HELD_BY_TOKENS))
@every_form
@pytest.mark.parametrize("cut", [True, False])
def test_a_cut_between_calls_leaves_no_markup(name: str, cut: bool) -> None:
    """Wherever a limit, or the model, ends the answer behind the first call's arguments: its call is whole, and no text
    is said."""
    calls: list[tuple[str, JsonObject]] = [("any", {"k": 1}), ("read_file", {"path": "a"})]
    text = written(name, *calls[: 1 if DERIVED[name].between is None else 2])
    start = text.index('{"k": 1}') + len('{"k": 1}')
    for size in range(start, len(text)):
        splitter = Splitter(family_of(name).output_format, starts_in_reasoning=False, tools=TOOLS)
        deltas = [*splitter.feed(text[:size]), *splitter.finish(cut=cut)]
        assert not [delta for delta in deltas if type(delta).__name__ == "ContentDelta"], text[:size]
        assert calls_of(deltas)[0].call.arguments == '{"k": 1}'


@every_form
def test_a_tool_that_is_not_offered_takes_no_neighbour(name: str) -> None:
    """Beside a call of a tool that is, it is called too, in its place; alone it is text, to the letter."""
    output_format, row = family_of(name).output_format, DERIVED[name]
    good: tuple[str, JsonObject] = ("any", {"k": 1})
    other: tuple[str, JsonObject] = ("read_file", {"path": "a"})
    for calls in ([other, good], [good, other], [other, other, good], [good, other, good]):
        if row.between is not None:
            text = written(name, *calls).replace("read_file", "nope")
            expected = [(tool.replace("read_file", "nope"), json.dumps(arguments)) for tool, arguments in calls]
            assert read(output_format, list(text)) == (expected, ""), text
    text = written(name, other).replace("read_file", "nope")
    assert read(output_format, [text]) == ([], text)


@pytest.mark.parametrize("name", [n for n in DERIVED if n in ("counted", "list", "nemotron_nano_v2", "cohere_r7b")])
def test_a_list_that_is_opened_again_leaves_no_markup(name: str) -> None:
    """Its closing tag may be missing."""
    text = written(name, ("any", {"k": 1}))
    tags = [tag for tag in family_of(name).output_format.tool_forms[0].close_tags if text.endswith(tag)]
    twice = text.removesuffix(tags[0] if tags else "").rstrip()
    assert read(family_of(name).output_format, [f"{twice}\n{text}"]) == ([("any", '{"k": 1}')] * 2, "")


# --- other spellings --------------------------------------------------------------------------------------------------

LISTED_CALLS = (
    '[{"name": "any"}]',
    '[{"name": "any", "arguments": null}]',
    '[{"name": "any", "arguments": "{\\"k\\": 1}"}, {"name": "read_file", "arguments": {"path": "a"}}]',
    '[{"arguments": {"k": 1}, "name": "any"}]',
    '[{"id": "abcdefghi", "name": "any", "arguments": {}}]',
    '[{"type": "function", "name": "any", "arguments": {}, "id": "a"}]',
    ' [ {"name":"any","arguments":{"path":"[TOOL_CALLS]"}} ] ',
)
HEADED_CALLS = (
    'any[ARGS]{"k": 1}',
    ' any [ARGS] {"k": 1}',
    '\nread_file[ARGS]{"path": "a"}[TOOL_CALLS]any[ARGS]{}[TOOL_CALLS] any[ARGS]{"k": [1, {}]}',
)


@sampled_cells(lambda name, body: name in ("mistral_nemo", "mistral_small_3_2"))
@pytest.mark.parametrize("name", MISTRALS)
@pytest.mark.parametrize("body", [*LISTED_CALLS, *HEADED_CALLS])
def test_what_mlx_lm_reads_of_mistrals_calls_is_read(name: str, body: str) -> None:
    """Whichever of its forms the template has, the model may write the other."""
    try:
        answer = mistral.parse_tool_call(body)
    except ValueError:
        answer = [{"name": "any", "arguments": {}}]  # null is none to us
    meant = [(call["name"], call["arguments"]) for call in (answer if isinstance(answer, list) else [answer])]
    found, content = read(family_of(name).output_format, list(f"[TOOL_CALLS]{body}"))
    assert [(tool, json.loads(arguments)) for tool, arguments in found] == meant
    assert not content.strip()


@settings(max_examples=num_examples(10), deadline=None)
@given(COMPANY, st.booleans(), st.booleans())
def test_mistrals_forms_are_read_like_mlx_lm_does(
    calls: list[tuple[str, JsonObject]], as_list: bool, as_text: bool
) -> None:
    """Any arguments, also as JSON inside a string, in either form."""
    if not MISTRALS:
        pytest.skip("the templates in shared/ are not here")
    items = [{"name": tool, "arguments": json.dumps(a) if as_text else a} for tool, a in calls]
    headed = "[TOOL_CALLS]".join(f"{tool}[ARGS]{json.dumps(arguments)}" for tool, arguments in calls)
    body = json.dumps(items) if as_list else headed
    answer = mistral.parse_tool_call(body)
    meant = [(call["name"], call["arguments"]) for call in (answer if isinstance(answer, list) else [answer])]
    assert meant == calls
    for name in MISTRALS:
        found, content = read(family_of(name).output_format, [f"[TOOL_CALLS]{body}"])
        assert ([(tool, json.loads(arguments)) for tool, arguments in found], content) == (calls, "")


@pytest.mark.parametrize("name", [n for n in DERIVED if n in ("counted", "list", "nemotron_nano_v2", "cohere_r7b")])
def test_members_of_a_listed_call_may_stand_in_any_order(name: str) -> None:
    """And arguments may be missing, null, or JSON inside a string; other members say nothing."""
    text = written(name, ("any", {"k": 1}))
    start, end = text.index("["), text.rindex("]")
    tool, arguments = derived._keys(DERIVED[name]) or ("", "")
    tag, closing = text[: start if start else text.index("[", 1)], text[end + 1 :]
    tag = derived.form_of(DERIVED[name]).open_tag
    spelt = json.dumps(json.dumps({"k": 1}))
    for item, meant in (
        (f'{{"{arguments}": {{"k": 1}}, "{tool}": "any"}}', '{"k": 1}'),
        (f'{{"{tool}": "any", "{arguments}": {spelt}}}', '{"k": 1}'),
        (f'{{"{tool}": "any", "{arguments}": null}}', "{}"),
        (f'{{"{tool}": "any"}}', "{}"),
        (f'{{"id": "a", "{tool}": "any", "{arguments}": {{"k": 1}}, "why": ["b"]}}', '{"k": 1}'),
        (f'{{"{tool}": "any", "{arguments}": {{"k": 1}}, "why": {{"b": 2}}}}', '{"k": 1}'),
    ):
        answer = f"{tag}[{item}]{closing}"
        assert read(family_of(name).output_format, list(answer)) == ([("any", meant)], ""), answer


@every_form
def test_white_space_around_a_name_behind_a_tag_says_nothing(name: str) -> None:
    """Line ends too; inside quotes it would be another name."""
    row = DERIVED[name]
    opening = str(row.opening[-1])
    if not opening.endswith((">", "]")):
        return
    text = written(name, ("any", {"k": 1})).replace("any", "\nany\n")
    assert read(family_of(name).output_format, [text]) == ([("any", '{"k": 1}')], "")


@pytest.mark.parametrize("name", BARE_ROWS)
def test_calls_without_a_tag_follow_each_other(name: str) -> None:
    """On the next line or behind a semicolon, with their type, with members that no call needs; grammars hold all."""
    case = Setup(byte_tokenizer(()), family_of(name).output_format)
    grammar = case.grammar(ToolChoice(), tools=TOOLS)
    first, second = written(name, ("read_file", {"path": "a"})), written(name, ("any", {"k": 1}))
    typed = first.replace("{", '{"type": "function", ', 1)
    both = [("read_file", '{"path": "a"}'), ("any", '{"k": 1}')]
    for gap in ("\n", "; ", ";\n", "", " "):
        for text in (first + gap + second, typed + gap + second):
            assert read(case.format, list(text)) == (both, ""), text
            assert case.accepts(grammar, text) and not case.accepts(grammar, text.replace('"a"', "5"))
        turned = second + gap + typed
        assert read(case.format, list(turned)) == (both[::-1], "")
        assert case.accepts(grammar, turned) and not case.accepts(grammar, turned.replace('"a"', "5"))
    assert read(case.format, [f'{first[:-1]}, "id": "x"}}']) == (both[:1], "")
    assert read(case.format, [f"{first}\nand {second}"]) == (both[:1], f"\nand {second}")


# --- strict tools -----------------------------------------------------------------------------------------------------

OTHER = ToolSpec("read", "Reads too.", {**READ.parameters, "properties": {"path": {"type": "string"}}}, strict=True)
THREE = (READ, ANY, OTHER)
POOL: list[tuple[str, JsonObject]] = [
    ("read_file", {"path": 5}), ("any", {"z": [1]}), ("read", {"path": "x"}), ("read", {"q": 1}),
    ("read_file", {"path": "a"}),
]  # fmt: skip
INSERTED = (
    " ", "\n", "\t", "\r\n", ";", ",", "{", "}", "[", "]", '"', ":", "<tool_call>", "<think>\n", "</think>",
    '{"name": "read_file", "parameters": ', '{"type": "function", "name": "read", "parameters": ', "read_file", "nope",
    ', "id": "x"', "[TOOL_CALLS]", "[ARGS]", "functions.",
)  # fmt: skip


def _wrong_calls(output_format: OutputFormat, text: str) -> list[tuple[str, str]]:
    """Calls of strict tools that do not obey their schema, or are no JSON."""
    found, _ = read(output_format, [text], THREE)
    return [
        (tool, arguments) for tool, arguments in found if tool in ("read", "read_file") and not _obeys(tool, arguments)
    ]


def _obeys(tool: str, arguments: str) -> bool:
    try:
        value = json.loads(arguments)
    except ValueError:
        return False
    keys = {"path", "lines"} if tool == "read_file" else {"path"}
    return isinstance(value, dict) and isinstance(value.get("path"), str) and set(value) <= keys


@cache
def _held(name: str, tags_are_tokens: bool) -> tuple[Setup, Grammar]:
    tokens = tokens_in(source_of(name)) if tags_are_tokens else []
    case = Setup(byte_tokenizer(tokens), family_of(name).output_format)
    return case, case.grammar(ToolChoice(), tools=THREE)


@st.composite
def _damaged(draw: st.DrawFn, name: str) -> str:
    """Calls as the template writes them, with anything put in, taken away or said twice."""
    row = DERIVED[name]
    calls = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=1 if row.between is None else 3))
    text = written(name, *calls)
    parts = [p for parts in (row.opening, row.middle, row.between or (), row.closing) for p in parts]
    own = tuple(part for part in parts if isinstance(part, str))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(text)))
        if draw(st.booleans()):
            text = text[:place] + draw(st.sampled_from((*INSERTED, *own))) + text[place:]
        else:
            text = text[:place] + text[place + draw(st.integers(1, 12)) :]
    return text


@sampled_cells(lambda tokens, name: tokens is (name in HELD_BY_TOKENS))
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_no_wrong_call_of_a_strict_tool_gets_through(name: str, tokens: bool) -> None:
    """Whatever text the grammar lets through under `auto`: each call of a strict tool that is read in it obeys."""
    case, grammar = _held(name, tokens)
    num_wrong = 0

    @settings(max_examples=num_examples(16), deadline=None)
    @given(_damaged(name))
    def check(text: str) -> None:
        nonlocal num_wrong
        wrong = _wrong_calls(case.format, text)
        num_wrong += bool(wrong)
        assert not (wrong and case.accepts(grammar, text)), wrong  # type: ignore[arg-type]

    check()
    assert num_wrong, "the control: without the grammar wrong calls are read"


# --- the one call that is allowed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLAYED)
def test_the_one_allowed_call_is_closed_as_the_template_writes_it(name: str) -> None:
    """Cut behind its arguments, wherever tokens end, its tokens and what closes it are the beginning of the next
    prompt, and its text is what the template writes."""
    of, text = family_of(name), written(name, ("read_file", {"path": "a b  c", "lines": 3}))
    more = text + (written(name, ("any", {})) if DERIVED[name].between is not None else "")
    for split in range(0, len(more), 5):
        ids = of.tokenizer.encode(more[:split]) + of.tokenizer.encode(more[split:])
        splitter = Splitter(of.output_format, starts_in_reasoning=False, tools=TOOLS)
        answer = AnswerReader(of.tokenizer.detokenizer(()), StopScanner(()), splitter, allows_many_calls=False)
        [end] = calls_of([delta for token in ids for delta in answer.feed([token])])
        said = answer.said_tokens()
        kept = ids[: said.num_tokens] + (of.tokenizer.encode(said.rest) if said.rest else ())
        assert answer.num_tokens - said.num_tokens <= 1, "but for the token that went on, all that it wrote is kept"
        is_named = CallSlot.ID in DERIVED[name].closing
        assert of.tokenizer.decode(kept) == (text.replace("call0", end.call.call_id) if is_named else text)
        talk = Talk(of, thinking=False, tools=TOOLS)
        talk.say("hi")
        held = talk.answer(kept)
        assert talk.results("done") == 1
        after = talk.stitched()
        assert after.num_replayed_turns == 1 and num_common(held, after.ids) == len(held)
