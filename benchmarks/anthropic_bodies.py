"""Bodies of `/v1/messages` as the chat bodies that say the same, for what reads only those. Own code: the server's
reading of these bodies is judged with it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

type Wire = dict[str, Any]


def as_chat(body: Wire) -> Wire:
    """The chat body: system text, messages and tools in their order, thinking as a switch."""
    system = _parts(body.get("system") or [])
    messages = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _messages(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools") or []
    ]
    chat: Wire = {"model": body["model"], "messages": messages, "stream": True}
    if tools:
        chat["tools"] = tools
    if "thinking" in body:
        chat["enable_thinking"] = body["thinking"]["type"] != "disabled"
    return chat


def without_thinking(body: Wire) -> Wire:
    """The same body without a thinking block in its messages."""
    messages = [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [block for block in message["content"] if block["type"] != "thinking"]}
        for message in body["messages"]
    ]
    return {**body, "messages": messages}


def _messages(message: Wire) -> Iterator[Wire]:
    if message["role"] == "assistant":
        yield _answer(_blocks(message["content"]))
        return
    words: list[Wire] = []
    for block in _blocks(message["content"]):
        if block["type"] == "tool_result":
            if words:
                yield {"role": message["role"], "content": words}
                words = []
            said = "\n".join(part["text"] for part in _parts(block.get("content") or []))
            yield {"role": "tool", "content": f"[error]\n{said}" if block.get("is_error") else said}
        else:
            words += _parts([block])
    if words:
        yield {"role": message["role"], "content": words}


def _answer(blocks: Sequence[Wire]) -> Wire:
    """An assistant's message; the text in several blocks is one in pieces."""
    thinking = "\n\n".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [
        {"type": "function", "function": {"name": block["name"], "arguments": json.dumps(block["input"])}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block["type"] == "text"),
        **({"reasoning_content": thinking} if thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _blocks(content: str | list[Wire]) -> list[Wire]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _parts(content: str | list[Wire]) -> list[Wire]:
    """Text blocks without their marks."""
    return [{"type": "text", "text": block["text"]} for block in _blocks(content)]
