"""Carries rows through their stages: they are admitted, prefilled one chunk at a time, and decoded together.

    waiting -> admitted: lookup -> restore, prefill the rest -> decode -> finished: insert

A row whose prompt another one is just prefilling waits for that one's KV. The policy says what is next; here it is
carried out. Everything here belongs to the engine thread.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from kvserve.engine.admission import Admission, Budget
from kvserve.engine.borders import ShortMemory, row_fails_alone
from kvserve.engine.cache_leases import CacheLeases
from kvserve.engine.cache_records import CacheReport, ForgottenKv
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import DecodeResult, ExtractedRow
from kvserve.engine.draft_model import DraftModel
from kvserve.engine.draft_nouns import DEFAULT_DRAFTS, DraftSettings
from kvserve.engine.model import LoadedModel
from kvserve.engine.policy import DecodeStep, Ending, Pause, Plan, PrefillChunk
from kvserve.engine.prefill import ChunkLength, Prefill
from kvserve.engine.prefill_pool import PrefillPool, PrefillStep
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.ranks.decisions import OUTGROWN, PLAN, WORK
from kvserve.engine.ranks.place import ALONE, Ranks
from kvserve.engine.rows import Row, expected_tokens
from kvserve.engine.turn_order import TurnOrder
from kvserve.engine.upkeep import EngineUpkeep
from kvserve.engine.waiting_for_prefix import WaitingForPrefix
from kvserve.engine.warmer import Warmer
from kvserve.engine.warming import WarmSettings
from kvserve.errors import EngineFailure, NoProgress


class Scheduler:
    """All rows of one model. `tick` does one unit of work; nothing here blocks or raises for a single row's fault."""

    def __init__(
        self,
        model: LoadedModel,
        budget: Budget,
        cache: PrefixCache,
        *,
        prefill_step_size: int,
        watchdog_seconds: float,
        stream_share: float,
        report: Callable[[str], None],
        warming: WarmSettings,
        send_tokens: Callable[[], None] = lambda: None,
        draft_model: DraftModel | None = None,
        draft_settings: DraftSettings = DEFAULT_DRAFTS,
        ranks: Ranks = ALONE,
    ) -> None:
        """Beside prompts streams have `stream_share` of the time. `send_tokens` is called whenever tokens that wait may
        go to their clients."""
        self.cache = cache
        self._model = model
        self._ranks = ranks
        self._watchdog_seconds = watchdog_seconds
        self._report = report
        self._memory = ShortMemory(cache.make_room, model.sizes.peak, report)
        self._rows: list[Row] = []
        self._waiting_for_prefix = WaitingForPrefix(cache, report, ranks)
        self._send_tokens = send_tokens
        self._pool = DecodePool(model, budget.max_rows, send_tokens, draft_settings, ranks)
        self._admission = Admission(budget, cache, self._pool)
        self._cache_leases = CacheLeases(cache, model.sizes, self._memory, report, self._account)
        self._chunk_length = ChunkLength(prefill_step_size)
        self.warmer = Warmer(model, budget, cache, self._chunk_length, warming)
        self.draft_model = draft_model
        self.upkeep = EngineUpkeep(model, cache, self.warmer, self._memory, draft_model, self._account)
        self._prefills = PrefillPool(model, self._chunk_length, ranks)
        self._turn_order = TurnOrder(
            cache, self._admission, self._waiting_for_prefix, self._prefills, self._pool, stream_share=stream_share
        )

    @property
    def num_prefilling(self) -> int:
        return len(self._waiting_for_prefix) + len(self._prefills)

    @property
    def num_decoding(self) -> int:
        return self._pool.num_rows

    @property
    def is_idle(self) -> bool:
        return not (self._turn_order.waiting or self._waiting_for_prefix or self._prefills or self._pool.num_rows)

    @property
    def _is_only_decoding(self) -> bool:
        """Whether a tick is a step and nothing else: what rows have said may wait until the middle of it."""
        return bool(self._pool.num_rows) and not (
            self._turn_order.waiting or self._waiting_for_prefix or self._prefills
        )

    def add(self, row: Row) -> None:
        """Queue a row behind those that wait; work ahead of requests makes way."""
        self._ranks.add(row)
        self.warmer.pause()
        if self.draft_model is not None:
            self.draft_model.add(row)
        self._rows.append(row)
        self._turn_order.queue(row)

    def tick(self) -> None:
        """Ask the policy and do what it says: rows go, rows enter, then one chunk of prefill or one step of streams."""
        self._ranks.begin_tick()
        self._look_around()
        plan = self._next_plan()
        while plan.ended or plan.admitted is not None:
            self._let_go(plan.ended)
            self._let_in(plan.admitted)
            plan = self._next_plan()
        is_changed = self._begin_ready() or bool(self._waiting_for_prefix)  # these say for whom they wait
        self._compute(self._ranks.decided(WORK, self._turn_order.next_work) if is_changed else plan.work)
        self._pool.settle()
        self._cache_leases.keep_long_answers(self._pool, self._send_tokens)
        self.upkeep.give_ram_back()

    def _next_plan(self) -> Plan[Row]:
        return self._ranks.decided(PLAN, lambda: self._turn_order.next_plan(self._watchdog_seconds))

    def _look_around(self) -> None:
        """Deal with what has changed since the last tick, before any row enters."""
        if not self.is_idle:
            self.upkeep.note_busy()
        if not self._is_only_decoding:
            self._send_tokens()
        self._account()
        self.cache.kv_room.memory.look()
        self._put_back_outgrown()
        self._quantise_due()
        self._pool.settle()

    def _compute(self, work: PrefillChunk[Row] | DecodeStep | Pause) -> None:
        """Do one piece of work and measure it; keeping what a chunk gave is part of it."""
        self._account()
        started, has_readers = time.perf_counter(), self._turn_order.has_readers
        match work:
            case PrefillChunk(row, seconds):
                step = self._prefills.step(row, seconds)
                self._settle_prefill(step)
                took, rows = time.perf_counter() - started, (prefill.row for prefill in step.computed)
                self._turn_order.prefilled(rows, step.num_tokens, took, is_beside_streams=has_readers)
            case DecodeStep(is_for_all):
                self._settle(self._pool.step_all() if is_for_all else self._pool.step())
                self._turn_order.stepped(time.perf_counter() - started)
            case Pause() if self._waiting_for_prefix:
                self.cache.await_disk()

    def sweep(self) -> None:
        """Evict what has outlived its time, also while no request comes."""
        self.upkeep.sweep()

    def do_idle_work(self) -> bool:
        """One small piece of work that no request waits for. Returns whether there was any."""
        return self.upkeep.do_idle_work()

    def seconds_to_rest(self, at_most: float) -> float:
        """How long an idle engine may wait before it looks at work ahead of requests."""
        return self.upkeep.seconds_to_rest(at_most)

    def report(self) -> CacheReport:
        """What is kept and was done, also ahead of requests."""
        return self.upkeep.report()

    def forget(self, is_forgotten: Callable[[str], bool]) -> ForgottenKv:
        """Forget what only the requests of these owners used; those under way continue, and nothing of them is kept."""
        for row in self._rows:
            row.is_forgotten |= is_forgotten(row.request.owner)
        self._waiting_for_prefix.forget()
        return self.upkeep.forget(is_forgotten)

    def keep_running(self) -> None:
        """Keep what running rows have computed so far: none of them will continue."""
        self.warmer.drop_all("shutdown")
        if self.draft_model is not None:
            self.draft_model.keep_running()
        for prefill in list(self._prefills):
            self._prefills.remove(prefill.row)
            with self._cache_leases.in_transit(prefill.row):
                self._cache_leases.keep_prefilled(prefill)
        for row in self._pool.rows():
            if (left := self._pool.remove(row)) is not None:
                with self._cache_leases.in_transit(row):
                    self._cache_leases.keep_rest(row, left.caches, left.tokens, left.rest)

    def drain(self, *, is_last: bool = False) -> list[Row]:
        """Take every row out, whatever its stage, also one that was between two stages when something broke. Generators
        and caches are dropped, and kept KV too unless it is to be written first (`is_last`)."""
        rows = [row for row in self._rows if not row.is_over]
        self._rows.clear()
        self.warmer.drop_all("the engine begins anew")
        if self.draft_model is not None:
            self.draft_model.drop_rows(is_cache_kept=is_last)
        self._pool.discard()
        self._prefills.discard()
        self._turn_order.clear()
        self._waiting_for_prefix.discard(is_cache_kept=is_last)
        self._cache_leases.clear(is_cache_kept=is_last)
        if not is_last:
            self.cache.clear()
        return rows

    # --- leaving and entering -----------------------------------------------------------------------------------------

    def _let_go(self, ended: Sequence[Ending[Row]]) -> None:
        """Free the rows whose client left or whose time is up, between two steps."""
        for row, reason in ((ending.row, ending.reason) for ending in ended):
            self._send_tokens()
            self._waiting_for_prefix.remove(row)
            prefill, left = self._prefills.remove(row), self._pool.remove(row)
            self._turn_order.leaves(row, prefill)
            if reason == "stuck":
                row.fail(NoProgress(self._watchdog_seconds))
            else:
                row.finish(reason)
            with self._cache_leases.in_transit(*([row] if prefill is not None or left is not None else [])):
                if prefill is not None and reason != "watchdog":
                    self._cache_leases.keep_prefilled(prefill)
                # The answer of a row that the watchdog ended is not kept; what a client stopped was wanted up to there.
                if reason == "watchdog":
                    self._cache_leases.keep_prompt_only(row, prefill, left)
                self._release(row, left if reason == "cancelled" else None)

    def _let_in(self, row: Row | None) -> None:
        """Admit a waiting row; kept KV makes room for it."""
        if row is not None:
            row.end_wait()
            self._arrive(row, has_room=False)

    def _begin_ready(self) -> bool:
        """Begin the rows that nothing keeps waiting, where there is room for them; whether there were any."""
        started, num_begun = time.perf_counter(), 0
        if self._waiting_for_prefix.make_way(
            self._admission.missing_bytes, is_beside_streams=bool(self._pool.num_rows)
        ):
            self._account()
        for row in self._waiting_for_prefix.take_ready(self._prefills, self._cache_leases.keep):
            self._begin(row)
            num_begun += 1
        if num_begun:
            self._turn_order.restored(time.perf_counter() - started)
        return num_begun > 0

    def _put_back_outgrown(self) -> None:
        """Let the newest row wait where answers longer than their allowance have outgrown the memory for all. It
        continues from what it has computed."""
        if len(self._pool.rows()) < 2 or (row := self._ranks.decided(OUTGROWN, self._admission.outgrown)) is None:
            return
        if (left := self._taken_out(row)) is None:
            return
        with self._cache_leases.in_transit(row):
            self._cache_leases.keep_rest(row, left.caches, left.tokens, left.rest)
            self._release(row, None)
        row.wait_again()
        self._turn_order.queue(row, is_back=True)

    def _quantise_due(self) -> None:
        """Keep what rows hold in full precision that have come to where quantised KV starts, and convert them."""
        for row in self._pool.at_quantise_start():
            if (left := self._taken_out(row)) is None:
                continue
            self._send_tokens()  # the others wait for nothing that is done now
            self._cache_leases.keep_rest(row, left.caches, left.tokens)
            with self._cache_leases.in_transit(row):
                self._settle(self._pool.make_way(row))
            with self._or_leaves(row):
                self._memory.with_second_try(partial(self._pool.enter, row, left.caches))

    def _taken_out(self, row: Row) -> ExtractedRow | None:
        """Take a row that will enter again out of its batch, and hand out the token that is drawn for it: its states
        are those before that one. None where it was the last one, or the batch broke."""
        self._settle(self._pool.hand_out_drawn(row))
        return self._pool.remove(row)

    def _arrive(self, row: Row, *, has_room: bool) -> None:
        self._turn_order.enters(row)
        self._admission.measure(row, self._turn_order.running())
        self._waiting_for_prefix.add(row, has_room=has_room)
        self._account()

    def _account(self) -> None:
        """Account what live rows hold: a row that has left its batch counts until it is kept."""
        live_bytes, copied = self._live_bytes() + self._cache_leases.transit_bytes, self._model.sizes.copied
        awaited_bytes = self._admission.arriving_bytes(self._waiting_for_prefix.without_room())
        self.cache.kv_room.account(live_bytes, copied(live_bytes), awaited_bytes + copied(awaited_bytes))

    def _live_bytes(self) -> float:
        """What live rows hold; one that has not begun to decode counts with its whole prompt, and with the room for its
        answer once it computes."""
        arriving, peak = self._admission.arriving_bytes(self._waiting_for_prefix.rows()), self._model.sizes.peak
        beginning = sum(peak(expected_tokens(prefill.row)) for prefill in self._prefills)
        return self._pool.held_bytes() + arriving + beginning + self.warmer.live_bytes()

    def _begin(self, row: Row) -> None:
        """Start a row that nothing keeps waiting: restore what is known of its tokens and prefill the rest."""
        with row_fails_alone(row, self._memory, self._forget_ended):
            images = self._ranks.together(lambda: self._model.images(row.request))
            if row.moved_bytes:
                self._waiting_for_prefix.remove(row)  # no other lease is on what it takes over
            cache_lease, caches, num_done = self._memory.with_second_try(lambda: self.cache.enter(row))
        if row.is_over:
            return
        if not row.has_begun:
            row.num_cached_tokens = num_done
            self.cache.totals.num_prompt_tokens += len(row.request.prompt)
            self.cache.totals.num_cached_tokens += num_done
        self._cache_leases.begin(row, cache_lease)
        self._prefills.add(prefill := Prefill(row, cache_lease, caches, num_done, images=images, ranks=self._ranks))
        self._turn_order.begins(row, prefill.num_left)
        row.report_progress(num_done)

    # --- computing ----------------------------------------------------------------------------------------------------

    def _settle_prefill(self, step: PrefillStep) -> None:
        """Keep what a chunk gave, and let those decode whose last one it was."""
        if step.trouble:
            self._report(step.trouble)
        if step.num_tokens:
            self.cache.totals.num_prefill_tokens += step.num_tokens
            self.cache.measured_prefill(self._chunk_length.tokens_per_second)
        for prefill in step.computed:
            if step.num_tokens:
                self._cache_leases.keep(prefill)
            if not prefill.num_left:
                self._decode(prefill)
        if step.failed is not None:
            self._settle_failed(*step.failed)

    def _settle_failed(self, prefill: Prefill, error: Exception) -> None:
        row, prefill.caches = prefill.row, []  # half written, and of no use
        self._turn_order.leaves(row, prefill)
        if self._memory.may_begin_again(row, error):
            self._release(row, None)
            self._arrive(row, has_room=True)
        else:
            row.fail(self._memory.client_error(row, error))
            self._release(row, None)

    def _decode(self, prefill: Prefill) -> None:
        """Move a row from its prefill into a batch; the first decode step computes its last prompt token."""
        padding_bytes = self._admission.padding_left(self._turn_order.running())
        self._settle(self._pool.make_way(prefill.row, padding_bytes))  # as long as this one counts as a prefill
        self._prefills.remove(prefill.row)
        prefill.row.begin_decoding()
        with self._or_leaves(prefill.row):
            self._memory.with_second_try(lambda: self._pool.enter(prefill.row, prefill.caches, padding_bytes))
            self.cache.totals.num_prefill_tokens += 1

    def _settle(self, step: DecodeResult) -> None:
        """Do what a decode step left to do; clients that must hear something hear it first."""
        if step.finished or step.evicted:
            self._send_tokens()  # the others wait for nothing that is done now
        if step.is_short_of_memory and step.evicted:  # while their leases hold what they will begin from
            self._memory.free()
        for row in step.failed:
            row.fail(row.failure or EngineFailure("The row failed for an unknown reason."))
            left = next((each for each in step.broken if each.row is row), None)
            with self._cache_leases.in_transit(*([row] if left is not None else [])):
                if left is not None:
                    self._cache_leases.keep_prompt(row, left.caches, left.tokens, left.rest)
                self._release(row, None)
        for row in step.evicted:
            cause = f"{type(row.trouble).__name__}: {row.trouble}"
            again = f"request {row.request.request_id} is computed again from its tokens"
            self._report(f"A decode batch failed ({cause}); {again}.")
            row.leave_batch()
            self._release(row, None)
            self._arrive(row, has_room=True)
        with self._cache_leases.in_transit(*(left.row for left in step.finished)):
            for left in step.finished:
                self._release(left.row, left)

    def _or_leaves(self, row: Row) -> AbstractContextManager[None]:
        """Work that lets a row enter its batch: where it raises, the row fails and is released."""
        return row_fails_alone(row, self._memory, partial(self._release, row, None))

    def _release(self, row: Row, left: ExtractedRow | None) -> None:
        """Release a row; with `left` its KV is kept up to the last whole token."""
        self._forget_ended()
        if row.is_forgotten:
            self.upkeep.forget_images()
        self._account()
        self._cache_leases.release(row, left)
        if self.draft_model is not None:
            self.draft_model.release(row, is_answer_kept=left is not None)

    def _forget_ended(self) -> None:
        """Let go of rows that are over: a request has its pictures as they were sent, and an idle engine holds none."""
        for row in self._rows:
            if row.is_over:
                self._turn_order.leaves(row)
        self._rows = [each for each in self._rows if not each.is_over]
