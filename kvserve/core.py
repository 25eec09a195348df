"""The nouns that cross rooms: frozen values without wire formats or arrays; and how a principal is named.

A conversation is a tuple of messages, a message a tuple of ordered blocks. Wire dicts stop in `protocols/`,
arrays stop in `engine/`; whatever travels between rooms is one of the types below.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NewType

from kvserve.keeping import Keeping

type JsonObject = Mapping[str, object]

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)

Role = Literal["system", "user", "assistant", "tool"]

# --- conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Reasoning that an assistant wrote before its answer; `signature` is the client's echo of ours, if any."""

    text: str
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallBlock:
    """One call of a tool. `arguments` is the JSON text exactly as it was received or as the model's call parsed to."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image as the client referred to it: a data URL, an https URL or a path; decoded in `prompt/` only."""

    source: str


@dataclass(frozen=True, slots=True)
class ToolBlock:
    """From here on a tool can be called or, with `is_removed`, it cannot any more.

    `parameters` is the JSON text of its schema, keys in the client's order: a block is compared and hashed with all
    that the model reads of it. None for a name that nobody defines.
    """

    name: str
    description: str | None = None
    parameters: str | None = None
    strict: bool = False
    is_removed: bool = False

    @classmethod
    def of(cls, tool: "ToolSpec") -> "ToolBlock":
        """The block that brings a tool in."""
        return cls(tool.name, tool.description, json.dumps(tool.parameters, ensure_ascii=False), tool.strict)

    @property
    def spec(self) -> "ToolSpec | None":
        """The tool that it brings in; None where it brings none."""
        if self.parameters is None or self.is_removed:
            return None
        return ToolSpec(self.name, self.description, json.loads(self.parameters), self.strict)


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    """What a tool returned for the call `call_id`."""

    call_id: str
    blocks: tuple[TextBlock | ImageBlock | ToolBlock, ...]
    is_error: bool = False


type Block = TextBlock | ThinkingBlock | ToolCallBlock | ToolResultBlock | ImageBlock | ToolBlock


@dataclass(frozen=True, slots=True)
class Message:
    """One message: who said it and its blocks in order. An empty tuple of blocks is an empty message."""

    role: Role
    blocks: tuple[Block, ...]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str
    description: str | None
    parameters: JsonObject
    strict: bool = False


def offered_tools(tools: Iterable[ToolSpec], messages: Iterable[Message]) -> tuple[ToolSpec, ...]:
    """The tools that can be called behind `messages`: those in front of them, as their blocks changed them since."""
    offered: dict[str, ToolSpec | ToolBlock] = {tool.name: tool for tool in tools}
    for block in tool_blocks(messages):
        if block.is_removed:
            offered.pop(block.name, None)
        elif block.parameters is not None:
            offered[block.name] = block
    return _specs(offered.values())


def known_tools(tools: Iterable[ToolSpec], messages: Iterable[Message]) -> tuple[ToolSpec, ...]:
    """The tools that calls anywhere in `messages` may be of: also those that were removed since."""
    known: dict[str, ToolSpec | ToolBlock] = {tool.name: tool for tool in tools}
    known |= {block.name: block for block in tool_blocks(messages) if block.parameters is not None}
    return _specs(known.values())


def _specs(tools: Iterable[ToolSpec | ToolBlock]) -> tuple[ToolSpec, ...]:
    specs = (tool.spec if isinstance(tool, ToolBlock) else tool for tool in tools)
    return tuple(spec for spec in specs if spec is not None)


