"""Parses `/v1/messages` and its `count_tokens`. This file knows the wire form of requests; `anthropic_answers.py`
encodes answers.

Every field may also be in `extra_body`; the top level counts first. The server's own extensions (`seed`, `min_p`,
`session_id`, `ttl`, `cache_mode`, `speculation`, ...) are read as in the other protocols.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.core import (
    JsonObject,
    Message,
    RequestDefaults,
    RequestId,
    SessionHint,
    ThinkingChoice,
    ToolChoice,
    ToolSpec,
    Turn,
    offered_tools,
)
from kvserve.errors import BadRequest
from kvserve.protocols.anthropic_content import read_effort, read_messages, read_system, wire_blocks
from kvserve.protocols.anthropic_tools import (
    SentTools,
    field_names,
    read_response_format,
    read_tool_choice,
    read_tools,
    wants_only_unserved,
    with_definitions,
)
from kvserve.protocols.fields import (
    MAX_TOKEN_COUNT,
    FieldNames,
    Fields,
    Reader,
    decode_body,
    flag,
    integer,
    list_of,
    mapping,
    text,
    with_extra_body,
    word,
)
from kvserve.protocols.openai_chat import read_template_arguments
from kvserve.protocols.placeholders import unserved_words
from kvserve.protocols.sampling_fields import read_sampling, read_speculation, read_stop_strings, refuse_unsupported
from kvserve.protocols.session import read_session, read_ttl
from kvserve.protocols.thinking import read_thinking

PROTOCOL = "anthropic_messages"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    # a conversation that goes on in a thread lacks what was said before
    "thread": (),
}
_TOLERATED: Mapping[str, Reader[object]] = {
    "service_tier": text,
    "inference_geo": text,
    "speed": text,
    "betas": list_of(text),
}
"""Known fields that change nothing here; only their types are checked."""

_KEEPS_THINKING = "clear_thinking_20251015"
_SESSION_IN_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,})\Z")
_DEFAULT_TTL = "5m"


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed body: the turn, whether to stream, whether to show the thinking, and the client's names of the fields
    that are checked later. `words` are the whole answer if no model can give one."""

    turn: Turn
    stream: bool
    shows_thinking: bool
    names: FieldNames
    words: str | None = None


