"""What a request is routed by: whose it is and the session that it goes on with or, without one, how its conversation
begins. Pure; it knows the fields of sessions and messages, no backend."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from kvserve.canonical.canonicalise import canonicalise
from kvserve.core import JsonObject, Message, SessionHint, TextBlock
from kvserve.errors import BadRequest
from kvserve.protocols.session import read_principal, read_session

_NUM_PROMPT_CHARACTERS = 256
_TEXT_PARTS = ("text", "input_text")


def routing_key(body: JsonObject, headers: Mapping[str, str]) -> bytes:
    """32 bytes, the same for every request of a conversation; `headers` have lower-case names.

    A `prompt_cache_key` alone is no session here: an application may give all its users the same one.
    """
    hint = _hint(body, headers)
    parts = [hint.principal.key, hint.principal.user, hint.session_id or ""]
    if hint.session_id is None or hint.is_shared_id:
        parts.append(_beginning(body))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()


def _hint(body: JsonObject, headers: Mapping[str, str]) -> SessionHint:
    """Mistyped fields state no session: the backend refuses them in its own words."""
    try:
        return read_session(body, headers)
    except BadRequest:
        return SessionHint(principal=read_principal(body, headers))


def _beginning(body: JsonObject) -> str:
    """The first user message that has an identity: what clients write before it (instructions, tools) changes from day
    to day, and so does what canonical rules take out of it."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        return str(body.get("prompt", ""))[:_NUM_PROMPT_CHARACTERS]
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user" and (texts := _texts(message.get("content"))):
            found = canonicalise(Message("user", tuple(map(TextBlock, texts))))
            if found.message is not None:
                return found.digest.hex()
    return json.dumps(messages[0], sort_keys=True)


def _texts(content: object) -> Sequence[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
    return [text for text in texts if isinstance(text, str)]
