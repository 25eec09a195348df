"""The causes of a miss: one table, in the order in which they are tried.

A row says when its cause holds, what is said of it, and how many tokens it cost. It knows facts, not where they come
from: `explanation.py` fills them in for messages, `raw.py` for a raw prompt. The words of `cause` are part
of the HTTP interface (`GET /v1/cache/explain/{request_id}`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvserve.core import UnsharedReason
from kvserve.explain.difference import Difference
from kvserve.explain.facts import TOLERANCE_TOKENS, ReuseFacts

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
    "shared cache not used",
    "not kept",
    "no checkpoint",
    "tools changed",
    "thinking switched",
    "template arguments changed",
    "volatile value",
    "message changed",
    "messages left out",
    "thinking dropped",
    "not replayed",
    "written differently by the template",
    "prompt changed",
    "tokenised differently",
]


@dataclass(frozen=True, slots=True)
class CauseRow:
    """One cause: `applies` says when it holds, if none above it does; `lost` how many tokens were computed again
    because of it (None: none that could have been kept).

    `place`: where the prompts part, if it lies in the prompt. `names_moved_rules`, `names_switched_rules`: which rules
    had a part in it. `decided_by`: the setting or the reason behind it.
    """

    cause: Cause
    applies: Callable[[ReuseFacts], bool]
    lost: Callable[[ReuseFacts], int] | None
    summary: str
    remedy: str | None = None
    place: Callable[[ReuseFacts], Difference | None] | None = None
    names_moved_rules: bool = False
    names_switched_rules: bool = False
    decided_by: Callable[[ReuseFacts], str | None] | None = None


def _misses(facts: ReuseFacts) -> bool:
    return facts.num_missing_tokens > TOLERANCE_TOKENS


def _missing(facts: ReuseFacts) -> int:
    return facts.num_missing_tokens


def _known(facts: ReuseFacts) -> int:
    return max(0, facts.num_known_tokens - facts.num_cached_tokens)


def _history(facts: ReuseFacts) -> int:
    return max(0, facts.num_history_tokens - facts.num_cached_tokens)


def _known_or_history(facts: ReuseFacts) -> int:
    return _history(facts) if facts.is_unknown else _known(facts)


def _place(facts: ReuseFacts) -> Difference | None:
    return facts.changes.place()


def _tool_place(facts: ReuseFacts) -> Difference | None:
    return facts.changes.tool_place()


def _template_place(facts: ReuseFacts) -> Difference | None:
    return facts.changes.template_place()


def _is_all_new(facts: ReuseFacts) -> bool:
    """Whether this model knows nothing of it: of a raw prompt not even the beginning, whoever else has read that."""
    if not facts.is_raw:
        return facts.is_unknown
    return max(facts.num_cached_tokens, facts.num_shared_tokens) <= TOLERANCE_TOKENS


def _is_only_the_answer(facts: ReuseFacts) -> bool:
    """Whether no message differs, and the tokens part in the answer that came last."""
    return facts.changes.is_written_differently and not facts.changes.parts_in_front


def _setting(facts: ReuseFacts) -> str:
    if not facts.looks_at_records:
        return "cache_mode"
    if not facts.policies:
        return "CACHE_CANONICALIZE_TOOL_CONTEXT"
    names = sorted(facts.changes.moved_rules | facts.changes.switched_rules)
    return f"CACHE_RULE_POLICIES ({', '.join(f'{name}={facts.policies.get(name, "off")}' for name in names)})"


def _lay_there(facts: ReuseFacts) -> bool:
    """Whether the shared cache was seen to have more of the prompt than it gave."""
    return _there(facts) > TOLERANCE_TOKENS


def _there(facts: ReuseFacts) -> int:
    unshared = facts.reuse.unshared
    return max(0, unshared.num_there_tokens - facts.num_cached_tokens) if unshared is not None else 0


def _was_not_asked(facts: ReuseFacts) -> bool:
    """Whether the history may lie in the shared cache, which did not say so."""
    return facts.is_unknown and facts.reuse.unshared is not None and not _has_nothing(facts)


def _has_nothing(facts: ReuseFacts) -> bool:
    return facts.reuse.unshared is not None and facts.reuse.unshared.reason in ("not there", "too short")


def _why_unshared(facts: ReuseFacts) -> str | None:
    return _UNSHARED[facts.reuse.unshared.reason] if facts.reuse.unshared is not None else None


_UNSHARED: Mapping[UnsharedReason, str] = {
    "not there": "it has nothing of it",
    "slower": "computing was expected to take less time",
    "silent": "it did not answer in time",
    "damaged": "what it gave was not what it should be",
    "gone": "that went from there while it was read",
    "no room": "there was no room for it here",
    "too short": "so little is missing that asking would take longer than computing",
    "away": "it cannot be reached, and is left alone until it answers again",
    "lying": "it gave damaged KV too often, and is left alone for five minutes",
    "paused": "somebody was being forgotten meanwhile",
}
_NOT_SHARED = (
    "What is missing of this prompt did not come from the shared cache: {decided_by}.",
    "GET /v1/cache (remote) says how the shared cache is, how fast it was found to be, and what went wrong; "
    "kvserve doctor tries it.",
)
_OTHER_TOOLS = (
    "The tools are others{place}, and what stands behind them in the prompt was computed again.",
    "Keep the tools' names, descriptions and schemas the same within a conversation; their order does not matter.",
)

CAUSES: tuple[CauseRow, ...] = (
    # --- tokens that were read before were not there ---
    CauseRow(
        "not kept",
        lambda facts: _misses(facts) and not facts.can_keep,
        _missing,
        "The caches of this model cannot be copied exactly, so nothing is kept.",
        "Serve a model whose caches can be kept (GET /health: is_prefix_cached).",
    ),
    CauseRow(
        "no checkpoint",
        lambda facts: _misses(facts) and facts.lacks_checkpoint,
        _missing,
        "More of the prompt is stored, but this model's layers need a copy of their state, and none was kept there.",
        "Raise PROMPT_CACHE_MAX_BYTES, half of which is for such copies; they are made where messages and answers end.",
    ),
    CauseRow(
        "evicted",
        lambda facts: _misses(facts) and facts.has_left,
        _missing,
        "What was kept of this conversation or prompt has left the cache since.",
        "Raise PROMPT_CACHE_MAX_BYTES or, for long pauses, PROMPT_CACHE_TTL_SECONDS and "
        "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS; for many branches at once PROMPT_CACHE_MAX_ENTRIES_PER_SESSION.",
    ),
    CauseRow(
        "aborted",
        lambda facts: facts.was_aborted,
        _known,
        "The request before was ended by its client before it was complete; what it had computed was reused.",
        "Let the client wait for the end, or send the part of the answer that it has read.",
        place=lambda facts: None if facts.is_raw else facts.changes.place(),  # a raw prompt may be the same
    ),
    CauseRow("shared cache not used", _lay_there, _there, *_NOT_SHARED, decided_by=_why_unshared),
    CauseRow(
        "nothing lost",
        lambda facts: facts.is_reused,
        None,
        "All that was known of this prompt was reused{checkpoint}.",
    ),
    # --- the prompts part in front of what differs ---
    CauseRow(
        "tools changed",
        lambda facts: facts.changes.parts_in_front and facts.changes.has_other_tools,
        _known,
        *_OTHER_TOOLS,
        place=_tool_place,
    ),
    CauseRow(
        "template arguments changed",
        lambda facts: facts.changes.parts_in_front and bool(facts.changes.changed_arguments - {"thinking"}),
        _known,
        "The request gives the template other arguments than the one before{place}.",
        "Keep chat_template_kwargs and tool_choice the same within a conversation.",
        place=_template_place,
    ),
    CauseRow(
        "thinking switched",
        lambda facts: facts.changes.parts_in_front and bool(facts.changes.changed_arguments),
        _known,
        "Thinking was switched or set otherwise, and the template writes the history differently for it{place}.",
        "Keep thinking and its effort the same within a conversation.",
        place=_template_place,
    ),
    # --- a message differs ---
    CauseRow(
        "volatile value",
        lambda facts: bool(facts.changes.moved_rules) and not facts.changes.changed_rules,
        _known,
        "A value that moves by itself has moved{place}: {rules}. The model reads what was sent.",
        "Let the client leave it out or keep it still; CACHE_RULE_POLICIES can let the model read the old value.",
        place=_place,
        names_moved_rules=True,
    ),
    CauseRow(
        "setting",
        lambda facts: (
            bool(facts.changes.changed_rules or facts.changes.switched_rules)
            or (facts.is_unknown and not facts.looks_at_records)
        ),
        _known_or_history,
        "A setting kept the conversation from being recognised: {decided_by}{place}.",
        "Leave {decided_by} as it is by default.",
        place=_place,
        names_moved_rules=True,
        names_switched_rules=True,
        decided_by=_setting,
    ),
    CauseRow("tools changed", lambda facts: facts.changes.changes_tool, _known, *_OTHER_TOOLS, place=_tool_place),
    CauseRow(
        "thinking dropped",
        lambda facts: facts.changes.drops_thinking,
        _known,
        "Old thinking is not in the prompt any more{place}.",
        "PRESERVE_THINKING=true keeps it where the template can; clients can echo it as reasoning_content.",
        place=_place,
    ),
    CauseRow(
        "message changed",
        lambda facts: facts.changes.changes_message,
        _known,
        "The client sent another text than before{place}.",
        "Append to the history instead of changing it.",
        place=_place,
    ),
    CauseRow(
        "messages left out",
        lambda facts: facts.changes.leaves_out_messages,
        _known,
        "The client left out what stood there before{place}.",
        "Append to the history instead of shortening it; a summary costs its prefill once.",
        place=_place,
    ),
    CauseRow(
        "not replayed",
        lambda facts: bool(facts.unreplayed) and _is_only_the_answer(facts),
        _known,
        "The last answer was computed again{place}: this model's answers do not keep their own tokens in the next "
        "prompt, as {decided_by}.",
        "Another chat template may let them (CHAT_TEMPLATE); scripts/check_template.py tells what is found out of one.",
        place=_place,
        decided_by=lambda facts: facts.unreplayed,
    ),
    CauseRow(
        "written differently by the template",
        lambda facts: facts.changes.is_written_differently,
        _known,
        "The messages are the same, but the template writes them differently now{place}.",
        "The template decides this; one that writes history as it was first written loses nothing.",
        place=_place,
    ),
    # --- a raw prompt differs ---
    CauseRow(
        "tokenised differently",
        lambda facts: facts.changes.is_tokenised_differently,
        _known,
        "The text of an earlier raw prompt and its answer is the same, but its tokens are others{place}.",
        "Let prompts and answers end where a word or a line ends: text that goes on within one changes its tokens.",
        place=_place,
    ),
    CauseRow(
        "prompt changed",
        lambda facts: facts.changes.is_read_again,
        _known,
        "An earlier raw prompt was sent again and is another one{place}; the text behind that was computed again.",
        "Put what changes behind what stays: a prompt is reused up to the first character that differs.",
        place=_place,
    ),
    # --- nothing to compare with ---
    CauseRow(
        "other model",
        lambda facts: _is_all_new(facts) and facts.other_model is not None,
        _history,
        "What is sent was read by another model before: {decided_by}. KV of one model means nothing to another.",
        "Send every request of a conversation, or of a text, to the same model.",
        decided_by=lambda facts: facts.other_model,
    ),
    CauseRow(
        "weights not known",
        lambda facts: facts.is_unknown and bool(facts.unread) and not facts.was_cleared,
        _history,
        "The history holds answers from before the start, and whether this is the same model is not known: "
        "{decided_by}. Until then nothing of before is found on disk.",
        "Wait: a model's files are read once, and again where one of them has changed. Changing them while they "
        "are loaded takes another start.",
        decided_by=lambda facts: facts.unread,
    ),
    CauseRow("shared cache not used", _was_not_asked, _history, *_NOT_SHARED, decided_by=_why_unshared),
    CauseRow(
        "no session",  # also where somebody was forgotten: to name one is what helps
        lambda facts: facts.is_unknown and not facts.names_session,
        _history,
        "Nothing shows whose conversation this is: the request names no session of its own, and it sends back no "
        "answers of this server, or only a few words.",
        "Name the session in every request (x-session-id or session_id): what is known of it then comes back.",
    ),
    CauseRow(
        "cache cleared",
        lambda facts: facts.is_unknown and facts.was_cleared,
        _history,
        "The history holds answers that this server does not know: since its start the cache was emptied, or what "
        "was kept of this session or client was forgotten.",
        "Empty the cache, or have a session forgotten (DELETE /v1/cache), between conversations, not within one.",
    ),
    CauseRow(
        "shared cache not used",
        lambda facts: facts.is_unknown and _has_nothing(facts),
        _history,
        *_NOT_SHARED,
        decided_by=_why_unshared,
    ),
    CauseRow(
        "not seen since the start",
        lambda facts: facts.is_unknown,
        _history,
        "The history holds answers that this server has not read or written since it started: it began before a "
        "restart, or elsewhere.",
        "Keep KV on disk over a restart: start without --ephemeral-cache and --no-disk-cache.",
    ),
    CauseRow(
        "new conversation",
        lambda facts: facts.is_new,
        None,
        "No earlier request of this conversation is known: only a beginning that it shares with others can be reused"
        "{checkpoint}.",
    ),
    CauseRow(
        "new prompt",
        lambda facts: facts.is_raw,
        None,
        "No earlier raw prompt that is remembered goes on like this one; what is known of its beginning was reused"
        "{checkpoint}.",
    ),
)

ROW_OF: dict[Cause, CauseRow] = {row.cause: row for row in CAUSES}
"""Rows of one cause say the same of it, and lie in the prompt or not alike."""

NO_MISS: frozenset[Cause] = frozenset(row.cause for row in CAUSES if row.lost is None)
"""Causes with which nothing was computed again that could have been kept."""


def cause_of(facts: ReuseFacts) -> CauseRow:
    """The first row that applies: one always does."""
    return next(row for row in CAUSES if row.applies(facts))
