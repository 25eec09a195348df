"""Why a request reused what it did: it is compared with the newest request that went through the same messages.

It knows prompts as model tokens and messages; which rules fired and what the process is set to it is told. The words of
`cause` are part of the HTTP interface (`GET /v1/cache/explain/{request_id}`); `explanation_words.py` makes sentences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvserve.core import Message, RequestId, Reuse, Role, ThinkingBlock, ToolSpec
from kvserve.sessions.difference import Difference, first_difference, first_tool_difference
from kvserve.sessions.explanation_place import Decode, has_thinking, message_at, template_difference
from kvserve.sessions.raw_prompts import RawRecord
from kvserve.sessions.seen import TurnRecord, pack_ids, packed_common_length
from kvserve.sessions.tool_layouts import NO_TOOLS, ToolLayout
from kvserve.sessions.writings import same_words

type Cause = Literal[
    "nothing lost",
    "new conversation",
    "new prompt",
    "not seen since the start",
    "no session",
    "cache cleared",
    "other model",
    "weights not known",
    "setting",
    "aborted",
    "evicted",
    "not kept",
    "no checkpoint",
    "tools changed",
    "thinking switched",
    "template arguments changed",
    "volatile value",
    "message changed",
    "messages left out",
    "thinking dropped",
    "written differently by the template",
    "prompt changed",
    "tokenised differently",
]

PLACED: frozenset[Cause] = frozenset(
    {
        "setting",
        "aborted",
        "tools changed",
        "thinking switched",
        "template arguments changed",
        "volatile value",
        "message changed",
        "messages left out",
        "thinking dropped",
        "written differently by the template",
        "prompt changed",
        "tokenised differently",
    }
)
"""Causes that lie in the prompt: they have a first difference."""

NO_MISS: frozenset[Cause] = frozenset({"nothing lost", "new conversation", "new prompt"})
"""Causes with which nothing was computed again that could have been kept."""

TOLERANCE_TOKENS = 64
"""So many known tokens or fewer may be computed again: that is the distance to a checkpoint, nothing that was lost."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the model saw it: messages, prompt ids, tools and their digest, template arguments, and the offsets
    in its ids where messages begin. `packed_ids` are the same ids as a record keeps them, where they are there;
    `tool_layout` says where the tools stood."""

    request_id: RequestId
    messages: Sequence[Message]
    ids: Sequence[int]
    tools_digest: bytes
    template_arguments: Mapping[str, object]
    tools: Sequence[ToolSpec] = ()
    starts: Sequence[int] = ()
    packed_ids: bytes | None = None
    tool_layout: ToolLayout = NO_TOOLS


@dataclass(frozen=True, slots=True)
class RulesFired:
    """What the canonical rules did to a request.

    They let the model read what it read before (`replayed`), or left a moved value as it was sent (`as_sent`), in the
    first `num_known_messages`, of which `num_rejected` differ without a rule. `dropped`: the messages of the request
    before, by their index, that a rule takes out of identity. `policies`: those that hold; `changed`: the rules whose
    policy the operator changed.
    """

    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    num_known_messages: int = 0
    num_rejected: int = 0
    dropped: Mapping[int, str] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def behind(self, difference: Difference) -> frozenset[str]:
        """The rules that say why a message differs; none for a change of meaning."""
        index = difference.message_index
        if index is None:
            return frozenset()
        if index in self.dropped:
            return frozenset({self.dropped[index]})
        return self.as_sent if index < self.num_known_messages else frozenset()


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides besides the messages: whether earlier requests were looked at, whether this model's KV can be kept,
    whether somebody emptied the cache or had this client's words forgotten, whether the request names a session of its
    own. `unread` says why nothing of before the start can be found, if that is so: it is not known which model it is.
    `rules_off` names the rules, switched off here, under which two messages would be the same; `decode` turns
    token ids into text."""

    looks_at_records: bool = True
    can_keep: bool = True
    was_cleared: bool = False
    names_session: bool = True
    unread: str = ""
    rules_off: Callable[[Message, Message], frozenset[str]] | None = None
    decode: Decode | None = None


