"""Removes from the shared cache what only somebody who is forgotten has used, of all models, and tells the other
servers of it; hears what they tell. The rule is the disk's: a blob stays where somebody else came to its end. Rows of
conversations are one session's and go with it.

    told first, removed then; a server that sends looks at what was told after it sent: so nothing stays between the two
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.remote_keys import FORGET_STREAM, FORMAT, NO_TENANT, RECORDS, name_digest
from kvserve.cache.remote_sending import END_MARK, PARTS_MARK
from kvserve.core.keeping import Scope
from kvserve.remote.redis_link import Command, Link, LinkFailed, LinkRefusal, Reply

EXCHANGE_SECONDS = 5.0
SCAN_COUNT = 1000
KEPT_SCOPES = 10_000
AT_ONCE = 512
BEGINNING = "0-0"


@dataclass(frozen=True, slots=True)
class Told:
    """What another server told: where in the stream, by whom, and who is to be forgotten."""

    place: str
    by: str
    scope: Scope


def tell(link: Link, scope: Scope, by: str) -> None:
    """Tell all servers whom to forget. Raises LinkFailed."""
    fields = ["by", by]
    fields += ["session", scope.session] if scope.session is not None else []
    fields += ["principal", scope.principal] if scope.principal is not None else []
    _run(link, [("XADD", FORGET_STREAM, "MAXLEN", "~", KEPT_SCOPES, "*", *fields)])


def heard(link: Link, since: str) -> list[Told]:
    """What was told since that place, oldest first. Raises LinkFailed."""
    [rows] = _run(link, [("XRANGE", FORGET_STREAM, f"({since}", "+", "COUNT", 100)])
    return [told for row in rows if (told := _told(row)) is not None] if isinstance(rows, list) else []


def newest(link: Link) -> str:
    """The place of what was told last. Raises LinkFailed."""
    [rows] = _run(link, [("XREVRANGE", FORGET_STREAM, "+", "-", "COUNT", 1)])
    return _text(rows[0][0]) if isinstance(rows, list) and rows else BEGINNING


def _told(row: Reply) -> Told | None:
    try:
        place, flat = row
        fields = {_text(flat[at]): _text(flat[at + 1]) for at in range(0, len(flat), 2)}
    except (TypeError, ValueError, IndexError):
        return None
    scope = Scope(fields.get("session"), fields.get("principal"))
    is_all = scope == Scope()  # nobody can tell another server to forget everything
    return None if is_all else Told(_text(place), fields.get("by", ""), scope)


def remove(link: Link, scope: Scope) -> int:
    """Remove what nobody else needs, and these users of all other blobs; returns the number of keys. Raises
    LinkFailed."""
    kept, num = set[str](), 0
    for keys in _scanned(link, f"{FORMAT}:*:u:*"):
        replies = _run(link, [("ZRANGE", key, 0, -1, "WITHSCORES") for key in keys])
        commands = list[Command]()
        for key, reply in zip(keys, replies, strict=True):
            meant, is_needed = _judged(reply, scope)
            if is_needed:
                kept.add(_blob_of(key))
                commands += [("ZREM", key, *meant)] if meant else []
        _run(link, commands)
    for keys in _scanned(link, f"{FORMAT}:*:?:*"):
        gone = [*_gone(link, keys, kept), *(key for key in keys if is_record_of(key, scope))]
        _unlink(link, gone)
        num += len(gone)
    return num


def remove_rows(link: Link, scopes: Sequence[Scope]) -> None:
    """Remove the rows in conversations of those who are meant. Raises LinkFailed."""
    for keys in _scanned(link, f"{FORMAT}:*:*:{RECORDS}:*"):
        _unlink(link, [key for key in keys if any(is_record_of(key, scope) for scope in scopes)])


def _unlink(link: Link, keys: Sequence[str]) -> None:
    for first in range(0, len(keys), AT_ONCE):
        _run(link, [("UNLINK", *keys[first : first + AT_ONCE])])


def _gone(link: Link, keys: Sequence[str], kept: set[str]) -> list[str]:
    """Those of these keys whose blob nobody needs; blocks are asked which blob is theirs."""
    blocks = [key for key in keys if _kind_of(key) == "i"]
    groups = [blocks[first : first + AT_ONCE] for first in range(0, len(blocks), AT_ONCE)]
    names = _run(link, [("MGET", *group) for group in groups])
    named = {
        key: _text(name)
        for group, reply in zip(groups, names, strict=True)
        for key, name in zip(group, reply if isinstance(reply, list) else [], strict=False)
        if name is not None
    }
    gone = [key for key in blocks if key in named and f"{_space_of(key)}:{named[key]}" not in kept]
    return gone + [key for key in keys if _kind_of(key) in ("b", "m", "u") and _blob_of(key) not in kept]


def clear(link: Link, model: str) -> None:
    """Remove all of one model. Raises LinkFailed."""
    for keys in _scanned(link, f"{FORMAT}:{model}:*"):
        _run(link, [("UNLINK", *keys)])


def _judged(reply: Reply, scope: Scope) -> tuple[list[str], bool]:
    """The members of a blob's users that are meant, and whether one of the others came to its end."""
    if not isinstance(reply, list):
        return [], False
    scores = {_text(reply[at]): int(float(reply[at + 1])) for at in range(0, len(reply) - 1, 2)}
    end = scores.pop(END_MARK, None)
    scores.pop(PARTS_MARK, None)
    meant = [member for member in scores if _is_meant(member, scope)]
    depth = max((scores[member] for member in scores if member not in meant), default=0)
    return meant, end is not None and depth >= end


def _is_meant(member: str, scope: Scope) -> bool:
    principal, _, session = member.partition(":")
    is_principal = scope.principal is None or name_digest(scope.principal) == principal
    is_session = scope.session is None or (name_digest(scope.session) if scope.session else NO_TENANT) == session
    return is_principal and is_session


def is_record_of(key: str, scope: Scope) -> bool:
    """Whether this is the key of a row in a conversation of those who are meant."""
    parts = key.split(":")
    if len(parts) != 6 or parts[3] != RECORDS:
        return False
    return _is_meant(f"{parts[2]}:{parts[4]}", scope)


def _scanned(link: Link, pattern: str) -> Iterator[list[str]]:
    cursor = "0"
    while True:
        [reply] = _run(link, [("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)])
        cursor, found = _text(reply[0]), [_text(key) for key in reply[1]]
        if found:
            yield found
        if cursor == "0":
            return


def _kind_of(key: str) -> str:
    parts = key.split(":")
    return parts[3] if len(parts) > 4 else ""


def _space_of(key: str) -> str:
    return ":".join(key.split(":")[:3])


def _blob_of(key: str) -> str:
    """The blob that a key is about, with its space."""
    return f"{_space_of(key)}:{key.split(':')[4]}"


def _text(data: Reply) -> str:
    return data.decode("utf-8", "surrogatepass") if isinstance(data, bytes) else str(data)


def _run(link: Link, commands: Sequence[Command]) -> list[Reply]:
    """A command that is refused here is a failure: what is to be gone would stay."""
    replies = link.run(commands, time.monotonic() + EXCHANGE_SECONDS)
    for reply in replies:
        if isinstance(reply, LinkRefusal):
            raise LinkFailed(reply.kind, reply)
    return replies
