"""A turn in the engine: its events as they come, until it is over.

    tokens -> text -> reasoning | content | tool call -> finish: the conversation is remembered, then the client told

It joins rooms as `serve.py` does, which makes it; it runs on the web thread of its request. What is kept of the turn is
at the end of the file, what is told of it besides is `answer_facts.py`'s.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvserve.core import (
    AnswerEvent,
    Awaiting,
    Block,
    ContentDelta,
    Finished,
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    Message,
    PrefillProgress,
    ReasoningDelta,
    RequestId,
    TextBlock,
    ThinkingBlock,
    TokenDelta,
    TokenSequence,
    ToolCallEnd,
    Waiting,
    Written,
)
from kvserve.errors import NotReady, RequestError
from kvserve.explain.raw_prompts import RawRecord
from kvserve.identity.conversations import RememberedTurn
from kvserve.output.answer import AnswerReader
from kvserve.requests.answer_facts import (
    AnswerState,
    Submitted,
    explanation_of,
    request_facts,
    running_facts,
    whose_limit,
)
from kvserve.requests.drafts import leave_for_drafts
from kvserve.requests.request_facts import RunningFacts
from kvserve.requests.turn_facts import FinishedTurn
from kvserve.sessions.lineage import Branch
from kvserve.sessions.seen import pack_ids


class RunningTurn:
    """One consumer iterates `events`; `cancel` may come from any thread."""

    def __init__(self, submitted: Submitted, answer: AnswerReader) -> None:
        self._submitted = submitted
        self._answer = answer
        self._conversations = submitted.served.conversations
        self._observe = submitted.served.observe
        self._said: list[Block] = []
        self._emitted: list[int] = []
        self._is_remembered = False
        self._branch: Branch | None = None
        self._prefill: PrefillProgress | None = None
        self._submitted_at = time.monotonic()

    @property
    def request_id(self) -> RequestId:
        return self._submitted.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Model tokens of the prompt."""
        return self._submitted.num_prompt_tokens

    @property
    def num_marked_tokens(self) -> int:
        """Those of them that the client wants to be kept, from the beginning; 0 where it marked nothing."""
        return self._submitted.prompt.num_marked_tokens

    @property
    def is_lost(self) -> bool:
        """Whether the watchdog or the server's end cut the answer, so that nothing of it is kept."""
        done = self._answer.done
        return done is not None and done.reason in ("watchdog", "shutdown")

    @property
    def said(self) -> Message:
        """The answer so far, as a message."""
        return Message("assistant", tuple(self._said))

    @property
    def context(self) -> TokenSequence:
        """The model's tokens of the conversation so far: the prompt and what was written."""
        prompt = self._submitted.prompt.tokens
        return TokenSequence((*prompt.ids, *self._emitted), prompt.images)

    def cancel(self) -> None:
        """Nobody wants the rest: the engine frees the row before its next step."""
        self._submitted.generation.cancel()

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """The answer as it comes, `Waiting` at least every `poll_seconds` while nothing does; the last is `Finished`,
        unless the turn was cancelled.

        Raises RequestError if generation failed, NotReady where the engine ended before the answer did.
        """
        error: RequestError | None = None
        self._observe.started(self)
        try:
            for batch in self._submitted.generation.batches(poll_seconds):
                yield from self._read(batch) if batch else (self._waiting(),)
        except RequestError as raised:
            error = raised
            raise
        finally:
            self.cancel()
            is_begun = self._prefill is not None and self._prefill.num_done_tokens > 0
            if error is None and (is_begun or self._emitted):
                self._remember(is_aborted=True)  # a client that left in the middle asks again, or goes on from there
            self._observe.finished(self._finished(error))

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        """Wait for the next event; tokens that come meanwhile are left to `read`, on another thread."""
        self._submitted.generation.wait(seconds, read)

    def _read(self, batch: list[GenerationEvent]) -> Iterator[AnswerEvent]:
        generated = [event for event in batch if isinstance(event, TokenDelta)]
        tokens = [event.token for event in generated]
        if not self._answer.is_over:
            self._emitted += tokens
        deltas = self._answer.feed(tokens, [event.logprobs for event in generated if event.logprobs is not None])
        if self._answer.is_over:
            self.cancel()
        was_looked_up = self._prefill is not None
        for event in batch:
            if isinstance(event, PrefillProgress):
                self._prefill = event
                num_done, num_all, seconds = event.num_done_tokens, event.num_prompt_tokens, event.first_token_seconds
                self._observe.prefill(self.request_id, num_done, num_all, seconds)
            elif isinstance(event, Awaiting):
                self._observe.awaits(self.request_id, event)
        last = batch[-1]
        if isinstance(last, GenerationFailed):
            raise last.error
        end = self._answer.finish(last) if isinstance(last, GenerationDone) else []
        told: list[AnswerEvent] = [*deltas, *map(self._completed, end)] or [self._waiting()]
        if self._prefill is not None and not was_looked_up and not isinstance(told[0], Waiting):
            told.insert(0, replace(self._waiting(), is_idle=False))  # what was reused is told before the first word
        for said in told:
            self._note(said)
        if isinstance(told[-1], Finished):
            self._remember()  # before the client hears of the end: its next request may come at once
        yield from told
        if isinstance(last, GenerationDone) and last.reason == "shutdown" and not isinstance(told[-1], Finished):
            raise NotReady("The server stopped before the answer was finished.")

    def _completed(self, event: AnswerEvent) -> AnswerEvent:
        """The end, with what the answer itself does not know: whose limit cut it, and what of the prompt is kept."""
        if not isinstance(event, Finished):
            return event
        usage, submitted = event.usage, self._submitted
        is_kept = submitted.served.keeps_kv and not submitted.turn.session.wants_nothing_kept
        num_written = usage.num_prompt_tokens - usage.num_cached_tokens if is_kept else 0
        return replace(
            event,
            usage=replace(usage, num_written_tokens=num_written),
            is_context_full=whose_limit(submitted, self._answer.done, event.reason) == "context limit",
        )

    def _waiting(self) -> Waiting:
        prefill = self._prefill
        if prefill is None:
            return Waiting(0, self.num_prompt_tokens, None)
        return Waiting(prefill.num_done_tokens, self.num_prompt_tokens, prefill.num_cached_tokens)

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
            case ToolCallEnd(call):
                self._said.append(call)

    # --- what is kept and told of it ----------------------------------------------------------------------------------

    def _remember(self, *, is_aborted: bool = False) -> None:
        """Keep what was read and written. A turn that the watchdog ended leaves nothing, nor does one whose owner was
        forgotten since it came; a second call does nothing."""
        with self._submitted.turn.keeping as may_keep:
            if may_keep and not (self.is_lost or self._is_remembered):
                self._is_remembered = True
                self._branch = remember(self._state, is_aborted=is_aborted)
                leave_for_drafts(self._submitted)

    def _finished(self, error: RequestError | None) -> FinishedTurn:
        submitted, state = self._submitted, self._state
        with submitted.turn.keeping as may_keep:
            try:
                explanation = explanation_of(state)
            finally:
                if not may_keep:
                    self._conversations.clear_memos()  # what was compared is remembered to be faster
        return FinishedTurn(
            turn=submitted.turn,
            owner=self._conversations.owner(submitted.turn.session),
            reading=submitted.reading,
            prompt=submitted.prompt,
            explanation=explanation,
            branch=self._branch,
            facts=request_facts(state, error),
            said=state.said,
        )

    @property
    def progress(self) -> RunningFacts:
        """How far it is; from any thread, so the numbers are those of about now."""
        return running_facts(self._state)

    @property
    def _state(self) -> AnswerState:
        return AnswerState(self._submitted, self._answer, self.said, self._emitted, self._prefill, self._submitted_at)


