"""The story of a request: `serve_turn` takes a turn and queues it; `running.py` tells its answer as it comes.

    1 recognise   identity  which conversation it continues; messages as the model saw them before
    2 render      prompt/   messages -> text (what the template refuses is said in the nearest form)
    3 stitch      prompt/   text -> model tokens: only new text is tokenised, what the model wrote keeps its own tokens
    4 constrain   output/   tool choice and response format -> a grammar
    5 submit      engine/   bounded queue -> the one engine thread: prefill, decode

This file joins rooms and knows no wire format. It runs on web threads and never touches an array.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from kvserve.call_ids import CallIds
from kvserve.core import (
    Answer,
    AnswerEvent,
    Block,
    ContentDelta,
    ContentToken,
    Finished,
    GenerationRequest,
    ImageBlock,
    Message,
    MessageStart,
    Principal,
    ReasoningDelta,
    RequestDefaults,
    TextBlock,
    ThinkingLimit,
    TokenSequence,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    ToolResultBlock,
    ToolSpec,
    Turn,
    Waiting,
    known_tools,
    offered_tools,
)
from kvserve.engine.worker import Engine
from kvserve.errors import BadRequest, ContextOverflow, EngineFailure
from kvserve.identity.conversations import Conversations
from kvserve.identity.reading import Reading
from kvserve.output.answer import AnswerReader
from kvserve.output.content_tokens import ContentTokens
from kvserve.output.formats import OutputFormat
from kvserve.output.grammar import AnswerStart, Promise, build_grammar, build_raw_grammar
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.images import Images
from kvserve.prompt.images_text import SEES_NOTHING, with_marks
from kvserve.prompt.images_unseen import without_images_seen
from kvserve.prompt.stitch import Stitched, Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.running import Observer, RunningTurn
from kvserve.sessions.seen import common_length
from kvserve.telemetry.terminal import LengthLimit
from kvserve.turn_facts import Prompt, Submitted

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
    added_tokens: Mapping[str, int]
    engine: Engine
    defaults: RequestDefaults
    vocab_size: int
    context_limit: int
    observe: Observer
    keeps_kv: bool = True
    images: Images | None = None
    isolates_tenants: bool = False
    call_ids: CallIds | None = None
    unheld_calls: str | None = None
    """Why calls in the form of the model's own template are not held, where they are not."""

    def clear_memos(self) -> None:
        """Forget the words of earlier prompts that are kept only to be faster."""
        self.stitcher.clear()
        self.template.clear()
        if self.call_ids is not None:
            self.call_ids.clear()
        self.conversations.clear_memos()
        if self.images is not None:
            self.images.clear()

    @contextmanager
    def keeping(self, turn: Turn) -> Iterator[bool]:
        """Something of a turn is read or rendered within the block: whether it may leave anything. Where it may not, it
        leaves no memos either."""
        with turn.keeping as may_keep:
            try:
                yield may_keep
            finally:
                if not may_keep:
                    self.clear_memos()

    def partition(self, principal: Principal) -> str:
        """Where the KV of a principal is: with tenants apart it finds its own only. Nobody has a partition with a name
        too, for what was kept while tenants were not apart is of all of them."""
        return self.partition_of(str(principal))

    def partition_of(self, name: str) -> str:
        """The same of the principal with this name (`str(Principal)`)."""
        return name if self.isolates_tenants else ""


def serve_turn(turn: Turn, served: ServedModel) -> RunningTurn:
    """Recognise and render a turn, and queue it.

    Raises RequestError for what cannot be served (400, 429, 503), before anything is computed.
    """
    with served.keeping(turn) as may_keep:  # whoever forgets finds a row in the engine, or one that keeps nothing comes
        return _submitted(turn if may_keep else _leaving_nothing(turn), served, may_keep=may_keep)


def _leaving_nothing(turn: Turn) -> Turn:
    """A turn whose owner was forgotten since it came: nothing is known of its history, and nothing is written down."""
    return replace(turn, session=replace(turn.session, cache_mode="prefix", ttl_seconds=0))


