"""Sets up what one engine needs on its thread, and takes it down: model, memory ledger, scheduler, disk. It knows no
request.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_blob import FORMAT
from kvserve.cache.disk_records import DiskLimits, Faults, Removal
from kvserve.cache.disk_scratch import ScratchStore
from kvserve.cache.disk_store import INDEX_NAME, FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.forget_users import IsForgotten
from kvserve.core import GenerationFailed, GenerationRequest, RequestId, SamplingParams, TokenSequence
from kvserve.engine.borders import costs_the_disk_only
from kvserve.engine.caches_seen import CacheLook, CachesSeen, surroundings
from kvserve.engine.engine_settings import DiskSettings, EngineSettings
from kvserve.engine.fingerprint import kv_fingerprint
from kvserve.engine.memory import Account, MemoryLedger, MemoryPlan, memory_bytes, overdrawn
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.self_check import check_caches
from kvserve.engine.vision_check import with_images_tried
from kvserve.engine.wired import WiredLimit, wired_bytes
from kvserve.errors import ModelLoadError, NotReady

FOLDER_NAME_DIGITS = 32
CLOSE_SECONDS = 5.0

type EngineCall = Callable[[Scheduler | None], None]
"""Something that another thread wants done on the engine thread; None means that it will not be done any more."""

type OpenTier = Callable[[BlockHasher], DiskTier | None]
"""Opens the disk tier of the model that the hasher names prefixes of; None if it cannot be."""


class EngineStart:
    """The start of one engine, and the end of what it set up. Belongs to the engine thread.

    `ledger`: all memory that grows with work, None while there is no model. `outside`: what others hold for the model.
    `can_draft`: the model was loaded to be drafted for, and its caches allow that.
    """

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        digest: ModelDigest,
        *,
        send_tokens: Callable[[], None],
        put: Callable[[EngineCall], None],
        report: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """`send_tokens` sends tokens that wait; `put` has something done between two steps, or raises NotReady."""
        self._folder = folder
        self._settings = settings
        self._digest = digest
        self._send_tokens = send_tokens
        self._put = put
        self._report = report
        self._note = note
        self._wired = WiredLimit()
        self._found_cache_limit: int | None = None
        self.outside: dict[Account, Callable[[], int]] = {}
        self.ledger: MemoryLedger | None = None
        self.can_draft = False

    def load(self) -> tuple[LoadedModel, Scheduler]:
        """Load the model, try out what its caches allow where that is not remembered, and begin with an empty cache.
        Raises whatever fails."""
        mx.clear_cache()  # buffers of a model that was here before
        self._digest.begin()
        look = self._look()
        model = load(self._folder, self._settings.max_kv_size, self._settings.kv, look.probed)
        support, plan = look.support or check_caches(model), self._settings.memory_plan(model)
        notes = (*support.notes, *model.kv_notes, *overdrawn(memory_bytes(), model.weight_bytes, plan))
        model = replace(model, cache_support=replace(support, notes=notes))
        model = with_images_tried(model, plan.image_feature_bytes)
        self._digest.confirm()
        scheduler = self._new_scheduler(model)
        _draw_two_tokens(scheduler, self._settings.default_sampling)
        if self._settings.drafts.is_on:
            drafts = scheduler.try_drafts()
            self.can_draft = drafts.ways is not None
            for line in drafts.notes:
                self._note(line)
        scheduler.cache.begin_anew()
        self._open_disk(scheduler.cache, model)
        look.remember(model, support)
        return model, scheduler

    def _look(self) -> CacheLook:
        """What is remembered of looks at models: in the folder of what outlives the process, else nothing."""
        disk, kv = self._settings.disk, self._settings.kv
        if disk is None or disk.is_ephemeral:
            return CacheLook(None, self._digest, self._folder, lambda: None)
        memory = CachesSeen(disk.folder, self._report, self._note)
        return CacheLook(memory, self._digest, self._folder, partial(surroundings, kv, self._settings.blas))

    def end(self) -> None:
        """Wire nothing any more, and let MLX hold as many freed buffers as before."""
        self.ledger = None
        mx.synchronize()
        self._wired.end()
        if self._found_cache_limit is not None:
            mx.set_cache_limit(self._found_cache_limit)

    def _new_scheduler(self, model: LoadedModel) -> Scheduler:
        memory = self.ledger = self._new_ledger(model)
        return Scheduler(
            model,
            self._settings.budget(model),
            PrefixCache(model, self._settings.cache, memory, secrets.token_hex(32)),  # a name of its own
            prefill_step_size=self._settings.prefill_step_size,
            watchdog_seconds=self._settings.watchdog_seconds,
            stream_share=self._settings.stream_share,
            report=self._report,
            warming=self._settings.warming,
            send_tokens=self._send_tokens,
            draft_settings=self._settings.drafts,
        )

    def _new_ledger(self, model: LoadedModel) -> MemoryLedger:
        """The ledger of all memory that grows with work. From here on MLX holds no more freed buffers, and wires no
        more, than it may."""
        plan = self._settings.memory_plan(model)
        self._found_cache_limit = mx.set_cache_limit(plan.buffer_bytes)
        mx.set_cache_limit(min(plan.buffer_bytes, self._found_cache_limit))
        self._wired.begin(wired_bytes(self._settings.wired_bytes, model.weight_bytes, plan))
        memory = MemoryLedger(plan, self._report)
        memory.open("buffers", mx.get_cache_memory)
        if (vision := model.vision) is not None:
            memory.open("image_features", lambda: vision.tower.num_bytes)
        for account, read in self.outside.items():
            memory.open(account, read)
        return memory

    def _open_disk(self, cache: PrefixCache, model: LoadedModel) -> None:
        """Begin to use the disk, so late that nothing of the warm-up is kept. What outlives the process waits for a
        name."""
        if (settings := self._settings.disk) is None:
            return
        open_tier = partial(self._open_tier, settings, self._settings.memory_plan(model))
        if not settings.is_ephemeral:
            cache.forget_on_disk = partial(_forget_on_disk, partial(open_tier, cache.hasher))
        if model.cache_support.can_keep and settings.is_ephemeral:
            self._use_disk(cache, open_tier, is_ram_lent=True)
        elif model.cache_support.can_keep:
            cache.is_unnamed = True
            ways = model.cache_support.cut_tokens, model.own_leaves
            self._digest.when_known(partial(self._name, open_tier, *ways))

    def _name(self, open_tier: OpenTier, cut_tokens: int, leaves: Sequence[str], fingerprint: str) -> None:
        """Begin to use the disk between two steps: it is known what was loaded. On the thread that found it out."""
        name = kv_fingerprint(fingerprint, self._settings.kv, cut_tokens, leaves)
        with suppress(NotReady):
            self._put(lambda scheduler: self._use_disk(scheduler.cache, open_tier, name) if scheduler else None)

    def _use_disk(
        self, cache: PrefixCache, open_tier: OpenTier, fingerprint: str | None = None, *, is_ram_lent: bool = False
    ) -> None:
        """Let a cache write to the disk and find there what a model of this fingerprint has written; without one, what
        it writes itself. Between two steps of the engine; says what goes wrong."""
        with costs_the_disk_only(lambda reason: self._report(f"KV is not kept on disk: {reason}")):
            if fingerprint is not None:
                cache.rename(fingerprint)
            cache.has_lost_disk = (tier := open_tier(cache.hasher)) is None
            if tier is not None:
                cache.use_disk(tier, is_ram_lent=is_ram_lent)

    def _open_tier(self, settings: DiskSettings, plan: MemoryPlan, hasher: BlockHasher) -> DiskTier | None:
        """The disk tier of the model that `hasher` names prefixes of; None, with a line for a person, if it cannot
        be."""
        limits = DiskLimits(
            settings.max_bytes,
            settings.min_free_bytes,
            settings.ttl_hours * 3600,
            max_queued_bytes=plan.write_queue_bytes,
            max_read_ahead_bytes=plan.read_ahead_bytes,
        )
        model = folder_name(hasher.fingerprint)
        try:
            store = (
                ScratchStore(settings.folder, model)
                if settings.is_ephemeral
                else FolderStore(settings.folder, model, (f"{INDEX_NAME}*", *settings.beside))
            )
            return DiskTier(store, BlobTrie(hasher, model), limits, Faults(self._report))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the disk, a server without it serves
            self._report(f"KV is not kept on disk: {settings.folder} cannot be used ({error}). Set DISK_CACHE_DIR.")
            return None


def _forget_on_disk(open_tier: Callable[[], DiskTier | None], is_forgotten: IsForgotten) -> Removal:
    """Forget what others than these users do not need of all models that ever wrote here, where the loaded one has no
    disk tier: its caches cannot be kept, or the folder could not be used at the start. Blocks on the disk."""
    if (tier := open_tier()) is None:
        return Removal(0, is_done=False)
    try:
        return tier.forget(is_forgotten) + tier.forget_of_others(is_forgotten)
    finally:
        tier.close(CLOSE_SECONDS)


def folder_name(fingerprint: str) -> str:
    """Where a model's blobs lie: by what its KV depends on, and their form."""
    return hashlib.sha256(f"{FORMAT}\n{fingerprint}".encode()).hexdigest()[:FOLDER_NAME_DIGITS]


def _draw_two_tokens(scheduler: Scheduler, sampling: SamplingParams) -> None:
    """Draw two tokens as a request would: kernels are compiled at their first use, which can take seconds.

    Raises ModelLoadError for a model that loads but cannot generate.
    """
    request = GenerationRequest(RequestId("warm-up"), TokenSequence((0, 0)), 2, sampling, frozenset())
    handle = RequestHandle(request)
    scheduler.add(Row(handle, lambda: None))
    while not scheduler.is_idle:
        scheduler.tick()
    for batch in handle.batches(0):
        if batch and isinstance(batch[-1], GenerationFailed):
            raise ModelLoadError(f"The model was loaded, but it cannot generate: {batch[-1].error}")
