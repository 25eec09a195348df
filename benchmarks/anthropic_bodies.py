"""Bodies of `/v1/messages` as the chat bodies that say the same, for what reads only those. Own code: the server's
reading of these bodies is judged with it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

type Wire = dict[str, Any]


def as_chat(body: Wire) -> Wire:
    """The chat body: system text, messages and tools in their order, thinking as a switch. A tool that waits for a
    reference to it is described there."""
    functions = {tool["name"]: _function(tool) for tool in body.get("tools") or []}
    system = _parts(body.get("system") or [])
    messages = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _messages(_with_definitions(message, functions))
    deferred = {tool["name"] for tool in body.get("tools") or [] if tool.get("defer_loading")}
    tools = [{"type": "function", "function": functions[name]} for name in functions if name not in deferred]
    chat: Wire = {"model": body["model"], "messages": messages, "stream": True}
    if tools:
        chat["tools"] = tools
    if "thinking" in body:
        chat["enable_thinking"] = body["thinking"]["type"] != "disabled"
    return chat


def _function(tool: Wire) -> Wire:
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}


def _with_definitions(message: Wire, functions: Mapping[str, Wire]) -> Wire:
    """The message with the tools that its results refer to as text."""
    content = [
        {**block, "content": [_defined(part, functions) for part in _blocks(block.get("content") or [])]}
        if block["type"] == "tool_result"
        else block
        for block in _blocks(message["content"])
    ]
    return {**message, "content": content}


def _defined(part: Wire, functions: Mapping[str, Wire]) -> Wire:
    if part["type"] != "tool_reference":
        return part
    return {"type": "text", "text": json.dumps(functions[part["tool_name"]], ensure_ascii=False)}


def joined_blocks(events: Sequence[Wire]) -> list[Wire]:
    """The blocks of a message, put together from the events of a stream as far as it came."""
    blocks: list[Wire] = []
    arguments = ""
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(dict(block))
                arguments = ""
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                arguments += piece
            case {"type": "content_block_delta", "delta": delta}:
                field = delta["type"].removesuffix("_delta")
                blocks[-1][field] = blocks[-1].get(field, "") + delta[field]
            case {"type": "content_block_stop"} if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments or "{}")
    return blocks


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
