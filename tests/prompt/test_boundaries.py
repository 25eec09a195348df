"""Where messages begin, per family, on the real templates."""

import pytest

from kvserve.core import Message, TextBlock, ToolCallBlock, ToolResultBlock, ToolSpec
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import load_tokenizer
from tests.models import tiny_model

FAMILIES = ("qwen3", "qwen3_5", "qwen3_next", "gemma3", "gemma4", "gpt_oss", "glm4_moe_lite", "llama")
TOOL = ToolSpec("look", "Look at a file.", {"type": "object", "properties": {"path": {"type": "string"}}})


def text(role: str, words: str) -> Message:
    return Message(role, (TextBlock(words),))  # type: ignore[arg-type]


CHAT = (
    text("system", "Be brief."),
    text("user", "First question"),
    text("assistant", "First answer"),
    text("user", "Second question"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_message_of_a_chat_begins_where_it_should(family: str) -> None:
    """The text from one start to the next holds one message; the last start is the generation tail."""
    tokenizer = load_tokenizer(tiny_model(family))
    template = ChatTemplate(tokenizer)
    prompt = template.render(CHAT, thinking=False)
    starts = learn_markers(tokenizer, template).message_starts(prompt.ids.ids)
    ends = [*[start.offset for start in starts][1:], len(prompt.ids.ids)]
    spans = [tokenizer.decode(prompt.ids.ids[start.offset : end]) for start, end in zip(starts, ends, strict=True)]
    for words in ("First question", "First answer", "Second question"):
        assert sum(words in span for span in spans) == 1
    assert "question" not in spans[-1], "the tail begins after the last message"
    users = [span for span, start in zip(spans, starts, strict=True) if start.is_user]
    assert [words for words in ("First question", "Second question") if any(words in span for span in users)] == [
        "First question",
        "Second question",
    ]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_a_tool_result_is_not_a_users_message(family: str) -> None:
    """The starts of a tool loop mark one user's message, whatever role the template gives the tool's result."""
    tokenizer = load_tokenizer(tiny_model(family))
    template = ChatTemplate(tokenizer)
    loop = (
        *CHAT[:2],
        Message("assistant", (ToolCallBlock("c1", "look", '{"path": "a"}'),)),
        Message("tool", (ToolResultBlock("c1", (TextBlock("contents"),)),)),
    )
    prompt = template.render(loop, (TOOL,), thinking=True)
    starts = learn_markers(tokenizer, template).message_starts(prompt.ids.ids)
    assert sum(start.is_user for start in starts) == 1
    assert len(starts) >= (3 if family == "gemma4" else 4), "gemma4 writes a whole tool loop as one message"


def test_a_model_without_special_tokens_has_no_starts() -> None:
    """Plain text has no markers; that costs checkpoints, not correctness."""
    tokenizer = load_tokenizer(tiny_model("llama"))
    markers = learn_markers(tokenizer, ChatTemplate(tokenizer))
    assert markers.message_starts(tokenizer.encode("User: hello\nAssistant: hi")) == ()