def tool_blocks(messages: Iterable[Message]) -> list[ToolBlock]:
    """What changes the tools in the messages, in order, tool results included. A request asks this of its whole history
    several times, so it is one comprehension."""
    return [
        inner
        for message in messages
        for block in message.blocks
        for inner in (block.blocks if isinstance(block, ToolResultBlock) else (block,))
        if isinstance(inner, ToolBlock)
    ]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`auto`: the model decides; `none`: no call; `required`: at least one call, of the tools `among` where these are
    given; `function`: a call of `name`."""

    mode: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None
    among: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of the content: free text, any JSON object, or JSON that obeys `schema`, all of it where `strict`."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: JsonObject | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy; 0 for `top_k` or `min_p` and 1 for `top_p` mean off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 256
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """What a request says of thinking; None where it says nothing and the server's default decides.

    `max_num_tokens`: thinking is ended after that many tokens of it.
    """

    enabled: bool | None = None
    effort: str | None = None
    preserve: bool | None = None
    max_num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request: digests of the key that it carries and of the stable part of its user, "" for none. Without
    either it is nobody. Records, explanations and responses are a principal's, KV only where tenants are kept apart."""

    key: str = ""
    user: str = ""

    def __str__(self) -> str:
        """The name by which an operator can have all of a principal's words forgotten; nobody's is `-.-`."""
        return f"{self.key or NO_KEY}.{self.user or NO_KEY}"


NOBODY = Principal()
AGENTS = Principal(key="agents")
"""The agents that this server keeps: no digest is this word. Whoever knows an agent's name may talk to it."""

KEY_HEADER: Final = "x-kvserve-key"
"""The digest of a client's key, or `NO_KEY`, told by the proxy: what comes from there carries the proxy's own key.
On its way it stands behind a secret, which `web/guard.py` takes off; told without that it is left out."""

NO_KEY: Final = "-"

_DIGEST_CHARACTERS = 16
_DIGEST = re.compile(rf"[0-9a-f]{{{_DIGEST_CHARACTERS}}}")


