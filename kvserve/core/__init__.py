"""The nouns that cross rooms: frozen values without wire formats or arrays; and how a principal is named.

A conversation is a tuple of messages, a message a tuple of ordered blocks. Wire dicts stop in `protocols/`,
arrays stop in `engine/`; whatever travels between rooms is one of the types below.
"""

from kvserve.core.answers import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ContentToken,
    Finished,
    FinishReason,
    OutputDelta,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    Usage,
    Waiting,
)
from kvserve.core.calls import JSON_SPELLING, CallParts, CallRow, CallSlot, PairParts, Spelling
from kvserve.core.drafting import CostlyDrafter, Draft, Drafted, Drafter, Drafting, DraftSource
from kvserve.core.generation import (
    Awaiting,
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    GenerationTiming,
    Grammar,
    MessageStart,
    PrefillProgress,
    Reuse,
    ReuseTier,
    StopReason,
    ThinkingLimit,
    TokenDelta,
    TokenLogprobs,
    TokenSequence,
    Unshared,
    UnsharedReason,
    Written,
)
from kvserve.core.messages import (
    Block,
    ImageBlock,
    JsonObject,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
    known_tools,
    offered_tools,
    tool_blocks,
)
from kvserve.core.principals import (
    AGENTS,
    BEGIN_HEADER,
    HELD,
    KEY_HEADER,
    NO_KEY,
    NOBODY,
    Principal,
    SessionHint,
    holder_digest,
    key_digest,
    principal_digest,
)
from kvserve.core.progress import TellBytes
from kvserve.core.requests import (
    ImageFacts,
    ImageInput,
    ImageSpan,
    ImageWords,
    MeasuredImage,
    RequestDefaults,
    RequestId,
    ResponseFormat,
    SamplingParams,
    ThinkingChoice,
    ToolChoice,
    Turn,
)
