"""Records of conversations between servers that share a cache: what one has read and written, another one takes in when
the conversation comes to it.

    tell    after a turn: each message of its path that is not there yet, signed
    bring   before a turn is recognised: the rows of its messages, by our own digests, as far as they are known nowhere
            here; each has to have the identity of what the client sent at this very place

What is taken in is used as what was recorded here is: what the client sends wins.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvserve.cache.remote_keys import RecordKeys
from kvserve.canonical.canonicalise import Canonical, canonicalise
from kvserve.core import Message, Written
from kvserve.identity.owner import Owner
from kvserve.identity.reading import RecognisedTurn
from kvserve.remote.shared_rows import RowToSend, SharedRows
from kvserve.sessions.seen import Conflicts, PathNode, PathStep, PlaceReadings
from kvserve.sessions.shared_row import MAX_ROW_BYTES, SharedRow, StrangeRow, UnsignedRow, packed, unpacked
from kvserve.sessions.stores import Stores
from kvserve.sessions.tool_layouts import ToolLayout
from kvserve.sessions.written_messages import VALUE_BYTES, message_bytes, same_words, written_bytes

MAX_UNSENDABLE = 4_096
"""So many rows that cannot be sent are known, in hashes; others are packed again."""

type IsReadable = Callable[[Written], bool]
"""Whether the model has each token of an answer."""


@dataclass(frozen=True, slots=True)
class SharedRecordTotals:
    """What went to other servers and came from them since the start; rows are those of all models of this process.

    `num_conversations`: of so many a part was taken in, `num_messages` in all. `num_refused` rows were not what they
    should be; at `num_crowded` places there were too many to go on. `longest_wait_seconds`: of a request, with the
    time that looking at the rows took. `num_queued` paths wait to be sent, `num_dropped` were not; `num_unsendable`
    rows cannot be: they are too large, or cannot be written.
    """

    num_conversations: int
    num_messages: int
    num_refused: int
    num_crowded: int
    num_reads: int
    num_given_up: int
    longest_wait_seconds: float
    num_sent: int
    num_sent_bytes: int
    num_queued: int
    num_dropped: int
    num_unsendable: int


@dataclass(slots=True)
class _Counts:
    """Counted under the lock."""

    num_conversations: int = 0
    num_messages: int = 0
    num_refused: int = 0
    num_unsendable: int = 0
    longest_wait_seconds: float = 0.0


class SharedRecords:
    """The records of one model's conversations in the shared cache. Any thread may call any method."""

    def __init__(self, rows: SharedRows, keys: RecordKeys, secret: bytes) -> None:
        self._rows = rows
        self._keys = keys
        self._secret = secret
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._unsendable = set[int]()

    def totals(self) -> SharedRecordTotals:
        """What was sent and taken in until now."""
        rows = self._rows.counts
        with self._lock:
            counts = replace(self._counts)
        return SharedRecordTotals(
            num_conversations=counts.num_conversations,
            num_messages=counts.num_messages,
            num_refused=counts.num_refused,
            num_crowded=rows.num_crowded,
            num_reads=rows.num_reads,
            num_given_up=rows.num_given_up,
            longest_wait_seconds=round(counts.longest_wait_seconds, 3),
            num_sent=rows.num_sent,
            num_sent_bytes=rows.num_sent_bytes,
            num_queued=self._rows.num_queued,
            num_dropped=rows.num_dropped,
            num_unsendable=counts.num_unsendable,
        )

    def _key_of(self, owner: Owner) -> Callable[[bytes], str]:
        """The key of a chain's row in this conversation."""
        return self._keys.session(str(owner.principal), owner.session or "")

    # --- telling ------------------------------------------------------------------------------------------------------

    def tell(
        self,
        owner: Owner,
        path: Sequence[tuple[PathNode, Canonical, Conflicts]],
        layouts: Iterable[tuple[bytes, ToolLayout]],
        now: float,
    ) -> None:
        """Have what was read and written there, behind this request: the whole path, with the identity of each message
        and what is unknown of it, and all layouts of its messages, by chain, the newest first."""
        if not owner.is_shared_by_servers:
            return
        held: dict[bytes, list[ToolLayout]] = {}
        for place, layout in layouts:
            held.setdefault(place, []).append(layout)
        key = self._key_of(owner)
        self._rows.send(
            [
                self._to_send(key(node.chain), _row_of(node, own, conflicts, held.get(node.chain, ()), now))
                for node, own, conflicts in path
            ]
        )

    def _to_send(self, key: str, row: SharedRow) -> RowToSend:
        written = row.written
        said = () if written is None else (written.message, len(written.ids), written.ids[:8], written.prefix_ids)
        mark = hash((row.message, row.meaning, said, row.layouts, row.conflicts))
        return RowToSend(key, mark, partial(self._made, row, key, hash((key, mark))), _held_bytes(row))

    def _made(self, row: SharedRow, key: str, mark: int) -> tuple[str, bytes] | None:
        """The row as it is sent; None, at once from the second time on, where it cannot be."""
        if mark in self._unsendable:
            return None
        try:
            body = packed(row, self._secret, key)
        except (ValueError, TypeError, RecursionError):  # what its writer may not write down here either
            body = None
        if body is not None and len(body) <= MAX_ROW_BYTES:
            return row.field, body
        with self._lock:
            self._counts.num_unsendable += 1
            if len(self._unsendable) >= MAX_UNSENDABLE:
                self._unsendable.clear()
            self._unsendable.add(mark)
        return None

    # --- bringing -----------------------------------------------------------------------------------------------------

    def bring(self, reading: RecognisedTurn, stores: Stores, until: float, is_readable: IsReadable) -> None:
        """Take in what other servers know of a conversation behind what is known here, up to its last answer. Waits for
        half a second at most; what does not come, or is not what it should be, is not known."""
        if not reading.identity.owner.is_shared_by_servers or not self._rows.server.is_open:
            return
        began = time.monotonic()
        num_messages = self._brought(reading, stores, until, is_readable)
        with self._lock:
            counts = self._counts
            counts.num_conversations += bool(num_messages)
            counts.num_messages += num_messages
            counts.longest_wait_seconds = max(counts.longest_wait_seconds, time.monotonic() - began)

    def _brought(self, reading: RecognisedTurn, stores: Stores, until: float, is_readable: IsReadable) -> int:
        """How many messages were taken in."""
        identity = reading.identity
        known = stores.turns.find(identity.chains)
        unknown = _unknown(reading, known)
        key = self._key_of(identity.owner)
        found = self._rows.read([key(identity.chains[index]) for index in unknown])
        places = list[PlaceReadings]()
        for index, fields in zip(unknown, found, strict=False):
            place = self._sound_place(reading, index, key(identity.chains[index]), fields, is_readable)
            if place is None:
                break
            places.append(place)
        if not places:
            return 0
        owner = identity.owner.name
        for place in places:
            for step in place.readings:
                if step.written is not None:
                    stores.healing.remember(place.chain, step.written, until, owner=owner)
            if place.conflicts.is_doubtful:
                stores.healing.remember(place.chain, None, until, owner=owner)
        stores.turns.take_in(known, places, until, owner=owner)
        return len(places)

    def _sound_place(
        self, reading: RecognisedTurn, index: int, key: str, fields: Mapping[str, bytes], is_readable: IsReadable
    ) -> PlaceReadings | None:
        """What is said of one message; None where a row of it is not what it should be."""
        found = list[tuple[SharedRow, PathStep]]()
        for field in sorted(fields):
            try:
                row = unpacked(fields[field], self._secret, key, field)
            except StrangeRow as error:
                if isinstance(error, UnsignedRow):
                    self._rows.server.lied(f"a row of a conversation: {error}")
                self._count_refused()
                return None
            step = _step(row, reading, index)
            if step is None or not (step.written is None or is_readable(step.written)) or not _stand(row, reading):
                self._count_refused()
                return None
            found.append((row, step))
        found.sort(key=lambda each: each[0].told_at_us)  # a path goes on from the newest, as on the server that told it
        return PlaceReadings(
            tuple(step for _, step in found),
            Conflicts(
                any(row.conflicts.is_doubtful for row, _ in found), any(row.conflicts.is_contested for row, _ in found)
            ),
            tuple(layout for row, _ in reversed(found) for layout in row.layouts),
        )

    def _count_refused(self) -> None:
        with self._lock:
            self._counts.num_refused += 1


