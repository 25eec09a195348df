"""Requests as the PI coding agent sends them, in words of our own: the shape of its system prompt and tools, how it
echoes an answer, how a tool's result comes back. It knows nothing of servers and figures."""

import json
from collections.abc import Sequence
from typing import Any

from probing.wire import Call, Json, Reply
from probing.words import prose

_RULES = (
    "Look at a file before changing it.",
    "List folders with bash, read files with read.",
    "Keep changes small and say which paths they touch.",
    "Answer briefly.",
)


def _tool(name: str, description: str, required: Sequence[str], **properties: Json) -> Json:
    parameters = {"type": "object", "required": list(required), "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _value(kind: str, description: str) -> Json:
    return {"type": kind, "description": description}


_EDIT = {
    "type": "object",
    "required": ["oldText", "newText"],
    "properties": {
        "oldText": _value("string", "The passage as it stands; it must occur once."),
        "newText": _value("string", "What stands there afterwards."),
    },
}
TOOLS: tuple[Json, ...] = (
    _tool(
        "read",
        "Show a text file or an image. Long files are cut; go on with offset and limit.",
        ("path",),
        path=_value("string", "The file, absolute or from the working directory."),
        offset=_value("number", "The first line, counted from 1."),
        limit=_value("number", "How many lines at most."),
    ),
    _tool(
        "bash",
        "Run a command in the working directory and show what it prints. Long output is cut at its beginning.",
        ("command",),
        command=_value("string", "The command line."),
        timeout=_value("number", "Seconds until it is ended; without it there is no limit."),
    ),
    _tool(
        "edit",
        "Replace passages of one file. Each passage is looked for in the file as it was.",
        ("path", "edits"),
        path=_value("string", "The file."),
        edits={"type": "array", "items": _EDIT, "description": "The replacements; they must not overlap."},
    ),
    _tool(
        "write",
        "Write a whole file; its folders are made where they are missing.",
        ("path", "content"),
        path=_value("string", "The file."),
        content=_value("string", "All of its text."),
    ),
)


def system_message(num_chars: int, nonce: str) -> Json:
    """The system prompt; its project instructions take `num_chars`. The nonce comes last, so that two conversations
    share all but the end."""
    tools = "\n".join(f"- {tool['function']['name']}: {tool['function']['description']}" for tool in TOOLS)
    sections = (
        "You help with programming from inside a terminal: you read files, run commands and change code.",
        f"<tools>\n{tools}\n</tools>",
        "<rules>\n" + "\n".join(f"- {rule}" for rule in _RULES) + "\n</rules>",
        f'<project_context>\n<project_instructions path="/home/dev/project/AGENTS.md">\n{prose(num_chars, 1)}\n'
        "</project_instructions>\n</project_context>",
        f"<cwd>\n/home/dev/project-{nonce}\n</cwd>\n",
    )
    return {"role": "system", "content": "\n\n".join(sections)}


def user_message(text: str) -> Json:
    """What a person typed, as a list of parts."""
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def echoed(reply: Reply) -> Json | None:
    """The answer as PI puts it into its next request; None where it leaves the message out.

    Reasoning goes under the field it came in, arguments are written anew without spaces, "" becomes null.
    """
    if not reply.content and not reply.calls:
        return None
    message: Json = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning_field is not None:
        message[reply.reasoning_field] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [encode_call(call) for call in reply.calls]
    return message


def encode_call(call: Call) -> Json:
    """A call on the wire, its arguments re-serialised."""
    function = {"name": call.name, "arguments": compact(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def compact(arguments: str) -> str:
    """JSON without spaces between its parts; what is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return arguments


def own_call(number: int) -> Call:
    """A call that the script makes up."""
    return Call(f"probe{number:04}", "bash", json.dumps({"command": f"wc -l notes/{number}.txt"}))


def own_call_message(call: Call) -> Json:
    """An assistant's turn with this call that no model wrote."""
    return {"role": "assistant", "content": None, "tool_calls": [encode_call(call)]}


def tool_message(call: Call, text: str) -> Json:
    """A tool's result."""
    return {"role": "tool", "content": text, "tool_call_id": call.call_id}


def chat_body(model: str, messages: Sequence[Json], *, max_tokens: int, thinking: bool, **fields: Any) -> Json:
    """A request, drawn greedily so that it can be compared."""
    return {
        "model": model,
        "messages": list(messages),
        "store": False,
        "max_tokens": max_tokens,
        "temperature": 0,
        "tools": list(TOOLS),
        "chat_template_kwargs": {"enable_thinking": thinking, "preserve_thinking": True},
        **fields,
    }
