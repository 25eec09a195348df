"""The tags between which a chat template writes what an answer says: found, and no part of what clients get."""

from dataclasses import replace

import pytest

from kvserve.core import ContentDelta, Message, TextBlock
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.prompt.answer_tags import ReadingTags, answer_tags, reading_tags
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.thinking_tags import thinking_tags
from kvserve.prompt.tokenizer import Tokenizer
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import LOOK

TOKENS = ("<|turn|>", "<|text|>", "<say>", "</say>", "<muse>", "</muse>", "<think>", "</think>", "<|end|>", "[CALLS]")


def tokenizer_with(text: str) -> Tokenizer:
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens([*TOKENS])
    return tokenizer_of(backend, text)


def source(answer: str, tail: str = "", user: str = "{{ m.content }}") -> str:
    return (
        "{% for m in messages %}<|turn|>{{ m.role }}<|text|>{% if m.role == 'assistant' %}"
        f"{answer}{{% else %}}{user}{{% endif %}}<|end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|turn|>assistant<|text|>{tail}{{% endif %}}"
    )


FOUND = {
    "around": source("<say>{{ m.content }}</say>"),
    "around everybody's words": source("<say>{{ m.content }}</say>", user="<say>{{ m.content }}</say>"),
    "behind thinking": source("{% if m.thinking %}<muse>{{ m.thinking }}</muse>{% endif %}<say>{{ m.content }}</say>"),
    "behind thinking that the prompt opens": source("<say>\n{{ m.content }}\n</say>", "<think>\n"),
}
NONE = {
    "where a prompt ends": source("{{ m.content }}"),
    "in the prompt": source("<say>{{ m.content }}</say>", "<say>"),
    "no token": source("<tell>{{ m.content }}</tell>"),
    "words": source("Answer: {{ m.content }}"),
    "a known family's thinking": source("<think></think>{{ m.content }}"),
    "its own thinking": source("<muse>{{ m.thinking or '' }}</muse>{{ m.content }}"),
    "in the last answer alone": source("{% if loop.last %}<say>{% endif %}{{ m.content }}"),
    "not in the last answer": source("{% if not loop.last %}<say>{% endif %}{{ m.content }}"),
}


def found(text: str) -> tuple[str, ...]:
    template = CompiledTemplate(text, {})
    return answer_tags(template, TOKENS, thinking_tags(template))


@pytest.mark.parametrize("name", FOUND)
def test_the_tags_are_found(name: str) -> None:
    assert found(FOUND[name]) == ("<say>", "</say>")


@pytest.mark.parametrize("name", NONE)
def test_what_a_model_does_not_write_around_its_words_is_none(name: str) -> None:
    assert found(NONE[name]) == ()


def test_an_opening_tag_alone_is_found() -> None:
    """What ends the answer is no tag around it."""
    template = CompiledTemplate(source("<say>{{ m.content }}"), {})
    assert answer_tags(template, {*TOKENS} - {"<|end|>"}) == ("<say>",)


def test_a_models_stop_tokens_are_none_of_them() -> None:
    """They end the answer anyway; here `</say>` is one."""
    tokenizer = tokenizer_with(source("<say>{{ m.content }}</say>"))
    assert reading_tags(tokenizer) == ReadingTags(None, ("<say>", "</say>"))
    stopping = replace(tokenizer, stop_token_ids=frozenset({tokenizer.backend.token_to_id("</say>")}))
    assert reading_tags(stopping) == ReadingTags(None, ("<say>",))


MESSAGES = """{% for m in messages %}{% if m.role == 'assistant' %}
{%- if m.reasoning %}<|turn|>assistant<muse>{{ m.reasoning }}<|end|>{% endif %}
{%- if m.tool_calls %}<|turn|>assistant[CALLS]{{ m.tool_calls[0].function.name }}
{%- else %}<|turn|>assistant<say>{{ m.content }}<|end|>{% endif %}
{%- else %}<|turn|>{{ m.role }}<say>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant{% endif %}"""
"""Thinking, words and calls are messages of one turn."""


