"""Recorded sessions as tokens of a real vocabulary: prompts and the answers that came, each message tokenised alone, as
a server has it that puts back the ids which it wrote. It knows recordings and a tokenizer, no server and no drafts.
"""

import json
import lzma
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.recordings import Conversation, Request, Wire, read_corpus, read_recordings

VOCABULARY = "qwen3"
CLIENTS: Mapping[str, str] = {
    "claude": "Claude Code",
    "pi": "PI",
    "lmcache_miniswe": "mini-SWE",
    "openhands": "OpenHands",
    "sweagent": "SWE-agent",
    "tau_airline": "tau",
    "lmcache_magentic": "Magentic",
    "openclaw": "OpenClaw",
    "opencode": "opencode",
    "codex": "Codex",
    "tracelab": "Codex",
}
"""Whose recordings files are, by how their names begin."""

_MADE_OF_ANOTHER = re.compile(r"-compact\d*$|-mix$|-sub-\w+$|-last5$| \(\d+\)$")
_ASSISTANT = "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Step:
    """A prompt and the answer that came to it, as tokens."""

    prompt: array[int]
    answer: array[int]


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a client. `reader`: sessions of one reader may be drafted from one another. `origin`: sessions of
    one origin say the same here and there, so they are never of one reader nor in two halves."""

    client: str
    reader: str
    origin: str
    name: str
    steps: tuple[Step, ...]


class Words:
    """Tokens of messages in Qwen's form, as ChatML with calls in JSON."""

    def __init__(self, shared: Path) -> None:
        packed = shared / "tokenizers" / VOCABULARY / "tokenizer.json.xz"
        self._tokenizer = Tokenizer.from_str(lzma.decompress(packed.read_bytes()).decode())
        self._known: dict[str, list[int]] = {}

    def prompt(self, chat: Wire) -> array[int]:
        """The prompt of a chat, up to where the answer begins."""
        tokens = array("i")
        if tools := chat.get("tools"):
            specs = "\n".join(map(json.dumps, tools))
            tokens.extend(self._ids(f"<|im_start|>system\n# Tools\n\n{specs}<|im_end|>\n"))
        for message in chat["messages"]:
            if message["role"] == "assistant":
                tokens.extend((*self._opening, *self.answer(message), *self._ids("\n")))
            else:
                tokens.extend(self._ids(_read(message)))
        tokens.extend(self._opening)
        return tokens

    def answer(self, message: Wire) -> array[int]:
        """What a model wrote, up to the token that ends it."""
        return array("i", self._ids(f"{_written(message)}<|im_end|>"))

    @cached_property
    def _opening(self) -> list[int]:
        return self._ids(_ASSISTANT)

    def _ids(self, text: str) -> list[int]:
        if (ids := self._known.get(text)) is None:
            ids = self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _read(message: Wire) -> str:
    said = _text(message.get("content"))
    if message["role"] == "tool":
        return f"<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n"
    return f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"


def _written(message: Wire) -> str:
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = [f"<think>\n{thought}\n</think>\n\n"] if thought else []
    parts.append(_text(message.get("content")))
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        spelt = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f'\n<tool_call>\n{{"name": "{name}", "arguments": {spelt}}}\n</tool_call>')
    return "".join(parts)


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")


def read_sessions(shared: Path) -> Iterator[Session]:
    """All recorded sessions with an answer in them."""
    words = Words(shared)
    for talk in (*read_corpus(shared), *read_recordings(shared)):
        client = next((name for begin, name in CLIENTS.items() if talk.client.startswith(begin)), None)
        steps = tuple(Step(words.prompt(each.chat), _answered(words, each)) for each in talk.requests if each.reply)
        if client is not None and steps:
            yield Session(client, _reader(talk), _origin(talk), talk.name, steps)


def _answered(words: Words, request: Request) -> array[int]:
    reply = request.reply
    assert reply is not None
    calls = [{"function": {"name": name, "arguments": spelt}} for name, spelt in reply.calls]
    return words.answer({"reasoning_content": reply.reasoning, "content": reply.content, "tool_calls": calls})


def _origin(talk: Conversation) -> str:
    name = talk.name
    while (shorter := _MADE_OF_ANOTHER.sub("", name)) != name:
        name = shorter
    return name


def _reader(talk: Conversation) -> str:
    """A file's sessions are one client's, one after another; one that is made of another again is not."""
    return f"{talk.client}{talk.name.removeprefix(_origin(talk)) if talk.name.endswith(')') else ''}"


def halves(sessions: list[Session]) -> tuple[list[Session], list[Session]]:
    """The sessions to choose by and those to report: of each client, one origin here and the next one there, in the
    order in which they come."""
    origins: dict[str, list[str]] = {}
    sides: tuple[list[Session], list[Session]] = ([], [])
    for session in sessions:
        known = origins.setdefault(session.client, [])
        if session.origin not in known:
            known.append(session.origin)
        sides[known.index(session.origin) % 2].append(session)
    return sides
