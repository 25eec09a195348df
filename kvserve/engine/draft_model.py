"""The draft model: a small model of the same tokenizer that drafts for the target on its thread, with a prefix cache,
an account of memory, a disk tier and work ahead of its own. It joins these for the drafters of rows (`model_drafter`).

    add       a row was queued: its drafter gets a part that asks this model
    release   the row is gone, or enters again: what was computed of its own tokens is kept
    warm      a prefix that is computed ahead for the target is computed here too

Everything here belongs to the engine thread. What fails here is reported, and costs no row more than its drafts.
"""

import time
from collections.abc import Callable

import mlx.core as mx

from kvserve.core import TokenSequence
from kvserve.engine.admission import Budget
from kvserve.engine.borders import costs_no_row
from kvserve.engine.cache_records import LONG_ROW_TOKENS, CacheSettings, ForgottenKv
from kvserve.engine.draft_costs import DraftCosts
from kvserve.engine.engine_settings import DraftStatus
from kvserve.engine.kv_buffers import held_arrays
from kvserve.engine.kv_room import NO_ROOM
from kvserve.engine.memory import MemoryLedger
from kvserve.engine.model import LoadedModel
from kvserve.engine.model_drafter import ComposedDrafter, DraftSetting, ModelDrafter
from kvserve.engine.prefill import ALIGNMENT_TOKENS, ChunkLength
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.return_point import why_no_return
from kvserve.engine.rows import Row
from kvserve.engine.warmer import Warmer
from kvserve.engine.warming import Warming, WarmJob, WarmSettings
from kvserve.errors import ModelLoadError

NUM_MEASURED_PASSES = 4
MEASURED_CHUNK_TOKENS = 4 * ALIGNMENT_TOKENS

IDLE_TROUBLE = "Idle work for the draft model failed"

MIN_COMPLETED_TOKENS = 5
"""Fewer are missing behind every answer: the next question computes them along with its own."""


def refuse_unfit(model: LoadedModel, name: str) -> None:
    """Raise ModelLoadError for a model that cannot draft: its KV cannot be kept, or cannot come back from tokens that
    were not drawn."""
    support = model.cache_support
    if not support.can_keep:
        reason: str | None = "its KV cannot be kept, so every turn would begin with its whole prompt"
    elif support.cut_tokens > 1:
        reason = "what it computes depends on where a prompt is cut"
    else:
        reason = why_no_return(model)
    if reason is not None:
        raise ModelLoadError(f"DRAFT_MODEL={name!r} cannot draft: {reason}.")


