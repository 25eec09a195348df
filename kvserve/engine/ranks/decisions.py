"""What rank 0 tells the others: every decision that steers a pass, as it goes over the wire. Rows are named by their
serial number, the same on all ranks. No arrays, no sockets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvserve.cache.checkpoints import Stop
from kvserve.core import GenerationRequest, MessageStart, RequestId, SamplingParams, TokenSequence
from kvserve.engine.policy import DecodeStep, Ending, Pause, Plan, PrefillChunk
from kvserve.engine.rows import Row

type Wire = Any
"""What JSON can hold."""

type RowOf = Callable[[int], Row]
type Work = PrefillChunk[Row] | DecodeStep | Pause


@dataclass(frozen=True, slots=True)
class Decision[T]:
    """One kind of decision: its name, and its value on the wire and back."""

    name: str
    written: Callable[[T], Wire]
    read: Callable[[Wire, RowOf], T]


@dataclass(frozen=True, slots=True)
class Readied:
    """A step on the way of rows that wait to begin: `row` begins; it is asked whether every rank has restored what it
    waits for; its prefill stops at `stop` too, or is kept where it is, because another row waits for that."""

    row: Row
    what: Literal["begin", "ask", "stop", "keep"]
    stop: Stop | None = None


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row of a prefill pass, and where it is: a follower that has it elsewhere must not compute."""

    row: Row
    num_done_tokens: int
    num_to_stop_tokens: int


def _work(work: Work) -> Wire:
    match work:
        case PrefillChunk(row, seconds):
            return ["chunk", row.serial, seconds]
        case DecodeStep(is_for_all):
            return ["step", is_for_all]
        case Pause():
            return ["pause"]


def _work_of(wire: Wire, row_of: RowOf) -> Work:
    match wire:
        case ["chunk", serial, seconds]:
            return PrefillChunk(row_of(serial), seconds)
        case ["step", is_for_all]:
            return DecodeStep(is_for_all)
        case _:
            return Pause()


def _plan(plan: Plan[Row]) -> Wire:
    ended = [[ending.row.serial, ending.reason] for ending in plan.ended]
    return [ended, plan.admitted.serial if plan.admitted is not None else None, _work(plan.work)]


def _plan_of(wire: Wire, row_of: RowOf) -> Plan[Row]:
    ended, admitted, work = wire
    endings = tuple(Ending(row_of(serial), reason) for serial, reason in ended)
    return Plan(endings, row_of(admitted) if admitted is not None else None, _work_of(work, row_of))


def _readied(step: Readied) -> Wire:
    return [step.row.serial, step.what, [step.stop.offset, step.stop.kind] if step.stop is not None else None]


def _readied_of(wire: Wire, row_of: RowOf) -> Readied:
    serial, what, stop = wire
    return Readied(row_of(serial), what, Stop(*stop) if stop is not None else None)


def _row(row: Row | None) -> Wire:
    return row.serial if row is not None else None


def _row_of(wire: Wire, row_of: RowOf) -> Row | None:
    return row_of(wire) if wire is not None else None


def _as_it_is(value: Any) -> Any:
    return value


def _as_it_came(wire: Wire, _row_of: RowOf) -> Any:
    return wire


PLAN: Decision[Plan[Row]] = Decision("plan", _plan, _plan_of)
WORK: Decision[Work] = Decision("work", _work, _work_of)
OUTGROWN: Decision[Row | None] = Decision("outgrown", _row, _row_of)
READY: Decision[Readied] = Decision("ready", _readied, _readied_of)
STOPS: Decision[tuple[Stop, ...]] = Decision(
    "stops",
    lambda stops: [[stop.offset, stop.kind] for stop in stops],
    lambda wire, _: tuple(Stop(offset, kind) for offset, kind in wire),
)
GROUP: Decision[tuple[ChunkRow, ...]] = Decision(
    "group",
    lambda rows: [[each.row.serial, each.num_done_tokens, each.num_to_stop_tokens] for each in rows],
    lambda wire, row_of: tuple(ChunkRow(row_of(serial), done, to_stop) for serial, done, to_stop in wire),
)
CHUNK: Decision[int] = Decision("chunk", _as_it_is, _as_it_came)
PLACE: Decision[int | None] = Decision("place", _as_it_is, _as_it_came)
TURN: Decision[int] = Decision("turn", _as_it_is, _as_it_came)
DRAWN: Decision[int | None] = Decision("drawn", _as_it_is, _as_it_came)
FAILED: Decision[list[Row]] = Decision(
    "failed",
    lambda rows: [row.serial for row in rows],
    lambda wire, row_of: [row_of(serial) for serial in wire],
)


def request_wire(row: Row) -> Wire:
    """What a follower needs of a request: its tokens, its end, and what steers what is kept. Not how it draws."""
    request = row.request
    return {
        "serial": row.serial,
        "request_id": request.request_id,
        "ids": list(request.prompt.ids),
        "max_tokens": request.max_tokens,
        "stop_tokens": sorted(request.stop_tokens),
        "message_starts": [[start.offset, start.is_user] for start in request.message_starts],
        "owner": request.owner,
        "ttl_seconds": request.ttl_seconds,
        "turn_end": request.turn_end,
        "partition": request.partition,
        "is_forgotten": row.is_forgotten,
    }


def request_of(wire: Wire) -> GenerationRequest:
    """The request of a follower's row. It draws what is likeliest, which nobody hears: rank 0's tokens count."""
    return GenerationRequest(
        request_id=RequestId(wire["request_id"]),
        prompt=TokenSequence(tuple(wire["ids"])),
        max_tokens=wire["max_tokens"],
        sampling=SamplingParams(),
        stop_tokens=frozenset(wire["stop_tokens"]),
        message_starts=tuple(MessageStart(offset, is_user) for offset, is_user in wire["message_starts"]),
        owner=wire["owner"],
        ttl_seconds=wire["ttl_seconds"],
        turn_end=wire["turn_end"],
        partition=wire["partition"],
        is_forgotten=wire["is_forgotten"],
    )
