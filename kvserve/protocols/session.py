"""Reads what a client states of its session: its id, how to use the cache, how long to keep it. Hints, not proof.

Order: the body, `extra_body`, `metadata`, `extra_body.metadata`, then the headers; in each the names in the table's
order. The first value counts: several names at once are normal (a session and a thread of it). `prompt_cache_key`
counts last: OpenAI uses it for routing, and an application may give all its users the same one.
"""

import re
from collections.abc import Mapping

from kvserve.core import JsonObject, SessionHint
from kvserve.protocols.fields import Fields, Reader, mistyped, number, places, stated, word
from kvserve.protocols.principal import read_principal

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
    )


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
