"""Bodies of `/v1/responses` as the chat bodies that say the same, for what reads only those. Own code: the server's
reading of these bodies is judged with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

type Wire = dict[str, Any]


def as_chat(body: Wire) -> Wire:
    """The chat body: instructions, items and functions in their order."""
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat: Wire = {"model": body["model"], "messages": [*system, *_messages(items)], "stream": True}
    tools = [function for tool in body.get("tools") or [] for function in _functions(tool)]
    return {**chat, "tools": tools} if tools else chat


def said_in(items: Sequence[Wire]) -> Wire:
    """The assistant's message that an answer's items make."""
    [message] = _messages(items)
    return message


def _messages(items: Sequence[Wire]) -> Iterator[Wire]:
    """Neighbouring items of an answer are one message: thoughts, then text, then calls."""
    answer: Wire = {}
    for item in items:
        kind = item.get("type", "message")
        is_answer = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        begins_anew = kind != "function_call" and bool(answer.get("content")) and "tool_calls" not in answer
        if answer and (not is_answer or begins_anew):
            yield answer
            answer = {}
        if is_answer:
            answer = _with(answer or {"role": "assistant", "content": ""}, item)
        elif kind == "function_call_output":
            yield {"role": "tool", "content": _text(item["output"])}
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            yield {"role": role, "content": _parts(item["content"])}
    if answer:
        yield answer


def _with(answer: Wire, item: Wire) -> Wire:
    """The answer with one more of its items."""
    match item.get("type", "message"):
        case "reasoning":
            thoughts = "".join(part["text"] for part in item.get("content") or item.get("summary") or [])
            return {**answer, "reasoning_content": answer.get("reasoning_content", "") + thoughts}
        case "function_call":
            name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
            call = {"type": "function", "function": {"name": name, "arguments": item["arguments"]}}
            return {**answer, "tool_calls": [*answer.get("tool_calls", []), call]}
    return {**answer, "content": answer["content"] + _text(item["content"])}


def _functions(tool: Wire) -> Iterator[Wire]:
    """The functions of a tool; none of one that only its own server could run."""
    if tool["type"] == "function":
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        yield {"type": "function", "function": function}
    elif tool["type"] == "namespace":
        for inner in tool["tools"]:
            yield from _functions({**inner, "name": f"{tool['name']}__{inner['name']}"})


def _parts(content: str | list[Wire]) -> list[Wire]:
    return (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else [{"type": "text", "text": part["text"]} for part in content]
    )


def _text(content: str | list[Wire]) -> str:
    return "".join(part["text"] for part in _parts(content))
