"""Parses `/v1/responses`, and keeps what the response repeats of its request. This file knows the wire form only.

Earlier items come from the store of responses (`SentHistory`) and are parsed like those of the body.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvserve.core import JsonObject, Message, RequestDefaults, RequestId, TextBlock, ToolChoice, Turn
from kvserve.errors import BadRequest
from kvserve.protocols.fields import (
    MAX_INTEGER,
    FieldNames,
    Fields,
    Reader,
    filled_text,
    flag,
    integer,
    list_of,
    mapping,
    text,
    with_extra_body,
    word,
)
from kvserve.protocols.logprobs import read_response_logprobs
from kvserve.protocols.openai_chat import read_template_arguments
from kvserve.protocols.placeholders import unserved_words
from kvserve.protocols.responses_items import input_items, read_items, resolve_references
from kvserve.protocols.responses_tools import (
    OfferedTools,
    read_text_format,
    read_tool_choice,
    read_tools,
    wants_only_unserved,
)
from kvserve.protocols.sampling_fields import (
    NO_LIMIT,
    read_max_tokens,
    read_sampling,
    read_speculation,
    read_stop_strings,
    read_stream,
    refuse_unsupported,
)
from kvserve.protocols.session import read_session
from kvserve.protocols.thinking import read_thinking

PROTOCOL = "openai_responses"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
}

_TOLERATED: Mapping[str, Reader[object]] = {
    "user": text,
    "safety_identifier": text,
    "service_tier": text,
    "metadata": mapping,
    "prompt_cache_key": text,
    "prompt_cache_retention": text,
    "max_tool_calls": integer(1, MAX_INTEGER),
    # a prompt beyond the context is always refused: dropping a part would hide it from the model
    "truncation": word("auto", "disabled"),
}
"""Known fields that do not change the answer; only their types are checked."""

_SEALED_REASONING = "reasoning.encrypted_content"


class SentHistory(Protocol):
    """The stored responses of former requests."""

    def items_until(self, response_id: str) -> Sequence[JsonObject]:
        """All items up to and with a response. Raises NotFound."""
        ...

    def item(self, item_id: str) -> JsonObject:
        """One item of a former answer. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class Described:
    """What a response repeats of its request; `echo` holds the fields as they are sent."""

    tools: OfferedTools
    echo: JsonObject
    with_summary: bool
    seals_reasoning: bool


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed body: the turn, how to send and store the answer (`items` are the request's own), and the client's names
    of the fields that are checked later. `words` are the whole answer if no model can give one."""

    turn: Turn
    stream: bool
    store: bool
    previous_response_id: str | None
    items: tuple[JsonObject, ...]
    described: Described
    names: FieldNames
    words: str | None = None


def parse_responses(
    body: JsonObject,
    headers: Mapping[str, str],
    defaults: RequestDefaults,
    request_id: RequestId,
    history: SentHistory,
) -> ResponsesRequest:
    """The request that `body` and `headers` (lower-case names) make. Raises BadRequest naming the field, and NotFound
    for a previous response or an item that is not kept."""
    fields = with_extra_body(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    for name, reader in _TOLERATED.items():
        fields.optional(name, reader)
    include = fields.optional("include", list_of(text)) or []
    previous = fields.optional("previous_response_id", filled_text)
    items = tuple(resolve_references(input_items(fields, request_id), history.item))
    tools = read_tools(fields)
    is_vain = wants_only_unserved(fields, tools)
    choice, tools = (ToolChoice(), tools) if is_vain else read_tool_choice(fields, tools)
    turn = Turn(
        request_id=request_id,
        protocol=PROTOCOL,
        model=fields.optional("model", text) or None,
        sampling=read_sampling(fields, defaults.sampling),
        messages=_read_messages(fields, previous, items, history),
        tools=tools.specs,
        tool_choice=choice,
        parallel_tool_calls=fields.optional("parallel_tool_calls", flag) is not False,
        response_format=read_text_format(fields),
        max_tokens=read_max_tokens(fields, "max_output_tokens"),
        stop_strings=read_stop_strings(fields),
        thinking=read_thinking(body),
        template_arguments=read_template_arguments(body),
        session=read_session(body, headers),
        num_top_logprobs=read_response_logprobs(fields, include),
        may_draft=read_speculation(fields),
        unserved_tools=tools.missed,
    )
    stream, _ = read_stream(fields)
    # not even in memory: a `previous_response_id` that works today and fails tomorrow helps no client
    store = fields.optional("store", flag) is not False and not turn.session.wants_nothing_kept
    reasoning = fields.optional("reasoning", mapping)
    with_summary = reasoning is not None and _asks_for_summary(reasoning)
    echo = _echo(fields, turn, tools, store=store, previous=previous)
    described = Described(tools, echo, with_summary, _SEALED_REASONING in include)
    names = FieldNames("input", "text.format.schema", tuple(tools.parameters[spec.name] for spec in tools.specs))
    words = unserved_words(tools.unserved) if is_vain else None
    return ResponsesRequest(turn, stream, store, previous, items, described, names, words)


def _read_messages(
    fields: Fields, previous: str | None, items: Sequence[JsonObject], history: SentHistory
) -> tuple[Message, ...]:
    """Instructions, earlier items and the input, as messages."""
    instructions = fields.optional("instructions", text)
    before = read_items(history.items_until(previous), "previous_response_id") if previous is not None else ()
    said = read_items(items, "input")
    if not (before or said):
        raise BadRequest("input is required: a string or items that say something.", param="input")
    system = (Message("system", (TextBlock(instructions),)),) if instructions else ()
    return (*system, *before, *said)


def _asks_for_summary(reasoning: Fields) -> bool:
    """Whether `summary`, or the older `generate_summary`, asks for one."""
    words = word("auto", "concise", "detailed", "none")
    said = [reasoning.optional(name, words) for name in ("summary", "generate_summary")]
    return any(one not in (None, "none") for one in said)


def _echo(fields: Fields, turn: Turn, tools: OfferedTools, *, store: bool, previous: str | None) -> dict[str, object]:
    """The fields of a response that repeat the request, with defaults filled in and without tools that the model did
    not get."""
    reasoning, options = fields.optional("reasoning", mapping), fields.optional("text", mapping)
    choice, _ = fields.locate("tool_choice")
    said = {name: fields.locate(name)[0] for name in ("instructions", "user", "prompt_cache_key", "max_tool_calls")}
    metadata = fields.optional("metadata", mapping)
    return {
        "background": False,
        **said,
        "max_output_tokens": None if turn.max_tokens == NO_LIMIT else turn.max_tokens,
        "metadata": metadata.values if metadata is not None else {},
        "parallel_tool_calls": turn.parallel_tool_calls,
        "previous_response_id": previous,
        "reasoning": {
            "effort": turn.thinking.effort,
            "summary": reasoning.values.get("summary") if reasoning else None,
        },
        "service_tier": "default",
        "store": store,
        "temperature": turn.sampling.temperature,
        "text": {"format": {"type": "text"}, **(options.values if options is not None else {})},
        "tool_choice": choice if choice is not None else "auto",
        "tools": list(tools.shown),
        "top_logprobs": turn.num_top_logprobs or 0,
        "top_p": turn.sampling.top_p,
        "truncation": "disabled",
    }
