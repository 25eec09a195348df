"""What the requests that ended say together: conversations with their turns, and misses by what they cost. It counts,
and knows no more of a request than what is kept of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvserve.core import JsonObject
from kvserve.observe.ended_requests import EndedRequest

MAX_LAST = 100
MAX_CONVERSATIONS = 60
MAX_TURNS = 200
MIN_SHARE = 0.05
"""Misses that cost less of all that was lost are folded into one row."""

_IN_TABLE = (
    *("request_id", "ended_at", "client", "model", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens"),
    *("num_prefilled_tokens", "first_token_seconds", "prefill_rate", "decode_rate", "end", "cause"),
)
_IN_TIMELINE = (
    *_IN_TABLE,
    "seconds_saved",
    "num_lost_tokens",
    "seconds_lost",
    "branch",
    "parent",
    "fork_message",
    "turn",
)


def last_requests(newest: Sequence[EndedRequest]) -> list[JsonObject]:
    """The last hundred, the newest first."""
    return [_shown(each, _IN_TABLE) for each in newest[:MAX_LAST]]


def _shown(each: EndedRequest, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(each, name) for name in names}


@dataclass(slots=True)
class _Conversation:
    newest: EndedRequest
    words: str = ""
    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefilled_tokens: int = 0
    seconds_saved: float = 0.0
    num_misses: int = 0


def conversations(newest: Iterable[EndedRequest], now: float) -> list[JsonObject]:
    """Those that were used last, the newest first, in sums; `timeline` has the turns of one. `now` in seconds since the
    epoch. `newest` come newest first."""
    found: dict[str, _Conversation] = {}
    for each in newest:
        known = found.setdefault(each.conversation, _Conversation(each))
        known.words = each.words or known.words  # the oldest that are known: a restart forgets them
        known.num_turns += 1
        known.num_prompt_tokens += each.num_prompt_tokens
        known.num_cached_tokens += each.num_cached_tokens
        known.num_generated_tokens += each.num_generated_tokens
        known.num_prefilled_tokens += each.num_prefilled_tokens
        known.seconds_saved += each.seconds_saved or 0.0
        known.num_misses += each.is_miss
    return [_in_sums(name, each, now) for name, each in list(found.items())[:MAX_CONVERSATIONS]]


def _in_sums(name: str, each: _Conversation, now: float) -> JsonObject:
    return {
        "id": name,
        "session": each.newest.session,
        "client": each.newest.client,
        "model": each.newest.model,
        "words": each.words,
        "newest": each.newest.request_id,
        "idle_seconds": round(max(0.0, now - each.newest.ended_at), 1),
        "num_turns": each.num_turns,
        "num_prompt_tokens": each.num_prompt_tokens,
        "num_cached_tokens": each.num_cached_tokens,
        "num_generated_tokens": each.num_generated_tokens,
        "num_prefilled_tokens": each.num_prefilled_tokens,
        "seconds_saved": round(each.seconds_saved, 3),
        "num_misses": each.num_misses,
    }


def timeline(newest: Iterable[EndedRequest], conversation: str) -> list[JsonObject]:
    """The last turns of a conversation, the oldest first, each with why no more was reused and what would mend it."""
    turns = [each for each in newest if each.conversation == conversation][:MAX_TURNS]
    return [
        {
            **_shown(each, _IN_TIMELINE),
            "summary": each.told(each.summary),
            "remedy": each.told(each.remedy),
            "is_miss": each.is_miss,
        }
        for each in reversed(turns)
    ]


@dataclass(slots=True)
class _Loss:
    newest: EndedRequest
    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    clients: Counter[str] = field(default_factory=Counter)


def losses(newest: Iterable[EndedRequest]) -> JsonObject:
    """Misses that are equal but for their request, by what they cost, the dearest first; each with the sentences of its
    newest. What costs less than a twentieth of all is in `rest`, in sums."""
    groups: dict[tuple[str, ...], _Loss] = {}
    for each in newest:
        if not each.is_miss:
            continue
        loss = groups.setdefault((each.cause, each.role, each.looks_like), _Loss(each))
        loss.num_requests += 1
        loss.num_tokens += each.num_lost_tokens
        loss.seconds += each.seconds_lost or 0.0
        loss.clients[each.client or "unknown client"] += 1
    num_all = sum(loss.num_tokens for loss in groups.values())
    dearest = sorted(groups.values(), key=lambda loss: (-loss.num_tokens, loss.newest.cause))
    shown = [loss for loss in dearest if loss.num_tokens >= MIN_SHARE * num_all]
    return {
        "num_tokens": num_all,
        "seconds": round(sum(loss.seconds for loss in dearest), 3),
        "groups": [_told(loss) for loss in shown],
        "rest": [_told(loss) for loss in dearest[len(shown) :]],
    }


def _told(loss: _Loss) -> JsonObject:
    newest = loss.newest
    return {
        "cause": newest.cause,
        "role": newest.role,
        "looks_like": newest.looks_like,
        "summary": newest.told(newest.summary),
        "remedy": newest.told(newest.remedy),
        "newest": newest.request_id,
        "num_requests": loss.num_requests,
        "num_tokens": loss.num_tokens,
        "seconds": round(loss.seconds, 3),
        "clients": [name for name, _ in loss.clients.most_common(3)],
    }
