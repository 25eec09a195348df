"""The conversations of the template matrix, as OpenAI's clients send them. It knows no template and no server."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.template_reference import Conversation, Wire


def user(text: Any) -> Wire:
    return {"role": "user", "content": text}


def system(text: str) -> Wire:
    return {"role": "system", "content": text}


def answer(text: str | None, *calls: Wire, reasoning: str | None = None) -> Wire:
    thought = {"reasoning_content": reasoning} if reasoning is not None else {}
    return {"role": "assistant", "content": text, **thought, **({"tool_calls": list(calls)} if calls else {})}


def call(call_id: str, name: str, arguments: Mapping[str, Any]) -> Wire:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def result(call_id: str, text: str) -> Wire:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str, description: str | None, properties: Mapping[str, Any], **more: Any) -> Wire:
    function: Wire = {"name": name}
    if description is not None:
        function["description"] = description
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)[:1]}
    return {"type": "function", "function": {**function, "parameters": schema, **more}}


READ = tool(
    "read_file",
    "Reads a file.",
    {
        "path": {"type": "string", "description": "Where it lies."},
        "lines": {"type": "integer", "description": "How many lines."},
    },
)
SAVE = tool(
    "save_all",
    "Saves values.",
    {
        "text": {"type": "string", "description": "Some text."},
        "count": {"type": "integer", "description": "A number."},
        "ratio": {"type": "number", "description": "A number."},
        "flag": {"type": "boolean", "description": "Yes or no."},
        "options": {"type": "object", "description": "More of it.", "properties": {}},
    },
)
NOTE = tool(
    "note_all",
    "Notes values.",
    {
        "text": {"type": "string", "description": "Some text."},
        "note": {"type": ["string", "null"], "description": "A note or none."},
    },
)
SORT = tool("sort_all", "Sorts.", {"items": {"type": "array", "description": "Several.", "items": {"type": "string"}}})
BARE = {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}}
STRICT = tool("read_file", "Reads a file.", READ["function"]["parameters"]["properties"], strict=True)
TOOLS = (READ,)

_LOOK = call("call1aaaa", "read_file", {"path": "kwmain", "lines": 40})
_LATER = call("call2bbbb", "read_file", {"path": "kwreadme", "lines": 5})
_TALK = (user("How is it?"), answer("It is fine."), user("And then?"))

RENDERED: Mapping[str, Conversation] = {
    "plain": Conversation((user("How is it?"),)),
    "thinking on": Conversation((user("How is it?"),), thinking=True),
    "system": Conversation((system("Be brief."), user("How is it?")), thinking=True),
    "later turn": Conversation(_TALK),
    "later turn, thinking on": Conversation((system("Be brief."), *_TALK), thinking=True),
    "tools": Conversation((system("Be brief."), user("Read it.")), (READ, SAVE), thinking=True),
    "tools of few words": Conversation((user("Read it."),), (BARE, STRICT)),
    "call and result": Conversation((user("Read it."), answer(None, _LOOK), result("call1aaaa", "12 lines")), TOOLS),
    "parallel calls": Conversation(
        (
            user("Read both."),
            answer(None, _LOOK, _LATER),
            result("call1aaaa", "12 lines"),
            result("call2bbbb", "5 lines"),
        ),
        TOOLS,
    ),
    "answer to a result": Conversation(
        (
            system("Be brief."),
            user("Read it."),
            answer(None, _LOOK),
            result("call1aaaa", "12 lines"),
            answer("It has twelve."),
            user("Go on."),
        ),
        TOOLS,
    ),
    "text before calls": Conversation(
        (user("Read it."), answer("I look.", _LOOK), result("call1aaaa", "12 lines")), TOOLS
    ),
    "reasoning in a loop": Conversation(
        (user("Read it."), answer(None, _LOOK, reasoning="Hm, a file."), result("call1aaaa", "12 lines")),
        TOOLS,
        thinking=True,
    ),
    "reasoning in history": Conversation(
        (user("How is it?"), answer("It is fine.", reasoning="Hm, well."), user("And then?")), thinking=True
    ),
    "list of parts": Conversation(
        (user([{"type": "text", "text": "How is it?"}, {"type": "text", "text": "Say it."}]),)
    ),
    "continued": Conversation((user("How is it?"), answer("It is")), continues=True),
}
"""By name; what each is for is said in it."""
