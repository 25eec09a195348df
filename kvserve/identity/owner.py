"""Whose records a request finds and leaves."""

from dataclasses import dataclass

from kvserve.core import Principal, SessionHint
from kvserve.core.keeping import Scope


@dataclass(frozen=True, slots=True)
class Owner:
    """A principal and, where sessions are kept apart, a session of it. Records of two owners never meet.

    `is_one_client`: all who come by this name are the same client, as they name a session of their own. Others, those
    without a session or with a `prompt_cache_key` that an application may give to everybody, share their records and
    have to show which of them are theirs (`provenance.py`).
    """

    principal: Principal
    session: str | None
    is_one_client: bool

    @classmethod
    def of(cls, hint: SessionHint, *, parts_sessions: bool = True) -> "Owner":
        """The owner of a request. `parts_sessions`: records of two session ids are kept apart."""
        if not parts_sessions or hint.session_id is None:
            return cls(hint.principal, None, is_one_client=False)
        return cls(hint.principal, hint.session_id, is_one_client=not hint.is_shared_id)

    @property
    def name(self) -> str:
        """Another one for every owner: `principal/session`, either of which may be empty."""
        return f"{self.principal}/{self.session or ''}"

    @property
    def root(self) -> bytes:
        """What the names of its conversations begin with."""
        return self.name.encode("utf-8", "surrogatepass")

    @property
    def session_name(self) -> str | None:
        """The name, if it is that of a session."""
        return None if self.session is None else self.name


def belongs_to(name: str, scope: Scope) -> bool:
    """Whether the owner of this name is meant."""
    principal, _, session = name.partition("/")
    return scope.covers(principal, session or None)
