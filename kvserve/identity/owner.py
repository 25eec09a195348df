"""Whose records a request finds and adds to."""

from dataclasses import dataclass

from kvserve.core import Principal, SessionHint
from kvserve.core.keeping import Scope


@dataclass(frozen=True, slots=True)
class Owner:
    """A principal and, where sessions are kept apart, a session of it. Owners share no records.

    `is_one_client`: the name is one client's, as it names a session of its own. Clients without a session, or with a
    `prompt_cache_key` that an application may give to all its users, share their records and have to show which of them
    are theirs (`provenance.py`).
    """

    principal: Principal
    session: str | None
    is_one_client: bool

    @classmethod
    def of(cls, hint: SessionHint, *, parts_sessions: bool = True) -> "Owner":
        """The owner of a request. `parts_sessions`: sessions of one principal share no records."""
        if not parts_sessions or hint.session_id is None:
            return cls(hint.principal, None, is_one_client=False)
        return cls(hint.principal, hint.session_id, is_one_client=not hint.is_shared_id)

    @property
    def name(self) -> str:
        """A unique name: `principal/session`, either of which may be empty."""
        return f"{self.principal}/{self.session or ''}"

    @property
    def root(self) -> bytes:
        """The root of the chains of its conversations."""
        return self.name.encode("utf-8", "surrogatepass")

    @property
    def session_name(self) -> str | None:
        """The name, if it is a session's."""
        return None if self.session is None else self.name


def belongs_to(name: str, scope: Scope) -> bool:
    """Whether the scope covers the owner of this name."""
    principal, _, session = name.partition("/")
    return scope.covers(principal, session or None)
