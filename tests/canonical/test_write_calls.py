"""Contents of past write calls as digests: only these, only their content, and only once."""

import json

import pytest

from kvserve.canonical.substitutions import with_write_content_digested
from kvserve.core import Message, TextBlock, ThinkingBlock, ToolCallBlock

CONTENT = "def f():\n    return 'é'\n" * 50


def assistant(name: str, arguments: str) -> Message:
    return Message("assistant", (ThinkingBlock("t"), TextBlock("I write."), ToolCallBlock("c", name, arguments)))


@pytest.mark.parametrize("name", ["write", "Write", "write_file"])
def test_the_content_of_a_write_call_becomes_a_digest(name: str) -> None:
    """Path and the rest of the message stay; another content has another digest."""
    first, second = with_write_content_digested(
        [assistant(name, json.dumps({"path": "a.py", "content": content})) for content in (CONTENT, CONTENT + "x")]
    )
    call = first.blocks[2]
    assert isinstance(call, ToolCallBlock)
    arguments = json.loads(call.arguments)
    assert arguments["path"] == "a.py"
    assert arguments["content"].startswith(f"[{len(CONTENT)} characters, sha256 ")
    assert "def f" not in call.arguments
    assert first.blocks[:2] == (ThinkingBlock("t"), TextBlock("I write."))
    assert first != second


@pytest.mark.parametrize(
    "message",
    [
        assistant("edit", json.dumps({"content": CONTENT})),
        assistant("write", json.dumps({"path": "a", "text": CONTENT})),
        assistant("write", json.dumps({"content": ["a"]})),
        assistant("write", '{"content": "cut'),
        assistant("write", "[" * 100_000),
        assistant("write", json.dumps([CONTENT])),
        Message("user", (TextBlock('write {"content": "x"}'),)),
        Message("user", (ToolCallBlock("c", "write", json.dumps({"content": CONTENT})),)),
    ],
)
def test_everything_else_stays_as_it_is(message: Message) -> None:
    """Other tools, other keys, text that is no JSON, other roles."""
    assert with_write_content_digested([message]) == (message,)


def test_twice_is_once() -> None:
    """A placeholder is not digested again; what was given stays as it was."""
    message = assistant("write", json.dumps({"path": "a", "content": CONTENT}))
    once = with_write_content_digested([message])
    assert with_write_content_digested(once) == once != (message,)
    assert message == assistant("write", json.dumps({"path": "a", "content": CONTENT}))
