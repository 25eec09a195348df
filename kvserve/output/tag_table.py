"""What a stream of text is searched for: tags, and everything that may still become one."""

import re
from collections.abc import Callable
from dataclasses import dataclass

type OnTag = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TagTable:
    """Each tag with what handles it, the beginnings of tags, and a pattern of text that no tag can start in.

    Line ends are not part of that pattern: they decide where a line begins and what is formatting.
    """

    tags: dict[str, OnTag]
    beginnings: frozenset[str]
    max_tag_chars: int
    plain: re.Pattern[str]

    @classmethod
    def of(cls, tags: dict[str, OnTag]) -> "TagTable":
        """The table of `tags`."""
        beginnings = frozenset(tag[:size] for tag in tags for size in range(1, len(tag)))
        firsts = "".join(re.escape(char) for char in sorted({tag[0] for tag in tags} | {"\n"}))
        return cls(tags, beginnings, max(map(len, tags), default=0), re.compile(f"[^{firsts}]+"))
