"""The engine thread: it owns the model and keeps the scheduler going, whatever a request does to it.

Web threads put requests in and take events out; they never touch an array.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from kvserve.core import GenerationRequest, TokenSequence
from kvserve.core.rank_place import RankPlace
from kvserve.engine import forget_everywhere
from kvserve.engine.borders import described, engine_outlives
from kvserve.engine.cache_records import CacheReport, ForgottenKv
from kvserve.engine.disk_writing import NOTHING_TO_FLUSH
from kvserve.engine.engine_settings import EngineSettings, EngineState, EngineStatus
from kvserve.engine.engine_start import EngineCall, EngineStart
from kvserve.engine.file_digest import DigestMemory
from kvserve.engine.follower import follow
from kvserve.engine.inbox import Inbox
from kvserve.engine.logits_processors import LogprobReader
from kvserve.engine.memory import Account
from kvserve.engine.model import LoadedModel
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.model_drafter import ComposedDrafter
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.submitting import check, constraints_of, within_memory
from kvserve.engine.token_dispatcher import TokenDispatcher
from kvserve.engine.vision_tower import ImageReport
from kvserve.engine.warming import Warming, WarmJob
from kvserve.errors import EngineFailure, ModelLoadError, NotReady, RankLost

CALL_TIMEOUT_SECONDS = 30.0
DIGEST_STOP_SECONDS = 2.0
FLUSH_SECONDS = 20.0
"""How long the end of the process may wait for KV that is on its way to the disk."""

TELL_SECONDS = 0.25
"""How often the waiting caller hears how far that is."""


class Engine:
    """One model on one thread. Every public method may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        *,
        grammar_tokenizer: Callable[[int], Any],
        report: Callable[[str], None],
        note: Callable[[str], None] = lambda _: None,
        place: RankPlace | None = None,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`grammar_tokenizer` makes an llguidance tokenizer for a logits width; `report` takes lines for a person on
        what went wrong, `note` on what is worth knowing. With a `place` the model is computed by several ranks;
        `on_lost` is told, once and on any thread, why they do not any more ("": rank 0 has stopped)."""
        self._folder = folder
        self._settings = settings
        self._grammar_tokenizer = grammar_tokenizer
        self._report = report
        self._inbox = Inbox()
        self._on_lost = on_lost
        self._loaded = threading.Event()
        self._stopping = threading.Event()
        self._is_flushing = threading.Event()
        self._flush = NOTHING_TO_FLUSH
        self._load_error: ModelLoadError | None = None
        self._model: LoadedModel | None = None
        self._scheduler: Scheduler | None = None
        self._dispatcher = TokenDispatcher()
        outlives = (disk := settings.disk) is not None and not disk.is_ephemeral
        memory = DigestMemory(disk.folder, report, note) if disk and outlives else None
        self.digest = ModelDigest(folder, memory, report, note)
        self._start = EngineStart(
            folder,
            settings,
            self.digest,
            send_tokens=self._dispatcher.send,
            put=self._inbox.put,
            report=report,
            note=note,
            place=place,
            lost=self.lose,
        )
        self._thread = threading.Thread(target=self._run, name="kvserve-engine", daemon=True)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading; `wait_until_ready` tells how it went."""
        self._dispatcher.start()
        self._thread.start()

    def wait_until_ready(self, timeout_seconds: float | None = None) -> LoadedModel:
        """Wait for the model. Raises ModelLoadError if it cannot be loaded, NotReady after the timeout."""
        self._loaded.wait(timeout_seconds)
        if self._load_error is not None:
            raise self._load_error
        if self._stopping.is_set():
            raise self._inbox.refusal()
        if self._model is None:
            raise NotReady("The model is still loading.", retry_after_seconds=5)
        return self._model

    @property
    def status(self) -> EngineStatus:
        """Row counts are those of the moment; the engine thread may be changing them."""
        scheduler = self._scheduler
        num_prefilling = scheduler.num_prefilling if scheduler else 0
        num_decoding = scheduler.num_decoding if scheduler else 0
        return EngineStatus(
            state=self._state(),
            num_waiting=max(0, self._inbox.num_open - num_prefilling - num_decoding),
            num_prefilling=num_prefilling,
            num_decoding=num_decoding,
            active_memory_bytes=mx.get_active_memory(),
            cache_support=model.cache_support if (model := self._model) is not None else None,
            held_bytes=scheduler.cache.held_bytes() if scheduler else (0, 0),
            digest=self.digest.status,
            memory=memory.report() if (memory := self._start.ledger) is not None else None,
            draft_model=draft.status() if scheduler and (draft := scheduler.draft_model) is not None else None,
            ranks=self._start.ranks_status(self._inbox.lost),
        )

    @property
    def can_draft(self) -> bool:
        """Whether the model was loaded to be drafted for, and its caches allow that."""
        return self._start.can_draft

    def count(self, account: Account, read: Callable[[], int]) -> None:
        """Count in this model's ledger what another part of the server holds for it. Before `start`."""
        self._start.outside[account] = read

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request; computes nothing.

        Raises ContextOverflow, BadRequest (logit_bias, a begun answer), MemoryExhausted, QueueFull, NotReady, or
        EngineFailure for a grammar that cannot be used.
        """
        model = self.wait_until_ready(0)
        budget = self._settings.budget(model)
        check(request, model, budget)
        request = within_memory(request, budget, self._start.ledger)
        if model.draft is not None and request.drafter is not None:
            request = replace(request, drafter=ComposedDrafter(request.drafter))
        constraints = constraints_of(request, partial(self._grammar_tokenizer, model.vocab_size))
        logprobs = LogprobReader(request.num_top_logprobs) if request.num_top_logprobs is not None else None
        self._inbox.let_in(self._settings.max_concurrent_requests + self._settings.max_queued_requests)
        handle = RequestHandle(request, self._dispatcher.dispatch)
        ended = partial(self._inbox.ended, handle)
        try:
            self._inbox.put(Row(handle, ended, constraints, is_forgotten=request.is_forgotten, logprobs=logprobs))
        except (NotReady, RankLost):
            ended()
            raise
        return handle

    def warm(self, job: WarmJob) -> Warming:
        """Have this prefix's KV computed while the engine is idle; neither waits nor raises."""
        warming = Warming(job)
        if not self._start.ranks.is_alone:
            warming.drop("nothing is computed ahead over several ranks")
            return warming
        try:
            self.wait_until_ready(0)
            self._inbox.put(lambda scheduler: scheduler.upkeep.warm(warming) if scheduler else warming.drop("shutdown"))
        except (NotReady, ModelLoadError):
            warming.drop("not ready")
        return warming

    def cache_report(self) -> CacheReport:
        """What the prefix cache holds and has done. Raises NotReady."""
        return self._ask(lambda scheduler: scheduler.report())

    def kept_tokens(self, tokens: TokenSequence) -> tuple[int, int]:
        """How many of these tokens' KV RAM has, and how many RAM or the disk. Raises NotReady."""
        return self._ask(lambda scheduler: scheduler.cache.kept_tokens(tokens))

    def discard(self, tokens: TokenSequence, is_owner: Callable[[str], bool]) -> None:
        """Forget what serves only this conversation and these owners, on disk too. Raises NotReady."""
        self._ask(lambda scheduler: forget_everywhere.discard(scheduler, self._start.ranks, tokens, is_owner))

    def clear_cache(self) -> None:
        """Forget everything that is kept, on disk too; running rows continue. Raises NotReady."""
        self._ask(lambda scheduler: forget_everywhere.clear(scheduler, self._start.ranks))

    def forget(self, owners: Callable[[str], bool]) -> ForgottenKv:
        """Forget what only the requests of these owners used, in RAM and on disk; it waits for the disk, and where that
        is about models that are not loaded the engine does not. Raises NotReady."""
        forget = forget_everywhere.forget
        gone, cache = self._ask(lambda scheduler: (forget(scheduler, self._start.ranks, owners), scheduler.cache))
        others = cache.forget_of_others(owners)
        num_bytes, is_done = gone.num_disk_bytes + others.num_bytes, gone.is_done and others.is_done
        return replace(gone, num_disk_bytes=num_bytes, is_done=is_done)

    def image_report(self) -> ImageReport | None:
        """What the vision tower has done; None for a model that takes no images. Raises NotReady."""
        vision = self.wait_until_ready(0).vision
        return vision.tower.report() if vision is not None else None

    def _ask[T](self, question: Callable[[Scheduler], T]) -> T:
        """Have something done between two steps of the engine, and wait for it."""
        self.wait_until_ready(0)
        try:
            return self._inbox.ask(question).result(CALL_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise NotReady("The engine is busy.", retry_after_seconds=5) from error

    def stop(self, timeout_seconds: float = 4.0, tell: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """End every row with reason `shutdown`, free the model and join the thread. Idempotent.

        With a timeout the thread has FLUSH_SECONDS more where it writes what it has to disk: `tell` hears meanwhile of
        how many bytes it has written, and of how many there are.
        """
        self._stopping.set()
        self._start.stop_reading()
        self._inbox.wake()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_seconds)
        until = time.monotonic() + (FLUSH_SECONDS if timeout_seconds and self._is_flushing.is_set() else 0.0)
        while self._thread.is_alive() and (seconds := until - time.monotonic()) > 0:
            tell(*self.flushed_bytes)
            self._thread.join(min(TELL_SECONDS, seconds))

    @property
    def flushed_bytes(self) -> tuple[int, int]:
        """How much the end has written of what it has to write, as far as that is known."""
        flush = self._flush
        return min(flush.num_written_bytes(), flush.num_bytes), flush.num_bytes

    @property
    def is_running(self) -> bool:
        """Whether the thread loads, computes or writes: after `stop` only where a pass or a load outlasts the wait."""
        return self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has run and is over: nothing of the model is left in it."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _state(self) -> EngineState:
        if self._load_error is not None:
            return "failed"
        if self._stopping.is_set():
            return "stopped"
        return "ready" if self._model is not None else "loading"

    def lose(self, reason: str) -> None:
        """The ranks do not compute together any more: every request hears of it from this thread, as the engine's may
        never come back from a pass. The first reason counts."""
        if not self._inbox.lose(reason):
            return
        if self._model is None:
            self._load_error = self._load_error or ModelLoadError(f"The ranks do not compute together: {reason}.")
            self._loaded.set()
        self._stopping.set()
        self._inbox.wake()
        self._on_lost(reason)

    # --- the engine thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with mx.stream(generation_stream):
                try:
                    self._load()
                    while self._scheduler is not None and not self._stopping.is_set():
                        self._serve(self._scheduler)
                    self._start.ranks.tell("end")
                    self._keep_on_disk()
                except RanksLost as lost:
                    self.lose(str(lost))
                    self._is_flushing.set()
                self._end()
        finally:
            self._loaded.set()
            self._dispatcher.stop()
            self._start.stop_reading(DIGEST_STOP_SECONDS)
            mx.clear_streams()  # else the interpreter aborts at exit because MLX ran on another thread

    def _end(self) -> None:
        """Let go of rows, of the model and of what is kept, once that is on disk."""
        self._end_all_rows()
        if self._scheduler is not None:
            if self._scheduler.upkeep.close_disk(FLUSH_SECONDS):
                self._flush = NOTHING_TO_FLUSH
            self._scheduler.cache.clear()
            if self._scheduler.draft_model is not None:
                self._scheduler.draft_model.cache.clear()
        self._model = self._scheduler = None
        self._start.ranks.close()
        self._start.end()

    def _load(self) -> None:
        try:
            model, scheduler = self._start.load()
        except ModelLoadError as error:
            self._load_error = error
            return
        except Exception as error:  # noqa: BLE001 - callers that wait for the model must hear of it, whatever it was
            self._load_error = ModelLoadError(f"The model in {self._folder} could not be loaded: {described(error)}")
            return
        self._settings = self._start.settings
        self._scheduler, self._model = scheduler, model
        self._loaded.set()

    def _keep_on_disk(self) -> None:
        """Keep what running rows have computed, to be written with all that RAM has."""
        if self._scheduler is None:
            return
        with engine_outlives(self._report, "KV could not be kept at the end"):
            self._is_flushing.set()
            self._dispatcher.send()
            self._scheduler.keep_running()
            self._flush = self._scheduler.upkeep.begin_flush()

    def _serve(self, scheduler: Scheduler) -> None:
        """The loop. A defect that no row can be blamed for ends all rows; the model stays loaded."""
        trouble = "The engine failed and starts again with the model loaded"
        with engine_outlives(self._report, trouble, partial(self._begin_anew, scheduler)):
            if isinstance(ranks := self._start.ranks, FollowingRanks):
                follow(scheduler, ranks, "end", self._inbox.take_calls, self._settings.idle_sweep_seconds)
                self._stopping.set()
                self._on_lost("")
            while not self._stopping.is_set():
                self._take_submitted(scheduler)
                scheduler.tick()

    def _begin_anew(self, scheduler: Scheduler, reason: str) -> None:
        if not self._start.ranks.is_alone:  # the others have not failed, and go on
            raise RanksLost(f"the engine failed on {self._start.ranks.place}: {reason}")
        for row in scheduler.drain():
            row.fail(EngineFailure(f"The engine failed on this request: {reason}"))
        mx.clear_cache()

    def _take_submitted(self, scheduler: Scheduler) -> None:
        """Move what was submitted into the scheduler; waits for something to do while there is nothing."""
        try:
            while True:
                while scheduler.is_idle and self._inbox.empty() and scheduler.do_idle_work():
                    pass
                if (item := self._next_item(scheduler)) is None:
                    return
                if isinstance(item, Row):
                    scheduler.add(item)
                else:
                    self._dispatcher.send()  # no stream waits for it
                    item(scheduler)
        except queue.Empty:
            return

    def _next_item(self, scheduler: Scheduler) -> "Row | EngineCall | None":
        """The next of the inbox. An idle engine waits, and looks now and then for what has outlived its time."""
        if not scheduler.is_idle or self._stopping.is_set():
            return self._inbox.get_nowait()
        try:
            return self._inbox.get(timeout=scheduler.seconds_to_rest(self._settings.idle_sweep_seconds))
        except queue.Empty:
            scheduler.sweep()
            raise

    def _end_all_rows(self) -> None:
        rows = self._scheduler.drain(is_last=True) if self._scheduler else []
        for item in self._inbox.closed():
            if isinstance(item, Row):
                rows.append(item)
            else:
                item(None)
        for row in rows:
            row.finish("shutdown")
