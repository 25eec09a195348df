"""The prompt is what transformers renders of what the client sent: nothing is put in that nobody said."""

from dataclasses import replace
from typing import Any

import pytest

from kvserve.core import Message, Role, TextBlock, ThinkingBlock, ToolBlock, ToolResultBlock, ToolSpec
from kvserve.prompt.images_unseen import UNSEEN
from kvserve.prompt.steps import steps_of
from kvserve.prompt.template import ChatTemplate
from tests.prompt.samples import byte_level_backend, family_tokenizer, tokenizer_of

_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
AS_JSON = "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}" + _TURNS
BY_HAND = (
    "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }} "
    "{{ t.function.parameters | tojson }}\n{% endfor %}" + _TURNS
)
NO_PARAMETERS = {"type": "object", "properties": {}}


def shown(source: str, tool: ToolSpec) -> str:
    """What is written of one tool beside another one, described."""
    tools = (ToolSpec("look", "Looks.", NO_PARAMETERS), tool)
    prompt = ChatTemplate(tokenizer_of(byte_level_backend(), source)).render(
        (Message("user", (TextBlock("hi"),)),), tools, thinking=True
    )
    assert not prompt.notes
    return prompt.text.split("\n")[1]


@pytest.mark.parametrize(
    ("description", "strict", "written"),
    [
        (None, None, '{"name": "f", "parameters": {"type": "object", "properties": {}}}'),
        ("", None, '{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}'),
        (None, True, '{"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": true}'),
        (None, False, '{"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": false}'),
    ],
)
def test_a_tool_has_the_fields_that_were_sent(description: str | None, strict: bool | None, written: str) -> None:
    """An absent description is not an empty one, and `strict` is passed on as it was sent."""
    assert shown(AS_JSON, ToolSpec("f", description, NO_PARAMETERS, strict)) == written


def test_a_template_that_demands_descriptions_gets_empty_ones() -> None:
    """It fails without; a description that was sent is not replaced."""
    assert shown(BY_HAND, ToolSpec("f", None, NO_PARAMETERS)).startswith("f:  {")
    assert shown(BY_HAND, ToolSpec("f", "Does it.", NO_PARAMETERS)).startswith("f: Does it. {")


MOVES = (
    "{% set rules = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('roles alternate') }}{% endif %}"
    "<{{ m.role }}>{{ rules ~ '\n\n' if loop.last and rules }}{{ m.content }}{% endfor %}"
)
"""A system text stands in the newest message, a question's beginning (Mistral Nemo)."""


def test_a_system_text_that_a_template_moves_begins_the_first_question_as_it_writes_it() -> None:
    """Of one question the prompt is the template's, and the next prompt begins with it. A template that writes more
    than the two texts gets the words of a system marked."""
    rules, hi = Message("system", (TextBlock("Be brief."),)), Message("user", (TextBlock("hi"),))
    later = (Message("assistant", (TextBlock("yes"),)), Message("user", (TextBlock("go"),)))

    def written(source: str, *messages: Message) -> str:
        return ChatTemplate(tokenizer_of(byte_level_backend(), source)).render(messages, (), thinking=True).text

    assert written(MOVES, rules, hi) == "<user>Be brief.\n\nhi"
    assert written(MOVES, rules, hi, *later) == "<user>Be brief.\n\nhi<assistant>yes<user>go"
    marks = MOVES.replace("rules ~", "'RULES ' ~ rules ~")
    assert written(marks, rules, hi, *later) == "<user>[system]\nBe brief.\n\nhi<assistant>yes<user>go"


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}SEPARATOR{% endfor %}{% endif %}{% endfor %}"
)
CONCATENATES, GLUES = PARTS.replace("SEPARATOR", ""), PARTS.replace("SEPARATOR", "{{ '' if loop.last else '\n\n' }}")
TAGS = PARTS.replace("SEPARATOR", "{{ '' if loop.last else '<sep>' }}")
DUMPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FAILS = "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}"


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize(
    ("source", "joint"), [(CONCATENATES, ""), (GLUES, "\n\n"), (TAGS, "\n"), (DUMPS, "\n"), (FAILS, "\n")]
)
def test_parts_are_joined_as_the_template_joins_them(role: Role, source: str, joint: str) -> None:
    """What it writes between parts stands between them, nothing included, but for words of its own; where it takes no
    parts, each is a line."""
    said = Message(role, (TextBlock("How "), TextBlock("is it?")))
    messages = (said,) if role == "user" else (said, Message("user", (TextBlock("hi"),)))
    prompt = ChatTemplate(tokenizer_of(byte_level_backend(), source)).render(messages, thinking=True)
    assert prompt.text.startswith(f"<{role}>How {joint}is it?")


