"""A turn in the engine: its events as they come, and what is remembered of it when it is over.

    tokens -> text -> reasoning | content | tool call -> finish: the conversation is remembered, then the client told

It joins rooms as `pipeline.py` does, which makes it; it runs on the web thread of its request.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvserve.core import (
    AnswerEvent,
    Block,
    ContentDelta,
    Finished,
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    Message,
    MessageStart,
    PrefillProgress,
    ReasoningDelta,
    RequestId,
    TextBlock,
    ThinkingBlock,
    TokenDelta,
    TokenSequence,
    ToolCallDelta,
    Turn,
    Waiting,
    Written,
)
from kvserve.engine.rows import Generation
from kvserve.errors import RequestError
from kvserve.identity import Conversations, Exchanged, Reading
from kvserve.output.answer import AnswerReader
from kvserve.sessions.explanation import Asked, Explanation, explain
from kvserve.sessions.lineage import Branch
from kvserve.telemetry.terminal import LengthLimit, RequestFacts


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model will see of a turn.

    `opens_reasoning`: the model's text begins inside its thinking. `continues`: it goes on with the last message, an
    assistant's. `tail_ids` are the tokens from that place's message opener on. `num_replayed_turns` turns of the
    history have the very ids that the model emitted.
    """

    text: str
    tokens: TokenSequence
    opens_reasoning: bool = False
    continues: bool = False
    message_starts: tuple[MessageStart, ...] = ()
    tail_ids: tuple[int, ...] = ()
    num_replayed_turns: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that is over, for logs: what was asked and how it was understood (None for a raw prompt), what the model
    saw, why that much of it was reused, and the facts of the request line."""

    turn: Turn
    reading: Reading | None
    prompt: Prompt
    explanation: Explanation | None
    branch: Branch | None
    facts: RequestFacts


@dataclass(frozen=True, slots=True)
class Observer:
    """Who hears of a request besides its client; called from web threads."""

    prefill: Callable[[RequestId, int, int], None]
    finished: Callable[[FinishedTurn], None]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A turn as it was given to the engine. `cut_by` is whose limit the answer has."""

    turn: Turn
    model_name: str
    reading: Reading | None
    prompt: Prompt
    generation: Generation
    cut_by: LengthLimit


