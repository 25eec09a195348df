"""What is kept of a request that is over, for the dashboard: numbers, names and the cause of a miss. It joins rooms,
and is where the text of a request ends: of a difference its place is kept, and what it looks like.

Its first words are there only where the operator allows text on the dashboard, and in memory only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

from kvserve.core import Message, TextBlock, Turn
from kvserve.explain.causes import NO_MISS
from kvserve.explain.difference import Difference
from kvserve.explain.explanation import Explanation
from kvserve.explain.words import remedy, summary
from kvserve.observe.savings import MIN_MEASURED_TOKENS
from kvserve.observe.trace import session_label
from kvserve.requests.turn_facts import FinishedTurn

NUM_WORDS_CHARACTERS = 80
NUM_BEGINNING_TOKENS = 128
SIGN = "\u2026"
"""Stands for a tool's name."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request. `ended_at` in seconds since the epoch, `session` as a file name may show it, `conversation` a digest
    that its turns share; rates in tokens per second, None where nothing was measured. `end` says how it ended.

    `cause` says why no more was reused ("" where nobody asked), `place` where the prompts part; `num_lost_tokens` were
    computed again although they could have been kept, which took about `seconds_lost`. `branch` left `parent` after
    `fork_message` messages. `turn` counts those of its conversation from 1, also such as are not kept any more. `words`
    are its first ones, where they may be shown, and `tool` is the one that differs, for which `summary` and `remedy`
    have a sign: both are a client's words, and in memory only.
    """

    request_id: str
    ended_at: float
    principal: str
    session: str
    conversation: str
    client: str
    model: str
    protocol: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_prefilled_tokens: int = 0
    first_token_seconds: float | None = None
    prefill_rate: float | None = None
    decode_rate: float | None = None
    seconds_saved: float | None = None
    end: str = ""
    cause: str = ""
    role: str = ""
    looks_like: str = ""
    summary: str = ""
    remedy: str = ""
    num_lost_tokens: int = 0
    seconds_lost: float | None = None
    branch: int | None = None
    parent: int | None = None
    fork_message: int = 0
    turn: int = 0
    words: str = ""
    tool: str = ""

    @property
    def is_miss(self) -> bool:
        """Whether something was computed again that could have been kept."""
        return bool(self.num_lost_tokens) and self.cause not in NO_MISS

    def told(self, sentence: str) -> str:
        """A sentence with the tool's name, where that is known."""
        for written, without in ((f"The tool {SIGN}", "One tool"), (f"tool {SIGN}", "one tool")):
            sentence = sentence.replace(written, written.replace(SIGN, self.tool) if self.tool else without)
        return sentence

    def as_json(self) -> str:
        """All of it but a client's words: what may lie on a disk."""
        return json.dumps(asdict(replace(self, words="", tool="")), separators=(",", ":"))


_KINDS: Mapping[object, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (int, float),
    int | None: (int, NoneType),
    float | None: (int, float, NoneType),
}
_FIELDS = {field.name: _KINDS[field.type] for field in fields(EndedRequest)}


def from_json(text: str | bytes) -> EndedRequest:
    """The same again; fields of another version are left out. Raises ValueError for what it is not."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a request is an object")
    known = {name: value for name, value in values.items() if name in _FIELDS}
    if not all(isinstance(value, _FIELDS[name]) for name, value in known.items()):
        raise ValueError("a request's field is of another kind")
    try:
        return EndedRequest(**known)
    except TypeError as error:  # one is missing
        raise ValueError(str(error)) from error


def ended_request(
    finished: FinishedTurn, *, ended_at: float, seconds_lost: float | None, shows_text: bool, salt: bytes
) -> EndedRequest:
    """What is kept of it; `salt` goes into the digest of its conversation."""
    facts, turn, branch = finished.facts, finished.turn, finished.branch
    is_measured = facts.prefill_seconds and facts.num_prefilled_tokens >= MIN_MEASURED_TOKENS
    rate = facts.num_prefilled_tokens / facts.prefill_seconds if is_measured and facts.prefill_seconds else None
    return EndedRequest(
        request_id=facts.request_id,
        ended_at=round(ended_at, 1),
        principal=str(turn.session.principal),
        session=session_label(facts.session) if facts.session else "",
        conversation=_conversation(finished, salt),
        client=turn.session.client,
        model=facts.model,
        protocol=facts.protocol,
        num_prompt_tokens=facts.num_prompt_tokens,
        num_cached_tokens=facts.num_cached_tokens,
        num_generated_tokens=facts.num_completion_tokens,
        num_prefilled_tokens=facts.num_prefilled_tokens,
        first_token_seconds=_rounded(facts.ttft_seconds),
        prefill_rate=_rounded(rate),
        decode_rate=_rounded(facts.tokens_per_second),
        seconds_saved=_rounded(facts.seconds_saved),
        end=str(facts.error_status) if facts.error_status is not None else facts.finish_reason or "",
        branch=branch.branch_id if branch is not None else None,
        parent=branch.parent_id if branch is not None else None,
        fork_message=branch.fork_message_index if branch is not None else 0,
        words=_first_words(turn) if shows_text else "",
        **(_why(finished.explanation, seconds_lost) if finished.explanation is not None else {}),
    )


def _why(explanation: Explanation, seconds_lost: float | None) -> Mapping[str, Any]:
    """Why no more was reused."""
    place = explanation.first_difference
    if place is not None:
        explanation = replace(explanation, first_difference=_without_words(place))
    return {
        "cause": explanation.cause,
        "role": place.role if place is not None else "",
        "tool": (place.tool or "") if place is not None else "",
        "looks_like": explanation.looks_like or "",
        "summary": summary(explanation),
        "remedy": remedy(explanation) or "",
        "num_lost_tokens": explanation.num_lost_tokens,
        "seconds_lost": _rounded(seconds_lost),
    }


def _without_words(place: Difference) -> Difference:
    return replace(place, before="", after="", tool=SIGN if place.tool is not None else None)


def _conversation(finished: FinishedTurn, salt: bytes) -> str:
    """What the turns of a conversation have in common: a session of its own, else all up to its first question; of raw
    prompts, how they begin, by whose they are. By model: another one's KV is another one's."""
    session, reading = finished.turn.session, finished.reading
    named = session.session_id if not session.is_shared_id else None
    if named is not None:
        mark = f"{session.principal} {named}".encode("utf-8", "surrogatepass")
    elif reading is not None and reading.identity.chains:
        mark = reading.identity.chains[_first_question(finished.turn.messages, len(reading.identity.chains))]
    else:
        mark = finished.owner.root + repr(finished.prompt.tokens.ids[:NUM_BEGINNING_TOKENS]).encode()
    return hashlib.sha256(salt + finished.facts.model.encode("utf-8", "surrogatepass") + b"\0" + mark).hexdigest()[:12]


def _first_question(messages: tuple[Message, ...], num_places: int) -> int:
    index = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
    return min(index, num_places - 1)


def _first_words(turn: Turn) -> str:
    """The first thing that a person said: what clients put before it stands between tags."""
    first = next((message for message in turn.messages if message.role == "user"), None)
    texts = [block.text.strip() for block in first.blocks if isinstance(block, TextBlock)] if first is not None else []
    said = next((text for text in texts if text and not text.startswith("<")), texts[0] if texts else "")
    return " ".join(said[: 4 * NUM_WORDS_CHARACTERS].split())[:NUM_WORDS_CHARACTERS]


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None else None
