"""A turn in the engine, as values: what was given to it, and how far its answer is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvserve.core import Message, PrefillProgress, RequestId, Reuse, Turn
from kvserve.engine.rows import RequestHandle
from kvserve.explain.raw_prompts import RawRecord
from kvserve.identity.reading import RecognisedTurn
from kvserve.output.answer import AnswerReader
from kvserve.requests.request_facts import LengthLimit
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Prompt
from kvserve.sessions.seen import pack_ids

NO_REUSE = Reuse()


@dataclass(frozen=True)
class Submitted:
    """A turn as it was given to the engine. `cut_by` is whose limit the answer has; `raw_before`: what a raw prompt is
    compared with; `unread`: why nothing of before the start can be found, if that is so."""

    turn: Turn
    served: ServedModel
    reading: RecognisedTurn | None
    prompt: Prompt
    generation: RequestHandle
    cut_by: LengthLimit
    raw_before: RawRecord | None
    unread: str

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