class RunningTurn:
    """One consumer iterates `events`; `cancel` may come from any thread."""

    def __init__(
        self, submitted: Submitted, answer: AnswerReader, conversations: Conversations, observe: Observer
    ) -> None:
        self._submitted = submitted
        self._answer = answer
        self._conversations = conversations
        self._observe = observe
        self._said: list[Block] = []
        self._emitted: list[int] = []
        self._is_remembered = False
        self._branch: Branch | None = None
        self._num_cached_tokens = 0
        self._num_prefilled_tokens = 0
        self._submitted_at = time.monotonic()

    @property
    def request_id(self) -> RequestId:
        return self._submitted.turn.request_id

    def cancel(self) -> None:
        """Nobody wants the rest: the engine frees the row before its next step."""
        self._submitted.generation.cancel()

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """The answer as it comes, `Waiting` at least every `poll_seconds` while nothing does; the last is `Finished`.

        Raises RequestError if generation failed.
        """
        error: RequestError | None = None
        try:
            for batch in self._submitted.generation.batches(poll_seconds):
                yield from self._read(batch)
        except RequestError as raised:
            error = raised
            raise
        finally:
            self.cancel()
            if error is None and (self._num_prefilled_tokens or self._emitted):
                self._remember()  # a client that left in the middle asks again, or goes on from there
            self._observe.finished(self._finished(error))

    def _read(self, batch: list[GenerationEvent]) -> Iterator[AnswerEvent]:
        tokens = [event.token for event in batch if isinstance(event, TokenDelta)]
        if not self._answer.is_over:
            self._emitted += tokens
        deltas = self._answer.feed(tokens)
        if self._answer.is_over:
            self.cancel()
        for event in batch:
            if isinstance(event, PrefillProgress):
                self._num_cached_tokens = event.num_cached_tokens
                self._num_prefilled_tokens = event.num_done_tokens
                self._observe.prefill(self.request_id, event.num_done_tokens, event.num_prompt_tokens)
        last = batch[-1] if batch else None
        if isinstance(last, GenerationFailed):
            raise last.error
        told: list[AnswerEvent]
        if isinstance(last, GenerationDone):
            told = [*deltas, *self._answer.finish(last)]
        else:
            told = [*deltas] or [Waiting(self._num_prefilled_tokens, len(self._submitted.prompt.tokens))]
        for said in told:
            self._note(said)
        if isinstance(told[-1], Finished):
            self._remember()  # before the client hears of the end: its next request may come at once
        yield from told

    def _note(self, event: AnswerEvent) -> None:
        """Put a delta to what was said so far."""
        last = self._said[-1] if self._said else None
        match event:
            case ReasoningDelta(text):
                if isinstance(last, ThinkingBlock):
                    self._said[-1] = ThinkingBlock(last.text + text)
                else:
                    self._said.append(ThinkingBlock(text))
            case ContentDelta(text):
                if isinstance(last, TextBlock):
                    self._said[-1] = TextBlock(last.text + text)
                else:
                    self._said.append(TextBlock(text))
            case ToolCallDelta(call):
                self._said.append(call)

    def _remember(self) -> None:
        """Keep what was read and written. A turn that the watchdog ended leaves nothing, a second call does nothing."""
        reading, done = self._submitted.reading, self._answer.done
        is_lost = done is not None and done.reason in ("watchdog", "shutdown")
        if reading is None or is_lost or self._is_remembered or self._submitted.turn.session.cache_mode == "prefix":
            return
        self._is_remembered = True
        prompt = self._submitted.prompt
        is_written = bool(self._said) and bool(self._emitted) and not prompt.continues
        written = Written(
            Message("assistant", tuple(self._said)), prompt.tail_ids, tuple(self._emitted), prompt.opens_reasoning
        )
        self._branch = self._conversations.remember(
            reading,
            Exchanged(
                request_id=self.request_id,
                session=self._submitted.turn.session,
                prompt=prompt.tokens,
                message_starts=prompt.message_starts,
                template_arguments=self._template_arguments(),
                written=written if is_written else None,
            ),
        )

    def _template_arguments(self) -> dict[str, object]:
        """What the rendering depends on besides messages and tools."""
        turn = self._submitted.turn
        thinking = turn.thinking
        return {
            **turn.template_arguments,
            "thinking": (thinking.enabled, thinking.effort, thinking.preserve),
            "tool_choice": turn.tool_choice.mode == "none",
        }

    # --- what is told of it -------------------------------------------------------------------------------------------

    def _finished(self, error: RequestError | None) -> FinishedTurn:
        explanation = self._explanation()
        submitted = self._submitted
        facts = self._facts(error, explanation)
        return FinishedTurn(submitted.turn, submitted.reading, submitted.prompt, explanation, self._branch, facts)

    def _explanation(self) -> Explanation | None:
        reading = self._submitted.reading
        if reading is None:
            return None
        asked = Asked(
            self.request_id,
            reading.messages,
            self._submitted.prompt.tokens.ids,
            reading.tools_digest,
            self._template_arguments(),
        )
        done = self._answer.done
        is_trim_miss = done is not None and done.is_trim_miss
        return explain(asked, reading.before, reading.rules_fired, self._num_cached_tokens, is_trim_miss=is_trim_miss)

    def _facts(self, error: RequestError | None, explanation: Explanation | None) -> RequestFacts:
        answer, done = self._answer, self._answer.done
        seconds = done.timing.decode_seconds if done else 0.0
        reason = answer.finish_reason
        return RequestFacts(
            request_id=self.request_id,
            protocol=self._submitted.turn.protocol,
            model=self._submitted.model_name,
            num_prompt_tokens=len(self._submitted.prompt.tokens),
            num_cached_tokens=self._num_cached_tokens,
            num_completion_tokens=answer.num_completion_tokens,
            session=self._submitted.turn.session.session_id,
            ttft_seconds=answer.first_token_at - self._submitted_at if answer.first_token_at else None,
            tokens_per_second=(answer.num_tokens - 1) / seconds if seconds and answer.num_tokens > 1 else None,
            finish_reason=reason or (None if error else "cancelled"),
            cut_by=_whose_limit(done, self._submitted.cut_by) if reason == "length" else None,
            error_status=error.status if error else None,
            notes=self._submitted.prompt.notes,
            cause=_cause(explanation),
        )


def _cause(explanation: Explanation | None) -> str | None:
    """Why less was reused than could have been, in a few words; None where nothing was lost."""
    if explanation is None or explanation.cause in ("nothing lost", "new conversation"):
        return None
    place = explanation.first_difference
    where = f" (message {place.message_index})" if place is not None else ""
    rules = f" [{', '.join(explanation.rules)}]" if explanation.rules else ""
    return f"{explanation.cause}{where}{rules}"


def _whose_limit(done: GenerationDone | None, own_limit: LengthLimit) -> LengthLimit | None:
    """Who cut an answer that ended with `length`; None where the server's end or the client did."""
    if done is None or done.reason not in ("length", "watchdog"):
        return None
    return "watchdog" if done.reason == "watchdog" else own_limit
