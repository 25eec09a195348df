"""Parses `/v1/chat/completions` and encodes its answers as chunks or one message. This file knows only the wire form.

Every field may also be in `extra_body`; the top level counts first. A request with the legacy `functions` is answered
in their form: one `function_call` instead of `tool_calls`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ContentToken,
    Finished,
    FinishReason,
    JsonObject,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    ToolCallBlock,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    Turn,
    Usage,
    Waiting,
)
from kvserve.errors import BadRequest
from kvserve.protocols.error_bodies import encode_openai_error
from kvserve.protocols.fields import FieldNames, flag, places, text, with_extra_body
from kvserve.protocols.logprobs import chat_logprobs, read_chat_logprobs
from kvserve.protocols.openai_messages import read_messages, read_prediction
from kvserve.protocols.openai_tools import (
    field_names,
    gives_functions,
    read_response_format,
    read_tool_choice,
    read_tools,
)
from kvserve.protocols.sampling_fields import (
    check_tolerated,
    read_max_tokens,
    read_sampling,
    read_speculation,
    read_stop_strings,
    read_stream,
    refuse_unsupported,
)
from kvserve.protocols.session import read_session
from kvserve.protocols.thinking import SWITCH_FIELDS, read_thinking

PROTOCOL = "openai_chat"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {"n": (1,)}

# The renderer itself passes these to the template; a request that set one of them would change what is rendered.
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "return_dict", "return_tensors", "padding", "truncation"),
        *("max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    )
)


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed body: the turn, how to send the answer, and the client's names of the fields that are checked later."""

    turn: Turn
    stream: bool
    include_usage: bool
    uses_functions: bool = False
    """Whether the tools are the legacy `functions`."""
    names: FieldNames = FieldNames()


def parse_chat(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> ChatRequest:
    """The request that `body` and `headers` (lower-case names) make. Raises BadRequest naming the field.

    `max_tokens` and the thinking choice are None if the request does not set them.
    """
    fields = with_extra_body(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    check_tolerated(fields)
    stream, include_usage = read_stream(fields)
    tools = read_tools(fields)
    uses_functions = gives_functions(fields)
    parallel = fields.optional("parallel_tool_calls", flag)
    turn = Turn(
        request_id=request_id,
        protocol=PROTOCOL,
        model=fields.optional("model", text) or None,
        sampling=read_sampling(fields, defaults.sampling),
        messages=read_messages(fields),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=parallel is not False and not uses_functions,
        response_format=read_response_format(fields),
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        stop_strings=read_stop_strings(fields),
        thinking=read_thinking(body),
        template_arguments=read_template_arguments(body),
        session=read_session(body, headers),
        num_top_logprobs=read_chat_logprobs(fields),
        prediction=fields.optional("prediction", read_prediction) or "",
        may_draft=read_speculation(fields),
    )
    return ChatRequest(turn, stream, include_usage, uses_functions, field_names(fields))


def read_template_arguments(body: JsonObject) -> JsonObject:
    """`chat_template_kwargs` without the thinking switches, which the renderer sets."""
    arguments: dict[str, object] = {}
    for place in reversed(places(body, ("chat_template_kwargs",), ("extra_body", "chat_template_kwargs"))):
        for name, value in place.values.items():
            if name in _RESERVED_TEMPLATE_ARGUMENTS:
                param = f"{place.path}.{name}"
                raise BadRequest(f"{param} cannot be set by a request.", param=param)
            if name not in SWITCH_FIELDS:
                arguments[name] = value
    return arguments


# --- answers ---------------------------------------------------------------------------------------------------------


def chat_id(request_id: RequestId) -> str:
    """The id in the body."""
    return f"chatcmpl-{request_id}"


class ChatEncoder:
    """Turns the events of one answer into chunks, in order, or the whole answer into one message. It remembers only how
    many calls it has sent."""

    def __init__(
        self,
        request_id: RequestId,
        model: str,
        created: int,
        include_usage: bool,
        *,
        with_logprobs: bool = False,
        uses_functions: bool = False,
    ) -> None:
        self._head = {
            "id": chat_id(request_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._include_usage = include_usage
        self._with_logprobs = with_logprobs
        self._uses_functions = uses_functions
        self._num_calls = 0

    def role_chunk(self) -> dict[str, object]:
        """The first chunk: the role without text."""
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> dict[str, object]:
        """An empty chunk for clients and proxies that give up on silence.

        LiteLLM drops comments and deltas without a field; an empty piece of thinking passes.
        """
        return self._chunk({"reasoning_content": ""})

    error_chunk = staticmethod(encode_openai_error)
    """The last event of a stream that failed after it began: the error's body, which clients raise."""

    def encode(self, event: AnswerEvent) -> list[dict[str, object]]:
        """The chunks for `event`: none while waiting, two for the end if the client asked for usage."""
        match event:
            case Waiting():
                return []
            case ReasoningDelta(text):
                return [self._chunk({"reasoning_content": text})]
            case ContentDelta(text, tokens):
                return [self._chunk({"content": text}, tokens=tokens)]
            case ToolCallStart(call_id, name):
                return [self._call_chunk({"name": name, "arguments": ""}, id=call_id, type="function")]
            case ToolCallPiece(text):
                return [self._call_chunk({"arguments": text})]
            case ToolCallEnd():
                self._num_calls += 1
                return []
            case Finished(reason, usage):
                usage_chunk = {**self._head, "choices": [], "usage": encode_usage(usage)}
                end = self._chunk({}, _finish_reason(reason, uses_functions=self._uses_functions))
                return [end, *([usage_chunk] if self._include_usage else [])]

    def encode_whole(self, answer: Answer) -> dict[str, object]:
        """The body of an answer that is not streamed: its message equals the joined chunks."""
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if answer.calls and not answer.content else answer.content,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls and self._uses_functions:
            message["function_call"] = _encode_function(answer.calls[0])
        elif answer.calls:
            message["tool_calls"] = [_encode_call(call) for call in answer.calls]
        logprobs = chat_logprobs(answer.tokens) if self._with_logprobs else None
        finish_reason = _finish_reason(answer.finished.reason, uses_functions=self._uses_functions)
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = encode_usage(answer.finished.usage)
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def _call_chunk(self, function: JsonObject, **head: str) -> dict[str, object]:
        """A piece of the current call."""
        if self._uses_functions:
            return self._chunk({"function_call": function})
        return self._chunk({"tool_calls": [{"index": self._num_calls, **head, "function": function}]})

    def _chunk(
        self,
        delta: JsonObject,
        finish_reason: str | None = None,
        tokens: Sequence[ContentToken] | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if self._with_logprobs:
            choice["logprobs"] = chat_logprobs(tokens) if tokens is not None else None
        return {**self._head, "choices": [choice], **({"usage": None} if self._include_usage else {})}


def _encode_call(call: ToolCallBlock) -> dict[str, object]:
    return {"id": call.call_id, "type": "function", "function": _encode_function(call)}


def _encode_function(call: ToolCallBlock) -> dict[str, object]:
    return {"name": call.name, "arguments": call.arguments}


def _finish_reason(reason: FinishReason, *, uses_functions: bool) -> str:
    return "function_call" if uses_functions and reason == "tool_calls" else reason


# --- usage -----------------------------------------------------------------------------------------------------------


def encode_usage(usage: Usage) -> dict[str, object]:
    """Prompt tokens include cached and written tokens, completion tokens include reasoning tokens. Predictions are all
    drafted tokens that went through the model, the client's `prediction` or the server's own: those that the model drew
    itself, which are completion tokens, and the others, which are not."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_written_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_rejected_tokens,
        },
    }
