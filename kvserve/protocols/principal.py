"""Reads the principal of a request: the key in its headers, and the stable part of the user that it names.

Several fields name a user. Claude Code adds its session to it: `user_<hash>_account__session_<uuid>`, or JSON with a
`session_id`; that part changes every day and is cut off.
"""

import json
import re
from collections.abc import Mapping

from kvserve.core import JsonObject, Principal, key_digest, principal_digest
from kvserve.protocols.fields import places

USER_FIELDS = ("user", "safety_identifier", "user_id")
"""In order of precedence: OpenAI's protocols have the first two, Anthropic's `metadata` the last."""

SESSION_NAMES = frozenset({"session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key"})
_SESSION_AT_THE_END = re.compile(r"_*session_[0-9A-Za-z-]+\Z")


def read_principal(body: JsonObject, headers: Mapping[str, str]) -> Principal:
    """The principal of `body` and `headers` (lower-case names). Users that are not text are ignored here: the protocol
    refuses them."""
    where = places(body, (), ("extra_body",), ("metadata",), ("extra_body", "metadata"))
    named = (fields.values.get(name) for name in USER_FIELDS for fields in where)
    user = next((stable for each in named if isinstance(each, str) and (stable := stable_user(each))), "")
    return Principal(key_digest(headers), principal_digest("user", user))


def stable_user(user: str) -> str:
    """A user's id without its session; "" if nothing is left."""
    text = user.strip()
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(value, dict):
            lasting = {name: each for name, each in value.items() if name not in SESSION_NAMES and each}
            return json.dumps(lasting, sort_keys=True) if lasting else ""
    return _SESSION_AT_THE_END.sub("", text)
