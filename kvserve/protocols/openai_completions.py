"""Parses `/v1/completions` and encodes its answers. This file knows only the wire form.

The prompt goes to the model as it is, and everything that the model writes is content.
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
    RequestDefaults,
    RequestId,
    Turn,
    Waiting,
)
from kvserve.errors import BadRequest
from kvserve.protocols.error_bodies import encode_openai_error
from kvserve.protocols.fields import (
    MAX_TOKEN_COUNT,
    FieldNames,
    filled_text,
    integer,
    list_of,
    mistyped,
    text,
    with_extra_body,
)
from kvserve.protocols.logprobs import completion_logprobs, read_completion_logprobs
from kvserve.protocols.openai_chat import encode_usage
from kvserve.protocols.openai_tools import content_names, read_response_format
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
from kvserve.protocols.thinking import read_thinking

PROTOCOL = "openai_completions"

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

_read_token_ids = list_of(integer(0, MAX_TOKEN_COUNT))


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed body: the turn, how to send the answer, and the client's names of the fields that are checked later."""

    turn: Turn
    stream: bool
    include_usage: bool
    names: FieldNames = FieldNames()


def parse_completion(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> CompletionRequest:
    """The request that `body` and `headers` (lower-case names) make. Raises BadRequest naming the field."""
    fields = with_extra_body(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    check_tolerated(fields)
    stream, include_usage = read_stream(fields)
    turn = Turn(
        request_id=request_id,
        protocol=PROTOCOL,
        model=fields.optional("model", text) or None,
        sampling=read_sampling(fields, defaults.sampling),
        raw_prompt=fields.required("prompt", read_prompt),
        response_format=read_response_format(fields),
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        stop_strings=read_stop_strings(fields),
        thinking=read_thinking(body),
        session=read_session(body, headers),
        num_top_logprobs=read_completion_logprobs(fields),
        may_draft=read_speculation(fields),
    )
    return CompletionRequest(turn, stream, include_usage, content_names(fields))


def read_prompt(value: object, path: str) -> str | tuple[int, ...]:
    """One prompt: a string, token ids, or an array of one of these. Raises BadRequest, also for several prompts."""
    if isinstance(value, str):
        return filled_text(value, path)
    if not isinstance(value, list | tuple) or not value:
        raise mistyped(path, "a string or an array of token ids that is not empty", value)
    if not isinstance(value[0], str | list | tuple):
        return tuple(_read_token_ids(value, path))
    if len(value) > 1:
        raise BadRequest(f"{path}: one request takes one prompt, got {len(value)}; send one request each.", param=path)
    if isinstance(value[0], str):
        return filled_text(value[0], f"{path}[0]")
    if not value[0]:
        raise mistyped(f"{path}[0]", "an array of token ids that is not empty", value[0])
    return tuple(_read_token_ids(value[0], f"{path}[0]"))


# --- answers ---------------------------------------------------------------------------------------------------------


def completion_id(request_id: RequestId) -> str:
    """The id in the body."""
    return f"cmpl-{request_id}"


class CompletionEncoder:
    """Turns the events of one completion into chunks, in order, or the whole completion into one body."""

    def __init__(
        self, request_id: RequestId, model: str, created: int, include_usage: bool, *, with_logprobs: bool = False
    ) -> None:
        self._head = {
            "id": completion_id(request_id),
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._include_usage = include_usage
        self._with_logprobs = with_logprobs

    def keep_alive(self) -> dict[str, object]:
        """An empty chunk for clients and proxies that give up on silence."""
        return self._chunk("")

    error_chunk = staticmethod(encode_openai_error)
    """The last event of a stream that failed after it began: the error's body, which clients raise."""

    def encode(self, event: AnswerEvent) -> list[dict[str, object]]:
        """The chunks for `event`. Raises TypeError for reasoning and calls: a completion has neither."""
        match event:
            case Waiting():
                return []
            case ContentDelta(text, tokens):
                return [self._chunk(text, tokens=tokens if self._with_logprobs else None)]
            case Finished(reason, usage):
                usage_chunk = {**self._head, "choices": [], "usage": encode_usage(usage)}
                return [self._chunk("", reason), *([usage_chunk] if self._include_usage else [])]
        raise TypeError(f"a completion has no {type(event).__name__}")

    def encode_whole(self, answer: Answer) -> dict[str, object]:
        """The body of a completion that is not streamed. Raises TypeError for reasoning or calls."""
        if answer.reasoning or answer.calls:
            raise TypeError("a completion has neither reasoning nor calls")
        tokens = answer.tokens if self._with_logprobs else None
        choice = _encode_choice(answer.content, answer.finished.reason, tokens)
        return {**self._head, "choices": [choice], "usage": encode_usage(answer.finished.usage)}

    def _chunk(
        self, text: str, finish_reason: FinishReason | None = None, tokens: Sequence[ContentToken] | None = None
    ) -> dict[str, object]:
        body = {**self._head, "choices": [_encode_choice(text, finish_reason, tokens)]}
        return {**body, "usage": None} if self._include_usage else body


def _encode_choice(
    text: str, finish_reason: FinishReason | None, tokens: Sequence[ContentToken] | None
) -> dict[str, object]:
    logprobs = completion_logprobs(tokens) if tokens is not None else None
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
