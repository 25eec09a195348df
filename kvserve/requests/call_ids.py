"""By which ids the model knows its calls: clients are given other ones, by which a conversation is known to be theirs.

It joins what was written (`output/`) with what is rendered (`prompt/`). An id that a model chose can be guessed, so it
is none for a client to show; and some stand behind the arguments, when the call has long begun.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvserve.canonical.message_layout import same_arguments
from kvserve.core import CallSlot, Message, ToolCallBlock, Written
from kvserve.output.formats import OutputFormat
from kvserve.output.written_ids import has_ids, written_ids
from kvserve.prompt.memo import Memo

_MEMO_BYTES = 8 * 2**20
_BYTES_PER_TOKEN = 64
"""Of an answer: its ids and what they say. A record that is gone is kept by the memo only."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The ids of one writing, which is kept so that its name stays its own."""

    written: Written
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallIds:
    """The ids of one model's calls. With `counts` its template numbers calls itself, and results name these numbers: of
    calls that the model wrote those are its own. Safe for several threads."""

    output_format: OutputFormat
    decode: Callable[[Sequence[int]], str]
    counts: bool = False
    _known: Memo[_Read] = field(default_factory=lambda: Memo(_MEMO_BYTES))

    @property
    def _slot(self) -> CallSlot:
        return CallSlot.NUMBER if self.counts else CallSlot.ID

    def clear(self) -> None:
        """Forget earlier answers."""
        self._known.clear()

    def of(
        self, messages: Iterable[Message], writings: Iterable[Written | None], *, is_one_client: bool
    ) -> Mapping[str, str]:
        """By the ids that a request has for calls, those that the model wrote, where it wrote some.

        `writings`: per assistant message what the model wrote there. Where several clients share what was written, a
        call is known by the id that its client was given, and by no other.
        """
        found: dict[str, str] = {}
        if not has_ids(self.output_format.row, self._slot):
            return found
        answers = (message for message in messages if message.role == "assistant")
        for answer, written in zip(answers, writings, strict=False):
            if written is None:
                continue
            sent, wrote = answer.calls, written.message.calls
            seen: set[str] = set()
            for mine, theirs, call_id in zip(sent, wrote, self._read(written, wrote), strict=False):
                is_theirs = is_one_client or mine.call_id == theirs.call_id
                # of two calls with one id in a message nobody could tell the results apart
                if call_id and call_id not in seen and is_theirs and self._is_same(mine, theirs):
                    found.setdefault(mine.call_id, call_id)
                seen.add(call_id)
        return found

    def _is_same(self, mine: ToolCallBlock, theirs: ToolCallBlock) -> bool:
        """Whether the call is the model's own. Its number stands only where its own tokens are said again."""
        return mine.name == theirs.name and (not self.counts or same_arguments(mine.arguments, theirs.arguments))

    def _read(self, written: Written, calls: Sequence[ToolCallBlock]) -> tuple[str, ...]:
        known = self._known.get(id(written))
        if known is not None and known.written is written:
            return known.ids
        names = [call.name for call in calls]
        text = self.decode(written.ids) if calls else ""
        in_reasoning = written.opens_reasoning
        ids = written_ids(self.output_format, text, names, in_reasoning=in_reasoning, slot=self._slot)
        self._known.put(id(written), _Read(written, ids), 512 + _BYTES_PER_TOKEN * len(written.ids))
        return ids
