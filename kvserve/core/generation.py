"""What the engine is asked for, and what it says: model tokens in, tokens and progress out. It knows ids and counts, no
text of an answer and no array."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvserve.core.drafting import Drafter, Drafting
from kvserve.core.messages import Message
from kvserve.core.requests import ImageInput, ImageSpan, RequestId, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Model tokens: ids, and which runs of them stand for images. Two images of one size have equal ids."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class MessageStart:
    """A message begins at this offset of the model tokens; `is_user` marks a user's own words, not a tool's result."""

    offset: int
    is_user: bool


@dataclass(frozen=True, slots=True)
class Written:
    """An assistant's turn that the model wrote here, so that its exact tokens can be said again.

    `message` is what the answer was parsed to, `prefix_ids` the end of the prompt from the start of the message that
    the model went on with (the generation tail), or of the template's own messages before it, `ids` what the model
    emitted after it, without the stop token and without a stop string; where such a string began inside a token, the
    text before it is tokenised anew. `opens_reasoning`: the tail ended inside an opened thinking block.
    """

    message: Message
    prefix_ids: tuple[int, ...]
    ids: tuple[int, ...]
    opens_reasoning: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on what the model may write, in llguidance's Lark dialect.

    It holds from the first token on or, where `after` is given, from the end of the first occurrence of these token
    ids (the end of thinking). `begun` is the text at the prompt's end that the constrained text begins with.
    """

    lark: str
    after: tuple[int, ...] = ()
    begun: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Thinking is ended once `max_num_tokens` tokens of it were written: `closing_ids` are forced then.

    `opening` and `closing` are its tags, in the text that `decode` makes of token ids; an opening one counts at the
    beginning of a line, or `anywhere`. `is_open`: the prompt ended inside thinking.
    """

    max_num_tokens: int
    opening: str
    closing: str
    closing_ids: tuple[int, ...]
    anywhere: bool
    is_open: bool
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the engine is asked for: continue `prompt` until a stop token, `max_tokens` or a cancellation.

    `message_starts`, `owner` and `ttl_seconds` (since its last use) steer what the prefix cache keeps and for how long,
    never what it reuses. `owner` names who asks: limits are its own, and what only it used can be forgotten by it; ""
    where that is not known. `turn_end` is the stop token that later prompts have behind the answer, whichever ended
    it; None where that is not known. `images` has every image that the prompt's spans name, once. What was
    computed for one `partition` is never reused in another one. `is_forgotten`: its owner was forgotten since it came,
    so nothing of it is kept. `num_top_logprobs`: tokens come with log-probabilities, and so many likeliest ones.
    `drafter`: what may come next is drafted by it, None where nothing is.
    """

    request_id: RequestId
    prompt: TokenSequence
    max_tokens: int
    sampling: SamplingParams
    stop_tokens: frozenset[int]
    grammar: Grammar | None = None
    thinking_limit: ThinkingLimit | None = None
    message_starts: tuple[MessageStart, ...] = ()
    owner: str = ""
    ttl_seconds: float | None = None
    turn_end: int | None = None
    images: tuple[ImageInput, ...] = ()
    partition: str = ""
    is_forgotten: bool = False
    num_top_logprobs: int | None = None
    drafter: Drafter | None = None


ReuseTier = Literal["nothing", "ram", "live row", "disk", "shared", "warmed"]
"""Where a prompt's beginning came from: `live row` is a request that was computing it at the same time, `shared` the
cache that several servers share; of what was `warmed` a part was computed ahead, and this is the first request to use
it."""


UnsharedReason = Literal[
    "not there", "slower", "silent", "damaged", "gone", "no room", "too short", "away", "lying", "paused"
]
"""Why a prompt was not read from the cache that several servers share: it has nothing; computing takes less time; it
did not answer in time; what it gave was no such KV; that went while it was read; there was no place for it here. Not
asked: the prompt is too short; it failed, or lied too often, and is left alone; somebody was being forgotten."""


@dataclass(frozen=True, slots=True)
class Unshared:
    """What a prompt did not get from the shared cache. `num_there_tokens`: so far the prompt was seen to be there, 0
    where nothing was seen."""

    reason: UnsharedReason
    num_there_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """How a prompt's beginning was found. `num_matched_tokens` of it were stored, token by token the same, though not
    all need be usable. `checkpoint` says why there was a state where the row starts (`user`: the end of a user's
    message); None where any place would do, or nothing was found. `is_trim_miss`: a checkpoint was missing.
    `unshared`: why the shared cache gave nothing, or not all that it has; None where it did, or there is none.
    """

    tier: ReuseTier = "nothing"
    num_matched_tokens: int = 0
    checkpoint: str | None = None
    is_trim_miss: bool = False
    unshared: Unshared | None = None


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`num_done_tokens` of `num_prompt_tokens` are in the KV cache, `num_cached_tokens` of them without computing; the
    first token comes in about `first_token_seconds` if nobody else does (None where no rate is known)."""

    num_done_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    reuse: Reuse = Reuse()
    first_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model held a token, as natural logarithms: its own distribution, before anything that steers the
    draw. `top` are the likeliest ids of its place, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The row begins once another one, of the request `request_id`, has computed the first `num_tokens` of its prompt:
    `num_left_tokens` from now on, in about `seconds` if that one's turn comes at once (None where no rate is known).
    For the operator: a client hears of no other request."""

    request_id: RequestId
    num_tokens: int
    num_left_tokens: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next generated token; a stop token is not delivered. `logprobs` where the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


StopReason = Literal["stop", "length", "watchdog", "cancelled", "shutdown"]


@dataclass(frozen=True, slots=True)
class GenerationTiming:
    """Seconds: waiting in the queue, first prefill chunk to first token, first token to last."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class GenerationDone:
    """The row left the engine without an error. `num_generated_tokens` counts the stop token too, if there was one."""

    reason: StopReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timing: GenerationTiming
    drafting: Drafting = Drafting()


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The row left the engine with an error; the others go on."""

    error: Exception


type GenerationEvent = PrefillProgress | Awaiting | TokenDelta | GenerationDone | GenerationFailed
