"""An answer as it comes and as a whole, once generated text was read. It knows text and calls, no token ids and no wire
form."""

from dataclasses import dataclass
from typing import Literal

from kvserve.core.messages import ToolCallBlock


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentToken:
    """A token that the answer's text was written with, for requests that ask for log-probabilities.

    `text_bytes` is the whole token, which may hold a part of a character or reach beyond the answer's text; `offset`
    counts that text's characters before it. `top` are the likeliest tokens of its place, the likeliest first.
    """

    text_bytes: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer's text. `tokens`, where the request asks for log-probabilities: those that begin in it."""

    text: str
    tokens: tuple[ContentToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its pieces follow and then its end; nothing else comes between them."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of the arguments' text of the call that has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call that had begun; its arguments are its pieces joined. `is_cut`: the text broke off inside it."""

    call: ToolCallBlock
    is_cut: bool = False


type OutputDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallPiece | ToolCallEnd

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; cached tokens are part of the prompt, reasoning tokens of the completion.
    `num_written_tokens` of the prompt were computed, and their KV is kept for other requests. Of the drafted tokens
    that went through the model it drew `num_accepted_tokens` itself, and others than `num_rejected_tokens`."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int = 0
    num_written_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing new yet: queued, or `num_done_tokens` of the prompt are in the KV cache.

    `num_cached_tokens` of them were there before; None until the prompt was looked up. `is_idle`: the next event has to
    be waited for.
    """

    num_done_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int | None = None
    is_idle: bool = True


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete, as far as a limit let it be; one that was broken off has no such event. `stop_string` is
    the one that ended it, if one did; `is_context_full`: the context limit cut it, not a limit of the request or the
    server's default."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    is_context_full: bool = False


type AnswerEvent = Waiting | OutputDelta | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, for clients that do not stream: the same events, collected."""

    reasoning: str
    content: str
    calls: tuple[ToolCallBlock, ...]
    finished: Finished
    tokens: tuple[ContentToken, ...] = ()