def _submitted(turn: Turn, served: ServedModel, *, may_keep: bool) -> RunningTurn:
    turn = _looked_at(turn, served)
    reading = served.conversations.read(turn) if turn.raw_prompt is None else None
    prompt = _render(turn, reading, served) if reading is not None else _raw_prompt(turn, served)
    owner = served.conversations.owner(turn.session)
    max_tokens, cut_by = _max_tokens(turn, served, len(prompt.tokens))
    offered = offered_tools(turn.tools, turn.messages)
    promise = _promise(turn, offered, served, prompt)
    prompt = replace(prompt, notes=(*prompt.notes, *promise.notes, *_unheld(turn, offered, served, promise)))
    request = GenerationRequest(
        request_id=turn.request_id,
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=turn.sampling,
        stop_tokens=served.tokenizer.stop_token_ids,
        grammar=promise.grammar,
        thinking_limit=_thinking_limit(turn, served, prompt, max_tokens, promise),
        message_starts=prompt.message_starts,
        turn_end=served.stitcher.turn_end,
        owner=owner.name,
        ttl_seconds=turn.session.marked_seconds if turn.session.ttl_seconds is None else turn.session.ttl_seconds,
        images=turn.images,
        partition=served.partition(turn.session.principal),
        is_forgotten=not may_keep,
        num_top_logprobs=turn.num_top_logprobs,
    )
    generation = served.engine.submit(request)
    submitted = Submitted(
        turn,
        served.name,
        reading,
        prompt,
        generation,
        cut_by,
        served.tokenizer.encode,
        served.tokenizer.decode,
        served.keeps_kv,
        served.conversations.raw_before(prompt.text, owner) if reading is None else None,
        served.engine.digest.status.reason,
    )
    return RunningTurn(submitted, _answer_reader(turn, offered, served, prompt), served.conversations, served.observe)


def count_tokens(turn: Turn, served: ServedModel) -> int:
    """The prompt's tokens as `serve_turn` would submit them; the engine hears nothing of it. Raises BadRequest."""
    with served.keeping(turn):
        turn = _looked_at(turn, served)
        return len(_stitch(turn, served.conversations.read(turn), served)[1].ids)


def preview(turn: Turn, served: ServedModel) -> Prompt:
    """The prompt as `serve_turn` would submit it now; the engine hears nothing of it. Raises BadRequest,
    ContextOverflow."""
    with served.keeping(turn):
        turn = _looked_at(turn, served)
        if turn.raw_prompt is None:
            prompt = _render(turn, served.conversations.read(turn), served)
        else:
            prompt = _raw_prompt(turn, served)
        _max_tokens(turn, served, len(prompt.tokens))
        return prompt


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """What several prompts begin with, and the messages that begin in it."""

    tokens: TokenSequence
    message_starts: tuple[MessageStart, ...]


def shared_beginning(turns: Sequence[Turn], served: ServedModel) -> SharedBeginning:
    """What the prompts of all these turns have in common, as `serve_turn` would write them now; their images were
    looked at, the engine hears nothing of it. Raises BadRequest, and ValueError for no turn."""
    stitched = [_stitch(turn, served.conversations.read(turn), served)[1] for turn in turns]
    if not stitched:
        raise ValueError("There is no prompt without a turn.")
    first = stitched[0]
    num_tokens = min([len(first.ids), *(common_length(first.ids, other.ids) for other in stitched[1:])])
    if (cut := next((span for span in first.images if span.start < num_tokens < span.end), None)) is not None:
        num_tokens = cut.start
    return SharedBeginning(
        TokenSequence(first.ids[:num_tokens], tuple(span for span in first.images if span.end <= num_tokens)),
        tuple(start for start in first.message_starts if start.offset < num_tokens),
    )


def without_images(turn: Turn) -> Turn:
    """The turn without its images, those in tool results too."""

    def without(block: Block) -> Block:
        if not isinstance(block, ToolResultBlock):
            return block
        return replace(block, blocks=tuple(each for each in block.blocks if not isinstance(each, ImageBlock)))

    messages = (
        replace(message, blocks=tuple(without(block) for block in message.blocks if not isinstance(block, ImageBlock)))
        for message in turn.messages
    )
    return replace(turn, messages=tuple(messages), images=())


def _looked_at(turn: Turn, served: ServedModel) -> Turn:
    """The turn with its images named by what they show; to a model that sees none they are words."""
    return without_images_seen(turn) if served.images is None else served.images.look(turn)


