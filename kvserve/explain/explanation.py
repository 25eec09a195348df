"""Why a request reused what it did: it is compared with the newest request that went through the same messages.

It knows prompts as model tokens and messages; which rules fired and what the process is set to it is told. It fills in
the facts of `facts.py`; `causes.py` says which cause they are, `words.py` makes sentences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvserve.core import Message, RequestId, Reuse, Role, ThinkingBlock, ToolSpec
from kvserve.explain.causes import Cause, cause_of
from kvserve.explain.difference import (
    Decode,
    Difference,
    first_difference,
    first_tool_difference,
    has_thinking,
    message_at,
    template_difference,
)
from kvserve.explain.facts import TOLERANCE_TOKENS, PromptChanges, ReuseFacts, no_model
from kvserve.explain.looks import OTHER_ORDER, Look, look_of
from kvserve.explain.raw_prompts import RawRecord
from kvserve.sessions.seen import TurnRecord, pack_ids, packed_common_length
from kvserve.sessions.tool_layouts import NO_TOOLS, ToolLayout
from kvserve.sessions.written_messages import same_words


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
    own. `unread` says why nothing of before the start can be found, if that is so: it is not known which model it is;
    `unreplayed` why this model's answers never keep their own tokens in the next prompt.
    `rules_off` names the rules, switched off here, under which two messages would be the same; `decode` turns
    token ids into text; `other_model` names another model that has read the conversation."""

    looks_at_records: bool = True
    can_keep: bool = True
    was_cleared: bool = False
    names_session: bool = True
    unread: str = ""
    unreplayed: str = ""
    rules_off: Callable[[Message, Message], frozenset[str]] | None = None
    decode: Decode | None = None
    other_model: Callable[[], str | None] = no_model


NO_REUSE = Reuse()
USUAL = Circumstances()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was reused and why not more.

    `num_shared_tokens` is the common beginning with the request before, its answer included; `source` names what the
    tokens were reused from; `rules` those that had a part in it. `is_rejection`: messages were equal canonically and
    not for the model, tokens were lost by it, and no rule says why: the key promised too much. `decided_by` names the
    setting or field behind the cause `setting`, the model behind `other model`, why weights are not known or the shared
    cache was not used. `num_lost_tokens` were computed again because of the cause, and could have been kept.
    `looks_like`: what stands at the place where the prompts part, by its form.
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
    num_lost_tokens: int = 0
    looks_like: Look | None = None


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
    facts = ReuseFacts(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.ids),
        num_cached_tokens=num_cached_tokens,
        num_shared_tokens=compared.num_shared if compared is not None else 0,
        reuse=reuse,
        can_keep=around.can_keep,
        unreplayed=around.unreplayed,
        looks_at_records=around.looks_at_records,
        replayed_rules=rules.replayed,
        policies=rules.policies,
        num_rejected=rules.num_rejected,
    )
    if compared is None or not _is_same_talk(compared):
        return explained(_without_record(facts, asked, around))
    return explained(_with_record(facts, compared))


def _compared(asked: Asked, before: TurnRecord, rules: RulesFired, around: Circumstances) -> _Comparison:
    packed = asked.packed_ids if asked.packed_ids is not None else pack_ids(asked.ids)
    shared = packed_common_length(before.packed_ids, packed)
    return _Comparison(asked, before, rules, around, shared, first_difference(before.messages, asked.messages))


def explained(facts: ReuseFacts) -> Explanation:
    """What these facts come to."""
    row = cause_of(facts)
    moved = facts.changes.moved_rules if row.names_moved_rules else frozenset()
    switched = facts.changes.switched_rules if row.names_switched_rules else frozenset()
    named = tuple(sorted(facts.replayed_rules | moved | switched))
    policies = facts.policies
    place = row.place(facts) if row.place is not None else None
    is_reordered = row.cause == "tools changed" and place is None
    return Explanation(
        request_id=facts.request_id,
        num_prompt_tokens=facts.num_prompt_tokens,
        num_cached_tokens=facts.num_cached_tokens,
        num_shared_tokens=facts.num_shared_tokens,
        source=source_of(facts.before, facts.num_cached_tokens, facts.num_shared_tokens, facts.reuse),
        reuse=facts.reuse,
        cause=row.cause,
        rules=named,
        policies={name: policies.get(name, "off") for name in named if name in policies or name in switched},
        first_difference=place,
        before=facts.before.request_id if facts.before is not None else None,
        is_rejection=bool(facts.num_rejected) and row.place is not None,
        decided_by=row.decided_by(facts) if row.decided_by is not None else None,
        num_lost_tokens=row.lost(facts) if row.lost is not None else 0,
        looks_like=OTHER_ORDER if is_reordered else look_of(place),
    )


def source_of(before: TurnRecord | RawRecord | None, num_cached_tokens: int, shared: int, reuse: Reuse) -> str:
    """What the tokens were reused from, in words."""
    if not num_cached_tokens:
        return "nothing"
    if before is None or num_cached_tokens > shared + 1:  # the answer's stop token is no part of the record
        return "what was computed ahead" if reuse.tier == "warmed" else "another request with the same beginning"
    return f"request {before.request_id}"


# --- facts -----------------------------------------------------------------------------------------------------------


