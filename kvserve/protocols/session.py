"""Reads what a client states of its session: its id, how to use the cache, how long to keep it, and whose it is. Hints,
not proof.

Order: the body, `extra_body`, `metadata`, `extra_body.metadata`, then the headers; in each the names in the table's
order. The first value counts: several names at once are normal (a session and a thread of it). `prompt_cache_key`
counts last: OpenAI uses it for routing, and an application may give all its users the same one.
"""

import json
import re
from collections.abc import Mapping

from kvserve.core import JsonObject, Principal, SessionHint, key_digest, principal_digest
from kvserve.protocols.fields import Fields, Reader, mistyped, number, places, stated, word

ID_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id")
SHARED_ID_FIELD = "prompt_cache_key"
ID_HEADERS = (
    "x-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
    "thread-id",
    "x-claude-code-session-id",
)
MAX_ID_CHARACTERS = 512
MAX_TTL_SECONDS = 366 * 86_400.0

_NAME = r"[A-Za-z][A-Za-z_-]{0,23}"
_VERSION = r"v?[0-9]{1,6}(?:\.[0-9]{1,6}){0,3}(?:[.-]?(?:alpha|beta|rc|dev|pre|post|nightly)[.-]?[0-9]{0,8})?"
_PRODUCT = re.compile(rf"{_NAME}(?:/{_NAME}){{0,2}}/(?:[A-Za-z]{{1,8}} )?{_VERSION}(?![^\s;,(])")
"""A name of letters with its version: a name alone, or one with digits, may be a person's or a key. OpenAI's libraries
put their language between both, others the name of a part."""

_UNIT_SECONDS: Mapping[str, int] = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")


def read_session(body: JsonObject, headers: Mapping[str, str]) -> SessionHint:
    """The hint in `body` and `headers` (lower-case names). Raises BadRequest for mistyped fields."""
    where = places(body, (), ("extra_body",), ("metadata",), ("extra_body", "metadata"))
    own_id = _first(where, ID_FIELDS, _read_id) or _first((Fields(headers),), ID_HEADERS, _read_id)
    shared_id = _first(where, (SHARED_ID_FIELD,), _read_id)
    cache_mode = _first(where, ("cache_mode",), word("full", "prefix"))
    return SessionHint(
        session_id=own_id or shared_id,
        principal=read_principal(body, headers),
        is_shared_id=own_id is None and shared_id is not None,
        cache_mode="prefix" if cache_mode == "prefix" else "full",
        ttl_seconds=_first(where, ("ttl",), read_ttl),
        client=read_client(headers),
    )


def read_client(headers: Mapping[str, str]) -> str:
    """The first product of a User-Agent, such as `claude-cli/2.1.331`; "" where that has another form. It is shown and
    kept, so nothing else that a client may have written there is."""
    match = _PRODUCT.match(headers.get("user-agent", ""))
    return match[0] if match is not None else ""


def read_ttl(value: object, path: str) -> float:
    """Seconds from a number or a string such as "5m", "1h", "24h". Raises BadRequest."""
    seconds = value
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise mistyped(path, 'seconds or a string such as "5m" or "1h"', value)
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
    return number(0, MAX_TTL_SECONDS)(seconds, path)


def _read_id(value: object, path: str) -> str:
    # messengers' chat ids are numbers, also in JSON metadata
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**40:
        return str(value)
    if not isinstance(value, str) or len(value) > MAX_ID_CHARACTERS:
        raise mistyped(path, f"a string of at most {MAX_ID_CHARACTERS} characters", value)
    return value.strip()


def _first[T](where: tuple[Fields, ...], names: tuple[str, ...], reader: Reader[T]) -> T | None:
    found: list[T] = []
    for place in where:
        for name in names:
            value = stated(place, name, reader)
            if value is not None and value != "":
                found.append(value)
    return found[0] if found else None


# --- whose request it is ---------------------------------------------------------------------------------------------
#
# Several fields name a user. Claude Code adds its session to it: `user_<hash>_account__session_<uuid>`, or JSON with a
# `session_id`; that part changes every day and is cut off.


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
