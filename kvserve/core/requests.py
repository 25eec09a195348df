"""One request for one answer, whichever protocol it came in: messages, tools, sampling, images and what else it asks
for; what stands for an image, and how the vision tower's input is made when it is needed. It knows no wire form, no
array and nothing of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType

from kvserve.core.keeping import Keeping
from kvserve.core.messages import JsonObject, Message, ToolSpec
from kvserve.core.principals import SessionHint


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


RequestId = NewType("RequestId", str)


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
class Turn:
    """One request for one answer, whichever protocol it came in.

    Either `messages` (a conversation for the chat template) or `raw_prompt` (text or token ids that go to the model
    as they are) is given. `tools` stand in front of the messages, whose blocks may bring more or take some away.
    `unserved_tools` are names of tools that the client expects to run on the server, and that nobody runs here.
    `max_tokens` None means up to the server's default. `images` are those of the messages once they were looked at:
    from then on a block's `source` is its image's digest. `num_top_logprobs`: the answer's tokens come with their
    log-probabilities and those of so many likeliest ones; None: with none. `prediction` is a text that the answer may
    resemble; `may_draft`: the next tokens may be drafted, where the server does so. `keeping` says whether the request
    may leave anything, and is one and the same however the turn is rewritten. `notes` are told with the request.
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
    images: tuple[ImageInput, ...] = ()
    num_top_logprobs: int | None = None
    prediction: str = ""
    may_draft: bool = True
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
