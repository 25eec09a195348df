"""Transcripts of other servers: what is not read or run here becomes words, all its text and nothing that moves."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import ImageBlock, Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from kvserve.errors import BadRequest
from kvserve.protocols.anthropic_content import read_message as read_anthropic
from kvserve.protocols.fields import Fields
from kvserve.protocols.openai_messages import read_message as read_openai
from kvserve.protocols.placeholders import words, words_of_unknown
from kvserve.protocols.responses_items import read_items
from tests.protocols.anthropic_wire import parse

BASE64 = base64.b64encode(bytes(range(256))).decode()
SERVER = "done by another server"
PARTLY = "done by another server, part of it cannot be read here"

ANTHROPIC: dict[str, tuple[str, dict[str, Any], str]] = {
    "search": (
        "assistant",
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "kv caches"}},
        f"\n[server_tool_use: {SERVER}]\nname: web_search\nquery: kv caches\n",
    ),
    "found": (
        "assistant",
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "url": "https://a.org",
                    "title": "A",
                    "encrypted_content": "Eo",
                    "page_age": None,
                },
                {"type": "web_search_result", "url": "https://b.org", "title": "B", "encrypted_content": "Ep"},
            ],
        },
        f"\n[web_search_tool_result: {PARTLY}]\nurl: https://a.org\ntitle: A\nurl: https://b.org\ntitle: B\n",
    ),
    "not found": (
        "assistant",
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
        },
        f"\n[web_search_tool_result: {SERVER}]\nerror_code: max_uses_exceeded\n",
    ),
    "fetched": (
        "assistant",
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "web_fetch_result",
                "url": "https://a.org",
                "content": {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "Words."},
                },
            },
        },
        f"\n[web_fetch_tool_result: {SERVER}]\nurl: https://a.org\ndata: Words.\n",
    ),
    "ran": (
        "assistant",
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "a\nb",
                "stderr": "",
                "return_code": 0,
                "content": [],
            },
        },
        f"\n[bash_code_execution_tool_result: {SERVER}]\nstdout: a\nb\nreturn_code: 0\n",
    ),
    "mcp": (
        "assistant",
        {"type": "mcp_tool_use", "id": "m", "name": "get", "server_name": "docs", "input": {"page": 3}},
        f"\n[mcp_tool_use: {SERVER}]\nname: get\nserver_name: docs\npage: 3\n",
    ),
    "compaction": (
        "assistant",
        {"type": "compaction", "content": "So far: all went well.", "encrypted_content": "EqEB"},
        "[Summary of the conversation up to here]\nSo far: all went well.",
    ),
    "sealed compaction": (
        "assistant",
        {"type": "compaction", "content": None, "signature": "s"},
        f"\n[compaction: {PARTLY}]\n",
    ),
    "upload": ("user", {"type": "container_upload", "file_id": "file_1"}, f"[container_upload: {SERVER}]"),
    "PDF": (
        "user",
        {
            "type": "document",
            "title": "Report",
            "context": "Of May",
            "citations": {"enabled": True},
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        },
        "[document: cannot be read here]\ntitle: Report\ncontext: Of May",
    ),
    "PDF elsewhere": (
        "user",
        {"type": "document", "source": {"type": "url", "url": "https://a.org/r.pdf"}},
        "[document: cannot be read here]\nurl: https://a.org/r.pdf",
    ),
    "uploaded PDF": (
        "user",
        {"type": "document", "title": "R", "source": {"type": "file", "file_id": "f"}},
        "[document: cannot be read here]\ntitle: R",
    ),
    "uploaded image": (
        "user",
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        "[image: cannot be read here]",
    ),
    "of tomorrow": ("user", {"type": "hologram", "id": "h", "text": "A ship."}, f"[hologram: {SERVER}]\nA ship."),
}


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropics_blocks_in_words(name: str) -> None:
    """Each has its heading and all that can be read of it; the words around it stay."""
    role, block, expected = ANTHROPIC[name]
    around = {"type": "text", "text": "a"}
    [message] = read_anthropic({"role": role, "content": [around, block, around]}, "m")
    assert message.blocks == (TextBlock("a"), TextBlock(expected, is_ours=True), TextBlock("a"))


def test_a_document_of_pages_keeps_its_images() -> None:
    """They are what a vision model can look at."""
    page = {"type": "image", "source": {"type": "url", "url": "https://a.org/p.png"}}
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "content", "content": [{"type": "text", "text": "1"}, page]},
    }
    [message] = read_anthropic({"role": "user", "content": [document]}, "m")
    assert message.blocks == (
        TextBlock("T", is_ours=True),
        TextBlock("1", is_ours=True),
        ImageBlock("https://a.org/p.png"),
    )


def test_a_mark_on_a_block_of_another_server_counts() -> None:
    """Clients mark the last block, whatever it is."""
    block = {**ANTHROPIC["upload"][1], "cache_control": {"type": "ephemeral"}}
    turn = parse(messages=[{"role": "user", "content": [block]}]).turn
    assert turn.session.num_marked_messages == 1


OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, "[input_audio: cannot be heard here]"),
    ({"type": "input_image", "file_id": "f"}, "[input_image: cannot be read here]"),
    (
        {"type": "video_url", "video_url": {"url": "https://a.org/v.mp4"}},
        f"[video_url: {SERVER}]\nurl: https://a.org/v.mp4",
    ),
    ({"type": "file", "file": {"file_id": "f", "filename": "a.pdf"}}, "[file: cannot be read here]\nfilename: a.pdf"),
    (
        {"type": "input_file", "file_url": "https://a.org/a.pdf"},
        "[file: cannot be read here]\nfile_url: https://a.org/a.pdf",
    ),
]


@pytest.mark.parametrize(("part", "expected"), OPENAI)
def test_openais_parts_in_words(part: dict[str, Any], expected: str) -> None:
    """In messages of both protocols."""
    wanted = Message("user", (TextBlock("a"), TextBlock(expected, is_ours=True)))
    content = [{"type": "text", "text": "a"}, part]
    assert read_openai({"role": "user", "content": content}, "m") == wanted
    assert read_items([{"role": "user", "content": content}], "input") == (wanted,)


ITEMS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q", "queries": ["q", "r"]},
        },
        f"[web_search_call: {SERVER}]\naction: search\nquery: q\nqueries: q\nqueries: r",
    ),
    (
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "failed",
            "action": {"type": "open_page", "url": "https://a.org"},
        },
        f"[web_search_call: {SERVER}]\nstatus: failed\naction: open_page\nurl: https://a.org",
    ),
    (
        {
            "type": "file_search_call",
            "id": "fs",
            "queries": ["q"],
            "results": [{"file_id": "f", "filename": "a", "score": 0.5, "text": "T"}],
        },
        f"[file_search_call: {SERVER}]\nqueries: q\nfilename: a\nT",
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci",
            "container_id": "c",
            "code": "1+1",
            "outputs": [{"type": "logs", "logs": "2"}],
        },
        f"[code_interpreter_call: {SERVER}]\ncode: 1+1\nlogs: 2",
    ),
    (
        {
            "type": "image_generation_call",
            "id": "ig",
            "status": "completed",
            "result": BASE64,
            "revised_prompt": "A cat",
        },
        f"[image_generation_call: {PARTLY}]\nrevised_prompt: A cat",
    ),
    (
        {
            "type": "mcp_call",
            "id": "m",
            "server_label": "docs",
            "name": "get",
            "arguments": '{"a":1}',
            "output": "text",
            "error": None,
        },
        f'[mcp_call: {SERVER}]\nserver_label: docs\nname: get\narguments: {{"a":1}}\ntext',
    ),
    (
        {
            "type": "mcp_list_tools",
            "id": "m",
            "server_label": "docs",
            "tools": [{"name": "get", "input_schema": {}, "description": "d"}],
        },
        f"[mcp_list_tools: {SERVER}]\nserver_label: docs\nname: get\ndescription: d",
    ),
    ({"type": "compaction", "id": "c", "encrypted_content": "gAAA"}, f"[compaction: {PARTLY}]"),
    ({"type": "of_tomorrow", "id": "t", "thought": "T"}, f"[of_tomorrow: {SERVER}]\nthought: T"),
]


@pytest.mark.parametrize(("item", "expected"), ITEMS)
def test_responses_items_in_words(item: dict[str, Any], expected: str) -> None:
    """They are part of the assistant's answer, between its thinking and its text."""
    thinking = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"role": "assistant", "content": "Done."}
    blocks = (ThinkingBlock("hm"), TextBlock(f"\n{expected}\n", is_ours=True), TextBlock("Done."))
    assert read_items([thinking, item, text], "input") == (Message("assistant", blocks),)


