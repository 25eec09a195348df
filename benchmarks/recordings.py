"""Requests that real clients sent: recorded sessions of several protocols, the corpus of conversations as chats.

They lie in `shared/` in or beside the repository. It knows the forms of these files and no server.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import responses_bodies
from benchmarks.anthropic_bodies import as_chat, joined_blocks, without_thinking

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDED_CLIENTS = (
    "pi-0.87-qwen",
    "pi-0.87-plain-reasoning",
    "openclaw-2026.9.6",
    "openclaw-2026.9.6-toolloop",
    "opencode",
    "pi-0.87-anthropic",
    "claude-code-2.1.119",
    "claude-code-2.1.330",
    "claude-code-2.1.330-toolsearch",
    "codex",
)
"""The recordings that are played; the last one has bodies of `/v1/responses`, the four before it of `/v1/messages`."""

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

IMAGES = "webvoyager_images"

TITLE = "Write a title of at most five words for the conversation."

type Wire = dict[str, Any]
"""A JSON object as it goes over the wire."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote. `calls` are name and the JSON text of the arguments, `call_ids` what these were called if
    that is known; an id says nothing."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    call_ids: tuple[str, ...] = field(default=(), compare=False)

    @property
    def message(self) -> Wire:
        """The assistant's message that says this, calls with arguments as an object."""
        calls = [
            {"type": "function", "function": {"name": name, "arguments": json.loads(arguments or "{}")}}
            for name, arguments in self.calls
        ]
        thinking = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **thinking, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True)
class Request:
    """One request and its answer; `reply` None where the client left before one came. `path` is its endpoint's."""

    body: Wire
    reply: Reply | None
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = CHAT

    @property
    def chat(self) -> Wire:
        """The body of `/v1/chat/completions` that says the same."""
        if self.path == RESPONSES:
            return responses_bodies.as_chat(self.body)
        return as_chat(self.body) if self.path == MESSAGES else self.body

    @property
    def messages(self) -> list[Wire]:
        return list(self.chat["messages"])


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of one client in the order in which they came; several agents may take turns in it."""

    client: str
    name: str
    requests: tuple[Request, ...]


def unthinking(talk: Conversation) -> Conversation:
    """A session of `/v1/messages` without a thought, in its messages and in its answers, under a name of its own."""
    requests = tuple(
        replace(
            request,
            body=without_thinking(request.body),
            reply=replace(request.reply, reasoning="") if request.reply is not None else None,
        )
        for request in talk.requests
    )
    return replace(talk, name=f"{talk.name} without thinking", requests=requests)


def side_request(request: Request, number: int) -> Request:
    """A small question of the same client: another prompt, the same session, no tools."""
    kept = ("model", "metadata", "max_tokens", "stream", "store", "include", "prompt_cache_key", "client_metadata")
    body = {key: request.body[key] for key in kept if key in request.body}
    if request.path == RESPONSES:
        part = {"type": "input_text", "text": f"Part {number}: {request.body['input'][-1]!s:.400}"}
        body |= {"instructions": TITLE, "input": [{"role": "user", "content": [part]}]}
    else:
        said = f"Part {number}: {request.body['messages'][-1]['content']!s:.400}"
        body |= {"system": [{"type": "text", "text": TITLE}], "messages": [{"role": "user", "content": said}]}
    return Request(body, Reply(content="A title"), request.headers, request.path)


def shared_folder(root: Path = REPOSITORY) -> Path | None:
    """Where recordings and corpus are, if they are there."""
    return next((folder for base in (root, root.parent) if (folder := base / "shared").is_dir()), None)


def read_recordings(shared: Path) -> Iterator[Conversation]:
    """The recorded sessions."""
    for client in RECORDED_CLIENTS:
        rows = [json.loads(file.read_text("utf-8")) for file in sorted((shared / "recordings" / client).glob("*.json"))]
        if rows:
            yield Conversation(client, client, tuple(_recorded(row) for row in rows))


def read_corpus(shared: Path) -> Iterator[Conversation]:
    """The conversations of the corpus, less those with images. Two of one id in a file have names of their own."""
    for file in sorted((shared / "corpus").glob("*.jsonl")):
        if file.stem == IMAGES:
            continue
        seen: Counter[str] = Counter()
        for line in file.read_text("utf-8").splitlines():
            record = json.loads(line)
            seen[record["id"]] += 1
            name = record["id"] if seen[record["id"]] == 1 else f"{record['id']} ({seen[record['id']]})"
            pool, tools = record["pool"], record.get("tools") or []
            requests = tuple(_collected(pool, tools, request) for request in record["requests"])
            yield Conversation(file.stem, name, requests)


def _recorded(row: Wire) -> Request:
    headers = {name.lower(): value for name, value in row["headers"]}
    reply = row.get("reply") if not row.get("disconnected") else None
    path = row["path"].partition("?")[0]
    if path == MESSAGES:
        blocks = joined_blocks(events_in(reply)) if isinstance(reply, str) else reply["blocks"] if reply else None
        return Request(row["body"], blocks_said(blocks) if blocks is not None else None, headers, MESSAGES)
    if path == RESPONSES:
        return Request(row["body"], items_said(reply["items"]) if reply else None, headers, RESPONSES)
    if not reply:
        return Request(row["body"], None, headers)
    calls = reply.get("tool_calls")
    said = Reply(reply.get("reasoning") or "", reply.get("content") or "", _calls(calls), _call_ids(calls))
    return Request(row["body"], said, headers)


def events_in(stream: str) -> list[Wire]:
    """The events of a recorded stream."""
    lines = (line for line in stream.splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _collected(pool: Sequence[Wire], tools: Sequence[Wire], request: Wire) -> Request:
    body: Wire = {"model": "corpus", "messages": [pool[number] for number in request["messages"]], "stream": True}
    if tools:
        body["tools"] = list(tools)
    if request.get("reply") is None:
        return Request(body, None)
    said = pool[request["reply"]]
    calls = said.get("tool_calls")
    reply = Reply(said.get("reasoning_content") or "", said.get("content") or "", _calls(calls), _call_ids(calls))
    return Request(body, reply)


def blocks_said(blocks: Sequence[Wire]) -> Reply:
    """What an answer of `/v1/messages` says."""
    return Reply(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"),
        tuple(block.get("id", "") for block in blocks if block["type"] == "tool_use"),
    )


def items_said(items: Sequence[Wire]) -> Reply:
    """What an answer of `/v1/responses` says."""
    said = responses_bodies.said_in(items)
    call_ids = tuple(item.get("call_id", "") for item in items if item.get("type") == "function_call")
    return Reply(said.get("reasoning_content", ""), said["content"], _calls(said.get("tool_calls")), call_ids)


def _calls(calls: Sequence[Wire] | None) -> tuple[tuple[str, str], ...]:
    return tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls or ())


def _call_ids(calls: Sequence[Wire] | None) -> tuple[str, ...]:
    return tuple(call.get("id") or "" for call in calls or ())
