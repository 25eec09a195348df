"""How the ranks of one model find each other. It knows MLX's group of processes, and nothing of models and rows.

The ranks agree on a port and a secret by a first collective; each follower shows the secret on its connection to
rank 0. The secret keeps strangers out, it does not hide what goes over the wire.
"""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from kvserve.core.rank_place import RankPlace
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.leading import LeadingRanks
from kvserve.engine.ranks.place import Ranks
from kvserve.engine.ranks.rank_link import Ears, Progress, RankLink
from kvserve.errors import ModelLoadError

SECRET_BYTES = 32
RANK_BYTES = 4
JOIN_SECONDS = 60.0
"""So long rank 0 waits for the connections of the others, once all have joined the group."""

GREETING_SECONDS = 5.0
"""So long it waits for the secret of one that has connected: a rank says it at once."""

LEVEL_MARK, NUM_LEVEL_MARKS = 0x5EED, 257
"""Of no pass: it sums nothing of such a value, or of so many."""


def join(place: RankPlace, ears: Ears) -> Ranks:
    """Join the other ranks; blocks until all are there. Called once in a process, on the thread that computes.

    Raises ModelLoadError where the group or a connection cannot be had.
    """
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise ModelLoadError(f"The ranks cannot find each other: {error}") from error
    if (group.rank(), group.size()) != (place.rank, place.size):
        raise ModelLoadError(f"This is {place}, but MLX says rank {group.rank()} of {group.size()}.")
    progress, is_lead = Progress(), mx.array(int(place.leads), dtype=mx.uint32)

    def agree(ids: mx.array) -> mx.array:
        return mx.distributed.all_sum(ids.astype(mx.uint32) * is_lead, group=group)

    def level() -> bool:
        marks = mx.distributed.all_sum(mx.full((NUM_LEVEL_MARKS,), LEVEL_MARK, dtype=mx.uint32), group=group)
        return bool(mx.all(marks == LEVEL_MARK * place.size).item())

    try:
        if place.leads:
            links = _accepted(place, agree, progress, ears)
            ranks: Ranks = LeadingRanks(place, links, progress, agree, level)
        else:
            links = [_connected(place, agree, progress, ears)]
            ranks = FollowingRanks(place, links[0], progress, agree, level)
    except OSError as error:
        raise ModelLoadError(f"{place} has no connection to the others at {place.link_host}: {error}") from error
    for link in links:
        link.start()
    return ranks


def _accepted(
    place: RankPlace, agree: Callable[[mx.array], mx.array], progress: Progress, ears: Ears
) -> list[RankLink]:
    family = socket.AF_INET6 if ":" in place.link_host else socket.AF_INET
    secret = secrets.token_bytes(SECRET_BYTES)
    with socket.create_server((place.link_host, 0), family=family) as listener:
        mx.eval(agree(mx.array([listener.getsockname()[1], *secret], dtype=mx.uint32)))
        listener.settimeout(JOIN_SECONDS)
        found: dict[int, RankLink] = {}
        while len(found) < place.size - 1:
            connection, _ = listener.accept()
            if (rank := _shown(connection, secret)) is None or rank in found or not 0 < rank < place.size:
                connection.close()
                continue
            found[rank] = RankLink(connection, rank, progress, ears)
    return [found[rank] for rank in sorted(found)]


def _connected(place: RankPlace, agree: Callable[[mx.array], mx.array], progress: Progress, ears: Ears) -> RankLink:
    shared: Any = agree(mx.zeros(1 + SECRET_BYTES, dtype=mx.uint32)).tolist()
    port, *secret = shared
    connection = socket.create_connection((place.link_host, port), timeout=JOIN_SECONDS)
    connection.sendall(bytes(secret) + place.rank.to_bytes(RANK_BYTES))
    return RankLink(connection, 0, progress, ears)


def _shown(connection: socket.socket, secret: bytes) -> int | None:
    """The rank that has connected; None for a stranger, who may say nothing, or less. Not a byte more is read: what
    follows is the link's."""
    greeting, until = b"", time.monotonic() + GREETING_SECONDS
    with suppress(OSError):
        while len(greeting) < SECRET_BYTES + RANK_BYTES:
            connection.settimeout(max(0.001, until - time.monotonic()))  # 0 would not wait at all
            if not (piece := connection.recv(SECRET_BYTES + RANK_BYTES - len(greeting))):
                break
            greeting += piece
    if len(greeting) < SECRET_BYTES + RANK_BYTES or not secrets.compare_digest(greeting[:SECRET_BYTES], secret):
        return None
    return int.from_bytes(greeting[SECRET_BYTES:])


def lost(reason: str) -> ModelLoadError:
    """What a start says that ended because of another rank."""
    return ModelLoadError(f"The ranks do not compute together: {reason}.")
