"""Parses and encodes `/v1/cache/prewarm`, whose bodies have OpenAI's or Anthropic's form.

A body needs no message: a system prompt or tools are enough.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvserve.core import JsonObject, RequestDefaults, RequestId, Turn
from kvserve.errors import BadRequest
from kvserve.protocols import anthropic_messages, openai_chat
from kvserve.protocols.model_cards import VERSION_HEADER
from kvserve.protocols.session import read_session

_PLACEHOLDER = ({"role": "user", "content": "x"},)
"""Replaces missing messages while the rest of a body is parsed."""


def speaks_anthropic(body: JsonObject, headers: Mapping[str, str]) -> bool:
    """Whether the body has Anthropic's form: its header, a `system` beside the messages, or its tools."""
    tools = body.get("tools")
    has_tools = isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools)
    return VERSION_HEADER in headers or "system" in body or has_tools


def parse_prewarm(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> Turn:
    """The turn whose prompt is computed, as a request with this body would make it. Raises BadRequest."""
    has_messages = bool(body.get("messages")) if body.get("messages", []) in ([], None) else True
    whole = body if has_messages else {**body, "messages": list(_PLACEHOLDER)}
    if speaks_anthropic(body, headers):
        turn = anthropic_messages.parse_counted(whole, headers, defaults, request_id)
    else:
        turn = openai_chat.parse_chat(whole, headers, defaults, request_id).turn
    if not has_messages:
        turn = replace(turn, messages=tuple(message for message in turn.messages if message.role == "system"))
    if not turn.messages and not turn.tools:
        raise BadRequest("There is nothing to compute: neither messages nor tools.", param="messages")
    if read_session(body, headers).wants_nothing_kept:
        raise BadRequest("ttl: what is computed ahead is kept, and 0 keeps nothing.", param="ttl")
    return turn


def encode_prewarmed(
    model: str, *, num_tokens: int, num_cached_tokens: int, num_computed_tokens: int, seconds: float, reason: str
) -> JsonObject:
    """The answer. `state` is `done`, or `dropped` with a reason; what was computed until then is kept."""
    return {
        "object": "cache.prewarm",
        "model": model,
        "state": "dropped" if reason else "done",
        "reason": reason or None,
        "tokens": num_tokens,
        "cached": num_cached_tokens,
        "computed": num_computed_tokens,
        "seconds": round(seconds, 4),
    }
