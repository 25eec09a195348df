"""Opens the disk tier of a model: a folder that outlives the process, or a scratch file. It knows settings and names,
no request and no array.
"""

import hashlib
from collections.abc import Callable

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_blob import FORMAT
from kvserve.cache.disk_records import DiskLimits, Faults, Removal
from kvserve.cache.disk_scratch import ScratchStore
from kvserve.cache.disk_store import INDEX_NAME, FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.forget_users import IsForgotten
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.memory import MemoryPlan

FOLDER_NAME_DIGITS = 32
CLOSE_SECONDS = 5.0

type OpenTier = Callable[[BlockHasher], DiskTier | None]
"""Opens the disk tier of the model that the hasher names prefixes of; None if it cannot be."""


def open_tier(
    settings: DiskSettings, plan: MemoryPlan, report: Callable[[str], None], hasher: BlockHasher
) -> DiskTier | None:
    """The disk tier of the model that `hasher` names prefixes of; None, with a line for a person, without one."""
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
        return DiskTier(store, BlobTrie(hasher, model), limits, Faults(report))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the disk, a server without it serves
        report(f"KV is not kept on disk: {settings.folder} cannot be used ({error}). Set DISK_CACHE_DIR.")
        return None


def forget_on_disk(open_model: Callable[[], DiskTier | None], is_forgotten: IsForgotten) -> Removal:
    """Forget what others than these users do not need of all models that ever wrote here, where the loaded one has no
    disk tier: its caches cannot be kept, or the folder could not be used at the start. Blocks on the disk."""
    if (tier := open_model()) is None:
        return Removal(0, is_done=False)
    try:
        return tier.forget(is_forgotten) + tier.forget_of_others(is_forgotten)
    finally:
        tier.close(CLOSE_SECONDS)


def folder_name(fingerprint: str) -> str:
    """Where a model's blobs lie: by what its KV depends on, and their form."""
    return hashlib.sha256(f"{FORMAT}\n{fingerprint}".encode()).hexdigest()[:FOLDER_NAME_DIGITS]
