"""Blobs whose tokens are known from other blobs already: another server wrote the same prefix in pieces of its own.

They serve no request themselves, but other blobs have them as parents, and these need their positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.cache.disk_blob import BlobHead, BlobName
from kvserve.cache.node import Position
from kvserve.cache.trie import Trie


@dataclass(slots=True)
class _Alias:
    """A blob, and the position behind its last token when that was looked for last."""

    head: BlobHead
    end: Position


class Aliases:
    """The positions of such blobs on a trie. The caller holds the index's lock."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._aliases: dict[BlobName, _Alias] = {}

    def add(self, head: BlobHead, end: Position) -> None:
        """Note that a blob's tokens end at this position."""
        self._aliases[head.name] = _Alias(head, end)

    def place(self, name: BlobName, offset: int) -> Position | None:
        """The position behind `offset` tokens, which is inside this blob; None where its path is not known any more."""
        alias = self._aliases.get(name)
        if alias is None or not alias.head.tokens.start < offset <= alias.head.tokens.end:
            return None
        position = self._trie.still_there(alias.end)
        if position is None or position.depth < alias.head.tokens.start:
            return None
        node, depth = position.node, min(position.depth, offset)
        while node.parent is not None and node.start >= depth:
            node = node.parent
        found = self._trie.walk(Position(node, depth), alias.head.tokens, offset)
        return found if found.depth == offset else None

    def state_place(self, name: str) -> Position | None:
        """The position of a state where another server's is known."""
        alias = self._aliases.get(BlobName(name))
        position = self._trie.still_there(alias.end) if alias is not None else None
        is_there = alias is not None and position is not None and position.depth == alias.head.tokens.start
        return position if is_there else None

    def head(self, name: str) -> BlobHead | None:
        """An alias's head."""
        alias = self._aliases.get(BlobName(name))
        return alias.head if alias is not None else None

    def parents(self, name: str) -> Iterator[BlobName]:
        """This blob, if it is an alias, and the aliases among its ancestors."""
        while (alias := self._aliases.get(BlobName(name))) is not None:
            yield alias.head.name
            name = alias.head.parent

    def forget(self, name: BlobName) -> None:
        """Forget an alias."""
        self._aliases.pop(name, None)

    def lost(self) -> list[BlobName]:
        """Forget the aliases whose tokens are not known to their end any more; returns their names."""
        lost = [name for name, each in self._aliases.items() if not self._is_whole(each.head)]
        for name in lost:
            del self._aliases[name]
        return lost

    def _is_whole(self, head: BlobHead) -> bool:
        if head.kind == "checkpoint":
            return self.state_place(head.name) is not None
        return self.place(head.name, head.tokens.end) is not None

    def clear(self) -> None:
        """Forget everything."""
        self._aliases.clear()
