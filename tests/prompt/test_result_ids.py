"""The id that a result names in a prompt is one that stands in its call."""

import json

import pytest

from kvserve.core import Message, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.prompt.template import ChatTemplate
from tests.laws import sampled
from tests.prompt.call_forms import ANY, READ, SMALL, source_of
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.vocabularies import TEMPLATES

BY_MESSAGE = SMALL["tags"].replace(
    "{{ m.content or '' }}", "{% if m.role == 'tool' %}Of {{ m.tool_call_id }}: {% endif %}{{ m.content or '' }}"
)
BY_CONVERSATION = (
    BY_MESSAGE.replace("{% for m in", "{% set n = namespace(calls=0) %}{% for m in")
    .replace(":{{ loop.index0 }}", ":{{ n.calls }}")
    .replace("{% endfor %}<|calls_end|>", "{% set n.calls = n.calls + 1 %}{% endfor %}<|calls_end|>")
)


def calls(*ids: str) -> Message:
    """Calls of different tools with these ids."""
    arguments = json.dumps({"path": "kwpath"})
    return Message(
        "assistant", tuple(ToolCallBlock(i, ("read_file", "any")[n % 2], arguments) for n, i in enumerate(ids))
    )


def result(call_id: str) -> Message:
    return Message("tool", (ToolResultBlock(call_id, (TextBlock(f"said by {call_id.upper()}"),)),))


def told(source: str) -> str:
    """A conversation with two calls at once, answered in the other order, and one behind them."""
    messages = (
        Message("user", (TextBlock("hi"),)),
        calls("kwfirst", "kwsecond"), result("kwsecond"), result("kwfirst"),
        calls("kwthird"), result("kwthird"),
    )  # fmt: skip
    return ChatTemplate(tokenizer_of(byte_level_backend(), source)).write(messages, (READ, ANY), thinking=False).shown


@pytest.mark.parametrize(("source", "last"), [(BY_MESSAGE, 0), (BY_CONVERSATION, 2)])
def test_results_name_calls_as_the_template_numbers_them(source: str, last: int) -> None:
    """In the message or in the conversation, whatever id the client has for them."""
    text = told(source)
    assert "Of functions.any:1: said by KWSECOND" in text and "Of functions.read_file:0: said by KWFIRST" in text
    assert f"Of functions.read_file:{last}: said by KWTHIRD" in text
    assert f"<|call|>functions.read_file:{last}<|args|>" in text.rpartition("said by KWFIRST")[2]


@pytest.mark.parametrize("name", sampled(TEMPLATES, {"kimi_k2_moonshot", "mistral_small_3_2"}))
def test_an_id_that_a_result_names_stands_in_its_call(name: str) -> None:
    """In all real templates: none writes an id of the client's with the result alone."""
    text = told(source_of(name))
    for client, written in (("kwfirst", "functions.read_file:0"), ("kwsecond", "functions.any:1")):
        assert text.count(client) != 1, text
        assert text.count(written) != 1 or name != "kimi_k2_moonshot"
    assert name != "kimi_k2_moonshot" or text.count("## Return of functions.read_file:0") == 2
