"""The nouns of a turn on its way: its prompt, what was given to the engine, how far its answer is, and the turn when it
is over. Values only: `pipeline.py` and `running.py` make them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvserve.core import Message, MessageStart, PrefillProgress, RequestId, Reuse, TokenSequence, Turn
from kvserve.engine.rows import RequestHandle
from kvserve.identity.owner import Owner
from kvserve.identity.reading import Reading
from kvserve.output.answer import AnswerReader
from kvserve.sessions.explanation import Explanation
from kvserve.sessions.lineage import Branch
from kvserve.sessions.raw_prompts import RawRecord
from kvserve.sessions.seen import pack_ids
from kvserve.telemetry.terminal import LengthLimit, RequestFacts

NO_REUSE = Reuse()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model will see of a turn.

    `opens_reasoning`: the model's text begins inside its thinking. `continues`: it goes on with the last message, an
    assistant's, whose text so far is `begun`. `tail_ids` are the tokens from that place's message opener on.
    `num_replayed_turns` turns of the history have the very ids that the model emitted. `num_marked_tokens` reach up to
    where the client marked the prompt for caching.
    """

    text: str
    tokens: TokenSequence
    opens_reasoning: bool = False
    continues: bool = False
    message_starts: tuple[MessageStart, ...] = ()
    tail_ids: tuple[int, ...] = ()
    num_replayed_turns: int = 0
    num_marked_tokens: int = 0
    notes: tuple[str, ...] = ()
    begun: str = ""


@dataclass(frozen=True)
class Submitted:
    """A turn as it was given to the engine. `cut_by` is whose limit the answer has, `encode` tokenises its text and
    `decode` says what ids mean; `keeps_kv`: the model's KV can be kept for other requests. `raw_before`: what a raw
    prompt is compared with. `unread`: why nothing of before the start can be found, if that is so."""

    turn: Turn
    model_name: str
    reading: Reading | None
    prompt: Prompt
    generation: RequestHandle
    cut_by: LengthLimit
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    keeps_kv: bool = True
    raw_before: RawRecord | None = None
    unread: str = ""

    @property
    def request_id(self) -> RequestId:
        return self.turn.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Model tokens of the prompt."""
        return len(self.prompt.tokens)

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt's ids as a record keeps them: packed once, as a long prompt takes milliseconds."""
        return pack_ids(self.prompt.tokens.ids)

    @property
    def template_arguments(self) -> dict[str, object]:
        """What the rendering depends on besides messages and tools."""
        thinking = self.turn.thinking
        return {
            **self.turn.template_arguments,
            "thinking": (thinking.enabled, thinking.effort, thinking.preserve),
            "tool_choice": self.turn.tool_choice.mode == "none",
        }


@dataclass(frozen=True, slots=True)
class AnswerState:
    """How far the answer to a turn is: what was said, the tokens that were emitted for it, and the newest word of the
    engine on the prompt (None until it was looked up)."""

    submitted: Submitted
    answer: AnswerReader
    said: Message
    emitted: Sequence[int]
    prefill: PrefillProgress | None
    submitted_at: float

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were reused."""
        return self.prefill.num_cached_tokens if self.prefill is not None else 0

    @property
    def reuse(self) -> Reuse:
        """What they were reused from."""
        return self.prefill.reuse if self.prefill is not None else NO_REUSE

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens in the KV cache: the last one is there once there is an answer."""
        if self.answer.num_completion_tokens:
            return self.submitted.num_prompt_tokens
        return self.prefill.num_done_tokens if self.prefill is not None else 0


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that is over, for logs: what was asked and how it was understood (None for a raw prompt), what the model
    saw, why that much of it was reused, and the facts of the request line. `owner`: whose records it found and left;
    `said`: what was answered."""

    turn: Turn
    owner: Owner
    reading: Reading | None
    prompt: Prompt
    explanation: Explanation | None
    branch: Branch | None
    facts: RequestFacts
    said: Message