def parse_messages(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> MessagesRequest:
    """The request that `body` and `headers` (lower-case names) make. Raises BadRequest naming the field."""
    fields = with_extra_body(body)
    max_tokens = fields.required("max_tokens", integer(1, MAX_TOKEN_COUNT))
    read = _read(body, headers, defaults, request_id)
    thinking = fields.optional("thinking", _read_thinking_object)
    is_omitted = thinking is not None and thinking.optional("display", text) == "omitted"
    return MessagesRequest(
        replace(read.turn, max_tokens=max_tokens),
        fields.optional("stream", flag) or False,
        not is_omitted,
        field_names(fields, read.sent, read.offered),
        unserved_words(read.sent.unserved) if read.wants_only_unserved else None,
    )


def parse_counted(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> Turn:
    """The turn whose prompt is counted; fields that only an answer needs may be missing. Raises BadRequest."""
    return _read(body, headers, defaults, request_id).turn


@dataclass(frozen=True, slots=True)
class _ReadBody:
    """A parsed body: its turn, its tools, and the tools that can be called at this point of the conversation."""

    turn: Turn
    sent: SentTools
    offered: tuple[ToolSpec, ...]
    wants_only_unserved: bool


def _read(body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId) -> _ReadBody:
    fields = with_extra_body(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    for name, reader in _TOLERATED.items():
        fields.optional(name, reader)
    sent, system = read_tools(fields), read_system(fields)
    messages = with_definitions(read_messages(fields), (*sent.front, *sent.deferred))
    said = (*system, *(message for some in messages for message in some))
    offered = offered_tools(sent.front, said)
    is_vain = wants_only_unserved(fields, offered, sent.unserved)
    tool_choice, is_parallel = (ToolChoice(), True) if is_vain else read_tool_choice(fields, offered)
    turn = Turn(
        request_id=request_id,
        protocol=PROTOCOL,
        model=fields.optional("model", text) or None,
        sampling=read_sampling(fields, defaults.sampling),
        messages=said,
        tools=sent.front,
        tool_choice=tool_choice,
        parallel_tool_calls=is_parallel,
        response_format=read_response_format(fields),
        stop_strings=read_stop_strings(fields, "stop_sequences"),
        thinking=_thinking(fields, body),
        template_arguments=read_template_arguments(body),
        session=_session(body, headers, _read_cache_marks(body, system, messages)),
        may_draft=read_speculation(fields),
        unserved_tools=sent.unserved,
    )
    return _ReadBody(turn, sent, offered, is_vain)


# --- thinking --------------------------------------------------------------------------------------------------------


def _read_thinking_object(value: object, path: str) -> Fields | None:
    """Anthropic's `thinking` object; None for a word or a switch, the other protocols' forms."""
    return mapping(value, path) if isinstance(value, Mapping) else None


def _thinking(fields: Fields, body: JsonObject) -> ThinkingChoice:
    """`thinking` switches it on, `output_config.effort` sets the amount, `context_management` may keep old thinking.

    A request that does not ask for thinking gets none, whatever the server's default: so does Anthropic's API, and its
    clients take the first block for the text. An effort alone does not switch thinking on.
    """
    choice = read_thinking(body)
    effort = _turn_effort(fields) or fields.optional("output_config", read_effort)
    if choice.enabled is None:
        choice = replace(choice, enabled=False)
    if choice.effort is None and choice.enabled:
        choice = replace(choice, effort=effort)
    if choice.preserve is None and _keeps_all_thinking(fields):
        choice = replace(choice, preserve=True)
    return choice


def _turn_effort(fields: Fields) -> str | None:
    """The effort that a message of the newest turn asks for; efforts of older turns have ended. A turn begins with the
    user's own words: tool results belong to the turn that called the tools."""
    effort: str | None = None
    for message in fields.required("messages", list_of(mapping)):
        blocks = message.values.get("content")
        if message.values.get("role") == "user" and not any(
            block.get("type") == "tool_result" for block in wire_blocks(blocks)
        ):
            effort = None
        effort = message.optional("output_config", read_effort) or effort
    return effort


def _keeps_all_thinking(fields: Fields) -> bool:
    """Whether the client's context edits keep the thinking of all turns; other edits are ignored."""
    management = fields.optional("context_management", mapping)
    edits = management.optional("edits", list_of(mapping)) if management is not None else None
    kept = [edit.values.get("keep") for edit in edits or () if edit.optional("type", text) == _KEEPS_THINKING]
    return any(each == "all" or (isinstance(each, Mapping) and each.get("type") == "all") for each in kept)


# --- session ---------------------------------------------------------------------------------------------------------


def _session(body: JsonObject, headers: Mapping[str, str], marks: "_CacheMarks") -> SessionHint:
    """The hint as in every protocol, with the session in `metadata.user_id` and the cache marks."""
    hint = read_session(body, headers)
    metadata = Fields(body).optional("metadata", mapping)
    user_id = metadata.optional("user_id", text) if metadata is not None else None
    own_id = None if hint.is_shared_id else hint.session_id
    named_by_user = _session_in(user_id or "")
    return replace(
        hint,
        session_id=own_id or named_by_user or hint.session_id,
        is_shared_id=hint.is_shared_id and named_by_user is None,
        num_marked_messages=marks.num_messages,
        marked_seconds=marks.ttl_seconds,
    )


def _session_in(user_id: str) -> str | None:
    """The session that Claude Code writes into its user id, as JSON or at its end; None for a plain user id."""
    if match := _SESSION_IN_USER_ID.search(user_id):
        return match[1]
    try:
        session = decode_body(user_id.encode()).get("session_id")  # lone surrogates are replaced as in a body
    except BadRequest:
        return None
    return session if isinstance(session, str) and session else None


# --- cache marks -----------------------------------------------------------------------------------------------------
#
# Tools, blocks of the system text, blocks of messages and the request itself (its last message) may carry a mark. Of
# several marks the last place and the longest time count: the prefix kept up to there serves them all.


@dataclass(frozen=True, slots=True)
class _CacheMarks:
    """The last mark follows `num_messages` messages (None: no mark); `ttl_seconds` is the longest time asked for."""

    num_messages: int | None = None
    ttl_seconds: float | None = None


def _read_cache_marks(
    body: JsonObject, system: Sequence[Message], messages: Sequence[Sequence[Message]]
) -> _CacheMarks:
    """The marks of a parsed body; `messages` are the messages of each wire message. Raises BadRequest."""
    places: list[int] = []
    seconds: list[float] = []
    for num_messages, holder in _marked_places(body, system, messages):
        ttl_seconds = holder.optional("cache_control", _read_mark)
        if ttl_seconds is not None:
            places.append(num_messages)
            seconds.append(ttl_seconds)
    return _CacheMarks(max(places), max(seconds)) if places else _CacheMarks()


def _marked_places(
    body: JsonObject, system: Sequence[Message], messages: Sequence[Sequence[Message]]
) -> Iterator[tuple[int, Fields]]:
    """Every object that may carry a mark, with the number of messages up to it."""
    num_messages = len(system)
    for key in ("tools", "system"):
        for index, block in enumerate(wire_blocks(body.get(key))):
            yield num_messages, Fields(block, f"{key}[{index}]")
    sent = body.get("messages")
    for number, message in enumerate(sent if isinstance(sent, list | tuple) else ()):
        num_messages += len(messages[number])
        for block in wire_blocks(message.get("content")):
            yield num_messages, Fields(block, f"messages[{number}].content")
    yield num_messages, Fields(body)


def _read_mark(value: object, path: str) -> float:
    """Seconds: 5 minutes unless the mark says otherwise."""
    mark = mapping(value, path)
    mark.required("type", word("ephemeral"))
    mark.optional("scope", text)
    ttl = mark.optional("ttl", read_ttl)
    return read_ttl(_DEFAULT_TTL, path) if ttl is None else ttl