class DraftModel:
    """One draft model beside one target. `cache` is its prefix cache, `costs` what was measured of it."""

    def __init__(
        self,
        model: LoadedModel,
        name: str,
        memory: MemoryLedger,
        settings: CacheSettings,
        fingerprint: str,
        *,
        max_rows: int,
        prefill_step_size: int,
        num_vocab_tokens: int,
        warming: WarmSettings,
        report: Callable[[str], None],
    ) -> None:
        """`memory` is a ledger of its own; `num_vocab_tokens` are those that the target can draw."""
        self.name = name
        self.cache = PrefixCache(model, settings, memory, fingerprint)
        self.costs = DraftCosts()
        self._model = model
        self._budget = Budget(max_rows, memory.plan.batch_bytes, model.sizes)
        self._chunk_length = ChunkLength(prefill_step_size)
        self._warmer = Warmer(model, self._budget, self.cache, self._chunk_length, warming)
        self._report = report
        self._drafters: dict[Row, ModelDrafter] = {}
        self._setting = DraftSetting(
            model,
            self.cache,
            self._budget,
            self.costs,
            self._chunk_length,
            num_vocab_tokens,
            report,
            self._has_room,
            self._account,
        )

    def measure(self) -> None:
        """Learn what its passes take, the first of each kind aside, as it may compile."""
        caches = self._model.new_caches()
        self._timed(caches, MEASURED_CHUNK_TOKENS)
        seconds = self._timed(caches, MEASURED_CHUNK_TOKENS)
        self._chunk_length.measured(MEASURED_CHUNK_TOKENS, seconds)
        self.costs.prefill_seconds = seconds / MEASURED_CHUNK_TOKENS
        self._timed(caches, 1)
        for _ in range(NUM_MEASURED_PASSES):
            self.costs.note_pass(self._timed(caches, 1))

    def _timed(self, caches: list[object], num_tokens: int) -> float:
        started = time.perf_counter()
        logits = self._model.module(mx.zeros((1, num_tokens), dtype=mx.int32), cache=caches)
        mx.eval(mx.argmax(logits[0, -1]), held_arrays(caches))
        return time.perf_counter() - started

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """Let this model draft for a row whose tokens are drafted; work ahead of requests makes way."""
        self._warmer.pause()
        for gone in [each for each in self._drafters if each.is_over]:  # they failed before they began
            self.release(gone, is_answer_kept=False)
        drafter = row.request.drafter
        if isinstance(drafter, ComposedDrafter):
            drafter.model = self._drafters[row] = ModelDrafter(self._setting, row)

    def release(self, row: Row, *, is_answer_kept: bool) -> None:
        """A row has left, or enters again later: keep what was computed of it, of its answer only where the target
        keeps it too. What is missing of a row that is over is computed once nobody waits."""
        if (drafter := self._drafters.get(row)) is None:
            return
        num_missing = drafter.num_missing_tokens
        drafter.put_down(keeps_answer=is_answer_kept or not row.is_over)
        if row.is_over:
            del self._drafters[row]
            self.costs.note_answer(len(row.generated))
            if is_answer_kept and num_missing >= MIN_COMPLETED_TOKENS:
                self._complete(drafter)
        self._account()
        with costs_no_row(self._report, NO_ROOM):
            self.cache.make_room()
        if row.num_tokens >= LONG_ROW_TOKENS:
            mx.clear_cache()

    def _complete(self, drafter: ModelDrafter) -> None:
        """Have the rest of a conversation computed when the engine is idle: its next turn begins with it."""
        row = drafter.row
        if row.is_forgotten or row.request.ttl_seconds is not None:
            return
        job = WarmJob(
            TokenSequence(tuple(row.tokens())),
            "next_turn",
            row.request.message_starts,
            partition=row.request.partition,
            owner=row.request.owner,
        )
        self.warm(job)

    def drop_rows(self, *, is_cache_kept: bool) -> None:
        """All rows are gone. Where the cache goes too, nothing of them is kept."""
        for drafter in self._drafters.values():
            if is_cache_kept:
                drafter.put_down(keeps_answer=True)
            else:
                drafter.give_up()
        self._drafters.clear()
        self._warmer.drop_all("the engine begins anew")
        if not is_cache_kept:
            self.cache.clear()
        self._account()

    def _has_room(self, num_tokens: int) -> bool:
        """Whether a row of so many tokens fits beside those that are held."""
        return self._live_bytes() + self._budget.peak_bytes(num_tokens) <= self._budget.max_bytes

    def _live_bytes(self) -> float:
        held = (drafter.num_held_tokens for drafter in self._drafters.values())
        return sum(self._model.sizes.peak(num_tokens) for num_tokens in held if num_tokens)

    def _account(self) -> None:
        """Account what rows hold, each twice in part while it is kept."""
        live_bytes = self._live_bytes() + self._warmer.live_bytes() + self.cache.kv_moves.held_bytes
        self.cache.kv_room.account(live_bytes, self._model.sizes.copied(live_bytes))

    # --- while nobody waits -------------------------------------------------------------------------------------------

    def warm(self, job: WarmJob) -> None:
        """Have a prefix computed here too, where drafts are worth it; one with images is none for this model."""
        if self.costs.is_worth_it and not job.tokens.images:
            self._warmer.add(Warming(job))

    def note_busy(self) -> None:
        """Note that rows compute."""
        self._warmer.note_busy()

    def do_idle_work(self) -> bool:
        """One small piece of work that no request waits for. Whether there was any."""
        self._account()
        if not self.costs.is_worth_it:
            self._warmer.drop_all("drafts do not pay")
        has_worked = False
        with costs_no_row(self._report, IDLE_TROUBLE):
            has_worked = self.cache.do_disk_work() or self.cache.coalesce() or self._warmer.step()
        return has_worked

    def seconds_to_rest(self, at_most: float) -> float:
        """How long an idle engine may wait before it looks again."""
        due = self._warmer.seconds_until_due()
        return at_most if due is None else min(due, at_most)

    def sweep(self) -> None:
        """Evict what has outlived its time."""
        self._account()
        self.cache.make_room()
        self.cache.kv_room.evict_rest(to_its_end=True)
        self.cache.kv_room.memory.look()

    def give_ram_back(self) -> None:
        """Where RAM is only lent, evict what no row uses as soon as the disk has it."""
        self.cache.give_ram_back()

    # --- forgetting, the end, what is told ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything that is kept; running rows continue."""
        self._warmer.drop_all("cleared")
        self.cache.empty()

    def forget(self, is_forgotten: Callable[[str], bool]) -> ForgottenKv:
        """Forget what only the requests of these owners used; the rows have been told before."""
        self._warmer.forget(is_forgotten)
        for drafter in self._drafters.values():
            drafter.note_forgotten()
        return self.cache.forget(is_forgotten)

    def keep_running(self) -> None:
        """Keep what rows have computed so far: none of them will continue."""
        self._warmer.drop_all("shutdown")
        for drafter in self._drafters.values():
            drafter.put_down(keeps_answer=True)

    @property
    def held_bytes(self) -> int:
        """Bytes of all its KV in memory; from any thread."""
        return self.cache.kv_room.memory.all_kv_bytes

    def status(self) -> DraftStatus:
        """What is told of it; from any thread, numbers of about now."""
        setting, (ram_bytes, disk_bytes) = self._setting, self.cache.held_bytes()
        return DraftStatus(
            self.name,
            ram_bytes,
            disk_bytes,
            setting.num_cached_tokens,
            setting.num_computed_tokens,
            round(self.costs.drawn_share, 3),
            self.costs.is_worth_it,
        )
