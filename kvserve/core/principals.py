"""Who sends a request, and how that is named; what a client says of itself and its session. It knows digests, never a
key or a user's name."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request: digests of the key that it carries and of the stable part of its user, "" for none. Without
    either it is nobody. Records, explanations and responses are a principal's, KV only where tenants are kept apart."""

    key: str = ""
    user: str = ""

    def __str__(self) -> str:
        """The name by which an operator can have all of a principal's words forgotten; nobody's is `-.-`."""
        return f"{self.key or NO_KEY}.{self.user or NO_KEY}"


NOBODY = Principal()

AGENTS = Principal(key="agents")
"""The agents that this server keeps: no digest is this word. Whoever knows an agent's name may talk to it."""

KEY_HEADER: Final = "x-kvserve-key"
"""The digest of a client's key, or `NO_KEY`, told by the proxy: what comes from there carries the proxy's own key.
On its way it stands behind a secret, which `web/handler.py` takes off; told without that it is left out."""

HELD: Final = "held"
"""Stands before the digest of a principal whose key an operator gave out: its agents are nobody else's."""

NO_KEY: Final = "-"

BEGIN_HEADER: Final = "x-kvserve-begin-seconds"
"""For how long an answer's head may wait for its first word: until it has gone out, a proxy may ask another server."""

_DIGEST_CHARACTERS = 16

_DIGEST = re.compile(rf"[0-9a-f]{{{_DIGEST_CHARACTERS}}}")


def principal_digest(kind: str, text: str) -> str:
    """A key or a user as a principal has it: it is kept in records, where the words themselves have no business."""
    digest = hashlib.sha256(f"kvserve {kind}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
    return digest[:_DIGEST_CHARACTERS] if text else ""


def key_digest(headers: Mapping[str, str]) -> str:
    """The digest of the key that headers (lower-case names) carry, as `Principal.key`; "" without one."""
    if told := headers.get(KEY_HEADER, "").strip().rpartition(" ")[2]:
        return "" if told == NO_KEY else told if _DIGEST.fullmatch(told) else principal_digest("key", told)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = bearer.strip() if scheme.lower() == "bearer" else ""
    return principal_digest("key", sent or headers.get("x-api-key", "").strip())


def holder_digest(headers: Mapping[str, str]) -> str:
    """The digest of the principal whose key an operator gave out; "" for all others, who share what has no owner."""
    mark, _, told = headers.get(KEY_HEADER, "").strip().partition(" ")
    return told if mark == HELD and _DIGEST.fullmatch(told) else ""


@dataclass(frozen=True, slots=True)
class SessionHint:
    """What a client said of itself and its session: for records and logs, never proof of a shared prefix.

    `is_shared_id`: the id is a `prompt_cache_key`, which an application may give to all its users: it keeps records
    together, and says nothing of whose they are. `ttl_seconds`: how long after its last use the prompt is to be kept, 0
    not at all; None leaves it to the server. `num_marked_messages` stand before the last place that the client marked
    for caching, for `marked_seconds` after its last use; None without one. `client`: its program's name and version.
    """

    session_id: str | None = None
    principal: Principal = NOBODY
    is_shared_id: bool = False
    cache_mode: Literal["full", "prefix"] = "full"
    ttl_seconds: float | None = None
    num_marked_messages: int | None = None
    marked_seconds: float | None = None
    client: str = ""

    @property
    def wants_nothing_kept(self) -> bool:
        """`ttl: 0`: no word of the request is to be left on disk, nor anything that goes on from it be served."""
        return self.ttl_seconds == 0

    @property
    def leaves_no_record(self) -> bool:
        """Whether nothing is remembered of the request: it wants nothing kept, or nothing looked at but the prefix."""
        return self.cache_mode == "prefix" or self.wants_nothing_kept
