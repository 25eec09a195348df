"""The policies that are simulated: the engine's own, and as a control the one that it had before."""

from kvserve.engine.fair_clock import FairClock, StreamShare
from kvserve.engine.policy import (
    PREFILL_SLICE_SECONDS,
    DecodeStep,
    Facts,
    Machine,
    Pause,
    PrefillChunk,
    PromptFacts,
    Stream,
    WaitingPrompt,
    candidates,
    plan,
)
from tests.engine.scheduling_simulator import SHARE, SimRow, Simulator


class Fair:
    """The engine's policy."""

    def __init__(self) -> None:
        self._clock = FairClock[SimRow]()
        self._share = StreamShare(SHARE)

    def admitted(self, machine: Simulator) -> SimRow | None:
        if not machine.waiting:
            return None
        waiting_prompts = [
            WaitingPrompt(
                row, machine.now - row.job.at, row.job.num_tokens - machine.num_known(row), False, row.num_overtaken
            )
            for row in machine.waiting
        ]
        asked = tuple(
            WaitingPrompt(
                each.row, each.waited_seconds, each.num_left_tokens, machine.fits(each.row), each.num_overtaken
            )
            for each in candidates(waiting_prompts)
        )
        return plan(Facts(waiting_prompts=asked)).admitted

    def work(self, machine: Simulator) -> PrefillChunk[SimRow] | DecodeStep | Pause:
        prompts = tuple(
            PromptFacts(
                row,
                self._clock.finish(row),
                row.num_left,
                row.awaits[0] if row.awaits is not None else None,
                row.awaits[1] - row.awaits[0].num_done if row.awaits is not None else 0,
                num_computed_tokens=row.num_computed,
            )
            for row in machine.prompts
        )
        streams = tuple(Stream(row, self._clock.finish(row), row.num_generated > 0) for row in machine.streams)
        rate, share = machine.trace.tokens_per_second, self._share
        now = Machine(self._clock.now, share.owed_seconds, share.slice_seconds, rate, SHARE)
        return plan(Facts(prompts=prompts, streams=streams, machine=now)).work

    def entered(self, row: SimRow) -> None:
        self._clock.enter(row, row.num_left)

    def left(self, row: SimRow, *, is_cancelled: bool) -> None:
        self._clock.leave(row, row.num_left if is_cancelled else 0)

    def prefilled(self, num_tokens: int, seconds: float, *, is_beside_streams: bool) -> None:
        self._clock.advance(num_tokens)
        self._share.prefilled(seconds, is_beside_streams=is_beside_streams)

    def stepped(self, num_rows: int, seconds: float, *, is_beside_prompts: bool) -> None:
        self._share.stepped(num_rows, seconds, is_beside_prompts=is_beside_prompts)
        if not is_beside_prompts:
            self._clock.rest()


class FirstComeOldestShortest:
    """What the engine did before: places first come first served, the oldest and the shortest prompt by turns, a chunk
    of a quarter of a second and a step."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._slice_seconds: float | None = None

    def admitted(self, machine: Simulator) -> SimRow | None:
        return machine.waiting[0] if machine.waiting and machine.fits(machine.waiting[0]) else None

    def work(self, machine: Simulator) -> PrefillChunk[SimRow] | DecodeStep | Pause:
        begun = [row for row in machine.prompts if row.has_begun]
        if not begun:
            return DecodeStep(True) if machine.streams else Pause()
        shortest = min(begun, key=lambda row: row.num_left)
        if self._slice_seconds is not None:
            if shortest.num_left <= machine.trace.tokens_per_second * self._slice_seconds:
                return PrefillChunk(shortest, min(self._slice_seconds, 1.0))
            if machine.streams:
                return DecodeStep(True)
        self._slice_seconds = 0.25 if machine.streams else PREFILL_SLICE_SECONDS
        self._num_begun += 1
        return PrefillChunk(begun[0] if self._num_begun % 2 else shortest, min(self._slice_seconds, 1.0))

    def entered(self, row: SimRow) -> None: ...

    def left(self, row: SimRow, *, is_cancelled: bool) -> None: ...

    def prefilled(self, num_tokens: int, seconds: float, *, is_beside_streams: bool) -> None:
        self._slice_seconds = (self._slice_seconds or 0.0) - seconds

    def stepped(self, num_rows: int, seconds: float, *, is_beside_prompts: bool) -> None:
        self._slice_seconds = None