@pytest.mark.parametrize("source", [CONCATENATES, GLUES])
def test_what_the_server_tells_stands_on_lines_of_its_own(source: str) -> None:
    """A file or an image unseen is glued to no part of the client's, nor two of them to each other; its text holds no
    control token, as a client may have written it."""
    tokenizer = family_tokenizer("qwen3")
    template = ChatTemplate(replace(tokenizer, chat_template=source))
    file = TextBlock("a.txt\n<|im_end|>", is_ours=True)
    said = Message("user", (TextBlock("Read"), file, UNSEEN, TextBlock("and "), TextBlock("say.")))
    prompt = template.render((said,), thinking=True)
    joint = "" if source == CONCATENATES else "\n\n"
    assert prompt.text == f"<user>Read\na.txt\n<|im_end|>\n{UNSEEN.text}\nand {joint}say."
    assert tokenizer.token_id("<|im_end|>") not in prompt.ids.ids


def test_a_control_token_in_two_parts_is_text() -> None:
    """The parts of a user's message cannot spell one together."""
    tokenizer = family_tokenizer("qwen3")
    template = ChatTemplate(replace(tokenizer, chat_template=CONCATENATES))
    for token in ("<|im_end|>", "<|image_pad|>"):
        for cut in range(1, len(token)):
            said = Message("user", (TextBlock(f"What is {token[:cut]}"), TextBlock(f"{token[cut:]} for?")))
            prompt = template.render((said,), thinking=True)
            assert prompt.text == f"<user>What is {token} for?" and tokenizer.token_id(token) is not None
            assert tokenizer.token_id(token) not in prompt.ids.ids


def test_an_error_and_what_is_the_servers_own_stand_on_lines() -> None:
    """Parts are put together, but the mark of an error is no part."""
    describe: Any = lambda tools: "described"  # noqa: E731
    result = ToolResultBlock("c", (TextBlock("no "), TextBlock("file"), ToolBlock("f"), TextBlock("x")), is_error=True)
    [step] = steps_of(Message("tool", (result,)), 0, describe, {"tool": ""})
    assert step.text == "[error]\nno file\ndescribed\nx"
    assert [step.text[slice(*run)] for run in step.own] == ["described"]
    [silent] = steps_of(Message("tool", (ToolResultBlock("c", (), is_error=True),)), 0, describe)
    assert silent.text == "[error]\n"


CUTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last and CONDITION %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("condition", "arguments", "is_shown"),
    [("true", {}, False), ("false", {}, True), ("not brings_back", {"brings_back": True}, True)],
)
def test_tags_that_are_cut_off_leave_nothing(condition: str, arguments: dict[str, object], is_shown: bool) -> None:
    """Thinking between tags stands in an answer only where the template goes on showing it or may be told to."""
    template = ChatTemplate(tokenizer_of(byte_level_backend(), CUTS.replace("CONDITION", condition)))
    answer = Message("assistant", (ThinkingBlock("hm"), TextBlock("so")))
    hi, go = Message("user", (TextBlock("hi"),)), Message("user", (TextBlock("go"),))
    thought = "<think>\nhm\n</think>\n\nso"
    prompt = template.render((hi, answer, go), thinking=True, template_arguments=arguments)
    assert prompt.text == f"<user>hi<assistant>{thought if is_shown else 'so'}<user>go"
    assert template.render((hi, answer), thinking=True).text == f"<user>hi<assistant>{thought}"


def test_thinking_that_only_a_question_cuts_off_stays_before_anything_else() -> None:
    """A template that shows it up to the next question shows it also in an answer that goes on in another message."""
    behind = "messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list"
    template = ChatTemplate(tokenizer_of(byte_level_backend(), CUTS.replace("CONDITION", behind)))
    answer, more = (ThinkingBlock("hm"), TextBlock("so")), (TextBlock("go"),)
    said = (Message("user", (TextBlock("hi"),)), Message("assistant", answer), Message("assistant", more))
    prompt = template.render(said, thinking=True)
    assert prompt.text == "<user>hi<assistant><think>\nhm\n</think>\n\nso<assistant>go"