def _row_of(
    node: PathNode, own: Canonical, conflicts: Conflicts, layouts: Sequence[ToolLayout], now: float
) -> SharedRow:
    message = _message_to_send(node, own)
    return SharedRow(node.meaning, message, node.written, tuple(layouts), conflicts, int(now * 1e6))


def _unknown(reading: RecognisedTurn, known: PathNode | None) -> list[int]:
    """The messages with identity behind what is known here, up to the last answer."""
    identity, messages = reading.identity, reading.messages
    answers = [
        index
        for index, each in enumerate(identity.canonical)
        if each.message is not None and messages[index].role == "assistant"
    ]
    if not answers:
        return []
    first = 0
    if known is not None:
        first = max(index for index, chain in enumerate(identity.chains) if chain == known.chain) + 1
    return [index for index in range(first, answers[-1] + 1) if identity.canonical[index].message is not None]


def _message_to_send(node: PathNode, own: Canonical) -> Message | None:
    """The message as the model read it; None where it is what the model wrote, or one in which no rule finds anything:
    whoever sends it again has all its words. `own` is the identity of what the client sent, which is that of both."""
    if node.written is not None:
        return None if node.message is node.written.message else node.message
    if node.message.role == "assistant" or own.message is None:
        return node.message
    return None if same_words(own.message, node.message) else node.message


def _held_bytes(row: SharedRow) -> int:
    """Bytes of memory that a row holds until it is sent, roughly."""
    message = 0 if row.message is None else message_bytes(row.message)
    return VALUE_BYTES + message + (0 if row.written is None else written_bytes(row.written))


def _step(row: SharedRow, reading: RecognisedTurn, index: int) -> PathStep | None:
    """How the model read our message; None where it is another one."""
    identity = reading.identity
    own, sent = identity.canonical[index], reading.messages[index]
    message = row.message
    if message is None and row.written is not None:
        message = row.written.message
    elif message is None and own.message is not None:
        message = sent if same_words(own.message, sent) else own.message
    if message is None or (row.written is not None and sent.role != "assistant"):
        return None
    said = [message] if row.written is None else [message, row.written.message]
    said = [each for each in said if each is not sent]
    if any(each.role != sent.role or canonicalise(each, identity.rules).digest != own.digest for each in said):
        return None
    return PathStep(identity.chains[index], message, row.written, row.meaning)


def _stand(row: SharedRow, reading: RecognisedTurn) -> bool:
    """Whether each message that is said to have brought tools in can have done so."""
    identity = reading.identity
    able = {
        place
        for place, message, own in zip(identity.chains, reading.messages, identity.canonical, strict=True)
        if message.role != "assistant" and own.message is not None
    }
    return all(each.place in able for layout in row.layouts for each in layout.added)
