"""The prompt is what transformers renders of what the client sent: nothing is put in that nobody said."""

import pytest

from kvserve.core import Message, TextBlock, ToolSpec
from kvserve.prompt.template import ChatTemplate
from tests.prompt.samples import byte_level_backend, tokenizer_of

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
