"""Fields that agents move between two requests although nothing was said: a table, one row per field.

Each row says how one conversation looks when its request `number` goes out. It knows the forms of these fields, not
what a server makes of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from probing.wire import Json

type Drift = Callable[[Sequence[Json], int], list[Json]]
"""The messages as the client sends them in its request `number`; the given ones are not changed."""


def _with_text(message: Json, text: str) -> Json:
    return {**message, "content": text}


def _text(message: Json) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message_id(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def message_id(messages: Sequence[Json], number: int) -> list[Json]:
    """The system prompt ends with an inbound context whose message_id is that of the newest message."""
    meta = {"schema": "inbound_meta.v1", "message_id": _message_id(number), "channel": "webchat"}
    block = f"## Inbound Context (trusted metadata)\n```json\n{json.dumps(meta, indent=2)}\n```\n"
    return [_with_text(messages[0], f"{_text(messages[0])}\n{block}"), *messages[1:]]


def billing_header(messages: Sequence[Json], number: int) -> list[Json]:
    """The system prompt begins with a line whose cch is new in every request."""
    cch = f"{number * 48271 % 2**20:05x}"
    line = f"x-anthropic-billing-header: cc_version=2.1.119.710; cc_entrypoint=sdk-cli; cch={cch};"
    return [_with_text(messages[0], f"{line}\n{_text(messages[0])}"), *messages[1:]]


def statistics(messages: Sequence[Json], number: int) -> list[Json]:
    """The first user message reports a sub-agent's run, whose statistics go on counting while it is history."""
    seconds, tokens = 60 + 5 * number, 1.2 + 0.3 * number
    line = f"Stats: runtime {seconds // 60}m{seconds % 60}s \u2022 tokens {tokens:.1f}k (in {tokens:.1f}k / out 40)"
    report = f'A background task "notes" just completed successfully.\n\nFindings:\n{_text(messages[1])}\n\n{line}'
    return [messages[0], _with_text(messages[1], report), *messages[2:]]


def inbound_block(messages: Sequence[Json], number: int) -> list[Json]:
    """A user message begins with a block about the conversation while it is the newest message, and never again."""
    newest = messages[-1]
    if newest["role"] != "user":
        return list(messages)
    info = {"message_id": _message_id(number), "sender": "cli", "timestamp": f"Fri 2026-11-20 21:{number:02} GMT+1"}
    block = f"Conversation info (untrusted metadata):\n```json\n{json.dumps(info, indent=2)}\n```\n\n"
    return [*messages[:-1], _with_text(newest, block + _text(newest))]


DRIFTS: Mapping[str, Drift] = {
    "message_id": message_id,
    "cch=": billing_header,
    "Stats: runtime": statistics,
    "inbound context": inbound_block,
}
