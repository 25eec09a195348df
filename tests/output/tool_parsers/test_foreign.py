"""Forms that a parser from outside reads: mlx-lm's real ones, and ones that misbehave."""

import pytest
from mlx_lm.tool_parsers import gemma4, kimi_k2, mistral, pythonic

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.output.tool_parsers.form import NotACall, ParsedCall, parse_text

TOOLS = [ToolSpec("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})]
CALL = ParsedCall("read", {"path": "a b"})


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (gemma4, '<|tool_call>call:read{path:<|"|>a b<|"|>}<tool_call|>'),
        (pythonic, '<|tool_call_start|>[read(path="a b")]<|tool_call_end|>'),
        (mistral, '[TOOL_CALLS]read[ARGS]{"path": "a b"}'),
        (
            kimi_k2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
            '{"path": "a b"}<|tool_call_end|><|tool_calls_section_end|>',
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2],
)  # fmt: skip
def test_real_parsers_read_their_form(module: object, text: str) -> None:
    """A family's own text becomes the call through the parser that mlx-lm has for it."""
    form = ForeignCallForm(module.tool_call_start, module.tool_call_end, module.parse_tool_call).form()  # type: ignore[attr-defined]
    assert parse_text(form, text, TOOLS) == [CALL]


@pytest.mark.parametrize(
    "answer",
    [
        KeyError("x"),
        RecursionError(),
        [],
        None,
        {},
        {"name": 5},
        {"name": "f", "arguments": [1]},
        {"name": "f", "arguments": {"a": float("nan")}},
        {"name": "f", "arguments": {"a": {1, 2}}},
    ],
)
def test_whatever_a_parser_does_wrong_means_not_a_call(answer: object) -> None:
    """An exception or an answer that is no call with JSON arguments leaves the text to be content."""

    def parse(text: str, tools: list[dict[str, object]] | None) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(NotACall):
        parse_text(ForeignCallForm("<a>", "</a>", parse).form(), "<a>x</a>", TOOLS)


def test_the_parser_gets_the_text_between_the_tags_and_the_tools() -> None:
    """Without tags, and tools in the shape of the wire."""
    seen: list[object] = []

    def parse(text: str, tools: list[dict[str, object]] | None) -> object:
        seen.append((text, tools))
        return [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g"}]

    form = ForeignCallForm("<a>", "</a>", parse).form()
    assert parse_text(form, "<a> x </a>", TOOLS) == [ParsedCall("f", {"a": 1}), ParsedCall("g", {})]
    tool = {
        "type": "function",
        "function": {"name": "read", "description": "Reads.", "parameters": TOOLS[0].parameters},
    }
    assert seen == [(" x ", [tool])]
