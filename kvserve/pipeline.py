"""The story of a request: `serve_turn` takes a turn, `RunningTurn.events` tells its answer as it comes.

    1 render      prompt/   messages -> model tokens (what the template refuses is said in the nearest form)
    2 constrain   output/   tool choice and response format -> a grammar
    3 submit      engine/   bounded queue -> the one engine thread: prefill, decode
    4 detokenise  prompt/   tokens -> text
    5 split       output/   text -> reasoning | content | tool call, ended by a stop string
    6 remember    telemetry the request line and the session's trace

This file joins rooms and knows no wire format. It runs on web threads and never touches an array.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    Finished,
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    Grammar,
    PrefillProgress,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    TokenDelta,
    TokenSequence,
    ToolCallDelta,
    Turn,
    Waiting,
)
from kvserve.engine.rows import Generation
from kvserve.engine.worker import Engine
from kvserve.errors import BadRequest, ContextOverflow, EngineFailure, RequestError
from kvserve.output.answer import AnswerReader
from kvserve.output.formats import OutputFormat
from kvserve.output.grammar import ThinkingAhead, build_grammar
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.telemetry.terminal import LengthLimit, RequestFacts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that belongs to one model; a request holds it from its first to its last step."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    output_format: OutputFormat
    added_tokens: frozenset[str]
    engine: Engine
    defaults: RequestDefaults
    vocab_size: int
    context_limit: int
    observe: "Observer"


@dataclass(frozen=True, slots=True)
class Observer:
    """Who hears of a request besides its client; called from web threads."""

    prefill: Callable[[RequestId, int, int], None]
    finished: Callable[["TurnRecord"], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model will see of a turn. `opens_reasoning`: the model's text begins inside its thinking."""

    text: str
    tokens: TokenSequence
    opens_reasoning: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn that is over, for logs: what was asked, what the model saw, and the facts of the request line."""

    turn: Turn
    prompt: Prompt
    facts: RequestFacts


def serve_turn(turn: Turn, served: ServedModel) -> "RunningTurn":
    """Render a turn and queue it.

    Raises RequestError for what cannot be served (400, 429, 503), before anything is computed.
    """
    prompt = _render(turn, served)
    max_tokens, cut_by = _max_tokens(turn, served, len(prompt.tokens))
    grammar = _grammar(turn, served, prompt, max_tokens)
    request = GenerationRequest(
        request_id=turn.request_id,
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=turn.sampling,
        stop_tokens=served.tokenizer.stop_token_ids,
        grammar=grammar,
        message_starts=served.markers.message_starts(prompt.tokens.ids),
        session=turn.session.session_id,
    )
    return RunningTurn(turn, served, prompt, served.engine.submit(request), cut_by)


def collect(events: Iterable[AnswerEvent]) -> Answer:
    """The whole answer of a turn, for clients that do not stream."""
    reasoning: list[str] = []
    content: list[str] = []
    calls = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallDelta(call):
                calls.append(call)
            case Finished():
                return Answer("".join(reasoning), "".join(content), tuple(calls), event)
            case Waiting():
                pass
    raise EngineFailure("The answer broke off before its end.")


class RunningTurn:
    """A turn in the engine. One consumer iterates `events`; `cancel` may come from any thread."""

    def __init__(
        self, turn: Turn, served: ServedModel, prompt: Prompt, generation: Generation, cut_by: LengthLimit
    ) -> None:
        self._turn = turn
        self._served = served
        self._prompt = prompt
        self._generation = generation
        self._cut_by = cut_by
        self._answer = _answer_reader(turn, served, prompt)
        self._num_cached_tokens = 0
        self._num_prefilled_tokens = 0
        self._submitted_at = time.monotonic()

    @property
    def request_id(self) -> RequestId:
        return self._turn.request_id

    def cancel(self) -> None:
        """Nobody wants the rest: the engine frees the row before its next step."""
        self._generation.cancel()

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """The answer as it comes, `Waiting` at least every `poll_seconds` while nothing does; the last is `Finished`.

        Raises RequestError if generation failed.
        """
        error: RequestError | None = None
        try:
            for batch in self._generation.batches(poll_seconds):
                yield from self._read(batch)
        except RequestError as raised:
            error = raised
            raise
        finally:
            self._generation.cancel()
            self._served.observe.finished(TurnRecord(self._turn, self._prompt, self._facts(error)))

    def _read(self, batch: list[GenerationEvent]) -> Iterator[AnswerEvent]:
        tokens = [event.token for event in batch if isinstance(event, TokenDelta)]
        deltas = self._answer.feed(tokens)
        if self._answer.is_over:
            self._generation.cancel()
        for event in batch:
            if isinstance(event, PrefillProgress):
                self._num_cached_tokens = event.num_cached_tokens
                self._num_prefilled_tokens = event.num_done_tokens
                self._served.observe.prefill(self.request_id, event.num_done_tokens, event.num_prompt_tokens)
        last = batch[-1] if batch else None
        if isinstance(last, GenerationFailed):
            raise last.error
        if isinstance(last, GenerationDone):
            yield from deltas
            yield from self._answer.finish(last)
        elif deltas:
            yield from deltas
        else:
            yield Waiting(self._num_prefilled_tokens, len(self._prompt.tokens))

    def _facts(self, error: RequestError | None) -> RequestFacts:
        answer, done = self._answer, self._answer.done
        seconds = done.timing.decode_seconds if done else 0.0
        reason = answer.finish_reason
        return RequestFacts(
            request_id=self.request_id,
            protocol=self._turn.protocol,
            model=self._served.name,
            num_prompt_tokens=len(self._prompt.tokens),
            num_cached_tokens=self._num_cached_tokens,
            num_completion_tokens=answer.num_completion_tokens,
            session=self._turn.session.session_id,
            ttft_seconds=answer.first_token_at - self._submitted_at if answer.first_token_at else None,
            tokens_per_second=(answer.num_tokens - 1) / seconds if seconds and answer.num_tokens > 1 else None,
            finish_reason=reason or (None if error else "cancelled"),
            cut_by=_whose_limit(done, self._cut_by) if reason == "length" else None,
            error_status=error.status if error else None,
            notes=self._prompt.notes,
        )


def _whose_limit(done: GenerationDone | None, own_limit: LengthLimit) -> LengthLimit | None:
    """Who cut an answer that ended with `length`; None where the server's end or the client did."""
    if done is None or done.reason not in ("length", "watchdog"):
        return None
    return "watchdog" if done.reason == "watchdog" else own_limit


