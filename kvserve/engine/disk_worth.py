"""Which states are worth writing to disk: where requests come back to, and now and then between. It knows no arrays.

A state is as large as thousands of tokens of KV. In a tool loop a prefill stops at the ends of several messages, and
RAM keeps a state at each: a client that edits its history goes on from one of them. After a restart it is enough to
begin at the end of an answer, of a user's words or of the system prompt, and in a long prompt at a stride, which a
prefill that is killed goes on from; of the rest a few are written, far apart.
"""

from dataclasses import dataclass

from kvserve.cache.records import BoundaryKind, Copy

KINDS: frozenset[BoundaryKind] = frozenset({"system", "user", "answer", "stride"})
"""Ends that requests come back to whatever else they change, and what is far from any end."""

STRIDE_TOKENS = 8192
"""So far from the last one any state is written."""


def is_worth_writing(kind: BoundaryKind, num_tokens_behind: int, *, is_end: bool) -> bool:
    """Whether a state goes to disk that stands so many tokens behind the last one there. `is_end`: its path is left
    now, and nothing stands behind it."""
    return is_end or kind in KINDS or num_tokens_behind >= STRIDE_TOKENS


@dataclass(frozen=True, slots=True)
class _Unwanted:
    """Stands for the copy of a state that the disk is not to have: there is nothing to wait for when it leaves RAM."""

    is_written: bool = True
    is_forgotten: bool = False


UNWANTED: Copy = _Unwanted()
