"""Sets up what one engine needs on its thread, and takes it down: model, memory ledger, scheduler, disk. It knows no
request.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.remote_tier import RemoteTier
from kvserve.core import GenerationFailed, GenerationRequest, RequestId, SamplingParams, TokenSequence
from kvserve.core.rank_place import RankPlace
from kvserve.engine.borders import costs_the_disk_only
from kvserve.engine.caches_seen import CacheLook, CachesSeen, surroundings
from kvserve.engine.device import device_facts
from kvserve.engine.disk_opening import OpenTier, forget_on_disk, open_tier
from kvserve.engine.draft_model import DraftModel, refuse_unfit
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.engine_settings import EngineSettings
from kvserve.engine.file_digest import DigestMemory
from kvserve.engine.fingerprint import kv_fingerprint
from kvserve.engine.follower import follow
from kvserve.engine.memory import Account, MemoryLedger, MemoryPlan, memory_bytes, overdrawn
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.quantised import FULL_PRECISION, KvSettings
from kvserve.engine.ranks.all_named import AllNamed
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.loading import joined, read_part, refuse_unlike_look, with_other_parts
from kvserve.engine.ranks.place import ALONE, Ranks
from kvserve.engine.ranks.rank_link import Ears
from kvserve.engine.ranks.status import FollowerStatus, RanksStatus, told_of
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.self_check import check_caches
from kvserve.engine.vision_check import with_images_tried
from kvserve.engine.wired import WiredLimit, wired_bytes
from kvserve.errors import ModelLoadError, NotReady

DRAFTS = "drafts"
"""In the name of what a draft model keeps on disk: a model that is served and drafts has two writers in one process,
and each has a folder of its own."""

NOISE_SHARE = 0.5
"""To look at the noise of wide passes takes at most so much of the time that the load took until then."""

type EngineCall = Callable[[Scheduler | None], None]
"""Something that another thread wants done on the engine thread; None means that it will not be done any more."""


class EngineStart:
    """The start of one engine, and the end of what it set up. Belongs to the engine thread.

    `ledger`: all memory that grows with work, None while there is no model. `outside`: what others hold for the model.
    `can_draft`: the model was loaded to be drafted for, its caches allow that, and it pays.
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
        place: RankPlace | None = None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`send_tokens` sends tokens that wait; `put` has something done between two steps, or raises NotReady. With a
        `place` the model is computed by several ranks; `lost` is told, on any thread, why they do not any more."""
        self._folder = folder
        self.settings = settings
        self.ranks: Ranks = ALONE
        self._place = place
        self._lost = lost
        self._fingerprint = ""
        self._all_named = AllNamed(place.size if place is not None else 1, lost)
        self._digest = digest
        self._send_tokens = send_tokens
        self._put = put
        self._report = report
        self._note = note
        self._wired = WiredLimit()
        self._found_cache_limit: int | None = None
        self._draft_digest = self._digest_of(settings.draft_folder) if settings.draft_folder is not None else None
        self.outside: dict[Account, Callable[[], int]] = {}
        self.ledger: MemoryLedger | None = None
        self.can_draft = False
        self._served_cache: PrefixCache | None = None

    def load(self) -> tuple[LoadedModel, Scheduler]:
        """Load the model, try out what its caches allow where that is not remembered, and begin with an empty cache.
        Raises whatever fails."""
        began_at = perf_counter()
        mx.clear_cache()  # buffers of a model that was here before
        if self._place is not None:
            ears = Ears(self._lost, self._all_named.note, lambda: told_of(self._served_cache))
            self.ranks, self.settings = joined(self._place, self.settings, ears)
        self._digest.begin()
        draft, draft_look = self._loaded_draft()
        model, look = self._loaded(self._folder, self.settings.kv, self._digest)
        support, model = model.cache_support, self._with_drafts(replace(model, draft=draft), look, began_at)
        draft = model.draft
        plan = self.settings.memory_plan(model)
        notes = (*support.notes, *model.kv_notes, *overdrawn(memory_bytes(), model.all_weight_bytes, plan))
        model = replace(model, cache_support=replace(support, notes=notes))
        model = with_images_tried(model, plan.image_feature_bytes)
        self._digest.confirm()
        scheduler = self._new_scheduler(model)
        self._warm_up(scheduler, model)
        self.can_draft = model.can_draft
        scheduler.cache.begin_anew()
        self._served_cache = scheduler.cache
        self._open_disk(scheduler.cache, model, self.settings.kv, self._digest, plan)
        self._share_name()
        look.remember(model, support)
        if scheduler.draft_model is not None and draft is not None and draft_look is not None:
            self._begin_drafts(scheduler.draft_model, draft, draft_look, plan)
        return model, scheduler

    def _loaded(self, folder: Path, kv: KvSettings, digest: ModelDigest) -> tuple[LoadedModel, CacheLook]:
        """The model in a folder, with what its caches allow."""
        look = self._look(folder, kv, digest)
        max_kv_size, is_alone = self.settings.max_kv_size, self.ranks.is_alone
        read = None if is_alone else partial(read_part, self.ranks, kv)
        model = load(folder, max_kv_size, kv, look.probed) if is_alone else load(folder, max_kv_size, kv, read=read)
        if self.ranks.span is not None:
            self._note(f"{self.ranks.place} computes {self.ranks.span}.".capitalize())
        model = with_other_parts(self.ranks, model)
        return replace(model, cache_support=look.support or check_caches(model)), look

    def _warm_up(self, scheduler: Scheduler, model: LoadedModel) -> None:
        """Draw two tokens, once all ranks have found the same about the model."""
        refuse_unlike_look(self.ranks, model)
        if isinstance(self.ranks, FollowingRanks):
            follow(scheduler, self.ranks, "loaded")
            return
        _draw_two_tokens(scheduler, self.settings.default_sampling)
        self.ranks.tell("loaded")

    def _share_name(self) -> None:
        """Where all ranks know already what they have loaded, the first request finds what is on their disks."""
        for rank, name in enumerate(self.ranks.gathered("name", self._fingerprint)):
            if rank and name:
                self._all_named.note(rank, name)

    def _with_drafts(self, model: LoadedModel, look: CacheLook, began_at: float) -> LoadedModel:
        """The model with what its caches allow of drafts, where these are on."""
        settings = self.settings.drafts
        if not settings.is_on:
            return model
        drafts = find_draft_support(model, settings, look.drafts, NOISE_SHARE * (perf_counter() - began_at))
        for line in drafts.notes:
            self._note(line)
        if drafts.ways is None and model.draft is not None:
            self._note("DRAFT_MODEL is not used and takes no memory: nothing can be drafted.")
            model = replace(model, draft=None)
        return replace(model, drafts=drafts)

    def _loaded_draft(self) -> tuple[LoadedModel | None, CacheLook | None]:
        """The model that drafts, in full precision: it is small. Raises ModelLoadError where it cannot."""
        folder, digest = self.settings.draft_folder, self._draft_digest
        if folder is None or digest is None:
            return None, None
        digest.begin()
        model, look = self._loaded(folder, FULL_PRECISION, digest)
        refuse_unfit(model, str(folder))
        digest.confirm()
        return model, look

    def _begin_drafts(self, draft_model: DraftModel, model: LoadedModel, look: CacheLook, plan: MemoryPlan) -> None:
        """Learn what the draft model costs, and let its cache use the disk."""
        draft_model.measure()
        draft_model.cache.begin_anew()
        if self._draft_digest is not None and plan.draft is not None:
            self._open_disk(draft_model.cache, model, FULL_PRECISION, self._draft_digest, plan.draft, (DRAFTS,))
        look.remember(model, model.cache_support)

    def _digest_of(self, folder: Path) -> ModelDigest:
        """What finds out which model is in a folder beside the target's."""
        disk = self.settings.disk
        outlives = disk is not None and not disk.is_ephemeral
        memory = DigestMemory(disk.folder, self._report, self._note) if disk is not None and outlives else None
        return ModelDigest(folder, memory, self._report, self._note)

    def ranks_status(self, lost: str) -> RanksStatus | None:
        """How the ranks are, which are lost for this reason if there is one; None of an engine that computes alone.
        From any thread."""
        if self._place is None:
            return None
        followers = tuple(FollowerStatus(rank, **told) for rank, told in self.ranks.told().items())
        return RanksStatus(self._place.size, followers, lost or None)

    def stop_reading(self, timeout_seconds: float = 0.0) -> None:
        """Read no further to know the models. Idempotent, from any thread."""
        self._digest.stop(timeout_seconds)
        if self._draft_digest is not None:
            self._draft_digest.stop(timeout_seconds)

    def _look(self, folder: Path, kv: KvSettings, digest: ModelDigest) -> CacheLook:
        """What is remembered of looks at models: in the folder of what outlives the process, else nothing."""
        disk = self.settings.disk
        if disk is None or disk.is_ephemeral or not self.ranks.is_alone:  # or one rank would try what another remembers
            return CacheLook(None, digest, folder, lambda: None)
        memory = CachesSeen(disk.folder, self._report, self._note)
        return CacheLook(memory, digest, folder, partial(surroundings, kv, self.settings.blas))

    def end(self) -> None:
        """Wire nothing any more, and let MLX hold as many freed buffers as before."""
        self.ledger = self._served_cache = None
        mx.synchronize()
        self._wired.end()
        if self._found_cache_limit is not None:
            mx.set_cache_limit(self._found_cache_limit)

    def _new_scheduler(self, model: LoadedModel) -> Scheduler:
        memory = self.ledger = self._new_ledger(model)
        return Scheduler(
            model,
            self.settings.budget(model),
            PrefixCache(model, self.settings.cache, memory, secrets.token_hex(32), self.ranks),  # a name of its own
            prefill_step_size=self.settings.prefill_step_size,
            watchdog_seconds=self.settings.watchdog_seconds,
            stream_share=self.settings.stream_share,
            report=self._report,
            warming=self.settings.warming,
            send_tokens=self._send_tokens,
            draft_model=self._new_draft_model(model, memory),
            draft_settings=self.settings.drafts,
            ranks=self.ranks,
        )

    def _new_draft_model(self, model: LoadedModel, memory: MemoryLedger) -> DraftModel | None:
        """The model that drafts for another one, with its part of the memory, which that one's ledger tells of."""
        folder, draft, plan = self.settings.draft_folder, model.draft, memory.plan.draft
        if folder is None or draft is None or plan is None:
            return None

        def report(line: str) -> None:
            self._report(f"Draft model: {line}")

        draft_model = DraftModel(
            draft,
            folder.name,
            MemoryLedger(plan, report),
            self.settings.cache,
            secrets.token_hex(32),
            max_rows=self.settings.max_concurrent_requests,
            prefill_step_size=self.settings.prefill_step_size,
            num_vocab_tokens=model.vocab_size,
            warming=self.settings.warming,
            report=report,
        )
        memory.open("draft_kv", lambda: draft_model.held_bytes)
        return draft_model

    def _new_ledger(self, model: LoadedModel) -> MemoryLedger:
        """The ledger of all memory that grows with work. From here on MLX holds no more freed buffers, and wires no
        more, than it may."""
        plan = self.settings.memory_plan(model)
        self._found_cache_limit = mx.set_cache_limit(plan.buffer_bytes)
        mx.set_cache_limit(min(plan.buffer_bytes, self._found_cache_limit))
        self._wired.begin(wired_bytes(self.settings.wired_bytes, model.all_weight_bytes, plan))
        memory = MemoryLedger(plan, self._report)
        memory.open("buffers", mx.get_cache_memory)
        if (vision := model.vision) is not None:
            memory.open("image_features", lambda: vision.tower.num_bytes)
        for account, read in self.outside.items():
            memory.open(account, read)
        return memory

    def _open_disk(
        self,
        cache: PrefixCache,
        model: LoadedModel,
        kv: KvSettings,
        digest: ModelDigest,
        plan: MemoryPlan,
        salt: Sequence[str] = (),
    ) -> None:
        """Begin to use the disk, so late that nothing of the warm-up is kept. What outlives the process waits for a
        name, in which `salt` has a part."""
        if (settings := self.settings.disk) is None:
            return
        open_model = partial(open_tier, settings, plan, self._report)
        if not settings.is_ephemeral:
            cache.forget_on_disk = partial(forget_on_disk, partial(open_model, cache.hasher))
        if model.cache_support.can_keep and settings.is_ephemeral:
            self._use_disk(cache, open_model, is_ram_lent=True)
        elif model.cache_support.can_keep:
            cache.is_unnamed = True
            ways = kv, model.cache_support.cut_tokens, (*salt, *self.ranks.salt, *model.own_leaves)
            digest.when_known(partial(self._name, cache, open_model, *ways))

    def _name(
        self,
        cache: PrefixCache,
        open_model: OpenTier,
        kv: KvSettings,
        cut_tokens: int,
        leaves: Sequence[str],
        fingerprint: str,
    ) -> None:
        """Begin to use the disk between two steps: it is known what was loaded. On the thread that found it out."""
        self._fingerprint = fingerprint
        name = kv_fingerprint(fingerprint, kv, cut_tokens, leaves)

        def use(scheduler: Scheduler | None) -> None:
            if scheduler is not None:
                self._use_disk(cache, open_model, name)
                self.ranks.named(fingerprint)

        def begin() -> None:
            with suppress(NotReady):
                self._put(use)

        if self.ranks.is_alone or self.ranks.is_following:
            begin()
        else:
            self._all_named.own(fingerprint, begin)

    def _use_disk(
        self, cache: PrefixCache, open_model: OpenTier, fingerprint: str | None = None, *, is_ram_lent: bool = False
    ) -> None:
        """Let a cache write to the disk and find there what a model of this fingerprint has written; without one, what
        it writes itself. Between two steps of the engine; says what goes wrong."""
        with costs_the_disk_only(lambda reason: self._report(f"KV is not kept on disk: {reason}")):
            if fingerprint is not None:
                cache.rename(fingerprint)
            cache.has_lost_disk = (tier := open_model(cache.hasher)) is None
            if tier is not None:
                cache.use_disk(tier, is_ram_lent=is_ram_lent, remote=self._open_shared(cache, tier))

    def _open_shared(self, cache: PrefixCache, tier: DiskTier) -> RemoteTier | None:
        """What the cache of the served model has of one that several servers share; a scratch file is nobody else's."""
        store, shared = tier.worker.store, self.settings.shared
        if shared is None or cache is not self._served_cache or not isinstance(store, FolderStore):
            return None
        kind = "metal" if (facts := device_facts()).has_metal and facts.kind == "gpu" else facts.kind
        return shared.open_tier(tier, store, cache.hasher, kind)


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
