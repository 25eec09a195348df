"""Why a request reused what it did: it is compared with the newest request that went through the same messages.

It knows prompts as model tokens and messages; which rules fired it is told. The words of `cause` are part of the HTTP
interface (`GET /v1/cache/explain/{request_id}`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvserve.core import Message, RequestId
from kvserve.sessions.difference import Difference, first_difference
from kvserve.sessions.seen import TurnRecord, pack_ids, packed_common_length

type Cause = Literal[
    "nothing lost",
    "new conversation",
    "not kept",
    "no checkpoint",
    "tools changed",
    "template arguments changed",
    "volatile value",
    "message changed",
    "messages left out",
    "written differently by the template",
]

TOLERANCE_TOKENS = 64
"""So many known tokens or fewer may be computed again: that is the distance to a checkpoint, nothing that was lost."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the model saw it: messages, prompt ids, tools' digest, template arguments."""

    request_id: RequestId
    messages: Sequence[Message]
    ids: Sequence[int]
    tools_digest: bytes
    template_arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RulesFired:
    """What the canonical rules did to a request.

    They let the model read what it read before (`replayed`), or left a moved value as it was sent (`as_sent`), in the
    first `num_known_messages`, of which `num_rejected` differ without a rule. `dropped`: the messages of the request
    before, by their index, that a rule takes out of identity.
    """

    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    num_known_messages: int = 0
    num_rejected: int = 0
    dropped: Mapping[int, str] = field(default_factory=dict)

    def behind(self, difference: Difference) -> frozenset[str]:
        """The rules that say why a message differs; none for a change of meaning."""
        if difference.message_index in self.dropped:
            return frozenset({self.dropped[difference.message_index]})
        return self.as_sent if difference.message_index < self.num_known_messages else frozenset()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was reused and why not more.

    `num_shared_tokens` is the common beginning with the request before, its answer included; `source` names what the
    tokens were reused from; `rules` those that had a part in it. `is_rejection`: messages were equal canonically and
    not for the model, tokens were lost by it, and no rule says why: the key promised too much.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int
    source: str
    cause: Cause
    rules: tuple[str, ...]
    first_difference: Difference | None
    before: RequestId | None
    is_rejection: bool
    is_trim_miss: bool


def explain(
    asked: Asked, before: TurnRecord | None, rules: RulesFired, num_cached_tokens: int, *, is_trim_miss: bool = False
) -> Explanation:
    """Compare a request with the one before it (None: nothing of its conversation is known).

    `is_trim_miss`: the engine knew more of the prompt than it had a checkpoint for.
    """
    shared = packed_common_length(before.packed_ids, pack_ids(asked.ids)) if before is not None else 0
    difference = first_difference(before.messages, asked.messages) if before is not None else None
    cause = _cause(asked, before, rules, num_cached_tokens, shared, difference)
    if cause == "not kept" and is_trim_miss:
        cause = "no checkpoint"
    is_lost = cause not in ("nothing lost", "new conversation", "not kept", "no checkpoint")
    moved = rules.behind(difference) if difference is not None and cause == "volatile value" else frozenset()
    return Explanation(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.ids),
        num_cached_tokens=num_cached_tokens,
        num_shared_tokens=shared,
        source=_source(before, num_cached_tokens, shared),
        cause=cause,
        rules=tuple(sorted(rules.replayed | moved)),
        first_difference=difference if is_lost else None,
        before=before.request_id if before is not None else None,
        is_rejection=bool(rules.num_rejected) and is_lost,
        is_trim_miss=is_trim_miss,
    )


def _cause(
    asked: Asked,
    before: TurnRecord | None,
    rules: RulesFired,
    num_cached_tokens: int,
    shared: int,
    difference: Difference | None,
) -> Cause:
    if before is None:
        return "new conversation"
    if min(_reachable(before, shared), len(asked.ids) - 1) - num_cached_tokens > TOLERANCE_TOKENS:
        return "not kept"
    tail = before.starts[-1] if before.starts else before.num_prompt_tokens
    if shared >= min(len(before.ids) if difference is not None else tail, len(asked.ids) - 1):
        return "nothing lost"
    if shared < tail and before.tools_digest != asked.tools_digest:
        return "tools changed"
    if shared < tail and dict(before.template_arguments) != dict(asked.template_arguments):
        return "template arguments changed"
    if difference is None:
        return "written differently by the template"
    if rules.behind(difference):
        return "volatile value"
    return "message changed" if difference.after else "messages left out"


def _reachable(before: TurnRecord, shared: int) -> int:
    """Where any model can go on from: the last message's end among the shared tokens, or the end of all that was
    computed. A model whose layers cannot be cut has its states there."""
    if shared >= len(before.ids) - 1:
        return shared
    return max((start for start in before.starts if start <= shared), default=0)


def _source(before: TurnRecord | None, num_cached_tokens: int, shared: int) -> str:
    if not num_cached_tokens:
        return "nothing"
    if before is None or num_cached_tokens > shared:
        return "another conversation with the same beginning"
    return f"request {before.request_id}"
