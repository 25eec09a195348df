"""Calls in forms that rows say: the laws of the splitter hold for them too, and what a grammar lets through is read."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import CallRow, CallSlot, ToolChoice, ToolSpec
from kvserve.output.formats import select_format
from tests.laws import num_examples, sampled_cells
from tests.output.schemas import schemas
from tests.output.test_grammar import STRICT, Setup, byte_tokenizer
from tests.output.test_splitter import split

ROWS = {
    "tags": CallRow(
        ("<|calls|><|call|>functions.",),
        (":", CallSlot.NUMBER, "<|args|>"),
        ("<|end|><|call|>functions.",),
        ("<|end|><|calls_end|>",),
    ),
    "names": CallRow(("[CALLS]",), ("[ID]", CallSlot.ID, "[ARGS]"), ("[CALLS]",), ()),
    "list": CallRow(
        ('[CALLS][{"name": "',),
        ('", "arguments": ',),
        (', "id": "', CallSlot.ID, '"}, {"name": "'),
        (', "id": "', CallSlot.ID, '"}]'),
    ),
    "bare": CallRow(('{"name": "',), ('", "parameters": ',), None, ("}",)),
    "keys": CallRow(('<tools>[{"',), ('": ',), ('}, {"',), ("}]</tools>",)),
}
TOKENS = [
    "<|calls|>",
    "<|call|>",
    "<|args|>",
    "<|end|>",
    "<|calls_end|>",
    "[CALLS]",
    "[ID]",
    "[ARGS]",
    "<|python_tag|>",
]
FORMATS = {name: select_format("auto", "", TOKENS, None, row) for name, row in ROWS.items()}
CALLS = (
    '<|calls|><|call|>functions.read:0<|args|>{"path": "a"}<|end|><|calls_end|>',
    '<|calls|><|call|>functions.now:0<|args|>{}<|end|><|call|>functions.read:1<|args|>{"path": "<|end|>"}<|end|>',
    '[CALLS]read[ID]a1[ARGS]{"path": "[CALLS]"}',
    '[CALLS][{"name": "read", "arguments": {"path": "a"}, "id": "a1"}, {"name": "now", "arguments": {}}]',
    '{"name": "read", "parameters": {"path": "}"}}',
    '<|python_tag|>{"name":"now","parameters":{}}',
    '<tools>[{"read": {"path": "a"}}, {"now": {}}]</tools>',
    '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>',
)
PIECES = (
    *TOKENS, "functions.", "read", "now", "other", ":0", ":", "0", "{", "}", "[", "]", "{}", '{"path": "a"}', '"', ", ",
    '{"name": "', '", "arguments": ', '", "parameters": ', ', "id": "', '"}', '"}]', "}]</tools>", "<tools>",
    "</tools>", " ", "\n", "<think>", "</think>", "hi", "<tool_call>", "</tool_call>", "<", "<|", "[C",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.sampled_from(CALLS), max_size=12).map("".join)
MEMBERS = re.compile(r',[^}]*"[^"]*"[^}]*')
"""What a call's object has besides name and arguments, which says nothing."""
every_row = pytest.mark.parametrize("name", ROWS)


@sampled_cells(lambda name: name in ("tags", "list"))
@every_row
def test_no_cut_matters_and_nothing_is_lost(name: str) -> None:
    """For any mixture of pieces of all forms, cut anywhere; every character is in a channel, a call or a tag."""

    @settings(max_examples=num_examples(60), deadline=None)
    @given(TEXTS, st.data(), st.booleans(), st.booleans())
    def check(text: str, data: st.DataObject, in_reasoning: bool, cut: bool) -> None:
        places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
        parts = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
        whole = split([text], FORMATS[name], in_reasoning=in_reasoning, cut=cut)
        assert split(parts, FORMATS[name], in_reasoning=in_reasoning, cut=cut) == whole
        assert split(list(text), FORMATS[name], in_reasoning=in_reasoning, cut=cut) == whole
        assert "".join(piece.text for piece in whole.pieces) == text
        assert "".join(piece.text for piece in whole.pieces if piece.kind == "content") == whole.content
        assert "".join(piece.text for piece in whole.pieces if piece.kind == "reasoning") == whole.reasoning
        marks = [MEMBERS.sub("", piece.text) for piece in whole.pieces if piece.kind in ("tag", "space")]
        assert not any(word in mark for mark in marks for word in ("read", "now", "other", "path"))

    check()


@pytest.mark.parametrize("before", ["Say ", "```json\n"])
def test_a_call_without_a_tag_is_one_only_where_the_answer_begins(before: str) -> None:
    """Behind words it is an example that the model shows, and stays as it was written."""
    call = '{"name": "now", "parameters": {}}'
    shown = split([before + call], FORMATS["bare"])
    assert not shown.calls and call in shown.content
    assert [called for _, called, _ in split([call], FORMATS["bare"]).calls] == ["now"]


@given(schemas, st.sampled_from(sorted(ROWS)), st.booleans())
@settings(max_examples=num_examples(15), deadline=None)
def test_no_schema_of_a_tool_that_is_not_strict_refuses_a_request(
    schema: dict[str, object], name: str, is_forced: bool
) -> None:
    """As in the forms that are known: there is a grammar that can be used."""
    odd = ToolSpec("odd", None, {"properties": {"p": schema, "<q>": schema}, "required": ["p", "<q>"]})
    case = Setup(byte_tokenizer(TOKENS), FORMATS[name])
    grammar = case.grammar(ToolChoice("required" if is_forced else "auto"), tools=(odd, STRICT[0]))
    assert case.accepts(grammar, "") is not is_forced


@every_row
@pytest.mark.parametrize("tokens", [True, False])
def test_whatever_a_forced_grammar_lets_through_is_read_as_calls(name: str, tokens: bool) -> None:
    """Random walks: nothing but calls of offered tools, with arguments that are JSON objects."""
    case = Setup(byte_tokenizer(TOKENS if tokens else ()), FORMATS[name])
    tools = STRICT[:2]  # arguments that nothing is said of may be numbers that no double is
    grammar = case.grammar(tools=tools)
    walks = [text for seed in range(num_examples(16)) if (text := case.wander(grammar, seed, 700)) is not None]
    assert walks
    for text in walks:
        calls, said = case.calls(text, tools)
        assert calls and said == "", text
        assert all("path" in arguments if called == "read" else arguments == {} for called, arguments in calls)
