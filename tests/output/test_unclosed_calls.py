"""Calls that are whole and that the model did not close: they are run, and cost the next one nothing."""

import pytest

from kvserve.core import ContentDelta, ToolSpec
from kvserve.output.formats import select_format
from kvserve.output.splitter import Splitter
from tests.calls import calls_of

TOOLS = (ToolSpec("look", None, {"type": "object", "properties": {"q": {"type": "string"}}}), ToolSpec("now", None, {}))
HERMES = '<tool_call>\n{"name": "look", "arguments": {"q": "a b"}}\n</tool_call>'
CODER = "<tool_call>\n<function=look>\n<parameter=q>\na b\n</parameter>\n</function>\n</tool_call>"
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def read(form: str, text: str, *, size: int, cut: bool = False) -> list[tuple[str, str, bool]]:
    """The calls of an answer that is nothing else, in pieces of this size."""
    splitter = Splitter(select_format("auto", form, (), None), starts_in_reasoning=False, tools=TOOLS)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [*(delta for piece in pieces for delta in splitter.feed(piece)), *splitter.finish(cut=cut)]
    assert "".join(piece.text for piece in splitter.pieces) == text
    assert not [piece for piece in splitter.pieces if piece.kind == "content"]
    return [(end.call.name, end.call.arguments, end.is_cut) for end in calls_of(deltas)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "left", [HERMES[len("<tool_call>") : -len("</tool_call>")], '{"name":"look","arguments":{"q":"a b"}']
)
def test_a_call_that_another_one_follows_is_whole(left: str, size: int) -> None:
    """Its JSON says where it ends: a closing tag that is missing takes neither call."""
    found = read("", f"<tool_call>\n{left}{HERMES}", size=size)
    assert found == [("look", '{"q": "a b"}', False)] * 2


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("left", ["\n</tool", "\n", ""])
@pytest.mark.parametrize(("call", "arguments"), [(CODER, '{"q": "a b"}'), (NOW, "{}")])
def test_a_function_that_is_closed_is_whole_at_the_end(call: str, arguments: str, left: str, size: int) -> None:
    """As in the JSON form, of what stands around it the last tag may be missing; where the function is not closed,
    another parameter may be."""
    name = "look" if call is CODER else "now"
    whole = call.removesuffix("\n</tool_call>")
    assert read("<function=", f"{call}\n{whole}{left}", size=size) == [(name, arguments, False)] * 2
    if call is CODER:
        [(_, _, is_cut)] = read("<function=", whole.removesuffix("</function>"), size=size)
        assert is_cut, "the control"


@pytest.mark.parametrize("name", ["look", "nobody"])
def test_prose_behind_a_function_without_its_last_tag_is_content_to_the_letter(name: str) -> None:
    """Also behind a call of a tool that is not offered, which is certain only at the end."""
    call = CODER.removesuffix("\n</tool_call>").replace("look", name)
    splitter = Splitter(select_format("auto", "<function=", (), None), starts_in_reasoning=False, tools=TOOLS)
    deltas = [*splitter.feed(f"{call}That is all."), *splitter.finish(cut=False)]
    assert [end.call.arguments for end in calls_of(deltas)] == ['{"q": "a b"}']
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == "That is all."