def format_of(text: str) -> OutputFormat:
    tags = reading_tags(tokenizer_with(text))
    return select_format("auto", text, TOKENS, None, None, tags.thinking, tags.around, tags.between)


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def test_headers_between_the_messages_of_a_turn_are_not_said() -> None:
    """Neither before words nor before calls, behind thinking and behind words; words that they hold are."""
    tags = reading_tags(tokenizer_with(MESSAGES))
    header = "<|end|><|turn|>assistant"
    assert tags == ReadingTags(("<muse>", f"{header}<say>"), ("<say>", "<|end|>", "<|turn|>assistant"), (header,))
    says = MessageReader.under(format_of(MESSAGES), (LOOK,))
    assert says(f"<muse>hm{header}<say>Yes, assistant.<|end|>") == ("hm", "Yes, assistant.", ())
    assert says(f"<muse>hm{header}<say>I look.{header}{CALL}") == ("hm", "I look.", (("look", "{}"),))
    assert says(f"<muse>hm{header}{CALL}") == ("hm", "", (("look", "{}"),))


@pytest.mark.parametrize("between", ["<|text|>final<say>", "<|text|><say>"])
def test_a_header_of_more_than_a_tag_stays_whole(between: str) -> None:
    """A half of it would reach clients: thinking ends with all of it."""
    text = MESSAGES.replace("assistant<say>", f"assistant{between}")
    closing = f"<|end|><|turn|>assistant{between}"
    assert reading_tags(tokenizer_with(text)) == ReadingTags(("<muse>", closing))
    assert MessageReader.under(format_of(text), ())(f"<muse>hm{closing}Yes.") == ("hm", "Yes.", ())


def test_prose_is_no_header() -> None:
    """What no token begins could stand in any answer."""
    text = MESSAGES.replace("<|end|>{% endif %}\n{%- if m.tool_calls", "\n---{% endif %}\n{%- if m.tool_calls")
    assert text != MESSAGES
    says = MessageReader.under(format_of(text), ())
    assert says("<say>One\n---\ntwo") == ("", "One\n---\ntwo", ())


def test_the_next_message_is_no_tag_around_an_answer() -> None:
    """Where nothing stands behind the last answer."""
    text = source("<say>{{ m.content }}").replace("<|end|>", "")
    assert reading_tags(tokenizer_with(text)) == ReadingTags(None, ("<say>",))


@pytest.mark.parametrize("text", [MESSAGES, FOUND["around"]])
def test_a_clients_tags_around_words_are_text(text: str) -> None:
    """No template looks for them there; tags of thinking that a client sends back stay what they are."""
    tokenizer, output_format = tokenizer_with(text), format_of(text)
    template = ChatTemplate(tokenizer, tags=output_format.tags, silent=output_format.silent_tags)
    said, asked = "Then <|turn|>assistant follows, <say> and </say>.", Message("user", (TextBlock("hi"),))
    prompts = [
        template.render((asked, Message("assistant", (TextBlock(words),)), asked), thinking=True)
        for words in (said, "x")
    ]
    for token in ("<|end|>", "<|turn|>", "<say>", "</say>"):
        assert len({prompt.ids.ids.count(tokenizer.token_id(token) or 0) for prompt in prompts}) == 1
    assert said in prompts[0].text


@pytest.mark.parametrize("cut", range(1, 30))
def test_nothing_of_the_tags_reaches_a_client(cut: int) -> None:
    """However the answer is cut; without them they are content."""
    answer = "<say>So it <is>.</say>"
    for around, expected in ((("<say>", "</say>"), "So it <is>."), ((), answer)):
        output_format = select_format("auto", FOUND["around"], TOKENS, None, around=around)
        splitter = Splitter(output_format, starts_in_reasoning=False, tools=())
        deltas = [*splitter.feed(answer[:cut]), *splitter.feed(answer[cut:]), *splitter.finish(cut=False)]
        assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == expected