def principal_digest(kind: str, text: str) -> str:
    """A key or a user as a principal has it: it is kept in records, where the words themselves have no business."""
    digest = hashlib.sha256(f"kvserve {kind}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
    return digest[:_DIGEST_CHARACTERS] if text else ""


def key_digest(headers: Mapping[str, str]) -> str:
    """The digest of the key that headers (lower-case names) carry, as `Principal.key`; "" without one."""
    if told := headers.get(KEY_HEADER, "").strip():
        return "" if told == NO_KEY else told if _DIGEST.fullmatch(told) else principal_digest("key", told)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = bearer.strip() if scheme.lower() == "bearer" else ""
    return principal_digest("key", sent or headers.get("x-api-key", "").strip())


@dataclass(frozen=True, slots=True)
class SessionHint:
    """What a client said of itself and its session: for records and logs, never proof of a shared prefix.

    `is_shared_id`: the id is a `prompt_cache_key`, which an application may give to all its users: it keeps records
    together, and says nothing of whose they are. `ttl_seconds`: how long after its last use the prompt is to be kept, 0
    not at all; None leaves it to the server. `num_marked_messages` stand before the last place that the client marked
    for caching, for `marked_seconds` after its last use; None without one.
    """

    session_id: str | None = None
    principal: Principal = NOBODY
    is_shared_id: bool = False
    cache_mode: Literal["full", "prefix"] = "full"
    ttl_seconds: float | None = None
    num_marked_messages: int | None = None
    marked_seconds: float | None = None

    @property
    def wants_nothing_kept(self) -> bool:
        """`ttl: 0`: no word of the request is to be left on disk, nor anything that goes on from it be served."""
        return self.ttl_seconds == 0

    @property
    def leaves_no_record(self) -> bool:
        """Whether nothing is remembered of the request: it wants nothing kept, or nothing looked at but the prefix."""
        return self.cache_mode == "prefix" or self.wants_nothing_kept


@dataclass(frozen=True, slots=True)
class Turn:
    """One request for one answer, whichever protocol it came in.

    Either `messages` (a conversation for the chat template) or `raw_prompt` (text or token ids that go to the model
    as they are) is given. `tools` stand in front of the messages, whose blocks may bring more or take some away.
    `unserved_tools` are names of tools that the client expects to run on the server, and that nobody runs here.
    `max_tokens` None means up to the server's default. `images` are those of the messages once they were looked at:
    from then on a block's `source` is its image's digest. `num_top_logprobs`: the answer's tokens come with their
    log-probabilities and those of so many likeliest ones; None: with none. `keeping` says whether the request may leave
    anything, and is one and the same however the turn is rewritten. `notes` are told with the request.
    """

    request_id: RequestId
    protocol: str
    model: str | None
    sampling: SamplingParams
    messages: tuple[Message, ...] = ()
    raw_prompt: str | tuple[int, ...] | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    thinking: ThinkingChoice = ThinkingChoice()
    template_arguments: JsonObject = field(default_factory=dict)
    session: SessionHint = SessionHint()
    images: "tuple[ImageInput, ...]" = ()
    num_top_logprobs: int | None = None
    unserved_tools: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keeping: Keeping = field(default_factory=Keeping, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a request that says nothing gets: the operator's settings."""

    sampling: SamplingParams
    max_tokens: int
    thinking: bool
    preserve_thinking: bool | None


# --- tokens and generation -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The half-open run `[start, end)` of placeholder ids that stands for the image with this content digest."""

    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a prompt says for one image: `ids` stand in its place.

    `digest` is that of its pixels and the processor's settings. `grid` counts (frames, rows, columns) of its tokens
    in families whose positions follow them, else None.
    """

    digest: str
    ids: tuple[int, ...]
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class ImageWords:
    """What a model's prompt says around an image: text before and behind its run of ids.

    `guarded` are the tokens that only an image may bring in, not a client who writes them out.
    """

    head: str
    tail: str
    guarded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredImage:
    """What a model's processor makes of a picture: its facts, and the vision tower's input by name."""

    facts: ImageFacts
    tower_input: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a request. `load` makes the vision tower's input by name; it is asked only where that is needed."""

    facts: ImageFacts
    load: Callable[[], Mapping[str, object]]


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
    the model went on with (the generation tail), `ids` what the model emitted after it, without the stop token and
    without a stop string; where such a string began inside a token, the text before it is tokenised anew.
    `opens_reasoning`: the tail ended inside an opened thinking block.
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


ReuseTier = Literal["nothing", "ram", "live row", "disk", "warmed"]
"""Where a prompt's beginning came from: `live row` is a request that was computing it at the same time; of what was
`warmed` a part was computed ahead, and this is the first request to use it."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """How a prompt's beginning was found. `num_matched_tokens` of it were stored, token by token the same, though not
    all need be usable. `checkpoint` says why there was a state where the row starts (`user`: the end of a user's
    message); None where any place would do, or nothing was found. `is_trim_miss`: a checkpoint was missing.
    """

    tier: ReuseTier = "nothing"
    num_matched_tokens: int = 0
    checkpoint: str | None = None
    is_trim_miss: bool = False


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


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The row left the engine with an error; the others go on."""

    error: Exception


type GenerationEvent = PrefillProgress | Awaiting | TokenDelta | GenerationDone | GenerationFailed

# --- answers ---------------------------------------------------------------------------------------------------------


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
    `num_written_tokens` of the prompt were computed, and their KV is kept for other requests."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int = 0
    num_written_tokens: int = 0


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


class CallSlot(Enum):
    """What stands at a place of a written call and is another in each: its id, or its number."""

    ID = "id"
    NUMBER = "number"


type CallParts = tuple[str | CallSlot, ...]
"""Text that is always the same, and slots, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """How a template writes the calls of a message, where a call's arguments are one JSON object:

        opening NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* closing

    `between` None: it writes one call in a message. `has_short_ids`: it takes ids of nine letters and digits only.
    """

    opening: CallParts
    middle: CallParts
    between: CallParts | None
    closing: CallParts
    has_short_ids: bool = False
