"""Which row is next: the facts that the policy gets of one model's rows, read off where they are, and the clocks that
order them. It computes nothing and moves no row. Belongs to the engine thread.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvserve.engine.admission import Admission
from kvserve.engine.decode import DecodePool
from kvserve.engine.fair_clock import FairClock, StreamShare
from kvserve.engine.policy import (
    DecodeStep,
    Facts,
    Life,
    Machine,
    Pause,
    Plan,
    PrefillChunk,
    PromptFacts,
    Stream,
    WaitingPrompt,
    candidates,
    first_token_seconds,
    plan,
)
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefill_pool import PrefillPool
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import Row, tokens_of
from kvserve.engine.waiting_for_prefix import WaitingForPrefix

TELL_SECONDS = 1.0
"""How often the client of a prompt that waits for its turn hears of it."""


class TurnOrder:
    """The queue, and the clocks of the rows that have a place."""

    def __init__(
        self,
        cache: PrefixCache,
        admission: Admission,
        waiting_for_prefix: WaitingForPrefix,
        prefills: PrefillPool,
        pool: DecodePool,
        *,
        stream_share: float,
    ) -> None:
        self.waiting: list[Row] = []
        self._cache = cache
        self._admission = admission
        self._waiting_for_prefix = waiting_for_prefix
        self._prefills = prefills
        self._pool = pool
        self._clock = FairClock[Row]()
        self._streams = StreamShare(stream_share)
        self._left_tokens: dict[Row, tuple[int, int]] = {}
        self._num_changes = 0
        self._asked_at_change = -1
        self._prefilled_at = 0.0
        self._told_at = 0.0

    def next_plan(self, watchdog_seconds: float) -> Plan[Row]:
        """Ask the policy for a plan."""
        return plan(self._facts(tuple(self._lives()), tuple(self._waiting_prompts()), watchdog_seconds))

    def next_work(self) -> PrefillChunk[Row] | DecodeStep | Pause:
        """Ask what is computed next, where no row goes or enters before that. Rows that wait are not asked for: one
        that was, and not admitted, would not be again."""
        return plan(self._facts()).work

    # --- what happens to rows ---------------------------------------------------------------------------------------

    def queue(self, row: Row, *, is_back: bool = False) -> None:
        """Let a row wait for a place, behind the others or, where it had one, in front of them."""
        self.waiting.insert(0 if is_back else len(self.waiting), row)
        self._num_changes += 1

    def enters(self, row: Row) -> None:
        """Give a row its place on the clock, with all of its prompt to compute that is not kept."""
        if row in self.waiting:
            self.waiting.remove(row)
            for other in self.waiting:
                other.num_overtaken += other.submitted_at < row.submitted_at
        if not self._waiting_for_prefix and not self._prefills:
            self._clock.rest()
        self._clock.leave(row)
        self._clock.enter(row, self._num_left(row))
        self._left_tokens.pop(row, None)
        self._num_changes += 1

    def begins(self, row: Row, num_left_tokens: int) -> None:
        """Correct how much of its prompt a row computes, as it begins: less where others did it, or more."""
        self._clock.correct(row, num_left_tokens)

    def leaves(self, row: Row, prefill: Prefill | None = None) -> None:
        """Take a row off the clock, from its prefill or from where it was; nothing where it was gone before. What is
        not computed of its prompt will not be."""
        is_over = row.decoding_from is not None or row.waits_again
        self._clock.leave(row, prefill.num_left if prefill is not None else 0 if is_over else row.num_tokens)
        self._left_tokens.pop(row, None)
        if row in self.waiting:
            self.waiting.remove(row)
        self._num_changes += 1

    def prefilled(self, rows: Iterable[Row], num_tokens: int, seconds: float, *, is_beside_streams: bool) -> None:
        """Note that so many tokens were computed for these rows in so many seconds."""
        self._streams.prefilled(seconds, is_beside_streams=is_beside_streams)
        if num_tokens:
            self._clock.advance(num_tokens)
            self._prefilled_at = time.monotonic()
            for row in rows:
                row.progressed_at = self._prefilled_at

    def restored(self, seconds: float) -> None:
        """Note how long kept KV was restored to rows: it takes streams' time like a chunk."""
        self._streams.prefilled(seconds, is_beside_streams=self.has_readers)

    def stepped(self, seconds: float) -> None:
        """Note how long streams stepped. While they are owed that, prompts wait without being stuck."""
        if self._streams.owed_seconds > 0:
            self._prefilled_at += seconds
            for row in (*self._waiting_for_prefix.rows(), *(prefill.row for prefill in self._prefills)):
                row.progressed_at += seconds
        self._streams.stepped(self._pool.num_rows, seconds, is_beside_prompts=bool(self._prefills))
        if not self._prefills and not self._waiting_for_prefix:
            self._clock.rest()

    def clear(self) -> None:
        """Forget all rows."""
        self.waiting.clear()
        self._left_tokens.clear()
        self._clock = FairClock()

    @property
    def has_readers(self) -> bool:
        """Whether a client reads an answer."""
        return any(row.generated for row in self._pool.rows())

    # --- facts of them ----------------------------------------------------------------------------------------------

    def _facts(
        self,
        lives: tuple[Life[Row], ...] = (),
        waiting_prompts: tuple[WaitingPrompt[Row], ...] = (),
        watchdog_seconds: float = 0.0,
    ) -> Facts[Row]:
        streams = tuple(Stream(row, self._clock.finish(row), bool(row.generated)) for row in self._pool.rows())
        facts = Facts(lives, waiting_prompts, tuple(self._prompts()), streams, self._machine(), watchdog_seconds)
        if facts.prompts:
            self._tell(facts)
        return facts

    def _lives(self) -> Iterator[Life[Row]]:
        """Rows that have no place yet, or decode, wait for nothing."""
        now, awaited = time.monotonic(), self._waiting_for_prefix.awaited()
        for row in (*self.waiting, *self._pool.rows()):
            yield Life(row, row.handle.is_cancelled, row.decoding_seconds(now))
        for row in (*self._waiting_for_prefix.rows(), *(prefill.row for prefill in self._prefills)):
            progressed_at = row.progressed_at
            if (wait := awaited.get(row)) is not None:
                progressed_at = max(progressed_at, wait[0].progressed_at)
            is_passed = self._prefilled_at > progressed_at and self._clock.now < self._clock.finish(row)
            decoding_seconds, idle_seconds = row.decoding_seconds(now), now - progressed_at
            yield Life(row, row.handle.is_cancelled, decoding_seconds, idle_seconds, is_passed=is_passed)

    def _waiting_prompts(self) -> Iterator[WaitingPrompt[Row]]:
        """The best of those that wait, and whether there is room. Of more than the first it is asked when rows have
        come or gone: what is asked looks into the cache."""
        running = self.running()
        if not self.waiting or not self._admission.has_place(running):
            return
        now = time.monotonic()
        first = candidates([self._waiting_prompt(row, now) for row in self.waiting])
        is_asked = self._asked_at_change != self._num_changes
        self._asked_at_change = self._num_changes
        for waiting_prompt in first if is_asked else first[:1]:
            num_left = self._num_left(waiting_prompt.row)
            fits = self._admission.admits(waiting_prompt.row, running, len(self.waiting))
            yield replace(waiting_prompt, num_left_tokens=num_left, fits=fits)

    def _waiting_prompt(self, row: Row, now: float) -> WaitingPrompt[Row]:
        num_left, _ = self._left_tokens.get(row, (row.num_tokens, -1))
        waited_seconds = now - row.submitted_at
        return WaitingPrompt(row, waited_seconds, num_left, False, row.num_overtaken, is_back=row.waits_again)

    def _num_left(self, row: Row) -> int:
        """Tokens of a row that are not computed yet, as far as is known since rows last came or went."""
        num_left, asked_at = self._left_tokens.get(row, (0, -1))
        if asked_at != self._num_changes:
            _, num_known = self._cache.kept_tokens(tokens_of(row), [row.request.partition])
            num_left = max(0, row.num_tokens - 1 - num_known)
            self._left_tokens[row] = num_left, self._num_changes
        return num_left

    def _prompts(self) -> Iterator[PromptFacts[Row]]:
        finish, awaited = self._clock.finish, self._waiting_for_prefix.awaited()
        num_done = {prefill.row: prefill.num_done for prefill in self._prefills}
        for prefill in self._prefills:
            num_computed = prefill.num_computed
            yield PromptFacts(prefill.row, finish(prefill.row), prefill.num_left, num_computed_tokens=num_computed)
        for row in self._waiting_for_prefix.rows():
            other, num_tokens = awaited.get(row, (None, 0))
            num_awaited = max(0, num_tokens - num_done.get(other, 0)) if other is not None else 0
            num_left = row.num_tokens - 1 - num_tokens
            yield PromptFacts(row, finish(row), num_left, other, num_awaited, is_held=other is None)

    def _machine(self) -> Machine:
        streams, rate = self._streams, self._prefills.chunk_length.slowest_tokens_per_second
        return Machine(self._clock.now, streams.owed_seconds, streams.slice_seconds, rate, streams.share)

    def _tell(self, facts: Facts[Row]) -> None:
        """Note on each row how long it takes to its first token; now and then tell clients of prompts that wait,
        too."""
        seconds = first_token_seconds(facts)
        for prompt in facts.prompts:
            prompt.row.first_token_seconds = seconds.get(prompt.row)
        now = time.monotonic()
        if now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        for prefill in self._prefills:
            if now - prefill.row.progressed_at > TELL_SECONDS:
                prefill.row.report_progress(prefill.num_done)

    def running(self) -> list[Row]:
        """The rows that have a place."""
        return [*self._waiting_for_prefix.rows(), *(prefill.row for prefill in self._prefills), *self._pool.rows()]