CALLS: list[tuple[dict[str, Any], dict[str, Any], ToolCallBlock, tuple[TextBlock | ImageBlock, ...]]] = [
    (
        {
            "type": "local_shell_call",
            "id": "ls",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ToolCallBlock("c", "local_shell", '{"action":{"type":"exec","command":["ls"]}}'),
        (TextBlock("a.txt"),),
    ),
    (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": 5}},
        {
            "type": "shell_call_output",
            "call_id": "c",
            "output": [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        ToolCallBlock("c", "shell", '{"action":{"commands":["ls"],"timeout_ms":5}}'),
        (TextBlock("stdout: a\n\noutcome: exit\nexit_code: 0", is_ours=True),),
    ),
    (
        {
            "type": "apply_patch_call",
            "call_id": "c",
            "status": "completed",
            "operation": {"type": "delete_file", "path": "a"},
        },
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ToolCallBlock("c", "apply_patch", '{"operation":{"type":"delete_file","path":"a"}}'),
        (TextBlock("status: failed", is_ours=True),),
    ),
    (
        {
            "type": "computer_call",
            "id": "x",
            "call_id": "c",
            "action": {"type": "screenshot"},
            "pending_safety_checks": [],
        },
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "data:x"},
        },
        ToolCallBlock("c", "computer", '{"action":{"type":"screenshot"}}'),
        (ImageBlock("data:x"),),
    ),
]


@pytest.mark.parametrize(("call", "output", "read", "result"), CALLS)
def test_what_the_client_ran_is_a_call_and_its_result(
    call: dict[str, Any], output: dict[str, Any], read: ToolCallBlock, result: tuple[TextBlock | ImageBlock, ...]
) -> None:
    """By OpenAI's name for the tool, with what was given to it and what came of it."""
    assert read_items([call, output], "input") == (
        Message("assistant", (read,)),
        Message("tool", (ToolResultBlock("c", result),)),
    )


def test_a_users_word_to_a_server_is_the_users() -> None:
    """An approval, and an item of a type that nobody knows but that names its role."""
    approval = {"type": "mcp_approval_response", "approval_request_id": "r", "approve": False, "reason": "no"}
    [message] = read_items([approval], "input")
    assert (message.role, message.blocks) == (
        "user",
        (
            TextBlock(
                f"[mcp_approval_response: {SERVER}]\napproval_request_id: r\napprove: false\nreason: no", is_ours=True
            ),
        ),
    )
    [message] = read_items([{"type": "note", "role": "user", "text": "x"}], "input")
    assert message == Message("user", (TextBlock(f"[note: {SERVER}]\nx", is_ours=True),))


@pytest.mark.parametrize("block", [{"type": "smell"}, {"type": "smell", "id": "x", "data": BASE64}])
def test_what_nobody_knows_and_cannot_be_read_is_refused(block: dict[str, Any]) -> None:
    """The error names the field; of a type that is known, the fields are checked as before."""
    for read in (
        lambda: read_anthropic({"role": "user", "content": [block]}, "m"),
        lambda: read_openai({"role": "user", "content": [block]}, "m"),
        lambda: read_items([block], "m"),
    ):
        with pytest.raises(BadRequest) as caught:
            read()
        assert str(caught.value.param).endswith(".type")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(["src", "tests", "node_modules", "README", "docs", "build"] * 12),
        "\n".join(map(str, range(300))),
        str(2**1000),
        "GATTACA" * 60,
        "A1-b2/c3_D4\n" * 30,
        "\n" * 300,
    ],
    ids=["names", "numbers", "one number", "letters", "paths", "blanks"],
)
def test_what_a_command_said_is_not_taken_for_bytes(text: str) -> None:
    """Lists of names and long numbers are written with the letters of base64 too, and are read."""
    assert words(Fields({"type": "x_output", "output": text})) == f"[x_output: {SERVER}]\n{text}"


