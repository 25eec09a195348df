"""Nothing is refused, dropped or hoisted, whatever the template: the laws over generated conversations."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import ImageBlock, Message, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.errors import BadRequest
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.conform import ConformMemo, Dialect, conform
from kvserve.prompt.probe import PROBE_TOOL, Prober, in_order, probe
from kvserve.prompt.template import ChatTemplate
from tests.laws import num_examples, sampled_cells
from tests.prompt.samples import (
    FAMILIES,
    HOSTILE,
    TOOLS,
    byte_level_backend,
    conversations,
    family_tokenizer,
    said,
    tokenizer_of,
)

NAMES = (*FAMILIES, *HOSTILE)
IN_FULL_ONLY = ("qwen3_next", "gemma4", "glm4_moe_lite", "llama")
"""Nothing of their dialects is not in another family or a hostile template too."""

HEADERS = (
    "<|im_start|>assistant\n",
    "<start_of_turn>model\n",
    "<|start|>assistant",
    "<|assistant|>",
    "<|start_header_id|>assistant",
)


@cache
def template_of(name: str) -> ChatTemplate:
    if name in HOSTILE:
        return ChatTemplate(tokenizer_of(byte_level_backend(), HOSTILE[name]))
    return ChatTemplate(family_tokenizer(name))


@cache
def dialect_of(name: str, with_tools: bool) -> Dialect:
    source = HOSTILE.get(name) or family_tokenizer(name).chat_template
    assert source is not None
    prober = Prober(CompiledTemplate(source, {"bos_token": "<s>"}), tools=(PROBE_TOOL,) if with_tools else ())
    dialect = probe(prober)
    assert dialect is not None
    return dialect


def user(text: str) -> Message:
    return Message("user", (TextBlock(text),))


def system(text: str) -> Message:
    return Message("system", (TextBlock(text),))


def answer(text: str, *calls: ToolCallBlock) -> Message:
    return Message("assistant", (*((TextBlock(text),) if text else ()), *calls))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResultBlock(call_id, (TextBlock(text),)),))


@sampled_cells(lambda name: name not in IN_FULL_ONLY)
@pytest.mark.parametrize("name", NAMES)
@given(messages=conversations(), with_tools=st.booleans(), thinking=st.booleans())
@settings(max_examples=num_examples(6))
def test_every_text_call_and_result_is_in_the_prompt_in_order(name: str, messages, with_tools, thinking) -> None:
    """Whatever agents send, every word that is not thinking is rendered, in the order it was said."""
    prompt = template_of(name).render(messages, TOOLS if with_tools else (), thinking=thinking)
    assert in_order(prompt.text, said(messages)), prompt.text
    if with_tools:
        assert "look" in prompt.text and "looks a thing up" in prompt.text


@pytest.mark.parametrize("name", FAMILIES)
@given(messages=conversations(), with_tools=st.booleans())
@settings(max_examples=num_examples(5))
def test_the_probed_dialect_of_a_real_family_is_never_refused(name: str, messages, with_tools) -> None:
    """For the families we serve the first attempt succeeds: no conversation falls through to a plainer form."""
    prompt = template_of(name).render(messages, TOOLS if with_tools else (), thinking=True)
    assert not any("refused" in note for note in prompt.notes), prompt.notes


@sampled_cells(lambda name: name not in IN_FULL_ONLY)
@pytest.mark.parametrize("name", NAMES)
@given(messages=conversations(), cut=st.integers(1, 8), with_tools=st.booleans())
@settings(max_examples=num_examples(8))
def test_what_is_rendered_does_not_depend_on_what_comes_later(name: str, messages, cut, with_tools) -> None:
    """The steps of the first messages are those of the whole conversation, up to text that is appended to the last.

    An answer ends a running loop: where a template forgets thinking there, words before the loop's calls move too.
    """
    dialect = dialect_of(name, with_tools)
    tools = TOOLS if with_tools else ()
    head = [step for step in conform(messages[:cut], tools, dialect).steps if step.index < len(messages[:cut])]
    whole = conform(messages, tools, dialect).steps
    if dialect.preamble is not None and any(step.kind == "assistant" for step in whole[len(head) - 1 :]):
        return
    assert whole[: max(len(head) - 1, 0)] == tuple(head[:-1])
    if head:
        assert whole[len(head) - 1].text.startswith(head[-1].text)


def test_a_later_system_message_stays_where_it_is() -> None:
    """A template that wants the system message first gets the later one as marked user text, in place."""
    messages = (system("rules"), user("hi"), answer("yes"), system("new rules"), user("go"))
    prompt = template_of("system_first").render(messages, thinking=True)
    assert prompt.text == (
        "<system>rules</s><user>hi</s><assistant>yes</s><user>[system]\nnew rules</s><user>go</s><assistant>"
    )
    assert prompt.notes == ("system message rendered as a user message (message 3)",)


def test_a_template_that_hoists_system_messages_is_not_allowed_to() -> None:
    """Hoisting breaks the prefix, so the later system message is rendered in place."""
    prompt = template_of("hoists_system").render((user("hi"), answer("yes"), system("new"), user("go")), thinking=True)
    assert prompt.text == "<user>hi</s><assistant>yes</s><user>[system]\nnew</s><user>go</s><assistant>"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_for_an_answer_has_before_it_what_history_will_have(name: str) -> None:
    """Fillers that the answer will need before it once it is history stand there already when it is asked for."""
    talk = (user("hi"), answer("", ToolCallBlock("c1", "look", "{}")), result("c1", "found"))
    asked = template_of(name).write(talk, TOOLS, thinking=False).text
    told = template_of(name).write((*talk, answer("ANSWER")), TOOLS, thinking=False).text
    header = next((header for header in HEADERS if header in asked.rpartition("found")[2]), "")
    assert told.startswith(asked[: asked.rindex(header) + len(header)])


def test_neighbours_are_merged_only_where_the_template_insists() -> None:
    """Two user messages in a row stay two, unless roles must alternate: then a blank line joins them."""
    messages = (user("one"), user("two"))
    assert template_of("system_first").render(messages, thinking=True).text == "<user>one</s><user>two</s><assistant>"
    assert template_of("alternating").render(messages, thinking=True).text == "<user>one\n\ntwo</s><assistant>"


def test_what_a_template_drops_is_written_as_text() -> None:
    """Without a tool role, calls and results are written in Hermes form and the tools described in the system text."""
    call = ToolCallBlock("c1", "look", '{"q": "x"}')
    messages = (system("rules"), user("hi"), answer("well", call), result("c1", "found"))
    text = template_of("drops_tools").render(messages, TOOLS, thinking=True).text
    assert text.startswith("<system>rules\n\n# Tools\n")
    assert '<assistant>well\n<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call></s>' in text
    assert text.endswith("<user><tool_response>\nfound\n</tool_response></s><assistant>")


def test_an_aborted_call_gets_the_result_the_template_wants() -> None:
    """A user message right after a call is led to by fillers, which are noted."""
    messages = (user("hi"), answer("", ToolCallBlock("c1", "look", "{}")), user("stop"))
    prompt = template_of("strict_tools").render(messages, thinking=True)
    assert in_order(prompt.text, ("look", "(no result)", "stop"))
    assert any("empty tool message put before (message 2)" in note for note in prompt.notes)


def test_results_find_the_name_of_their_call() -> None:
    """A tool result carries the name of the call that it answers, from anywhere earlier."""
    calls = (ToolCallBlock("c1", "look", "{}"), ToolCallBlock("c2", "find", "{}"))
    messages = (user("hi"), answer("", *calls), result("c2", "two"), result("c1", "one"))
    steps = conform(messages, (), dialect_of("qwen3", False)).steps
    assert [(step.call_name, step.call_number) for step in steps if step.kind == "result"] == [("find", 1), ("look", 0)]


def test_ids_take_the_form_that_the_template_needs() -> None:
    """Templates that write the id instead of the name get the name in it; strict ones nine characters."""
    messages = (user("hi"), answer("", ToolCallBlock("c1", "look", "{}")), result("c1", "found"))
    text = template_of("ids_name_calls").render(messages, thinking=True).text
    assert "<call>functions.look:0 {}" in text and "functions.look:0 found" in text
    assert dialect_of("strict_tools", False).form.call_ids == "nine_characters"


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("gemma3", "gpt_oss", "llama", "qwen3_next")]
)
def test_a_literal_closing_tag_in_an_answer_costs_nothing(name: str) -> None:
    """An answer that talks about </think> keeps the text before the tag."""
    messages = (user("hi"), answer("write before </think> and after"), user("go"))
    assert "write before </think> and after" in template_of(name).render(messages, thinking=True).text


def test_images_are_refused_for_now() -> None:
    """An image is a 400, not an empty message."""
    with pytest.raises(BadRequest, match="no images"):
        template_of("qwen3").render((Message("user", (ImageBlock("data:,x"),)),), thinking=True)


def test_a_conversation_that_no_form_saves_is_told_in_plain_text() -> None:
    """Where the template refuses every form, the conversation is rendered without it, whole, and that is noted."""
    prompt = template_of("needs_text").render((user("x" * 500), answer("ok"), user("go")), thinking=True)
    assert "x" * 500 in prompt.text and prompt.text.endswith("[user]\ngo\n\n[assistant]\n")
    assert any("plain text" in note for note in prompt.notes)


@sampled_cells(lambda name: name not in IN_FULL_ONLY)
@pytest.mark.parametrize("name", NAMES)
@given(
    messages=conversations(),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4),
    with_tools=st.booleans(),
)
@settings(max_examples=num_examples(6), deadline=None)
def test_with_a_memory_the_steps_are_the_same(name: str, messages, cuts, with_tools) -> None:
    """Whatever was placed before, shorter or longer, with tools or without: the steps, what the template reads, and the
    notes."""
    dialect, memory = dialect_of(name, with_tools), ConformMemo(2**20)
    for cut, offers in [*cuts, *[(len(messages), with_tools)] * 2]:
        said, tools = messages[:cut], TOOLS if offers else ()
        assert conform(said, tools, dialect, memory) == conform(said, tools, dialect)


def test_a_next_turn_is_placed_from_where_the_last_one_ended() -> None:
    """What is known of a conversation is not placed again; other messages of the same length are nobody's."""
    dialect, memory = dialect_of("qwen3", False), ConformMemo(2**20)
    talk = [user("one"), answer("two"), user("three")]
    first = conform(talk, (), dialect, memory)
    longer = conform([*talk, answer("four"), user("five")], (), dialect, memory)
    assert all(mine is theirs for mine, theirs in zip(longer.dicts, first.dicts, strict=False))
    other = conform([user("one"), answer("2"), talk[2]], (), dialect, memory)
    assert [step.text for step in other.steps] == ["one", "2", "three"]
    assert conform([*talk], (), dialect, ConformMemo(0)) == first


def test_a_next_turn_is_placed_from_there_where_tools_are_words_too() -> None:
    """Of a conversation with these very tools; with others, or none, it begins with another message."""
    dialect, memory = dialect_of("gemma3", False), ConformMemo(2**20)
    assert not dialect.tools
    other = replace(TOOLS[0], name="other_tool")
    talk = [system("Help."), user("one"), answer("two"), user("three")]
    first = conform(talk, TOOLS, dialect, memory)
    longer = [*talk, answer("four"), user("five")]
    whole = conform(longer, TOOLS, dialect, memory)
    assert all(mine is theirs for mine, theirs in zip(whole.dicts, first.dicts, strict=False))
    for tools in (TOOLS, (other,), ()):
        assert conform(longer, tools, dialect, memory) == conform(longer, tools, dialect)
