"""How often conversations began with which system prompt and tools: what is worth computing before the first request.
This file knows model tokens and counts, not what they say.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvserve.core import ImageSpan, MessageStart
from kvserve.sessions.journal import UNWRITTEN, Journal, JournaledEntry, JournaledStore
from kvserve.sessions.seen import PACKED, PACKED_BYTES

MIN_TOKENS = 32
"""A shorter prefix is computed faster than a person notices."""

MIN_USES = 2
"""A prefix that was used once may belong to a single question."""

MAX_PREFIXES = 64

NUM_USES_PER_ROW = 8
"""Each of the first uses is written down, of later ones one in so many: frequent prefixes stay in front."""

_HEAD = struct.Struct("<QQddB")


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """The tokens before the first user message; the first message begins at `first_message`. `uses`: how often each
    principal used it, the most frequent one first."""

    ids: tuple[int, ...]
    first_message: int
    uses: tuple[tuple[str, int], ...]

    @property
    def num_uses(self) -> int:
        """How often the most frequent principal used it."""
        return self.uses[0][1]


@dataclass(slots=True)
class _PrefixEntry(JournaledEntry):
    packed: bytes
    owner: str
    first_message: int
    num_uses: int
    used_at: float


class HotPrefixes(JournaledStore[bytes, _PrefixEntry]):
    """How often each prefix was used, by principal and content; the last one stays, however long it is."""

    def __init__(self, max_bytes: int = 8 << 20, journal: Journal = UNWRITTEN) -> None:
        super().__init__("beginning", journal, max_entries=MAX_PREFIXES, max_bytes=max_bytes, min_entries=1)

    def count(
        self,
        packed_prompt: bytes,
        starts: Sequence[MessageStart],
        images: Sequence[ImageSpan] = (),
        *,
        now: float,
        until: float | None = None,
        owner: str = "",
    ) -> None:
        """Count the part of this prompt (`pack_ids`) before its first user message, if it is long enough and has no
        image. `until`: its row is kept so long at least; None: it is not written down."""
        end = next((start.offset for start in starts if start.is_user), 0)
        if end < MIN_TOKENS or starts[0].offset >= end or any(span.start < end for span in images):
            return
        packed = packed_prompt[: end * PACKED_BYTES]
        key = _key(packed, owner)
        with self._lock:
            known = self._entries.get(key) or self._add(
                key, _PrefixEntry(packed, owner, starts[0].offset, 0, now, num_bytes=len(packed))
            )
            known.num_uses += 1
            known.used_at = now
            self._entries.move_to_end(key)
            is_telling = known.num_uses <= NUM_USES_PER_ROW or known.num_uses % NUM_USES_PER_ROW == 0
            if until is not None and (is_telling or known.is_due(until)):
                known.until = until
                self._put(key)
            self._shrink(self._max_bytes)

    def most_used(self, num: int) -> tuple[HotPrefix, ...]:
        """The `num` prefixes that one principal used most, and twice at least, the most used first."""
        with self._lock:
            known = [each for each in self._entries.values() if each.num_uses >= MIN_USES]
            known.sort(key=lambda each: (each.num_uses, each.used_at), reverse=True)
            alike: dict[bytes, list[_PrefixEntry]] = {}
            for each in known:
                alike.setdefault(each.packed, []).append(each)
            return tuple(
                HotPrefix(
                    tuple(array(PACKED, packed)),
                    used[0].first_message,
                    tuple((each.owner, each.num_uses) for each in used),
                )
                for packed, used in islice(alike.items(), num)
            )

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Delete the prefixes of these principals."""
        self._drop_where(lambda known: is_gone(known.owner))

    def _row_key(self, key: bytes) -> bytes:
        return key

    def _row_body(self, key: bytes, entry: _PrefixEntry, serial: int) -> Callable[[], bytes]:
        owner = entry.owner.encode()
        head = _HEAD.pack(entry.num_uses, entry.first_message, entry.used_at, entry.until or 0.0, len(owner))
        return partial(bytes.__add__, head + owner, entry.packed)

    def _stored(self, row_key: bytes, body: bytes) -> tuple[float, bytes, _PrefixEntry]:
        known = _known_of(body)
        if _key(known.packed, known.owner) != row_key:
            raise ValueError("the row of a prefix has the key of other tokens")
        return known.used_at, row_key, known


def _key(packed: bytes, owner: str) -> bytes:
    return hashlib.sha256(owner.encode() + b"\0" + packed).digest()


def _known_of(body: bytes) -> _PrefixEntry:
    """Raises ValueError for a row of another form."""
    if len(body) < _HEAD.size:
        raise ValueError("the row of a prefix has no head")
    num_uses, first_message, used_at, until, num_owner_bytes = _HEAD.unpack(body[: _HEAD.size])
    owner, packed = body[_HEAD.size :][:num_owner_bytes].decode(), body[_HEAD.size + num_owner_bytes :]
    if len(packed) % PACKED_BYTES or not packed:
        raise ValueError("the row of a prefix does not hold whole tokens")
    if first_message * PACKED_BYTES >= len(packed):
        raise ValueError("the row of a prefix has no message")
    return _PrefixEntry(packed, owner, first_message, num_uses, used_at, until=until, num_bytes=len(packed))