def test_the_input_of_a_tool_is_whole() -> None:
    """There every name is the tool's, also one that says nothing elsewhere: an id, a type, a state."""
    given = {"id": 4711, "type": "issue", "format": "md", "todo": {"status": "completed", "index": 2, "signature": "s"}}
    said = words(Fields({"type": "mcp_tool_use", "id": "m1", "name": "get", "input": given}))
    lines = ["name: get", "id: 4711", "type: issue", "format: md", "status: completed", "index: 2", "signature: s"]
    assert said.split("\n")[1:] == lines


@pytest.mark.parametrize("width", [60, 76, 5000], ids=str)
def test_bytes_in_lines_are_bytes(width: int) -> None:
    """As base64 is written: on one line, or on lines of one length."""
    data = base64.b64encode(bytes(range(256)) * 3).decode()
    lines = "\n".join(data[start : start + width] for start in range(0, len(data), width))
    for text in (lines, f"{lines}\n", lines.replace("\n", "\r\n")):
        assert text[:40] not in words(Fields({"type": "x", "output": text, "note": "n"}))


SAID = st.text(st.characters(codec="ascii", categories=["L", "Z"]), min_size=1, max_size=8).filter(str.strip)
NAMES = st.sampled_from(["query", "url", "text", "stdout", "input", "content", "name", "note"])
BLOCK = st.dictionaries(
    NAMES,
    st.recursive(SAID, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)),
    max_size=4,
)


def texts(value: object) -> list[str]:
    """Every text inside a value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in texts(each)]


@given(BLOCK, SAID)
def test_no_text_is_dropped_and_no_id_moves_the_words(block: dict[str, Any], name: str) -> None:
    """Every text is in the words, in its order; another id, seal or mark makes the same words."""
    said = words(Fields({"type": "x", **block}))
    place = 0
    for text in texts(block):
        place = said.index(text, place) + len(text)
    moved = {
        "id": name,
        "type": "x",
        **block,
        "cache_control": {"type": name},
        "tool_use_id": name,
        "status": "completed",
    }
    assert words(Fields(moved)) == said
    sealed = [words(Fields({"type": "x", **block, "encrypted_content": seal})) for seal in (name, name + "x")]
    assert sealed[0] == sealed[1] and name + "x" not in sealed[1].split("\n", 1)[0]
    if texts(block):
        assert words_of_unknown(Fields({"type": "x", **block}, "b"), ("text",)) == said
