"""A turn in the engine: its events as they come, and what is remembered of it when it is over.

    tokens -> text -> reasoning | content | tool call -> finish: the conversation is remembered, then the client told

It joins rooms as `pipeline.py` does, which makes it; it runs on the web thread of its request.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from kvserve.canonical.policies import rules_off
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
    MessageStart,
    PrefillProgress,
    ReasoningDelta,
    RequestId,
    Reuse,
    TextBlock,
    ThinkingBlock,
    TokenDelta,
    TokenSequence,
    ToolCallEnd,
    Turn,
    Waiting,
    Written,
)
from kvserve.engine.rows import Generation
from kvserve.errors import NotReady, RequestError
from kvserve.identity.conversations import Conversations, Exchanged
from kvserve.identity.owner import Owner
from kvserve.identity.reading import Reading
from kvserve.output.answer import AnswerReader
from kvserve.sessions.explanation import Asked, Circumstances, Explanation, explain
from kvserve.sessions.explanation_raw import RawAsked, explain_raw
from kvserve.sessions.lineage import Branch
from kvserve.sessions.raw_prompts import RawRecord, text_digests
from kvserve.sessions.seen import pack_ids
from kvserve.telemetry.activity import RunningFacts
from kvserve.telemetry.terminal import LengthLimit, RequestFacts


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


@dataclass(frozen=True, slots=True)
class Observer:
    """Who hears of a request besides its client; called from web threads. `finished` follows every `started`.
    `other_model` says which model but this one (by its name) has read what has these digests."""

    prefill: Callable[[RequestId, int, int, float | None], None]
    finished: Callable[[FinishedTurn], None]
    started: Callable[["RunningTurn"], None] = lambda _: None
    awaits: Callable[[RequestId, Awaiting], None] = lambda _, __: None
    other_model: Callable[[str, Sequence[bytes]], str | None] = lambda _, __: None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A turn as it was given to the engine. `cut_by` is whose limit the answer has, `encode` tokenises its text and
    `decode` says what ids mean; `keeps_kv`: the model's KV can be kept for other requests. `raw_before`: what a raw
    prompt is compared with. `unread`: why nothing of before the start can be found, if that is so."""

    turn: Turn
    model_name: str
    reading: Reading | None
    prompt: Prompt
    generation: Generation
    cut_by: LengthLimit
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    keeps_kv: bool = True
    raw_before: RawRecord | None = None
    unread: str = ""


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
        self._is_looked_up = False
        self._reuse = Reuse()
        self._submitted_at = time.monotonic()

    @property
    def request_id(self) -> RequestId:
        return self._submitted.turn.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Model tokens of the prompt."""
        return len(self._submitted.prompt.tokens)

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
            if error is None and (self._num_prefilled_tokens or self._emitted):
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
        was_looked_up = self._is_looked_up
        for event in batch:
            if isinstance(event, PrefillProgress):
                self._is_looked_up = True
                self._num_cached_tokens, self._reuse = event.num_cached_tokens, event.reuse
                self._num_prefilled_tokens = event.num_done_tokens
                num_done, num_all, seconds = event.num_done_tokens, event.num_prompt_tokens, event.first_token_seconds
                self._observe.prefill(self.request_id, num_done, num_all, seconds)
            elif isinstance(event, Awaiting):
                self._observe.awaits(self.request_id, event)
        last = batch[-1]
        if isinstance(last, GenerationFailed):
            raise last.error
        end = self._answer.finish(last) if isinstance(last, GenerationDone) else []
        told: list[AnswerEvent] = [*deltas, *map(self._completed, end)] or [self._waiting()]
        if self._is_looked_up and not was_looked_up and not isinstance(told[0], Waiting):
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
        is_kept = submitted.keeps_kv and not submitted.turn.session.wants_nothing_kept
        num_written = usage.num_prompt_tokens - usage.num_cached_tokens if is_kept else 0
        return replace(
            event,
            usage=replace(usage, num_written_tokens=num_written),
            is_context_full=self._cut_by(event.reason) == "context limit",
        )

    def _cut_by(self, reason: str | None) -> LengthLimit | None:
        """Whose limit a `length` was."""
        return _whose_limit(self._answer.done, self._submitted.cut_by) if reason == "length" else None

    def _waiting(self) -> Waiting:
        cached = self._num_cached_tokens if self._is_looked_up else None
        return Waiting(self._num_prefilled_tokens, self.num_prompt_tokens, cached)

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

    def _remember(self, *, is_aborted: bool = False) -> None:
        """Keep what was read and written. A turn that the watchdog ended leaves nothing, nor does one whose owner was
        forgotten since it came; a second call does nothing."""
        with self._submitted.turn.keeping as may_keep:
            if may_keep and not (self.is_lost or self._is_remembered):
                self._is_remembered = True
                self._keep(is_aborted=is_aborted)

    def _keep(self, *, is_aborted: bool) -> None:
        reading = self._submitted.reading
        prompt = self._submitted.prompt
        ids = self._said_ids()
        num_computed_tokens = self._num_computed_tokens + len(ids) if is_aborted else None
        if reading is None:
            if not self._submitted.turn.session.leaves_no_record:
                self._remember_raw(ids, num_computed_tokens)
            return
        is_written = bool(self._said) and bool(ids) and not prompt.continues
        written = Written(Message("assistant", tuple(self._said)), prompt.tail_ids, ids, prompt.opens_reasoning)
        self._branch = self._conversations.remember(
            reading,
            Exchanged(
                request_id=self.request_id,
                session=self._submitted.turn.session,
                prompt=prompt.tokens,
                message_starts=prompt.message_starts,
                template_arguments=self._template_arguments(),
                written=written if is_written else None,
                packed_prompt=self._packed_prompt,
                num_computed_tokens=num_computed_tokens,
            ),
        )

    def _remember_raw(self, ids: tuple[int, ...], num_computed_tokens: int | None) -> None:
        """Keep a raw prompt and what was written to it, for the next one to be compared with."""
        prompt = self._submitted.prompt
        said = "".join(block.text for block in self._said if isinstance(block, TextBlock))
        self._conversations.raw_prompts.remember(
            RawRecord(
                request_id=self.request_id,
                owner=self._conversations.owner(self._submitted.turn.session).name,
                num_prompt_characters=len(prompt.text),
                text=prompt.text + said,
                packed_ids=self._packed_prompt + pack_ids(ids),
                num_prompt_tokens=self.num_prompt_tokens,
                num_computed_tokens=num_computed_tokens,
            )
        )

    def _said_ids(self) -> tuple[int, ...]:
        """The tokens of what was said: a stop string and what the model wrote behind it are no part of that."""
        said = self._answer.said_tokens()
        return (*self._emitted[: said.num_tokens], *(self._submitted.encode(said.rest) if said.rest else ()))

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

    @property
    def progress(self) -> RunningFacts:
        """How far it is; from any thread, so the numbers are those of about now."""
        num_generated = len(self._emitted)
        return RunningFacts(
            request_id=self.request_id,
            protocol=self._submitted.turn.protocol,
            model=self._submitted.model_name,
            session=self._submitted.turn.session.session_id,
            stage="decode" if num_generated else "prefill" if self._is_looked_up else "waiting",
            num_prompt_tokens=self.num_prompt_tokens,
            num_done_tokens=self._num_computed_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=num_generated,
            seconds=time.monotonic() - self._submitted_at,
        )

    @cached_property
    def _packed_prompt(self) -> bytes:
        """The prompt's ids as a record keeps them: packed once, as a long prompt takes milliseconds."""
        return pack_ids(self._submitted.prompt.tokens.ids)

    @property
    def _num_computed_tokens(self) -> int:
        """Prompt tokens in the KV cache: the last one is there once there is an answer."""
        return self.num_prompt_tokens if self._answer.num_completion_tokens else self._num_prefilled_tokens

    def _finished(self, error: RequestError | None) -> FinishedTurn:
        submitted = self._submitted
        with submitted.turn.keeping as may_keep:
            try:
                explanation = self._explanation()
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
            facts=self._facts(error),
            said=self.said,
        )

    def _explanation(self) -> Explanation | None:
        submitted, reading = self._submitted, self._submitted.reading
        if not self._is_looked_up:
            return None
        if reading is None:
            return self._raw_explanation()
        asked = Asked(
            self.request_id,
            reading.messages,
            submitted.prompt.tokens.ids,
            reading.identity.tools_digest,
            self._template_arguments(),
            reading.all_tools,
            [start.offset for start in submitted.prompt.message_starts],
            self._packed_prompt,
            reading.tool_layout,
        )
        around = Circumstances(
            looks_at_records=submitted.turn.session.cache_mode == "full",
            can_keep=submitted.keeps_kv,
            was_cleared=self._conversations.was_forgotten(reading.identity.owner),
            names_session=reading.identity.owner.is_one_client,
            unread=submitted.unread,
            rules_off=partial(rules_off, reading.identity.rules),
            decode=submitted.decode,
            other_model=partial(self._observe.other_model, submitted.model_name, reading.identity.chains),
        )
        return explain(
            asked, reading.before, reading.rules_fired, self._num_cached_tokens, reuse=self._reuse, around=around
        )

    def _raw_explanation(self) -> Explanation:
        submitted, prompt = self._submitted, self._submitted.prompt
        asked = RawAsked(self.request_id, prompt.text, prompt.tokens.ids, self._packed_prompt, submitted.decode)
        return explain_raw(
            asked,
            submitted.raw_before,
            self._num_cached_tokens,
            reuse=self._reuse,
            can_keep=submitted.keeps_kv,
            other_model=self._other_reader,
        )

    def _other_reader(self) -> str | None:
        # at least about a quarter of it: a line that many prompts begin with says nothing
        owner = self._conversations.owner(self._submitted.turn.session)
        digests = raw_digests(self._submitted.prompt.text, owner)[-3:]
        return self._observe.other_model(self._submitted.model_name, digests)

    def _facts(self, error: RequestError | None) -> RequestFacts:
        answer, done = self._answer, self._answer.done
        timing = done.timing if done is not None else None
        seconds = timing.decode_seconds if timing is not None else 0.0
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
            cut_by=self._cut_by(reason),
            error_status=error.status if error else None,
            notes=self._submitted.prompt.notes,
            tier=self._reuse.tier,
            num_matched_tokens=self._reuse.num_matched_tokens,
            num_prefilled_tokens=max(0, self._num_computed_tokens - self._num_cached_tokens),
            queue_seconds=timing.queue_seconds if timing is not None else None,
            prefill_seconds=timing.prefill_seconds if timing is not None else None,
            seconds=time.monotonic() - self._submitted_at,
        )


def raw_digests(text: str, owner: Owner) -> Sequence[bytes]:
    """What a raw prompt is known by; without a session nothing, as its words do not show whose it is."""
    return text_digests(text, owner.name) if owner.is_one_client else ()


def _whose_limit(done: GenerationDone | None, own_limit: LengthLimit) -> LengthLimit | None:
    """Who cut an answer that ended with `length`."""
    if done is None or done.reason not in ("length", "watchdog"):
        return None
    return "watchdog" if done.reason == "watchdog" else own_limit
