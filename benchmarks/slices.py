"""The same answers over HTTP and bare, in slices of a second that take turns while the other side stands still.

A machine that becomes slower for a while, as one that others use does, falls on both alike; whole answers, one behind
the other, would give one of them the bad ten seconds. The server is stopped as a shell stops a job, and goes on where
it was.
"""

import os
import signal
import time
from types import TracebackType
from typing import Any, Protocol, Self

from benchmarks.client import BenchmarkError, Client, Stream
from benchmarks.prompts import Prompt
from benchmarks.rig import Rig

SLICE_SECONDS = 1.0
NAP_SECONDS = 0.01


class Answers(Protocol):
    """Answers to some prompts on their way. `run` computes for about so many seconds (None: until each has its first
    token), leaves nothing in flight, and returns whether all are through."""

    def run(self, seconds: float | None) -> bool: ...


class HttpAnswers:
    """Streams of one server, which is stopped between two slices and goes on at the end, whatever happens."""

    def __init__(self, rig: Rig, prompts: list[Prompt], num_tokens: int) -> None:
        self._rig = rig
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._client = Client(rig.port, NAP_SECONDS)
        self._streams: list[Stream] = []

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._signal(signal.SIGCONT)
        self._client.__exit__(kind, error, at)

    def run(self, seconds: float | None) -> bool:
        """One slice. Raises BenchmarkError unless every prompt and answer has the tokens that bare mlx-lm is given."""
        ends_at = time.perf_counter() + (seconds or 0.0)
        self._signal(signal.SIGCONT)
        self._streams = self._streams or [self._client.chat(prompt.text, self._num_tokens) for prompt in self._prompts]

        def is_slice_over() -> bool:
            if seconds is not None:
                return self._is_over() or time.perf_counter() >= ends_at
            return all(stream.first_text_at is not None or stream.ended_at is not None for stream in self._streams)

        self._client.run_until(is_slice_over)
        # also behind the last one: what the server writes to disk then is not to fall on the other side's last slice
        self._signal(signal.SIGSTOP)
        if self._is_over():
            self._check()
            return True
        return False

    def usages(self) -> list[dict[str, Any]]:
        """What each answer's usage says, once all are through."""
        return [stream.usage() for stream in self._streams]

    def _is_over(self) -> bool:
        return all(stream.ended_at is not None for stream in self._streams)

    def _check(self) -> None:
        for prompt, stream in zip(self._prompts, self._streams, strict=True):
            usage = stream.usage()
            found = (usage["prompt_tokens"], usage["completion_tokens"])
            if found != (len(prompt.ids), self._num_tokens):
                raise BenchmarkError(
                    f"tokens of prompt and answer are {found}, not {len(prompt.ids), self._num_tokens}"
                )

    def _signal(self, number: int) -> None:
        os.kill(self._rig.server_pid, number)


def in_turns(*sides: Answers) -> list[float]:
    """Let the sides take turns until all are through; returns the seconds that each computed."""
    seconds = [0.0] * len(sides)
    going = list(range(len(sides)))
    slice_seconds: float | None = None
    while going:
        for side in list(going):
            started = time.perf_counter()
            is_through = sides[side].run(slice_seconds)
            seconds[side] += time.perf_counter() - started
            if is_through:
                going.remove(side)
        slice_seconds = SLICE_SECONDS
    return seconds


def answer_pair(
    rig: Rig, num_streams: int, prompt_tokens: int, answer_tokens: int, num_rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of `num_streams` answers at once, over HTTP and bare, per round; by turns either begins.

    A round before the first is thrown away: kernels are compiled at their first use.
    """
    found: list[tuple[float, float]] = []
    for number in range(-1, num_rounds):
        asked = [rig.prompts.make(prompt_tokens) for _ in range(num_streams)]
        ids = [rig.prompts.make(prompt_tokens).ids for _ in range(num_streams)]
        with HttpAnswers(rig, asked, answer_tokens) as http, rig.bare.answers(ids, answer_tokens) as bare:
            if number % 2:
                http_seconds, bare_seconds = in_turns(http, bare)
            else:
                bare_seconds, http_seconds = in_turns(bare, http)
        rig.settle()
        if number >= 0:
            found.append((http_seconds, bare_seconds))
    return [http for http, _ in found], [bare for _, bare in found]