def collect(events: Iterable[AnswerEvent]) -> Answer:
    """The whole answer of a turn, for clients that do not stream."""
    reasoning: list[str] = []
    content: list[str] = []
    tokens: list[ContentToken] = []
    calls = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text, written_with):
                content.append(text)
                tokens += written_with
            case ToolCallEnd(call):
                calls.append(call)
            case Finished():
                return Answer("".join(reasoning), "".join(content), tuple(calls), event, tuple(tokens))
            case Waiting() | ToolCallStart() | ToolCallPiece():
                pass
    raise EngineFailure("The answer broke off before its end.")


def _render(turn: Turn, reading: Reading, served: ServedModel) -> Prompt:
    """The turn as model tokens, its history as the model saw and wrote it."""
    text, stitched = _stitch(turn, reading, served)
    return Prompt(
        text=text.shown,
        tokens=TokenSequence(stitched.ids, stitched.images),
        opens_reasoning=text.opens_reasoning,
        continues=text.continues,
        message_starts=_message_starts(turn, reading, served, stitched),
        tail_ids=stitched.tail_ids,
        num_replayed_turns=stitched.num_replayed_turns,
        num_marked_tokens=_num_marked_tokens(turn, reading, served, stitched),
        notes=(*turn.notes, *_unserved(turn), *reading.notes, *text.notes),
        begun=text.begun,
    )


def _unserved(turn: Turn) -> tuple[str, ...]:
    names = ", ".join(turn.unserved_tools)
    return (f"not offered, for this server does not run them: {names}",) if names else ()


def _message_starts(turn: Turn, reading: Reading, served: ServedModel, stitched: Stitched) -> tuple[MessageStart, ...]:
    """Where messages begin, also those that the template writes into another one: there other prompts part from this
    one, and the beginning that they share is wanted."""
    starts = stitched.message_starts
    if len(reading.lasting) < len(reading.rendered):
        parting = _parting(turn, reading, served, stitched, reading.lasting)
        starts = (*starts, MessageStart(parting, is_user=False))
    first = reading.rendered[0]
    if first.role == "system" and len(reading.rendered) > 1 and starts and starts[0].is_user:
        end_of_system = _parting(turn, reading, served, stitched, _and_somebody(first))
        starts = (replace(starts[0], is_user=False), MessageStart(end_of_system, is_user=True), *starts[1:])
    if starts is stitched.message_starts:
        return starts
    return tuple(sorted(set(starts), key=lambda start: start.offset))


def _num_marked_tokens(turn: Turn, reading: Reading, served: ServedModel, stitched: Stitched) -> int:
    """Tokens before the last place that the client marked for caching; 0 without one."""
    num_messages = turn.session.num_marked_messages
    if num_messages is None:
        return 0
    if num_messages >= len(reading.rendered):
        return len(stitched.ids) - len(stitched.tail_ids)
    return _parting(turn, reading, served, stitched, _and_somebody(*reading.rendered[:num_messages]))


def _and_somebody(*messages: Message) -> tuple[Message, ...]:
    """These messages, and another user's words behind them."""
    return (*messages, Message("user", (TextBlock(_NOBODY_SAYS),)))


def _parting(
    turn: Turn, reading: Reading, served: ServedModel, stitched: Stitched, messages: tuple[Message, ...]
) -> int:
    """How many tokens the prompt has in common with that of other messages."""
    other = _stitch(turn, replace(reading, rendered=messages), served)[1]
    return common_length(stitched.ids, other.ids)


def _stitch(turn: Turn, reading: Reading, served: ServedModel) -> tuple[PromptText, Stitched]:
    """The text of a turn and its ids."""
    preserve = turn.thinking.preserve
    tools = reading.tools if turn.tool_choice.mode != "none" else ()
    images = served.images
    text = served.template.write(
        with_marks(reading.rendered, SEES_NOTHING) if images is None else images.marked(reading.rendered),
        tools,
        thinking=_is_thinking(turn, served),
        preserve_thinking=served.defaults.preserve_thinking if preserve is None else preserve,
        effort=turn.thinking.effort,
        template_arguments=turn.template_arguments,
        call_ids=_call_ids(reading, served),
    )
    if images is not None:
        text = images.worded(text, turn.images)
    called = known_tools(tools, reading.rendered) if turn.tool_choice.mode != "none" else ()
    return text, served.stitcher.tokens(text, reading.writings, MessageReader.under(served.output_format, called))