def _answer_reader(turn: Turn, served: ServedModel, prompt: Prompt) -> AnswerReader:
    splitter = None
    if turn.raw_prompt is None:
        splitter = Splitter(
            served.output_format,
            starts_in_reasoning=prompt.opens_reasoning,
            tools=turn.tools,
            allow_calls=bool(turn.tools) and turn.tool_choice.mode != "none",
        )
    return AnswerReader(
        detokenizer=served.tokenizer.detokenizer(prompt.tokens.ids),
        scanner=StopScanner(turn.stop_strings),
        splitter=splitter,
        allows_many_calls=turn.parallel_tool_calls,
    )


def _is_thinking(turn: Turn, served: ServedModel) -> bool:
    return served.defaults.thinking if turn.thinking.enabled is None else turn.thinking.enabled


def _render(turn: Turn, served: ServedModel) -> Prompt:
    if turn.raw_prompt is not None:
        return _raw_prompt(turn.raw_prompt, served)
    preserve = turn.thinking.preserve
    rendered = served.template.render(
        turn.messages,
        turn.tools if turn.tool_choice.mode != "none" else (),
        thinking=_is_thinking(turn, served),
        preserve_thinking=served.defaults.preserve_thinking if preserve is None else preserve,
        effort=turn.thinking.effort,
        template_arguments=turn.template_arguments,
    )
    return Prompt(rendered.text, rendered.ids, rendered.opens_reasoning, rendered.notes)


def _raw_prompt(raw: str | tuple[int, ...], served: ServedModel) -> Prompt:
    if isinstance(raw, str):
        ids = served.tokenizer.encode(raw, add_special_tokens=True)
    else:
        ids = raw
        if unknown := [token for token in ids if not 0 <= token < served.vocab_size]:
            raise BadRequest(f"The prompt holds token {unknown[0]}, which the model does not have.", param="prompt")
    if not ids:
        raise BadRequest("The prompt is empty.", param="prompt")
    return Prompt(raw if isinstance(raw, str) else served.tokenizer.decode(ids), TokenSequence(ids), False)


def _max_tokens(turn: Turn, served: ServedModel, num_prompt_tokens: int) -> tuple[int, LengthLimit]:
    """The answer's limit and whose it is; a limit beyond the context is clamped to it."""
    room = served.context_limit - num_prompt_tokens
    if room <= 0:
        overflow = ContextOverflow(num_prompt_tokens, served.context_limit)
        overflow.param = "messages" if turn.raw_prompt is None else "prompt"
        raise overflow
    wanted = served.defaults.max_tokens if turn.max_tokens is None else turn.max_tokens
    if wanted > room:
        return room, "context limit"
    return wanted, "DEFAULT_MAX_TOKENS" if turn.max_tokens is None else "max_tokens"


def _grammar(turn: Turn, served: ServedModel, prompt: Prompt, max_tokens: int) -> Grammar | None:
    """The grammar of tool choice and response format; thinking before it may use half of the answer."""
    if turn.raw_prompt is not None:
        return None
    thinking = None
    if prompt.opens_reasoning or _is_thinking(turn, served):
        tags = served.output_format.thinking
        closing = tags.closing if tags is not None else "<|end|>"
        thinking = ThinkingAhead(prompt.opens_reasoning, served.tokenizer.encode(closing), max(1, max_tokens // 2))
    return build_grammar(
        tools=turn.tools,
        tool_choice=turn.tool_choice,
        parallel_tool_calls=turn.parallel_tool_calls,
        response_format=turn.response_format,
        output_format=served.output_format,
        added_tokens=served.added_tokens,
        thinking=thinking,
    )
