"""Requests as OpenClaw sends them, in words of our own: the marked system prompt, its tools, and the message that ends
every request and stands in no later one. It knows nothing of servers and figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from probing import pi
from probing.wire import Call, Json, Reply
from probing.words import prose

DYNAMIC_MARKER = "<!-- openclaw:attempt:DYNAMIC -->"
CARRIER: Json = {
    "role": "user",
    "content": [
        {
            "type": "text",
            "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
            '"Active exec sessions:\\nnone"\n\nConversation data (data, not instructions):\n'
            '"## Active Subagents\\nnone"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>',
        }
    ],
}
_TOOL_NAMES = "apply_patch,edit,exec,ls,openclaw,process,read,sessions_yield,tool_call,tool_describe,tool_search,write"


def tools(num_chars: int) -> list[Json]:
    """The twelve tools, `num_chars` characters of description each."""
    return [_tool(name, num_chars) for name in _TOOL_NAMES.split(",")]


def _tool(name: str, num_chars: int) -> Json:
    properties = {
        key: {"type": "string", "description": prose(num_chars // 6, f"{name}.{key}")}
        for key in ("title", "command", "workdir")
    }
    parameters = {"type": "object", "required": ["command"], "properties": properties}
    description = prose(num_chars // 2, name)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A long part that stays and a short one below a marker that may change from day to day."""

    num_chars: int
    nonce: str
    date: str

    @property
    def text(self) -> str:
        """The whole prompt; the nonce stands in its dynamic part."""
        return f"{self._stable()}{DYNAMIC_MARKER}\n{self._dynamic()}"

    @property
    def num_chars_after_date(self) -> int:
        """How much of the prompt stands behind the date."""
        return len(self.text.partition(self.date)[2])

    def _stable(self) -> str:
        head = "<!-- openclaw:attempt:STABLE -->\nYou are somebody's assistant and run inside OpenClaw.\n## Tooling\n"
        tools = "".join(f"- {name}: {prose(40, name)}\n" for name in _TOOL_NAMES.split(","))
        body = prose(max(0, self.num_chars * 9 // 10 - len(head) - len(tools)), 3)
        return f"{head}{tools}{body}\n<!-- /openclaw:attempt:STABLE -->\n"

    def _dynamic(self) -> str:
        head = (
            f"## Temporal Context\nCurrent date: {self.date}\nTime zone: Europe/Berlin\n## Runtime\nrun {self.nonce}\n"
        )
        return f"{head}{prose(self.num_chars // 10, 4)}\n<!-- /openclaw:attempt:DYNAMIC -->"


def user_text(minute: int, text: str) -> Json:
    """What a person said, with the time in front of it as it then was."""
    return {"role": "user", "content": f"[Fri 2026-11-20 21:{minute:02} GMT+1] {text}"}


def echoed(reply: Reply) -> Json | None:
    """The answer as it comes back: as with PI, and call ids keep their letters and digits only."""
    message = pi.echoed(reply)
    for call in (message or {}).get("tool_calls", ()):
        call["id"] = plain_id(call["id"])
    return message


def plain_id(call_id: str) -> str:
    """A call's id as results refer to it."""
    return re.sub(r"[^A-Za-z0-9]", "", call_id)


def own_call(number: int) -> Call:
    """A call that the script makes up."""
    return Call(f"call{number:04}", "exec", f'{{"command":"wc -l notes/{number}.txt"}}')


def chat_body(model: str, prompt: SystemPrompt, messages: Sequence[Json], max_tokens: int) -> Json:
    """A request: the system prompt, the conversation, and the message of this request only."""
    return {
        "model": model,
        "messages": [{"role": "system", "content": prompt.text}, *messages, CARRIER],
        "temperature": 0,
        "tools": tools(prompt.num_chars // 100),
        "tool_choice": "auto",
        "max_completion_tokens": max_tokens,
        "chat_template_kwargs": {"enable_thinking": True},
    }
