"""The nouns of what the model has read: a path of messages, a step of it, the record of one request. Values only."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvserve.core import ImageSpan, Message, RequestId, ToolSpec, Written
from kvserve.sessions.tool_layouts import NO_TOOLS, ToolLayout

PACKED: Final = "I"
"""Token ids are packed as unsigned 32-bit integers in the machine's byte order."""

PACKED_BYTES: Final = array(PACKED).itemsize


@dataclass(frozen=True, slots=True)
class PathStep:
    """A message that the model read (`message`, as it saw it) or wrote (`written` too). `chain` is the digest of the
    canonical conversation up to and with it; `meaning` also covers what a client may leave out, such as the sender."""

    chain: bytes
    message: Message
    written: Written | None = None
    meaning: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class PathNode:
    """A message as the model saw it, below the one before it. Compared by identity and never changed, so a path that a
    caller holds stays whole. `index` is 0 for a first message; `owner` is the whole conversation's."""

    parent: "PathNode | None" = field(repr=False)
    chain: bytes
    message: Message
    written: Written | None
    index: int
    meaning: bytes = b""
    owner: str = ""

    def ancestry(self) -> "Iterator[PathNode]":
        """This node, then its parents up to the first message."""
        seen: PathNode | None = self
        while seen is not None:
            yield seen
            seen = seen.parent

    def path(self) -> "tuple[PathNode, ...]":
        """From the first message to this one; `path()[i].index == i`."""
        path = list(self.ancestry())
        path.reverse()
        return tuple(path)


@dataclass(frozen=True, slots=True)
class Conflicts:
    """What is unknown of a place. `is_doubtful`: the model wrote several things here, `is_contested`: it was read with
    several meanings; which of them a client leaves out nobody knows."""

    is_doubtful: bool = False
    is_contested: bool = False


@dataclass(frozen=True, slots=True)
class PlaceReadings:
    """What another server read at one place: at least one reading, the newest last. `layouts`: the newest first."""

    readings: tuple[PathStep, ...]
    conflicts: Conflicts = Conflicts()
    layouts: tuple[ToolLayout, ...] = ()

    @property
    def chain(self) -> bytes:
        return self.readings[0].chain


def pack_ids(*runs: Iterable[int]) -> bytes:
    """Token ids, one run after the other, as a record keeps them. Raises OverflowError for more than 32 bits."""
    packed = array(PACKED)
    for run in runs:
        packed.extend(run)
    return packed.tobytes()


def packed_common_length(one: bytes, other: bytes) -> int:
    """How many token ids two packed runs share at their beginning."""
    low, high = 0, min(len(one), len(other)) // PACKED_BYTES
    while low < high:  # bytes compare at memory speed: halve what may be equal
        middle = (low + high + 1) // 2
        end = middle * PACKED_BYTES
        if one[low * PACKED_BYTES : end] == other[low * PACKED_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


def common_length(one: Iterable[int], other: Iterable[int]) -> int:
    """How many token ids two runs share at their beginning."""
    return packed_common_length(pack_ids(one), pack_ids(other))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TurnRecord:
    """What one request put before the model and what came of it.

    `messages`: all that the model read, in order and as it read them, those without identity too, and what it wrote.
    `packed_ids`: the prompt's model tokens and the emitted ones (`pack_ids`); `images`: the runs among them that stand
    for images. `starts`: the offset in model tokens where each message of the prompt begins. `tools`: those that could
    be called; `tool_layout`: which of them stood in front and where the others came in. `num_computed_tokens`: how many
    were computed, of a request whose client disconnected; None for a complete one.
    """

    request_id: RequestId
    session: str | None
    leaf: PathNode
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    tools_digest: bytes
    packed_ids: bytes
    num_prompt_tokens: int
    starts: tuple[int, ...]
    template_arguments: Mapping[str, object]
    fired: frozenset[str]
    images: tuple[ImageSpan, ...] = ()
    num_computed_tokens: int | None = None
    tool_layout: ToolLayout = NO_TOOLS

    def __post_init__(self) -> None:
        object.__setattr__(self, "template_arguments", MappingProxyType(dict(self.template_arguments)))

    @property
    def ids(self) -> Sequence[int]:
        """The model tokens, read-only, without a copy."""
        view: Sequence[int] = memoryview(self.packed_ids).cast(PACKED)
        return view


@dataclass(frozen=True, slots=True)
class TurnTotals:
    """What a turn store keeps."""

    num_nodes: int
    num_bytes: int
    num_records: int
    num_record_bytes: int
