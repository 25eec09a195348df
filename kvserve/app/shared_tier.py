"""The shared cache of this process, where REMOTE_CACHE_URL names one: built from the settings, and told whom other
servers forget. Where none is named nothing of it exists.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvserve.cache.shared_cache import SharedCache
from kvserve.config import DiskMode, Settings
from kvserve.remote.redis_link import RedisLink
from kvserve.remote.shared_server import SharedServer
from kvserve.settings.redis_address import parse_address

PLACE_PREFIX = "shared-heard-"
MAX_PLACE_CHARACTERS = 64


def shared_cache(settings: Settings, mode: DiskMode, report: Callable[[str], None]) -> SharedCache | None:
    """None where none is wanted. It speaks to nobody before `start`."""
    if settings.remote_cache_url is None or mode != "on":
        return None
    address = parse_address(settings.remote_cache_url)
    server = SharedServer(address.shown, partial(RedisLink, address), report)
    # Of servers on one folder the one that heard has forgotten there for all of them.
    digest = hashlib.sha256(f"{address.shown}\n{settings.disk_cache_dir}".encode()).hexdigest()[:16]
    file = settings.state_dir / f"{PLACE_PREFIX}{digest}"
    seconds = settings.disk_cache_ttl_hours * 3_600
    return SharedCache(server, seconds, partial(_read_place, file), partial(_write_place, file))


def why_records_stay(settings: Settings) -> str | None:
    """Why what a model wrote in a conversation is known to no other server: the words that a start says; None where it
    travels."""
    if not settings.cache_session_partitioning:
        return "CACHE_SESSION_PARTITIONING=false keeps no session's apart"
    if settings.proxy_secret is None:
        return "without PROXY_SECRET nobody can tell whose they are; give all servers the same"
    return None


def _read_place(file: Path) -> str | None:
    """Up to where others' forgetting was heard; None where that was never, or is not known."""
    try:
        place = file.read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    is_place = len(place) <= MAX_PLACE_CHARACTERS and place.replace("-", "", 1).isdigit()
    return place if is_place else None


def _write_place(file: Path, place: str) -> None:
    """Whole, or not at all: what was not written down is heard again at the next start."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(place, "ascii")
        scratch.replace(file)