# --- keeping it: the conversation that the model has read and written, or the raw prompt -----------------------------


def remember(state: AnswerState, *, is_aborted: bool) -> Branch | None:
    """Keep what was read and written; the branch that it went on in, or None for a raw prompt."""
    submitted, said, conversations = state.submitted, state.said, state.submitted.served.conversations
    reading, prompt, session = submitted.reading, submitted.prompt, submitted.turn.session
    ids = _said_ids(state)
    num_computed_tokens = state.num_computed_tokens + len(ids) if is_aborted else None
    if reading is None:
        if not session.leaves_no_record:
            _remember_raw(state, ids, num_computed_tokens)
        return None
    is_written = bool(said.blocks) and bool(ids) and not prompt.continues
    written = Written(said, prompt.tail_ids, ids, prompt.opens_reasoning) if is_written else None
    return conversations.remember(
        reading,
        RememberedTurn(
            request_id=submitted.request_id,
            session=session,
            prompt=prompt.tokens,
            message_starts=prompt.message_starts,
            template_arguments=submitted.template_arguments,
            written=written,
            packed_prompt=submitted.packed_prompt,
            num_computed_tokens=num_computed_tokens,
        ),
    )


def _remember_raw(state: AnswerState, ids: tuple[int, ...], num_computed_tokens: int | None) -> None:
    """Keep a raw prompt and what was written to it, for the next one to be compared with."""
    submitted, text, conversations = state.submitted, state.submitted.prompt.text, state.submitted.served.conversations
    conversations.raw_prompts.remember(
        RawRecord(
            request_id=submitted.request_id,
            owner=conversations.owner(submitted.turn.session).name,
            num_prompt_characters=len(text),
            text=text + state.said.text,
            packed_ids=submitted.packed_prompt + pack_ids(ids),
            num_prompt_tokens=submitted.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
    )


def _said_ids(state: AnswerState) -> tuple[int, ...]:
    """The tokens of what was said: a stop string and what the model wrote behind it are no part of that."""
    said, encode = state.answer.said_tokens(), state.submitted.served.tokenizer.encode
    return (*state.emitted[: said.num_tokens], *(encode(said.rest) if said.rest else ()))
