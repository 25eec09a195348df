"""A memo of `canonicalise` and `replay` for equal messages: every request sends its whole history again.

It keeps a number of bytes, least recently used first out. Its results equal theirs; it knows no conversations.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvserve.canonical.canonicalise import Canonical, canonicalise
from kvserve.canonical.message_layout import forget_arguments
from kvserve.canonical.message_replay import Replayed, replay
from kvserve.canonical.rule import RuleSet
from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
)

MAX_BYTES = 128 * 2**20
VALUE_BYTES = 256
"""The approximate size of a message's entry without its texts, and of each block."""


class _Asked(NamedTuple):
    """The arguments of a call of `replay`, compared by identity; the entry keeps the objects alive."""

    seen: Message
    wrote: Message | None
    rules: RuleSet
    in_history: bool
    may_put_back: bool

    def is_same(self, other: "_Asked") -> bool:
        return all(mine is theirs for mine, theirs in zip(self, other, strict=True))


@dataclass(slots=True, eq=False)
class Known:
    """A message, its canonical form, and its last replay with the arguments."""

    message: Message
    canonical: Canonical
    num_bytes: int
    last: tuple[_Asked, Replayed] | None = None


class CanonicalMessageCache:
    """The memo under one set of rules; `num_bytes` is the approximate size of its entries. Thread-safe."""

    def __init__(self, rules: RuleSet, max_bytes: int = MAX_BYTES) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: dict[Message, Known] = {}
        self._by_id: OrderedDict[int, Known] = OrderedDict()
        self.num_bytes = 0

    def recall(self, messages: Sequence[Message]) -> list[Known]:
        """For each message the equal known one, or the message itself, which becomes known."""
        with self._lock:
            found = [self._known.get(message) for message in messages]
        recalled = [
            known if known is not None else Known(message, canonicalise(message, self._rules), _num_bytes(message))
            for known, message in zip(found, messages, strict=True)
        ]
        with self._lock:
            for known in recalled:
                self._keep(known)
        return recalled

    def replay(
        self,
        fresh: Message,
        seen: Message,
        *,
        wrote: Message | None,
        in_history: bool,
        rules: RuleSet,
        may_put_back: bool,
    ) -> Replayed:
        """`message_replay.replay`; the same object again for the same arguments."""
        known, asked = self._by_id.get(id(fresh)), _Asked(seen, wrote, rules, in_history, may_put_back)
        if known is not None and known.message is not fresh:
            known = None
        if known is not None and known.last is not None and asked.is_same(known.last[0]):
            return known.last[1]
        answer = replay(fresh, seen, wrote=wrote, in_history=in_history, rules=rules, may_put_back=may_put_back)
        if known is not None:
            known.last = asked, answer
        return answer

    def clear(self) -> None:
        """Forget all messages."""
        forget_arguments()
        with self._lock:
            self._known.clear()
            self._by_id.clear()
            self.num_bytes = 0

    def _keep(self, known: Known) -> None:
        """Make the entry the most recently used one. Of two equal entries the first stays."""
        if self._by_id.get(id(known.message)) is known:
            self._by_id.move_to_end(id(known.message))
        elif self._known.setdefault(known.message, known) is known:
            self._by_id[id(known.message)] = known
            self.num_bytes += known.num_bytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._by_id.popitem(last=False)
                del self._known[oldest.message]
                self.num_bytes -= oldest.num_bytes


def _num_bytes(message: Message) -> int:
    """A message and its canonical form, which shares most of its texts with it."""
    return VALUE_BYTES + sum(map(_block_bytes, message.blocks))


def _block_bytes(block: Block) -> int:
    match block:
        case TextBlock(text) | ThinkingBlock(text) | ImageBlock(text):
            return VALUE_BYTES + sys.getsizeof(text)
        case ToolCallBlock(_, _, arguments):
            return VALUE_BYTES + 2 * sys.getsizeof(arguments)
        case ToolBlock(_, description, parameters):
            return VALUE_BYTES + sys.getsizeof(description) + sys.getsizeof(parameters)
        case ToolResultBlock(_, blocks):
            return VALUE_BYTES + sum(map(_block_bytes, blocks))
