"""Whose words a text has that is kept for drafts. It knows names and an index."""

from dataclasses import dataclass, field
from typing import Final

from kvserve.core import NOBODY
from kvserve.drafting.text_index import TextIndex

NO_WORDS: Final = TextIndex()


@dataclass(frozen=True, slots=True)
class TextOwner:
    """A principal (by its name), a session of it, and the partition of the KV that its requests may use.
    `is_one_client`: the session is one client's, no `prompt_cache_key` that an application may give to all its users.
    """

    principal: str
    session: str | None = None
    partition: str = ""
    is_one_client: bool = True

    @property
    def is_one_reader(self) -> bool:
        """Whether an answer may be drafted from other texts of the same reader. Two people may be nobody, so that is
        one within a session only."""
        return self.principal != str(NOBODY) or (self.session is not None and self.is_one_client)

    @property
    def reader(self) -> tuple[str, str, str | None]:
        """Whose texts may be drafted from: a principal's, whatever the session; who is nobody is one reader within a
        session."""
        return self.partition, self.principal, self.session if self.principal == str(NOBODY) else None


@dataclass(slots=True, eq=False)
class KeptText:
    """A conversation's tokens, prompts and answers alike. The index is replaced and never changed, so a thread may read
    the one that it took; of a text that was forgotten or left it is empty. `offcut`: what its last prompt left out, as
    thoughts that a template drops."""

    owner: TextOwner
    index: TextIndex = field(default=NO_WORDS)
    offcut: TextIndex = field(default=NO_WORDS)

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return self.index.num_bytes + self.offcut.num_bytes

    def drop(self) -> None:
        """Hold nothing any more."""
        self.index = self.offcut = NO_WORDS
