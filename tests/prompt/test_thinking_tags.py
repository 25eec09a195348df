"""The tags of thinking that a chat template of no known family writes: found, looked for in prompts and in answers."""

from dataclasses import replace

import pytest

from kvserve.core import ContentDelta, Message, TextBlock
from kvserve.output.formats import select_format
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.thinking_tags import thinking_tags
from tests.prompt.samples import byte_level_backend, tokenizer_of

BLOCKS = {
    "where something was thought": "{% if m.thinking %}<muse>\n{{ m.thinking }}\n</muse>\n\n{% endif %}",
    "in every answer": "<muse>{{ m.reasoning_content or '' }}</muse>",
    "in the last answer": "{% if loop.last and m.reasoning %}<muse>{{ m.reasoning }}</muse>{% endif %}",
    "beside another block": "{% if m.reasoning %}<muse>{{ m.reasoning }}</muse>{% else %}<mute>{% endif %}",
}
OTHERS = {
    "a known family's": "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}",
    "none": "",
    "of two words": "{% if m.thinking %}<muse> {{ m.thinking }} </muse> <say>{% endif %}",
    "alike": "{% if m.thinking %}<muse>{{ m.thinking }}<muse>{% endif %}",
    "without an opening one": "{% if m.thinking %}{{ m.thinking }}</muse>{% endif %}",
    "a word": "{% if m.thinking %}thinking\n{{ m.thinking }}\n<|end|>{% endif %}",
    "a title": "{% if m.thinking %}Thought:\n{{ m.thinking }}\nAnswer:\n{% endif %}",
    "behind half of a tag": "{% if m.thinking %}<|a|>muse<|b|>{{ m.thinking }}<|c|>muse<|b|>{% endif %}<|a|>say<|b|>",
    "a sign": "{% if m.thinking %}#\n{{ m.thinking }}\n##\n{% endif %}",
}


def source(block: str, tail: str = "") -> str:
    return (
        "{% for m in messages %}<|turn|>{{ m.role }}<|text|>{% if m.role == 'assistant' %}"
        f"{block}{{% endif %}}{{{{ m.content }}}}<|end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|turn|>assistant<|text|>{tail}{{% endif %}}"
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tags_are_found(name: str) -> None:
    """Whatever stands before them, and wherever thinking is shown."""
    assert thinking_tags(CompiledTemplate(source(BLOCKS[name]), {})) == ("<muse>", "</muse>")


def test_tags_without_brackets_are_found() -> None:
    """White space is not theirs."""
    block = "{% if m.thinking %}@muse\n{{ m.thinking }}\n@end\n\n{% endif %}"
    assert thinking_tags(CompiledTemplate(source(block), {})) == ("@muse", "@end")


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_pair_of_tags_is_none(name: str) -> None:
    """Known families have theirs from the table."""
    assert thinking_tags(CompiledTemplate(source(OTHERS[name]), {})) is None


@pytest.mark.parametrize("tail", ["", "<muse>\n"])
def test_a_prompt_knows_whether_it_opened_thinking(tail: str) -> None:
    """And what is written between the tags is thinking, wherever they stand in a line if they are tokens."""
    text = source(BLOCKS["where something was thought"], tail)
    template = ChatTemplate(tokenizer_of(byte_level_backend(), text))
    prompt = template.write((Message("user", (TextBlock("hi"),)),), thinking=True)
    assert prompt.opens_reasoning is bool(tail)
    output_format = select_format("auto", text, ["<muse>"], None, thinking=template.own_tags)
    assert MessageReader.under(output_format, ())("x <muse>Hm.</muse> Yes.") == ("Hm.", "x  Yes.", ())


@pytest.mark.parametrize("name", ["without an opening one", "a word", "a title", "a sign"])
def test_an_answer_that_thought_nothing_is_shown(name: str) -> None:
    """Whatever its lines begin with: what thinking stands between cannot be told from what is said."""
    text = source(OTHERS[name])
    template = ChatTemplate(tokenizer_of(byte_level_backend(), text))
    prompt = template.write((Message("user", (TextBlock("hi"),)),), thinking=True)
    output_format = select_format("auto", text, ["<|text|>"], None, thinking=template.own_tags)
    answer = "thinking of it:\n# Yes\nThought: no"
    splitter = Splitter(output_format, starts_in_reasoning=prompt.opens_reasoning, tools=())
    said = [*splitter.feed(answer), *splitter.finish(cut=False)]
    assert "".join(delta.text for delta in said if isinstance(delta, ContentDelta)) == answer


def test_a_closing_tag_in_an_answer_hides_nothing() -> None:
    """Where the template cuts what stands before one, as it does with thinking in the text."""
    split = "{% if '</muse>' in m.content and m.thinking is not string %}{{ m.content.split('</muse>')[-1] }}{% else %}"
    text = source(BLOCKS["where something was thought"]).replace(
        "{{ m.content }}", f"{split}{{{{ m.content }}}}{{% endif %}}"
    )
    template = ChatTemplate(tokenizer_of(byte_level_backend(), text))
    said = [("user", "hi"), ("assistant", "it ends with </muse> always"), ("user", "so?")]
    messages = tuple(Message(role, (TextBlock(words),)) for role, words in said)  # type: ignore[arg-type]
    assert "it ends with </muse> always" in template.write(messages, thinking=True).shown


def test_a_closing_tag_with_an_answers_end_in_it_is_words_in_an_answer() -> None:
    """Where thinking stands in a message of its own, what closes it would end the message in a client's text too."""
    block = "{% if m.thinking %}<muse>{{ m.thinking }}<|im_end|><|turn|>assistant<|say|>{% endif %}"
    text = source(block).replace("<|end|>", "<|im_end|>")
    backend = byte_level_backend()
    end = backend.token_to_id("<|im_end|>")
    tokenizer = replace(tokenizer_of(backend, text), stop_token_ids=frozenset({end}))
    tags = thinking_tags(CompiledTemplate(text, {}))
    assert tags == ("<muse>", "<|im_end|><|turn|>assistant<|say|>")
    template = ChatTemplate(tokenizer, tags=tags)
    said = [("user", "hi"), ("assistant", f"no {tags[1]} yes"), ("user", "so?")]
    messages = tuple(Message(role, (TextBlock(words),)) for role, words in said)  # type: ignore[arg-type]
    assert list(template.render(messages, thinking=True).ids.ids).count(end) == len(said)
