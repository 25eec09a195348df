"""What the operator decides about an engine, and what `/health` reads of it. No arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvserve.cache.shared_cache import SharedCache
from kvserve.core import SamplingParams
from kvserve.engine.admission import Budget
from kvserve.engine.cache_records import CacheSettings
from kvserve.engine.draft_nouns import DraftSettings
from kvserve.engine.memory import MemoryPlan, MemoryReport, WantedMemory, memory_bytes, plan_memory
from kvserve.engine.model import CacheSupport, LoadedModel
from kvserve.engine.model_digest import DigestStatus
from kvserve.engine.quantised import FULL_PRECISION, KvSettings
from kvserve.engine.ranks.status import RanksStatus
from kvserve.engine.warming import WarmSettings


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What the operator decides about KV on disk; `max_bytes` None leaves it to the free space of the volume.

    `is_ephemeral`: a scratch file that vanishes with the process, and RAM holds what rows need now, nothing else.
    `beside`: patterns of other files in `folder` that count in `max_bytes`.
    """

    folder: Path
    max_bytes: int | None
    min_free_bytes: int
    ttl_hours: float
    is_ephemeral: bool = False
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the operator decides about the engine; bytes that are None are a share of the memory that weights leave.
    `wired_bytes`: 0 wires nothing, None what weights and KV take. `blas` tells what stands before MLX's own BLAS, and
    the variables that choose kernels of both, from others. `draft_folder` has the model
    that drafts; None: none does. `machine_bytes`: the memory that there is, where it is not all of this machine's.
    `shared` is the cache that several servers share."""

    max_kv_size: int
    max_concurrent_requests: int
    max_queued_requests: int
    max_batch_bytes: int | None
    prefill_step_size: int
    watchdog_seconds: float
    stream_share: float
    default_sampling: SamplingParams
    cache: CacheSettings
    kv: KvSettings = FULL_PRECISION
    disk: DiskSettings | None = None
    idle_sweep_seconds: float = 30.0
    image_feature_bytes: int | None = None
    records_bytes: int | None = None
    wired_bytes: int | None = 0
    warming: WarmSettings = WarmSettings()
    drafts: DraftSettings = DraftSettings()
    blas: str = ""
    draft_folder: Path | None = None
    machine_bytes: int | None = None
    shared: SharedCache | None = None

    def memory_plan(self, model: LoadedModel) -> MemoryPlan:
        """How the memory that this model's weights leave is divided."""
        wanted = WantedMemory(
            kv_bytes=self.cache.max_bytes,
            batch_bytes=self.max_batch_bytes,
            records_bytes=self.records_bytes,
            image_feature_bytes=self.image_feature_bytes,
            has_drafts=model.can_draft,
        )
        plan = plan_memory(self.machine_bytes or memory_bytes(), model.all_weight_bytes, wanted)
        if (draft := model.draft) is None:
            return plan
        kept, drafted = (sizes.kept(0, USUAL_ROW_TOKENS) for sizes in (model.sizes, draft.sizes))
        return plan.with_draft(drafted / (kept + drafted))

    def budget(self, model: LoadedModel) -> Budget:
        """How many rows of this model may compute at the same time, and how long they may be."""
        return Budget(
            max_rows=self.max_concurrent_requests, max_bytes=self.memory_plan(model).batch_bytes, sizes=model.sizes
        )


USUAL_ROW_TOKENS = 8192
"""The memory for KV holds about as many tokens of the model as of the one that drafts, in rows of this length."""

type EngineState = Literal["loading", "ready", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """The draft model: its folder's name, bytes of its KV in RAM and on disk, and of the tokens that rows needed those
    found in its cache and those computed. `drawn_share` of its drafts is drawn, as far as is known; `is_used`: it saves
    time."""

    name: str
    ram_bytes: int
    disk_bytes: int
    num_cached_tokens: int
    num_computed_tokens: int
    drawn_share: float
    is_used: bool


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for `/health`: rows by stage, bytes of MLX memory in use, of KV that is kept in RAM and on disk, and
    what the loaded model's caches allow."""

    state: EngineState
    num_waiting: int
    num_prefilling: int
    num_decoding: int
    active_memory_bytes: int
    cache_support: CacheSupport | None
    held_bytes: tuple[int, int] = (0, 0)
    digest: DigestStatus = DigestStatus()
    memory: MemoryReport | None = None
    draft_model: DraftStatus | None = None
    ranks: RanksStatus | None = None
