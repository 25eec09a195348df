"""An explanation in sentences: what happened, and what would have mended it. A table of causes; it decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvserve.sessions.explanation import NO_MISS, Cause, Explanation


@dataclass(frozen=True, slots=True)
class Words:
    """What is said of a cause. `{place}`, `{rules}`, `{decided_by}` and `{checkpoint}` are filled in."""

    summary: str
    remedy: str | None = None


WORDS: Mapping[Cause, Words] = {
    "nothing lost": Words("All that was known of this prompt was reused{checkpoint}."),
    "new conversation": Words(
        "No earlier request of this conversation is known; a common beginning was reused{checkpoint}."
    ),
    "new prompt": Words(
        "No earlier raw prompt that is remembered goes on like this one; what is known of its beginning was reused"
        "{checkpoint}."
    ),
    "not seen since the start": Words(
        "The history holds answers that this server has not read or written since it started: it began before a "
        "restart, or elsewhere.",
        "Keep KV on disk over a restart: start without --ephemeral-cache and --no-disk-cache.",
    ),
    "no session": Words(
        "Nothing shows whose conversation this is: the request names no session of its own, and it sends back no "
        "answers of this server, or only a few words.",
        "Name the session in every request (x-session-id or session_id): what is known of it then comes back.",
    ),
    "cache cleared": Words(
        "The history holds answers that this server does not know: since its start the cache was emptied, or what was "
        "kept of this session or client was forgotten.",
        "Empty the cache, or have a session forgotten (DELETE /v1/cache), between conversations, not within one.",
    ),
    "other model": Words(
        "What is sent was read by another model before: {decided_by}. KV of one model means nothing to another.",
        "Send every request of a conversation, or of a text, to the same model.",
    ),
    "weights not known": Words(
        "The history holds answers from before the start, and whether this is the same model is not known: "
        "{decided_by}. Until then nothing of before is found on disk.",
        "Wait: a model's files are read once, and again where one of them has changed. Changing them while they are "
        "loaded takes another start.",
    ),
    "setting": Words(
        "A setting kept the conversation from being recognised: {decided_by}{place}.",
        "Leave {decided_by} as it is by default.",
    ),
    "aborted": Words(
        "The request before was ended by its client before it was complete; what it had computed was reused.",
        "Let the client wait for the end, or send the part of the answer that it has read.",
    ),
    "evicted": Words(
        "What was kept of this conversation or prompt has left the cache since.",
        "Raise PROMPT_CACHE_MAX_BYTES or, for long pauses, PROMPT_CACHE_TTL_SECONDS and "
        "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS; for many branches at once PROMPT_CACHE_MAX_ENTRIES_PER_SESSION.",
    ),
    "not kept": Words(
        "The caches of this model cannot be copied exactly, so nothing is kept.",
        "Serve a model whose caches can be kept (GET /health: is_prefix_cached).",
    ),
    "no checkpoint": Words(
        "More of the prompt is stored, but this model's layers need a copy of their state, and none was kept there.",
        "Raise PROMPT_CACHE_MAX_BYTES, half of which is for such copies; they are made where messages and answers end.",
    ),
    "tools changed": Words(
        "The tools are others{place}, and what stands behind them in the prompt was computed again.",
        "Keep the tools' names, descriptions and schemas the same within a conversation; their order does not matter.",
    ),
    "thinking switched": Words(
        "Thinking was switched or set otherwise, and the template writes the history differently for it{place}.",
        "Keep thinking and its effort the same within a conversation.",
    ),
    "template arguments changed": Words(
        "The request gives the template other arguments than the one before{place}.",
        "Keep chat_template_kwargs and tool_choice the same within a conversation.",
    ),
    "volatile value": Words(
        "A value that moves by itself has moved{place}: {rules}. The model reads what was sent.",
        "Let the client leave it out or keep it still; CACHE_RULE_POLICIES can let the model read the old value.",
    ),
    "message changed": Words(
        "The client sent another text than before{place}.",
        "Append to the history instead of changing it.",
    ),
    "messages left out": Words(
        "The client left out what stood there before{place}.",
        "Append to the history instead of shortening it; a summary costs its prefill once.",
    ),
    "thinking dropped": Words(
        "Old thinking is not in the prompt any more{place}.",
        "PRESERVE_THINKING=true keeps it where the template can; clients can echo it as reasoning_content.",
    ),
    "written differently by the template": Words(
        "The messages are the same, but the template writes them differently now{place}.",
        "The template decides this; one that writes history as it was first written loses nothing.",
    ),
    "prompt changed": Words(
        "An earlier raw prompt was sent again and is another one{place}; the text behind that was computed again.",
        "Put what changes behind what stays: a prompt is reused up to the first character that differs.",
    ),
    "tokenised differently": Words(
        "The text of an earlier raw prompt and its answer is the same, but its tokens are others{place}.",
        "Let prompts and answers end where a word or a line ends: text that goes on within one changes its tokens.",
    ),
}


def summary(explanation: Explanation) -> str:
    """What happened, in one sentence."""
    return _filled(WORDS[explanation.cause].summary, explanation)


def remedy(explanation: Explanation) -> str | None:
    """What would have mended it, in one sentence; None where nothing is to be mended."""
    text = WORDS[explanation.cause].remedy
    return None if text is None else _filled(text, explanation)


def clause(explanation: Explanation) -> str | None:
    """The cause in a few words, for the request line; None where nothing was lost that could have been kept."""
    if explanation.cause in NO_MISS:
        return None
    rules = f" [{', '.join(explanation.rules)}]" if explanation.rules else ""
    decided_by = f": {explanation.decided_by}" if explanation.decided_by is not None else ""
    return f"{explanation.cause}{decided_by}{_place(explanation, short=True)}{rules}"


def _filled(text: str, explanation: Explanation) -> str:
    checkpoint = explanation.reuse.checkpoint
    return text.format(
        place=_place(explanation, short=False),
        rules=", ".join(explanation.rules) or "no rule",
        decided_by=explanation.decided_by or "",
        checkpoint=f", from the copy at the end of a {checkpoint} part" if checkpoint is not None else "",
    )


def _place(explanation: Explanation, *, short: bool) -> str:
    """Message and character of the first difference, without any of its text."""
    place = explanation.first_difference
    if place is None:
        return ""
    if place.tool is not None and place.message_index is not None:
        where = f"tool {place.tool} in message {place.message_index}, character {place.char}"
    elif place.tool is not None:
        where = f"tool {place.tool}, character {place.char}"
    elif place.role == "prompt":
        where = f"character {place.char}"
    elif place.message_index is None:
        where = f"character {place.char} of a message"
    else:
        where = f"message {place.message_index}{'' if short else f' ({place.role})'}, character {place.char}"
    return f" ({where})" if short else f" from {where} on"