def _call_ids(reading: Reading, served: ServedModel) -> Mapping[str, str]:
    """By which ids the model knows the calls of a conversation."""
    if served.call_ids is None:
        return {}
    is_one_client = reading.identity.owner.is_one_client
    return served.call_ids.of(reading.rendered, reading.writings, is_one_client=is_one_client)


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


def _answer_reader(turn: Turn, tools: tuple[ToolSpec, ...], served: ServedModel, prompt: Prompt) -> AnswerReader:
    splitter = None
    if turn.raw_prompt is None:
        splitter = Splitter(
            served.output_format,
            starts_in_reasoning=prompt.opens_reasoning,
            tools=tools,
            allow_calls=bool(tools) and turn.tool_choice.mode != "none",
        )
    return AnswerReader(
        detokenizer=served.tokenizer.detokenizer(prompt.tokens.ids),
        scanner=StopScanner(turn.stop_strings),
        splitter=splitter,
        allows_many_calls=turn.parallel_tool_calls,
        content_tokens=_content_tokens(turn, served, splitter),
    )


def _content_tokens(turn: Turn, served: ServedModel, splitter: Splitter | None) -> ContentTokens | None:
    if turn.num_top_logprobs is None:
        return None
    return ContentTokens(cache(served.tokenizer.token_bytes), splitter.written_from if splitter is not None else None)


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


def _promise(turn: Turn, tools: Sequence[ToolSpec], served: ServedModel, prompt: Prompt) -> Promise:
    """The grammar of tool choice, strict tools and response format. Raises BadRequest."""
    if turn.raw_prompt is not None:
        return build_raw_grammar(turn.response_format)
    bounds = served.output_format.thinking_bounds
    return build_grammar(
        tools=tools,
        tool_choice=turn.tool_choice,
        parallel_tool_calls=turn.parallel_tool_calls,
        response_format=turn.response_format,
        output_format=served.output_format,
        added_tokens=served.added_tokens,
        start=AnswerStart(
            opens_thinking=prompt.opens_reasoning,
            closing_ids=served.tokenizer.encode(bounds.closing) if bounds is not None else (),
            may_think=_is_thinking(turn, served),
            begun=served.output_format.content_of(prompt.begun),
        ),
    )


def _unheld(turn: Turn, tools: Sequence[ToolSpec], served: ServedModel, promise: Promise) -> tuple[str, ...]:
    """The note on calls that are promised, but not in the form of the model's own template."""
    mode, is_promised = turn.tool_choice.mode, promise.grammar is not None or any(tool.strict for tool in tools)
    if served.unheld_calls is None or turn.raw_prompt is not None or not tools or mode == "none" or not is_promised:
        return ()
    return (f"calls are not held in the model's own form: {served.unheld_calls}",)


def _thinking_limit(
    turn: Turn, served: ServedModel, prompt: Prompt, max_tokens: int, promise: Promise
) -> ThinkingLimit | None:
    """The limit of the request's thinking, clamped so that an answer can follow; before a promised form it may use half
    of the answer, whatever the request says. Who wants none has none: where the template cannot be told so, thinking is
    ended as it begins, unless the client's own last message began it. None where there is none to keep."""
    bounds = served.output_format.thinking_bounds
    if turn.raw_prompt is not None or bounds is None:
        return None
    may_begin = _is_thinking(turn, served) or served.template.thinks_unasked((bounds.opening, bounds.closing))
    if not (prompt.opens_reasoning or may_begin):
        return None
    closing_ids = served.tokenizer.encode(bounds.closing)
    limits = [max(1, max_tokens // 2)] if promise.is_whole else []
    if not (_is_thinking(turn, served) or (prompt.opens_reasoning and prompt.continues)):
        limits.append(0)
    if turn.thinking.max_num_tokens is not None:
        limits += [turn.thinking.max_num_tokens, max(0, max_tokens - len(closing_ids) - 1)]
    if not limits:
        return None
    return ThinkingLimit(
        max_num_tokens=min(limits),
        opening=bounds.opening,
        closing=bounds.closing,
        closing_ids=closing_ids,
        anywhere=bounds.anywhere,
        is_open=prompt.opens_reasoning,
        decode=served.tokenizer.decode,
    )
