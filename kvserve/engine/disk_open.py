"""Opens the disk tier of a model as the operator wants it, or says why there is none. It knows folders and settings."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_blob import FORMAT
from kvserve.cache.disk_faults import Faults
from kvserve.cache.disk_records import DiskLimits, Removal
from kvserve.cache.disk_scratch import BlobStore, ScratchStore
from kvserve.cache.disk_store import INDEX_NAME, FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.forget_users import IsForgotten
from kvserve.engine.borders import costs_the_disk_only
from kvserve.engine.memory import READ_AHEAD_CAP, WRITE_QUEUE_CAP
from kvserve.engine.prefix_cache import PrefixCache

FOLDER_NAME_DIGITS = 32
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What the operator decides about KV on disk; `max_bytes` None leaves it to the free space of the volume.

    What may wait to be written, or be read ahead, is for the engine to say where it is None.
    `is_ephemeral`: a scratch file that vanishes with the process, and RAM holds what rows need now, nothing else.
    `beside`: patterns of other files in `folder` that count in `max_bytes`.
    """

    folder: Path
    max_bytes: int | None
    min_free_bytes: int
    ttl_hours: float
    max_queued_bytes: int | None = None
    max_read_ahead_bytes: int | None = None
    is_ephemeral: bool = False
    beside: tuple[str, ...] = ()


def open_disk(settings: DiskSettings, hasher: BlockHasher, report: Callable[[str], None]) -> DiskTier | None:
    """The disk tier of the model that `hasher` names prefixes of; None, with a line for a person, if it cannot be."""
    limits = DiskLimits(
        settings.max_bytes,
        settings.min_free_bytes,
        settings.ttl_hours * 3600,
        max_queued_bytes=settings.max_queued_bytes or WRITE_QUEUE_CAP,
        max_read_ahead_bytes=settings.max_read_ahead_bytes or READ_AHEAD_CAP,
    )
    model = folder_name(hasher.fingerprint)
    try:
        store = _open_store(settings, model)
        return DiskTier(store, BlobTrie(hasher, model), limits, Faults(report))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the disk, a server without it serves
        report(f"KV is not kept on disk: {settings.folder} cannot be used ({error}). Set DISK_CACHE_DIR.")
        return None


def use_disk(
    cache: PrefixCache, settings: DiskSettings, report: Callable[[str], None], fingerprint: str | None = None
) -> None:
    """Let a cache write to the disk and find there what a model of this fingerprint has written; without one, what it
    writes itself. Between two steps of the engine; says what goes wrong."""
    with costs_the_disk_only(lambda reason: report(f"KV is not kept on disk: {reason}")):
        if fingerprint is not None:
            cache.rename(fingerprint)
        cache.has_lost_disk = (tier := open_disk(settings, cache.hasher, report)) is None
        if tier is not None:
            cache.use_disk(tier, is_ram_lent=settings.is_ephemeral)


def forget_on_disk(
    settings: DiskSettings, hasher: BlockHasher, report: Callable[[str], None], is_forgotten: IsForgotten
) -> Removal:
    """Forget what others than these users do not need of all models that ever wrote here, where the loaded one has no
    disk tier: its caches cannot be kept, or the folder could not be used at the start. Blocks on the disk."""
    if settings.is_ephemeral:
        return Removal(0, is_done=True)
    tier = open_disk(settings, hasher, report)
    if tier is None:
        return Removal(0, is_done=False)
    try:
        return tier.forget(is_forgotten) + tier.forget_of_others(is_forgotten)
    finally:
        tier.close(CLOSE_SECONDS)


def _open_store(settings: DiskSettings, model: str) -> BlobStore:
    if settings.is_ephemeral:
        return ScratchStore(settings.folder, model)
    return FolderStore(settings.folder, model, (f"{INDEX_NAME}*", *settings.beside))


def folder_name(fingerprint: str) -> str:
    """Where a model's blobs lie: by what its KV depends on, and their form."""
    return hashlib.sha256(f"{FORMAT}\n{fingerprint}".encode()).hexdigest()[:FOLDER_NAME_DIGITS]
