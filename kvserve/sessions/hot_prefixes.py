"""Which beginnings, system and tools, conversations have had, and how often: what is worth having before the first
request comes. It knows model tokens and counts, not what they say.
"""

import hashlib
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvserve.core import ImageSpan, MessageStart
from kvserve.sessions.journal import UNWRITTEN, Journal, Rows
from kvserve.sessions.seen import PACKED, PACKED_BYTES

MIN_TOKENS = 32
"""Fewer are computed faster than a person notices."""

MIN_USES = 2
"""A beginning that was used once may have been somebody's only question."""

MAX_PREFIXES = 64
ROW_LIFE_SECONDS = 3_600.0
"""A beginning in use is written down again when its row would go so much earlier than it should."""

NUM_USES_PER_ROW = 8
"""The first uses are written down each, later ones now and then: what was used a hundred times stays in front."""

_HEAD = struct.Struct("<QQddB")


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """The tokens up to the first user's words; the first message begins at `first_message`. `uses`: the principals that
    used it, each as often as it did, the one that did most first."""

    ids: tuple[int, ...]
    first_message: int
    uses: tuple[tuple[str, int], ...]

    @property
    def num_uses(self) -> int:
        """How often one principal used it."""
        return self.uses[0][1]


@dataclass(slots=True)
class _Known:
    """As it is kept: packed ids, whose prompts began so, and until when its row may stay (None: it has none)."""

    packed: bytes
    owner: str
    first_message: int
    num_uses: int
    used_at: float
    until: float | None = None


class HotPrefixes:
    """Counts by content, the least recently used forgotten first. Safe for several threads."""

    def __init__(self, max_bytes: int = 8 << 20, journal: Journal = UNWRITTEN) -> None:
        self._max_bytes = max_bytes
        self._journal = journal
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._num_bytes = 0

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
        """The model has read this prompt (`pack_ids`) of principal `owner`. What comes before its first user message
        counts, if it is long enough and has no picture. `until`: its row is kept so long at least; None: it is not
        written down."""
        end = next((start.offset for start in starts if start.is_user), 0)
        if end < MIN_TOKENS or starts[0].offset >= end or any(span.start < end for span in images):
            return
        packed = packed_prompt[: end * PACKED_BYTES]
        key = _key(packed, owner)
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _Known(packed, owner, starts[0].offset, 0, now)
                self._num_bytes += len(packed)
            known.num_uses += 1
            known.used_at = now
            self._known.move_to_end(key)
            is_telling = known.num_uses <= NUM_USES_PER_ROW or known.num_uses % NUM_USES_PER_ROW == 0
            is_due = until is not None and (known.until is None or until - known.until > ROW_LIFE_SECONDS)
            if until is not None and (is_telling or is_due):
                known.until = until
                self._put(key, known)
            while len(self._known) > MAX_PREFIXES or (self._num_bytes > self._max_bytes and len(self._known) > 1):
                self._forget(next(iter(self._known)))

    def most_used(self, num: int) -> tuple[HotPrefix, ...]:
        """The `num` that some principal used most, the most used first; those that nobody has used twice are none."""
        with self._lock:
            known = [each for each in self._known.values() if each.num_uses >= MIN_USES]
            known.sort(key=lambda each: (each.num_uses, each.used_at), reverse=True)
            alike: dict[bytes, list[_Known]] = {}
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
        """Forget what the prompts of these principals began with."""
        with self._lock:
            for key in [key for key, each in self._known.items() if is_gone(each.owner)]:
                self._forget(key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            for key in list(self._known):
                self._forget(key)

    def expire(self, now: float) -> None:
        """Forget those whose rows nobody needs any more."""
        with self._lock:
            for key in [key for key, each in self._known.items() if each.until is not None and each.until < now]:
                self._forget(key)

    def put_all(self) -> None:
        """Tell the journal everything that is to last."""
        with self._lock:
            for key, known in self._known.items():
                if known.until is not None:
                    self._put(key, known)

    def load(self, rows: Rows) -> None:
        """Take in what was written down. Raises ValueError for rows of another form."""
        found = [(key, _known_of(body)) for key, body in rows.get("beginning", ())]
        with self._lock:
            for key, known in sorted(found, key=lambda pair: pair[1].used_at):
                if _key(known.packed, known.owner) != key:
                    raise ValueError("a beginning has another name than its tokens")
                self._known[key] = known
                self._num_bytes += len(known.packed)

    def _forget(self, key: bytes) -> None:
        known = self._known.pop(key)
        self._num_bytes -= len(known.packed)
        if known.until is not None:
            self._journal.drop("beginning", key)

    def _put(self, key: bytes, known: _Known) -> None:
        owner = known.owner.encode()
        head = _HEAD.pack(known.num_uses, known.first_message, known.used_at, known.until or 0.0, len(owner))
        self._journal.put("beginning", key, partial(bytes.__add__, head + owner, known.packed))


def _key(packed: bytes, owner: str) -> bytes:
    return hashlib.sha256(owner.encode() + b"\0" + packed).digest()


def _known_of(body: bytes) -> _Known:
    """Raises ValueError for a row of another form."""
    if len(body) < _HEAD.size:
        raise ValueError("a beginning without its head")
    num_uses, first_message, used_at, until, num_owner_bytes = _HEAD.unpack(body[: _HEAD.size])
    owner, packed = body[_HEAD.size :][:num_owner_bytes].decode(), body[_HEAD.size + num_owner_bytes :]
    if len(packed) % PACKED_BYTES or not packed:
        raise ValueError("a beginning is no run of tokens")
    if first_message * PACKED_BYTES >= len(packed):
        raise ValueError("a beginning has no message")
    return _Known(packed, owner, first_message, num_uses, used_at, until)
