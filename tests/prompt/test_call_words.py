"""What a model is told of how to call, where its template says nothing: the form that it then reads, and is held to."""

import json
from functools import cache

import pytest

from kvserve.app.learned_template import unheld_calls
from kvserve.core import CallRow, Message, TextBlock, ToolBlock, ToolChoice, ToolSpec
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.said import MessageReader
from kvserve.prompt.call_words import ARGUMENT, FUNCTION, VALUE
from kvserve.prompt.template import ChatTemplate
from tests.laws import sampled
from tests.output.test_grammar import Setup, byte_tokenizer
from tests.prompt.call_forms import ANY, READ, SMALL, conversation, source_of, told_or_found_row
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.vocabularies import TEMPLATES, tokens_in

CALLED = ToolSpec(FUNCTION, "", {"type": "object", "properties": {ARGUMENT: {"type": "string"}}})
WORDS_END = "Its result follows."
MARKERS = (
    "<tool_call>", "</tool_response>", "<function=", "<arg_key>", "to=functions.", "[TOOL_CALLS]", "[CALLS]",
    "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<TOOLCALL>", "<|START_ACTION|>", "<|tools_prefix|>",
    "<|tool_call|>", "<|tool_call>", "<minimax:tool_call>", "<seed:tool_call>", "<|tool_call_start|>", "<｜DSML｜",
    "<calls>", "<|calls|>", "<call name=",
)  # fmt: skip
"""Each stands in calls or results of some form, and in no other one's."""


QUESTION = "kwquestion"
CALLS = (
    Message("user", (TextBlock(QUESTION),)),
    *conversation([("read_file", {"path": "a"}), ("any", {})])[1:],
)


def told_in_front(template: ChatTemplate) -> str:
    """The whole prompt of a conversation with calls."""
    return template.write(CALLS, (READ, ANY), thinking=False).shown


def told_later(template: ChatTemplate) -> str:
    """The same where the tools came behind the first answer, and none stands in front."""
    first = (Message("user", (TextBlock("hello"),)), Message("assistant", (TextBlock("Hi there."),)))
    tools = Message("system", (ToolBlock.of(READ), ToolBlock.of(ANY)))
    return template.write((*first, tools, *CALLS), (), thinking=False).shown


@cache
def template_of(name: str) -> tuple[ChatTemplate, OutputFormat]:
    source, row = source_of(name), told_or_found_row(name)
    derived = row if isinstance(row, CallRow) else None
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(source))
    output_format = select_format("auto", source, tokens_in(source), None, derived)
    return ChatTemplate(tokenizer_of(backend, source), tags=output_format.tags, row=derived), output_format


EVERY = sampled([*SMALL, *TEMPLATES], {*SMALL, "deepseek_v3_1", "r1_distill_llama", "mistral_nemo", "qwen3_coder"})


@pytest.mark.parametrize("told", [told_in_front, told_later])
@pytest.mark.parametrize("name", EVERY)
def test_no_other_form_of_calls_stands_in_a_prompt(name: str, told) -> None:  # type: ignore[no-untyped-def]
    """What is said of calls in words, what the history shows and what forced calls are held to is one form."""
    template, output_format = template_of(name)
    prompt = told(template)
    if "Each line between <tools>" not in prompt:
        pytest.skip("the template says it itself")
    others = [marker for marker in MARKERS if marker not in prompt.rpartition(QUESTION)[2]]
    assert not [marker for marker in others if marker in prompt]
    words = prompt.partition("# Tools")[2].partition(WORDS_END)[0]
    assert FUNCTION in words
    if unheld_calls(template, output_format, None) is not None:
        return  # nobody reads the model's own form
    example = words.partition("</tools>")[2].partition(":\n")[2].removesuffix("\n")
    case = Setup(byte_tokenizer(()), output_format)
    forced = case.grammar(ToolChoice("required"), tools=(CALLED,))
    for number, text in enumerate(example.split("\nTwo calls at once are written like this:\n"), 1):
        said = MessageReader.under(output_format, (CALLED,))(text)
        assert said.calls == ((FUNCTION, json.dumps({ARGUMENT: VALUE})),) * number and not said.content, text
        assert output_format.channels == "harmony" or case.accepts(forced, text), text