def _without_record(facts: ReuseFacts, asked: Asked, around: Circumstances) -> ReuseFacts:
    """The facts where nothing is there to compare with."""
    answers = [index for index, message in enumerate(asked.messages) if message.role == "assistant"]
    end = asked.starts[answers[-1] + 1] if answers and len(asked.starts) > len(asked.messages) else None
    return replace(
        facts,
        is_new=not answers,
        is_unknown=bool(answers),
        # Its KV is there all the same, from a disk that outlived the records for one.
        is_reused=end is not None and end - facts.num_cached_tokens <= TOLERANCE_TOKENS,
        num_history_tokens=end if end is not None else facts.num_prompt_tokens - 1,
        names_session=around.names_session,
        was_cleared=around.was_cleared,
        unread=around.unread,
        find_other_model=around.other_model,
    )


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


def _with_record(facts: ReuseFacts, compared: _Comparison) -> ReuseFacts:
    """The facts beside the request before."""
    before, shared, last = compared.before, compared.num_shared, facts.num_prompt_tokens - 1
    # where all messages are the same, a few tokens of the answer to the last one may be written otherwise; where
    # answers are never replayed, only the token that ends one
    most = 1 if facts.unreplayed else TOLERANCE_TOKENS
    is_whole = compared.difference is None and len(before.ids) - shared <= most
    return replace(
        facts,
        before=before,
        num_missing_tokens=max(0, min(_reachable(before, shared), last) - facts.num_cached_tokens),
        lacks_checkpoint=facts.reuse.is_trim_miss,
        has_left=not facts.reuse.is_trim_miss,
        was_aborted=before.num_computed_tokens is not None and _is_behind_the_abort(compared, facts.num_cached_tokens),
        is_reused=shared >= min(_tail(before) if is_whole else len(before.ids), last),
        find_changes=partial(_changes, compared),
    )


def _reachable(before: TurnRecord, shared: int) -> int:
    """Where any model can go on from: the last message's end among the shared tokens, or the end of all that was
    computed. A model whose layers cannot be cut has its states there."""
    if before.num_computed_tokens is not None:
        shared = min(shared, before.num_computed_tokens)
    if shared >= len(before.ids) - 1:
        return shared
    return max((start for start in before.starts if start <= shared), default=0)


def _tail(before: TurnRecord) -> int:
    return before.starts[-1] if before.starts else before.num_prompt_tokens


def _is_behind_the_abort(compared: _Comparison, num_cached_tokens: int) -> bool:
    """Whether what is missing is what the request before would have computed, had its client stayed."""
    asked, before, shared = compared.asked, compared.before, compared.num_shared
    if min(shared, len(asked.ids) - 1) - num_cached_tokens > TOLERANCE_TOKENS:
        return True
    difference = compared.difference
    is_answer = len(before.ids) > before.num_prompt_tokens
    return difference is not None and is_answer and difference.message_index == len(before.messages) - 1


def _changes(compared: _Comparison) -> PromptChanges:
    """What differs, in front of the messages and in the first one that does."""
    asked, before, difference = compared.asked, compared.before, compared.difference
    index = message_at(before, compared.num_shared)
    # A message that differs in the very place where the tokens part is the cause, whatever else has changed.
    is_in_message = difference is not None and bool(index) and difference.message_index == index
    changes = PromptChanges(
        parts_in_front=compared.num_shared < _tail(before) and not is_in_message,
        has_other_tools=_has_other_tools(before, asked),
        changed_arguments=_changed_arguments(before, asked),
        place=partial(_place, compared),
        tool_place=partial(_tool_place, compared),
        template_place=partial(_template_place, compared),
    )
    if difference is None:
        is_thinking = index is not None and has_thinking(before.messages[index])
        return replace(changes, drops_thinking=is_thinking, is_written_differently=True)
    was, now = _pair(compared)
    rules_off, moved = compared.around.rules_off, compared.rules.behind(difference)
    return replace(
        changes,
        moved_rules=moved,
        changed_rules=moved & compared.rules.changed,
        switched_rules=rules_off(was, now) if rules_off is not None and now is not None else frozenset(),
        changes_tool=difference.tool is not None,
        drops_thinking=now is not None and same_words(_without_thinking(was), now),
        changes_message=now is not None,
        leaves_out_messages=now is None,
    )


def _has_other_tools(before: TurnRecord, asked: Asked) -> bool:
    """Whether the tools that the model read are others, or stand elsewhere; more of them behind those are no change."""
    if before.tool_layout.front and asked.tool_layout.front:
        return not asked.tool_layout.continues(before.tool_layout)
    return before.tools_digest != asked.tools_digest


def _changed_arguments(before: TurnRecord, asked: Asked) -> frozenset[str]:
    was, now = dict(before.template_arguments), dict(asked.template_arguments)
    return frozenset(name for name in {*was, *now} if (name in was, was.get(name)) != (name in now, now.get(name)))


def _pair(compared: _Comparison) -> tuple[Message, Message | None]:
    """The message that differs, as it was and as it is."""
    difference = compared.difference
    if difference is None or difference.message_index is None:
        raise ValueError("no message differs")
    index, now = difference.message_index, compared.asked.messages
    return compared.before.messages[index], now[index] if index < len(now) else None


def _without_thinking(message: Message) -> Message:
    blocks = tuple(block for block in message.blocks if not isinstance(block, ThinkingBlock))
    return Message(message.role, blocks, message.name)


# --- places ----------------------------------------------------------------------------------------------------------


def _place(compared: _Comparison) -> Difference | None:
    return compared.difference if compared.difference is not None else _template_place(compared)


def _tool_place(compared: _Comparison) -> Difference | None:
    if compared.before.tools_digest != compared.asked.tools_digest:
        return first_tool_difference(compared.before.tools, compared.asked.tools)
    return _place(compared)


def _template_place(compared: _Comparison) -> Difference | None:
    return template_difference(compared.before, compared.asked.ids, compared.num_shared, compared.around.decode)
