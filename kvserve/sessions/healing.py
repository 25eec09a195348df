"""What the model wrote at a place of a conversation, to restore thinking and raw calls that an echo has lost.

A place is the chain digest at the assistant's message: it covers the content and the calls there and all that precedes,
so the same "Done." in two conversations is two places. This file knows neither templates nor tokens' meaning; the
caller says whether the arguments of two calls are equal.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile

from kvserve.core import Block, Message, TextBlock, ThinkingBlock, ToolCallBlock, Written
from kvserve.sessions.journal import UNWRITTEN, Journal, JournaledEntry, JournaledStore
from kvserve.sessions.message_rows import dump, number, parse, seconds, text_of, written_of, written_row
from kvserve.sessions.written_messages import same_writing, written_bytes

type SameArguments = Callable[[str, str], bool]
"""Whether two texts of arguments are equal in meaning."""


@dataclass(slots=True)
class _PlaceEntry(JournaledEntry):
    """`wrote` is None where the model wrote different things: it is unknown which of them a client means."""

    wrote: Written | None
    owner: str


class HealingStore(JournaledStore[bytes, _PlaceEntry]):
    """What the model wrote, by place."""

    def __init__(self, *, max_entries: int = 2_000, max_bytes: int = 256 << 20, journal: Journal = UNWRITTEN) -> None:
        super().__init__("healing", journal, max_entries=max_entries, max_bytes=max_bytes)

    def remember(self, chain: bytes, written: Written | None, until: float | None = None, *, owner: str = "") -> None:
        """The model wrote this here, for the conversation's owner. The same words again keep the first tokens, which
        have KV; other words make the place ambiguous for good, as None does: it wrote several things elsewhere. The row
        is kept `until` then at least; None: no row."""
        with self._lock:
            place = self._entries.get(chain) or self._add(chain, _entry(written, owner))
            if place.wrote is not None and (written is None or not same_writing(place.wrote, written)):
                self._num_bytes -= place.num_bytes
                place.wrote, place.num_bytes = None, 0
            self._entries.move_to_end(chain)
            if until is not None:
                place.until = until if place.until is None else max(place.until, until)
            if place.until is not None:
                self._put(chain)
            self._shrink(self._max_bytes)

    def find(self, chain: bytes) -> Written | None:
        """What the model wrote here; None where it did not, or where that is ambiguous."""
        with self._lock:
            place = self._entries.get(chain)
            if place is None:
                return None
            self._entries.move_to_end(chain)
            return place.wrote

    def ambiguous(self, chains: Iterable[bytes]) -> set[bytes]:
        """Those of these places where the model wrote different things. Does not count as a use."""
        with self._lock:
            found = ((chain, self._entries.get(chain)) for chain in chains)
            return {chain for chain, place in found if place is not None and place.wrote is None}

    def heal(self, message: Message, chain: bytes, same_arguments: SameArguments) -> Message:
        """The message with what the client lost of the model's words; the same object where nothing is to be added."""
        if message.role != "assistant":
            return message
        written = self.find(chain)
        return message if written is None else healed(message, written.message, same_arguments)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Delete what was written for these owners."""
        self._drop_where(lambda place: is_gone(place.owner))

    def shrink(self, share: float) -> None:
        """Evict until this share of the bytes is left."""
        with self._lock:
            self._shrink(int(self._num_bytes * share))

    def _row_key(self, key: bytes) -> bytes:
        return key

    def _row_body(self, key: bytes, entry: _PlaceEntry, serial: int) -> Callable[[], bytes]:
        return partial(_body, entry.wrote, entry.owner, entry.until, serial)

    def _stored(self, row_key: bytes, body: bytes) -> tuple[float, bytes, _PlaceEntry]:
        row = parse(body)
        wrote = None if row.get("written") is None else written_of(row["written"])
        place = _entry(wrote, text_of(row.get("owner")), seconds(row.get("until")))
        return number(row.get("serial")), row_key, place


def _entry(wrote: Written | None, owner: str, until: float | None = None) -> _PlaceEntry:
    return _PlaceEntry(wrote, owner, until=until, num_bytes=0 if wrote is None else written_bytes(wrote))


def _body(wrote: Written | None, owner: str, until: float | None, serial: int) -> bytes:
    written = None if wrote is None else written_row(wrote)
    return dump({"written": written, "owner": owner, "until": until, "serial": serial})


# --- one message -----------------------------------------------------------------------------------------------------


def healed(sent: Message, wrote: Message, same_arguments: SameArguments) -> Message:
    """A client's echo of an assistant message with the thinking and the raw call texts that the model wrote.

    Only where the rest is the same: equal text (white space around it aside), the same calls with equal arguments, no
    thinking of the client's own that differs. Anything else, and any block that a model cannot write, is returned as
    sent.
    """
    sent_calls, wrote_calls = _calls(sent), _calls(wrote)
    if not (
        all(isinstance(block, TextBlock | ThinkingBlock | ToolCallBlock) for block in sent.blocks)
        and _text(sent) == _text(wrote)
        and _thinking(sent) in ("", _thinking(wrote))
        and len(sent_calls) == len(wrote_calls)
        and all(
            one.name == other.name and same_arguments(one.arguments, other.arguments)
            for one, other in zip(sent_calls, wrote_calls, strict=True)
        )
    ):
        return sent
    raw = iter(wrote_calls)
    blocks = tuple(
        replace(block, arguments=next(raw).arguments) if isinstance(block, ToolCallBlock) else block
        for block in sent.blocks
    )
    if not _thinking(sent) and _thinking(wrote):
        blocks = _with_thinking(blocks, wrote.blocks)
    return sent if blocks == sent.blocks else replace(sent, blocks=blocks)


def _with_thinking(sent: tuple[Block, ...], wrote: tuple[Block, ...]) -> tuple[Block, ...]:
    """The client's blocks with the thinking where it stood; unchanged where its places cannot be found."""
    thinking = tuple(block for block in wrote if isinstance(block, ThinkingBlock))
    others = tuple(block for block in sent if not isinstance(block, ThinkingBlock))
    if not any(isinstance(block, ThinkingBlock) for block in dropwhile(_is_thinking_or_empty, wrote)):
        return (*thinking, *others)
    solid = [block for block in others if not _is_empty(block)]
    if not _is_aligned(solid, [block for block in wrote if not _is_thinking_or_empty(block)]):
        return sent
    rest = iter(solid)
    return tuple(
        block if isinstance(block, ThinkingBlock) else next(rest)
        for block in wrote
        if isinstance(block, ThinkingBlock) or not _is_empty(block)
    )


def _is_aligned(sent: Sequence[Block], wrote: Sequence[Block]) -> bool:
    """Whether both have the same kinds of blocks in the same order with the same text: then thinking has its place."""
    return len(sent) == len(wrote) and all(
        type(one) is type(other)
        and (
            not (isinstance(one, TextBlock) and isinstance(other, TextBlock)) or one.text.strip() == other.text.strip()
        )
        for one, other in zip(sent, wrote, strict=True)
    )


def _is_empty(block: Block) -> bool:
    return isinstance(block, TextBlock | ThinkingBlock) and not block.text.strip()


def _is_thinking_or_empty(block: Block) -> bool:
    return isinstance(block, ThinkingBlock) or _is_empty(block)


def _text(message: Message) -> str:
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock)).strip()


def _thinking(message: Message) -> str:
    return "".join(block.text for block in message.blocks if isinstance(block, ThinkingBlock)).strip()


def _calls(message: Message) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]