NO_REUSE = Reuse()
USUAL = Circumstances()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was reused and why not more.

    `num_shared_tokens` is the common beginning with the request before, its answer included; `source` names what the
    tokens were reused from; `rules` those that had a part in it. `is_rejection`: messages were equal canonically and
    not for the model, tokens were lost by it, and no rule says why: the key promised too much. `decided_by` names the
    setting or field behind the cause `setting`, the model behind `other model`, why weights are not known.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int
    source: str
    reuse: Reuse
    cause: Cause
    rules: tuple[str, ...]
    policies: Mapping[str, str]
    first_difference: Difference | None
    before: RequestId | None
    is_rejection: bool
    decided_by: str | None = None

    @property
    def is_trim_miss(self) -> bool:
        """More of the prompt was stored than could be used, for want of a checkpoint."""
        return self.reuse.is_trim_miss


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A request beside the one before it: the tokens and the messages that they have in common."""

    asked: Asked
    before: TurnRecord
    rules: RulesFired
    around: Circumstances
    num_shared: int
    difference: Difference | None


def explain(
    asked: Asked,
    before: TurnRecord | None,
    rules: RulesFired,
    num_cached_tokens: int,
    *,
    reuse: Reuse = NO_REUSE,
    around: Circumstances = USUAL,
) -> Explanation:
    """Compare a request with the one before it (None: nothing of its conversation is known)."""
    compared = _compared(asked, before, rules, around) if before is not None else None
    num_shared = compared.num_shared if compared is not None else 0
    if compared is None or not _is_same_talk(compared):
        cause: Cause = _without_record(asked, num_cached_tokens, around)
        difference, before = None, None
    else:
        cause = _cause(compared, num_cached_tokens, reuse)
        difference = _place(compared, cause)
    rules_off = _rules_off(compared) if compared is not None and cause == "setting" else frozenset()
    moved = (
        rules.behind(difference) if difference is not None and cause in ("volatile value", "setting") else frozenset()
    )
    named = tuple(sorted(rules.replayed | moved | rules_off))
    return Explanation(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.ids),
        num_cached_tokens=num_cached_tokens,
        num_shared_tokens=num_shared,
        source=source_of(before, num_cached_tokens, num_shared, reuse),
        reuse=reuse,
        cause=cause,
        rules=named,
        policies={
            name: rules.policies.get(name, "off") for name in named if name in rules.policies or name in rules_off
        },
        first_difference=difference,
        before=before.request_id if before is not None else None,
        is_rejection=bool(rules.num_rejected) and cause in PLACED,
        decided_by=_decided_by(cause, rules, around, moved | rules_off),
    )


def _compared(asked: Asked, before: TurnRecord, rules: RulesFired, around: Circumstances) -> _Comparison:
    packed = asked.packed_ids if asked.packed_ids is not None else pack_ids(asked.ids)
    shared = packed_common_length(before.packed_ids, packed)
    return _Comparison(asked, before, rules, around, shared, first_difference(before.messages, asked.messages))


# --- causes ----------------------------------------------------------------------------------------------------------


def _without_record(asked: Asked, num_cached_tokens: int, around: Circumstances) -> Cause:
    """The cause where nothing is there to compare with."""
    answers = [index for index, message in enumerate(asked.messages) if message.role == "assistant"]
    if not answers:
        return "new conversation"
    # Its KV is there all the same, from a disk that outlived the records for one.
    end = asked.starts[answers[-1] + 1] if len(asked.starts) > len(asked.messages) else None
    if end is not None and end - num_cached_tokens <= TOLERANCE_TOKENS:
        return "nothing lost"
    if not around.looks_at_records:
        return "setting"
    if around.unread and not around.was_cleared:
        return "weights not known"
    if not around.names_session:
        return "no session"  # also where somebody was forgotten: to name one is what helps
    return "cache cleared" if around.was_cleared else "not seen since the start"


def _is_same_talk(compared: _Comparison) -> bool:
    """Whether the request before belongs to this conversation, or only begins as it does."""
    now, was = compared.asked.messages, compared.before.messages
    first_user = next((index for index, message in enumerate(now) if message.role == "user"), None)
    if first_user is None or compared.rules.num_known_messages > first_user:
        return True
    roles: tuple[Role, ...] = ("user", "assistant")
    for role in roles:
        mine, theirs = _first(now, role), _first(was, role)
        if mine is not None and theirs is not None and same_words(mine, theirs):
            return True
    return False


def _first(messages: Sequence[Message], role: Role) -> Message | None:
    return next((message for message in messages if message.role == role), None)


def _cause(compared: _Comparison, num_cached_tokens: int, reuse: Reuse) -> Cause:
    asked, before, shared = compared.asked, compared.before, compared.num_shared
    if min(_reachable(before, shared), len(asked.ids) - 1) - num_cached_tokens > TOLERANCE_TOKENS:
        if not compared.around.can_keep:
            return "not kept"
        return "no checkpoint" if reuse.is_trim_miss else "evicted"
    if before.num_computed_tokens is not None and _is_behind_the_abort(compared, num_cached_tokens):
        return "aborted"
    difference, tail = compared.difference, _tail(before)
    # where all messages are the same, a few tokens of the answer to the last one may be written otherwise
    is_whole = difference is None and len(before.ids) - shared <= TOLERANCE_TOKENS
    if shared >= min(tail if is_whole else len(before.ids), len(asked.ids) - 1):
        return "nothing lost"
    index = message_at(before, shared)
    # A message that differs in the very place where the tokens part is the cause, whatever else has changed.
    if shared < tail and not (difference is not None and index and difference.message_index == index):
        if _tools_changed(before, asked):
            return "tools changed"
        if (changed := _changed_arguments(before, asked)) is not None:
            return changed
    if difference is None:
        is_thinking = index is not None and has_thinking(before.messages[index])
        return "thinking dropped" if is_thinking else "written differently by the template"
    return _message_cause(compared, difference)


def _message_cause(compared: _Comparison, difference: Difference) -> Cause:
    """The cause where a message differs from the one that the model read or wrote."""
    rules = compared.rules
    if moved := rules.behind(difference):
        return "setting" if moved & rules.changed else "volatile value"
    if _rules_off(compared):
        return "setting"
    if difference.tool is not None:
        return "tools changed"
    was, now = _pair(compared)
    if now is not None and same_words(_without_thinking(was), now):
        return "thinking dropped"
    return "message changed" if now is not None else "messages left out"


def _is_behind_the_abort(compared: _Comparison, num_cached_tokens: int) -> bool:
    """Whether what is missing is what the request before would have computed, had its client stayed."""
    asked, before, shared = compared.asked, compared.before, compared.num_shared
    if min(shared, len(asked.ids) - 1) - num_cached_tokens > TOLERANCE_TOKENS:
        return True
    difference = compared.difference
    is_answer = len(before.ids) > before.num_prompt_tokens
    return difference is not None and is_answer and difference.message_index == len(before.messages) - 1


def _tools_changed(before: TurnRecord, asked: Asked) -> bool:
    """Whether the tools that the model read are others, or stand elsewhere; more of them behind those are no change."""
    if before.tool_layout.front and asked.tool_layout.front:
        return not asked.tool_layout.continues(before.tool_layout)
    return before.tools_digest != asked.tools_digest


def _changed_arguments(before: TurnRecord, asked: Asked) -> Cause | None:
    was, now = dict(before.template_arguments), dict(asked.template_arguments)
    if was == now:
        return None
    others = [name for name in {*was, *now} if (name in was, was.get(name)) != (name in now, now.get(name))]
    return "thinking switched" if others == ["thinking"] else "template arguments changed"


def _pair(compared: _Comparison) -> tuple[Message, Message | None]:
    """The message that differs, as it was and as it is."""
    difference = compared.difference
    if difference is None or difference.message_index is None:
        raise ValueError("no message differs")
    index, now = difference.message_index, compared.asked.messages
    return compared.before.messages[index], now[index] if index < len(now) else None


def _rules_off(compared: _Comparison) -> frozenset[str]:
    if compared.difference is None or compared.around.rules_off is None:
        return frozenset()
    was, now = _pair(compared)
    return compared.around.rules_off(was, now) if now is not None else frozenset()


def _without_thinking(message: Message) -> Message:
    blocks = tuple(block for block in message.blocks if not isinstance(block, ThinkingBlock))
    return Message(message.role, blocks, message.name)


# --- places ----------------------------------------------------------------------------------------------------------


def _place(compared: _Comparison, cause: Cause) -> Difference | None:
    """Where the prompts part, for a cause that lies in the prompt."""
    if cause not in PLACED:
        return None
    if cause == "tools changed" and compared.before.tools_digest != compared.asked.tools_digest:
        return first_tool_difference(compared.before.tools, compared.asked.tools)
    if compared.difference is not None and cause not in ("thinking switched", "template arguments changed"):
        return compared.difference
    return template_difference(compared.before, compared.asked.ids, compared.num_shared, compared.around.decode)


def _tail(before: TurnRecord) -> int:
    return before.starts[-1] if before.starts else before.num_prompt_tokens


def _reachable(before: TurnRecord, shared: int) -> int:
    """Where any model can go on from: the last message's end among the shared tokens, or the end of all that was
    computed. A model whose layers cannot be cut has its states there."""
    if before.num_computed_tokens is not None:
        shared = min(shared, before.num_computed_tokens)
    if shared >= len(before.ids) - 1:
        return shared
    return max((start for start in before.starts if start <= shared), default=0)


def source_of(before: TurnRecord | RawRecord | None, num_cached_tokens: int, shared: int, reuse: Reuse) -> str:
    """What the tokens were reused from, in words."""
    if not num_cached_tokens:
        return "nothing"
    if before is None or num_cached_tokens > shared + 1:  # the answer's stop token is no part of the record
        return "what was computed ahead" if reuse.tier == "warmed" else "another request with the same beginning"
    return f"request {before.request_id}"


def _decided_by(cause: Cause, rules: RulesFired, around: Circumstances, names: frozenset[str]) -> str | None:
    if cause == "weights not known":
        return around.unread
    if cause != "setting":
        return None
    if not around.looks_at_records:
        return "cache_mode"
    if not rules.policies:
        return "CACHE_CANONICALIZE_TOOL_CONTEXT"
    return f"CACHE_RULE_POLICIES ({', '.join(f'{name}={rules.policies.get(name, "off")}' for name in sorted(names))})"
