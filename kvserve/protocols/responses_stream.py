"""Encodes answers of `/v1/responses` as events and as a whole response. This file knows only the wire form.

    response.created, response.in_progress
    per item:  output_item.added, its part and its pieces, output_item.done      reasoning | message | one per call
    response.completed | response.incomplete | response.failed

An answer that is not streamed is the response in the last event: the same encoder makes both.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    ContentToken,
    Finished,
    JsonObject,
    ReasoningDelta,
    RequestId,
    ToolCallBlock,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    Usage,
    Waiting,
)
from kvserve.errors import RequestError
from kvserve.protocols.logprobs import response_delta_logprobs, response_logprobs
from kvserve.protocols.responses_items import item_id
from kvserve.protocols.responses_request import Described
from kvserve.protocols.responses_tools import CustomInput, call_item
from kvserve.protocols.sealed_thinking import seal_reasoning

type Wire = dict[str, object]
type Status = Literal["in_progress", "completed", "incomplete", "failed"]

_PIECES = {
    # kind of the open item -> its part, the prefix of its pieces' events
    "message": ("output_text", "response.output_text"),
    "thoughts": ("reasoning_text", "response.reasoning_text"),
    "summary": ("summary_text", "response.reasoning_summary_text"),
}
_CALL_PIECES = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
_ERROR_CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}


def response_id(request_id: RequestId) -> str:
    """The id in the body."""
    return f"resp_{request_id}"


class ResponseStreamEncoder:
    """Turns the events of one answer into wire events, in order, and joins the response. `response` is complete after
    `Finished`; `keep` is given it before the client receives its end: the next request may name it at once."""

    def __init__(
        self,
        request_id: RequestId,
        model: str,
        created: int,
        described: Described,
        keep: Callable[[Wire], None] = lambda response: None,
    ) -> None:
        self._request_id = request_id
        self._described = described
        self._keep = keep
        self._head: Wire = {
            "id": response_id(request_id),
            "object": "response",
            "created_at": created,
            "model": model,
            **described.echo,
        }
        self._num_events = 0
        self._output: list[Wire] = []
        self._open: str | None = None
        self._said: list[str] = []
        self._tokens: list[ContentToken] = []
        self._custom_input: CustomInput | None = None
        self.response: Wire = self._response("in_progress")

    # --- what a stream asks for --------------------------------------------------------------------------------------

    def first_events(self) -> list[Wire]:
        """The events before the first token."""
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def keep_alive(self) -> Wire:
        """An event without news, for clients that give up on silence and ignore comments."""
        return self._event("response.in_progress", response=self.response)

    def error_chunk(self, error: RequestError) -> Wire:
        """The last event of an answer that failed after it began."""
        code = _ERROR_CODES.get(error.status, "server_error" if error.status >= 500 else error.code or "invalid_prompt")
        self.response = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=self.response)

    def encode(self, event: AnswerEvent) -> list[Wire]:
        """The wire's events for `event`; none while waiting."""
        match event:
            case Waiting():
                return []
            case ReasoningDelta(text):
                return self._say("summary" if self._described.with_summary else "thoughts", text)
            case ContentDelta(text, tokens):
                return self._say("message", text, tokens)
            case ToolCallStart(call_id, name):
                return [*self._close("completed"), self._begin_call(call_id, name)]
            case ToolCallPiece(text):
                return self._call_piece(self._custom_input.feed(text) if self._custom_input is not None else text)
            case ToolCallEnd(call, is_cut):
                return self._end_call(call, "incomplete" if is_cut else "completed")
            case Finished(reason, usage):
                return self._finish("incomplete" if reason == "length" else "completed", usage)

    # --- items -------------------------------------------------------------------------------------------------------

    def _say(self, kind: str, text: str, tokens: Sequence[ContentToken] = ()) -> list[Wire]:
        """A piece of text, in the open item if that has this kind."""
        events = [] if self._open == kind else [*self._close("completed"), *self._open_item(kind)]
        self._said.append(text)
        self._tokens += tokens
        return [*events, self._piece(f"{_PIECES[kind][1]}.delta", tokens, delta=text)]

    def _open_item(self, kind: str) -> list[Wire]:
        self._open, self._said, self._tokens = kind, [], []
        item = self._item("", "in_progress", with_part=False)
        return [
            self._event("response.output_item.added", output_index=len(self._output), item=item),
            self._part("added", ""),
        ]

    def _close(self, status: Status) -> list[Wire]:
        """The end of the open item, if one is open."""
        if self._open is None:
            return []
        said = "".join(self._said)
        done = [
            self._piece(f"{_PIECES[self._open][1]}.done", self._tokens, text=said),
            self._part("done", said),
            self._add(self._item(said, status, with_part=True)),
        ]
        self._open = None
        return done

    def _begin_call(self, call_id: str, name: str) -> Wire:
        body = call_item(ToolCallBlock(call_id, name, ""), self._described.tools)
        self._custom_input = CustomInput() if body["type"] == "custom_tool_call" else None
        item = {"id": self._call_id, **body, "status": "in_progress"}
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _call_piece(self, said: str) -> list[Wire]:
        """A piece of the current call: of its arguments, or of a custom tool's input."""
        if not said:
            return []
        _, name = _CALL_PIECES[self._call_kind]
        where = {"item_id": self._call_id, "output_index": len(self._output)}
        return [self._event(f"{name}.delta", **where, delta=said)]

    def _end_call(self, call: ToolCallBlock, status: Status) -> list[Wire]:
        rest = self._call_piece(self._custom_input.finish() if self._custom_input is not None else "")
        body = call_item(call, self._described.tools)
        field, name = _CALL_PIECES[self._call_kind]
        where = {"item_id": self._call_id, "output_index": len(self._output)}
        named = {"name": body["name"]} if field == "arguments" else {}
        return [
            *rest,
            self._event(f"{name}.done", **where, **named, **{field: body[field]}),
            self._add({"id": self._call_id, **body, "status": status}),
        ]

    @property
    def _call_kind(self) -> str:
        return "function_call" if self._custom_input is None else "custom_tool_call"

    @property
    def _call_id(self) -> str:
        return item_id("fc" if self._custom_input is None else "ctc", self._request_id, len(self._output))

    def _add(self, item: Wire) -> Wire:
        done = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done

    def _item(self, said: str, status: Status, *, with_part: bool) -> Wire:
        """The open item with its text."""
        parts = [self._part_of(said)] if with_part else []
        if self._open == "message":
            return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": parts}
        item: Wire = {"id": self._item_id, "type": "reasoning", "summary": [], "status": status}
        item |= {"summary": parts} if self._open == "summary" else {"content": parts}
        if self._described.seals_reasoning:
            item["encrypted_content"] = seal_reasoning(said) if with_part else None
        return item

    @property
    def _item_id(self) -> str:
        return item_id("msg" if self._open == "message" else "rs", self._request_id, len(self._output))

    # --- parts and events --------------------------------------------------------------------------------------------

    @property
    def _index(self) -> Wire:
        return {"summary_index": 0} if self._open == "summary" else {"content_index": 0}

    def _part_of(self, said: str) -> Wire:
        part: Wire = {"type": _PIECES[self._open or "message"][0], "text": said}
        if self._open != "message":
            return part
        return {**part, "annotations": [], "logprobs": response_logprobs(self._tokens)}

    def _part(self, what: str, said: str) -> Wire:
        name = "reasoning_summary_part" if self._open == "summary" else "content_part"
        return self._event(f"response.{name}.{what}", **self._where, part=self._part_of(said))

    def _piece(self, name: str, tokens: Sequence[ContentToken], **said: object) -> Wire:
        event = self._event(name, **self._where, **said)
        return {**event, "logprobs": response_delta_logprobs(tokens)} if self._open == "message" else event

    @property
    def _where(self) -> Wire:
        return {"item_id": self._item_id, "output_index": len(self._output), **self._index}

    def _event(self, kind: str, **fields: object) -> Wire:
        event: Wire = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    # --- the response ------------------------------------------------------------------------------------------------

    def _finish(self, status: Status, usage: Usage) -> list[Wire]:
        closing = self._close(status)
        self.response = self._response(status, usage=_encode_usage(usage))
        self._keep(self.response)
        return [*closing, self._event(f"response.{status}", response=self.response)]

    def _response(self, status: Status, usage: JsonObject | None = None, error: JsonObject | None = None) -> Wire:
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": usage,
        }


def _encode_usage(usage: Usage) -> Wire:
    """Input tokens include cached and written tokens, output tokens include reasoning tokens. OpenAI's form has no
    drafted tokens: they stand under chat/completions' names, where there were any."""
    drafted = {
        "accepted_prediction_tokens": usage.num_accepted_tokens,
        "rejected_prediction_tokens": usage.num_rejected_tokens,
    }
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_written_tokens,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            **(drafted if any(drafted.values()) else {}),
        },
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
