"""The story of a request: `serve_turn` takes a turn and queues it; `running.py` tells its answer as it comes.

    1 recognise   identity  which conversation it continues; messages as the model saw them before
    2 render      prompt/   messages -> text (what the template refuses is said in the nearest form)
    3 stitch      prompt/   text -> model tokens: only new text is tokenised, what the model wrote keeps its own tokens
    4 constrain   output/   tool choice and response format -> a grammar
    5 submit      engine/   bounded queue -> the one engine thread: prefill, decode

This file joins rooms and knows no wire format. It runs on web threads and never touches an array.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    Finished,
    GenerationRequest,
    Grammar,
    Message,
    MessageStart,
    ReasoningDelta,
    RequestDefaults,
    TextBlock,
    TokenSequence,
    ToolCallDelta,
    Turn,
    Waiting,
)
from kvserve.engine.worker import Engine
from kvserve.errors import BadRequest, ContextOverflow, EngineFailure
from kvserve.identity import Conversations, Reading
from kvserve.output.answer import AnswerReader
from kvserve.output.formats import OutputFormat
from kvserve.output.grammar import ThinkingAhead, build_grammar
from kvserve.output.said import Says
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.stitch import Stitched, Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.running import Observer, Prompt, RunningTurn, Submitted
from kvserve.sessions.seen import common_length
from kvserve.telemetry.terminal import LengthLimit

_NOBODY_SAYS = "\u2058"
"""Another user's words, to see where the system's end."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that belongs to one model; a request holds it from its first to its last step."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    conversations: Conversations
    output_format: OutputFormat
    added_tokens: frozenset[str]
    engine: Engine
    defaults: RequestDefaults
    vocab_size: int
    context_limit: int
    observe: Observer


def serve_turn(turn: Turn, served: ServedModel) -> RunningTurn:
    """Recognise and render a turn, and queue it.

    Raises RequestError for what cannot be served (400, 429, 503), before anything is computed.
    """
    reading = served.conversations.read(turn) if turn.raw_prompt is None else None
    prompt = _render(turn, reading, served) if reading is not None else _raw_prompt(turn, served)
    max_tokens, cut_by = _max_tokens(turn, served, len(prompt.tokens))
    request = GenerationRequest(
        request_id=turn.request_id,
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=turn.sampling,
        stop_tokens=served.tokenizer.stop_token_ids,
        grammar=_grammar(turn, served, prompt, max_tokens),
        message_starts=prompt.message_starts,
        session=served.conversations.partition(turn.session),
    )
    generation = served.engine.submit(request)
    submitted = Submitted(turn, served.name, reading, prompt, generation, cut_by)
    return RunningTurn(submitted, _answer_reader(turn, served, prompt), served.conversations, served.observe)


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


def _render(turn: Turn, reading: Reading, served: ServedModel) -> Prompt:
    """The turn as model tokens, its history as the model saw and wrote it."""
    text, stitched = _stitch(turn, reading, served)
    return Prompt(
        text=text.text,
        tokens=TokenSequence(stitched.ids),
        opens_reasoning=text.opens_reasoning,
        continues=text.continues,
        message_starts=_message_starts(turn, reading, served, stitched),
        tail_ids=stitched.tail_ids,
        num_replayed_turns=stitched.num_replayed_turns,
        notes=(*reading.notes, *text.notes),
    )


def _message_starts(turn: Turn, reading: Reading, served: ServedModel, stitched: Stitched) -> tuple[MessageStart, ...]:
    """Where messages begin, also those that the template writes into another one: there other prompts part from this
    one, and the beginning that they share is wanted."""
    starts = stitched.message_starts

    def parting(messages: tuple[Message, ...]) -> int:
        other = _stitch(turn, replace(reading, rendered=messages), served)[1]
        return common_length(stitched.ids, other.ids)

    if len(reading.lasting) < len(reading.rendered):
        starts = (*starts, MessageStart(parting(reading.lasting), is_user=False))
    first = reading.rendered[0]
    if first.role == "system" and len(reading.rendered) > 1 and starts and starts[0].is_user:
        end_of_system = parting((first, Message("user", (TextBlock(_NOBODY_SAYS),))))
        starts = (replace(starts[0], is_user=False), MessageStart(end_of_system, is_user=True), *starts[1:])
    return tuple(sorted(set(starts), key=lambda start: start.offset))


def _stitch(turn: Turn, reading: Reading, served: ServedModel) -> tuple[PromptText, Stitched]:
    """The text of a turn and its ids."""
    preserve = turn.thinking.preserve
    tools = reading.tools if turn.tool_choice.mode != "none" else ()
    text = served.template.write(
        reading.rendered,
        tools,
        thinking=_is_thinking(turn, served),
        preserve_thinking=served.defaults.preserve_thinking if preserve is None else preserve,
        effort=turn.thinking.effort,
        template_arguments=turn.template_arguments,
    )
    return text, served.stitcher.tokens(text, reading.writings, Says.under(served.output_format, tools))


def _raw_prompt(turn: Turn, served: ServedModel) -> Prompt:
    """Text or token ids that go to the model as they are."""
    raw = turn.raw_prompt or ()
    if isinstance(raw, str):
        ids = served.tokenizer.encode(raw, add_special_tokens=True)
    else:
        ids = raw
        if unknown := [token for token in ids if not 0 <= token < served.vocab_size]:
            raise BadRequest(f"The prompt holds token {unknown[0]}, which the model does not have.", param="prompt")
    if not ids:
        raise BadRequest("The prompt is empty.", param="prompt")
    return Prompt(
        text=raw if isinstance(raw, str) else served.tokenizer.decode(ids),
        tokens=TokenSequence(ids),
        message_starts=served.markers.message_starts(ids),
    )


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
