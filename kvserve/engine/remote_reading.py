"""When a row waits for the shared cache, and how long. It belongs to the engine thread, which never waits itself: the
row is looked at again after each step of the others.
"""

from kvserve.cache.match import PrefixMatch
from kvserve.cache.remote_fetch import Fetch
from kvserve.cache.remote_tier import RemoteTier
from kvserve.core import Unshared

END_SECONDS = 2.0
"""So long the end of a model waits for what is still to be sent."""


def begin_fetch(
    remote: RemoteTier, match: PrefixMatch, on_disk: int, room_bytes: float, *, needs_checkpoints: bool
) -> Fetch | Unshared:
    """Look for what the shared cache has of a row's prompt beyond RAM and the disk; or why that is not done."""
    known = max(match.num_usable_tokens, on_disk)
    return remote.begin(match.run, match.chain, known, room_bytes, needs_checkpoints=needs_checkpoints)


def awaits(fetch: Fetch) -> bool:
    """Whether a row goes on waiting; one that has waited long enough gives up."""
    if not fetch.is_over and fetch.is_late():
        fetch.give_up()
    return not fetch.is_over
