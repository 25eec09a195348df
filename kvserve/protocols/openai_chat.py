"""`/v1/chat/completions`: body -> Turn, answer events -> chunks or one message. Knows the wire form and nothing else.

Every field may also stand in `extra_body`; what stands at the top level counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    Finished,
    FinishReason,
    JsonObject,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    ToolCallBlock,
    ToolCallDelta,
    Turn,
    Waiting,
)
from kvserve.errors import BadRequest, RequestError
from kvserve.protocols.fields import flag, places, text, with_extra_body
from kvserve.protocols.openai_errors import encode_error
from kvserve.protocols.openai_messages import read_messages
from kvserve.protocols.openai_tools import field_names, read_response_format, read_tool_choice, read_tools
from kvserve.protocols.openai_usage import encode_usage
from kvserve.protocols.renaming import FieldNames
from kvserve.protocols.sampling import (
    check_tolerated,
    read_max_tokens,
    read_sampling,
    read_stop_strings,
    read_stream,
    refuse_unsupported,
)
from kvserve.protocols.session import read_session
from kvserve.protocols.thinking import SWITCH_FIELDS, read_thinking

PROTOCOL = "openai_chat"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {"n": (1,), "logprobs": (False, 0), "top_logprobs": (0,)}

# what the renderer passes to the template itself: a request that set one of these would change what a render is
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
    """A parsed body: the turn, how the answer travels, and what it calls the fields that are judged later."""

    turn: Turn
    stream: bool
    include_usage: bool
    names: FieldNames = FieldNames()


def parse_chat(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> ChatRequest:
    """The request that `body` and `headers` (lower-case names) make. Raises BadRequest naming the field.

    `max_tokens` and the thinking choice stay None where the request says nothing of them.
    """
    fields = with_extra_body(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    check_tolerated(fields)
    stream, include_usage = read_stream(fields)
    tools = read_tools(fields)
    parallel = fields.optional("parallel_tool_calls", flag)
    turn = Turn(
        request_id=request_id,
        protocol=PROTOCOL,
        model=fields.optional("model", text) or None,
        sampling=read_sampling(fields, defaults.sampling),
        messages=read_messages(fields),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=parallel is not False,
        response_format=read_response_format(fields),
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        stop_strings=read_stop_strings(fields),
        thinking=read_thinking(body),
        template_arguments=read_template_arguments(body),
        session=read_session(body, headers),
    )
    return ChatRequest(turn, stream, include_usage, field_names(fields))


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
    """The id that the body carries."""
    return f"chatcmpl-{request_id}"


class ChatStreamEncoder:
    """Turns the events of one answer into chunks, in order. It remembers only how many calls it has sent."""

    def __init__(self, request_id: RequestId, model: str, created: int, include_usage: bool) -> None:
        self._head = {
            "id": chat_id(request_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._include_usage = include_usage
        self._num_calls = 0

    def role_chunk(self) -> dict[str, object]:
        """The first chunk: who speaks, and no text yet."""
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> dict[str, object]:
        """A chunk that says nothing, for clients and proxies that give up on silence.

        LiteLLM swallows comments and deltas without a field; an empty piece of thinking passes.
        """
        return self._chunk({"reasoning_content": ""})

    def error_chunk(self, error: RequestError) -> dict[str, JsonObject]:
        """The last event of a stream that fails after it began: the error's body, which clients raise."""
        return encode_error(error)

    def encode(self, event: AnswerEvent) -> list[dict[str, object]]:
        """The chunks that `event` makes: none while waiting, two for the end where usage was asked for."""
        match event:
            case Waiting():
                return []
            case ReasoningDelta(text):
                return [self._chunk({"reasoning_content": text})]
            case ContentDelta(text):
                return [self._chunk({"content": text})]
            case ToolCallDelta(call):
                delta = {"index": self._num_calls, **_encode_call(call)}
                self._num_calls += 1
                return [self._chunk({"tool_calls": [delta]})]
            case Finished(reason, usage):
                usage_chunk = {**self._head, "choices": [], "usage": encode_usage(usage)}
                return [self._chunk({}, reason), *([usage_chunk] if self._include_usage else [])]

    def _chunk(self, delta: JsonObject, finish_reason: FinishReason | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._include_usage else {})}


def encode_answer(answer: Answer, request_id: RequestId, model: str, created: int) -> dict[str, object]:
    """The body of an answer that is not streamed: its message is what the chunks put together say."""
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if answer.calls and not answer.content else answer.content,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_encode_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finished.reason}
    return {
        "id": chat_id(request_id),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": encode_usage(answer.finished.usage),
    }


def _encode_call(call: ToolCallBlock) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
