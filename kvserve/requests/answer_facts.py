"""A turn in the engine, as values: what was given to it, how far its answer is, and what is told of it besides the
answer: why that much of its prompt was reused, and the facts of its request line. It joins rooms and changes nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from kvserve.canonical.canonicalise import rules_off
from kvserve.core import Drafting, GenerationDone, Message, PrefillProgress, RequestId, Reuse, Turn
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.engine.rows import RequestHandle
from kvserve.errors import RequestError
from kvserve.explain.explanation import Asked, Circumstances, Explanation, explain
from kvserve.explain.raw import RawAsked, explain_raw
from kvserve.explain.raw_prompts import RawRecord, text_digests
from kvserve.identity.owner import Owner
from kvserve.identity.reading import RecognisedTurn
from kvserve.output.answer import AnswerReader
from kvserve.requests.request_facts import LengthLimit, RequestFacts, RunningFacts
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Prompt
from kvserve.sessions.seen import pack_ids

NO_REUSE = Reuse()
NO_DRAFTS = Drafting()


@dataclass(frozen=True)
class Submitted:
    """A turn as it was given to the engine. `cut_by` is whose limit the answer has; `raw_before`: what a raw prompt is
    compared with; `unread`: why nothing of before the start can be found, if that is so; `drafter`: what drafts its
    answer, None where nothing does."""

    turn: Turn
    served: ServedModel
    reading: RecognisedTurn | None
    prompt: Prompt
    generation: RequestHandle
    cut_by: LengthLimit
    raw_before: RawRecord | None
    unread: str
    drafter: TextDrafter | None

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


def running_facts(state: AnswerState) -> RunningFacts:
    """How far it is; from any thread, so the numbers are those of about now."""
    submitted, num_generated = state.submitted, len(state.emitted)
    return RunningFacts(
        request_id=submitted.request_id,
        protocol=submitted.turn.protocol,
        model=submitted.served.name,
        session=submitted.turn.session.session_id,
        stage="decode" if num_generated else "prefill" if state.prefill is not None else "waiting",
        num_prompt_tokens=submitted.num_prompt_tokens,
        num_done_tokens=state.num_computed_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_generated_tokens=num_generated,
        seconds=time.monotonic() - state.submitted_at,
    )


def request_facts(state: AnswerState, error: RequestError | None) -> RequestFacts:
    """The facts of the request line, when the turn is over."""
    submitted, answer, done = state.submitted, state.answer, state.answer.done
    timing = done.timing if done is not None else None
    seconds = timing.decode_seconds if timing is not None else 0.0
    reason = answer.finish_reason
    return RequestFacts(
        request_id=submitted.request_id,
        protocol=submitted.turn.protocol,
        model=submitted.served.name,
        num_prompt_tokens=submitted.num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_completion_tokens=answer.num_completion_tokens,
        session=submitted.turn.session.session_id,
        ttft_seconds=answer.first_token_at - state.submitted_at if answer.first_token_at else None,
        tokens_per_second=(answer.num_tokens - 1) / seconds if seconds and answer.num_tokens > 1 else None,
        finish_reason=reason or (None if error else "cancelled"),
        cut_by=whose_limit(submitted, done, reason),
        error_status=error.status if error else None,
        notes=submitted.prompt.notes,
        tier=state.reuse.tier,
        num_matched_tokens=state.reuse.num_matched_tokens,
        num_prefilled_tokens=max(0, state.num_computed_tokens - state.num_cached_tokens),
        queue_seconds=timing.queue_seconds if timing is not None else None,
        prefill_seconds=timing.prefill_seconds if timing is not None else None,
        seconds=time.monotonic() - state.submitted_at,
        drafting=done.drafting if done is not None else NO_DRAFTS,
        tokens_per_step=tokens_per_step(done) if done is not None else None,
    )


def tokens_per_step(done: GenerationDone) -> float | None:
    """Tokens that a pass of the model gave; None where nothing was drafted."""
    drafting = done.drafting
    if not (drafting.num_drafted_tokens and drafting.num_steps):
        return None
    return done.num_generated_tokens / drafting.num_steps


def whose_limit(submitted: Submitted, done: GenerationDone | None, finish_reason: str | None) -> LengthLimit | None:
    """Who cut an answer that ended with `length`."""
    if finish_reason != "length" or done is None or done.reason not in ("length", "watchdog"):
        return None
    return "watchdog" if done.reason == "watchdog" else submitted.cut_by


# --- why that much was reused ----------------------------------------------------------------------------------------


def explanation_of(state: AnswerState) -> Explanation | None:
    """Why that much of the prompt was reused; None where it was never looked up."""
    if state.prefill is None:
        return None
    if state.submitted.reading is None:
        return _raw_explanation(state)
    submitted, served, reading = state.submitted, state.submitted.served, state.submitted.reading
    asked = Asked(
        submitted.request_id,
        reading.messages,
        submitted.prompt.tokens.ids,
        reading.identity.tools_digest,
        submitted.template_arguments,
        reading.all_tools,
        [start.offset for start in submitted.prompt.message_starts],
        submitted.packed_prompt,
        reading.tool_layout,
    )
    around = Circumstances(
        looks_at_records=submitted.turn.session.cache_mode == "full",
        can_keep=served.keeps_kv,
        was_cleared=served.conversations.was_forgotten(reading.identity.owner),
        names_session=reading.identity.owner.is_one_client,
        unread=submitted.unread,
        unreplayed=served.stitcher.unreplayed or "",
        rules_off=partial(rules_off, reading.identity.rules),
        decode=served.tokenizer.decode,
        other_model=partial(served.observe.other_model, served.name, reading.identity.chains),
    )
    return explain(
        asked, reading.before, reading.rules_fired, state.num_cached_tokens, reuse=state.reuse, around=around
    )


def _raw_explanation(state: AnswerState) -> Explanation:
    submitted, served, prompt = state.submitted, state.submitted.served, state.submitted.prompt
    owner = served.conversations.owner(submitted.turn.session)
    asked = RawAsked(
        submitted.request_id, prompt.text, prompt.tokens.ids, submitted.packed_prompt, served.tokenizer.decode
    )
    return explain_raw(
        asked,
        submitted.raw_before,
        state.num_cached_tokens,
        reuse=state.reuse,
        can_keep=served.keeps_kv,
        # at least about a quarter of it: a line that many prompts begin with says nothing
        other_model=lambda: served.observe.other_model(served.name, raw_digests(prompt.text, owner)[-3:]),
    )


def raw_digests(text: str, owner: Owner) -> Sequence[bytes]:
    """What a raw prompt is known by; without a session nothing, as its words do not show whose it is."""
    return text_digests(text, owner.name) if owner.is_one_client else ()
