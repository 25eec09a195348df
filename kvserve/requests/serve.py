"""The story of a request: `serve_turn` takes a turn and queues it; `running_answer.py` tells its answer as it comes.

    1 recognise   identity  which conversation it continues; messages as the model saw them before
    2 render      prompt/   messages -> text (what the template refuses is said in the nearest form)
    3 stitch      prompt/   text -> model tokens: only new text is tokenised, what the model wrote keeps its own tokens
    4 constrain   output/   tool choice and response format -> a grammar
    5 submit      engine/   bounded queue -> the one engine thread: prefill, decode

How 2 and 3 are done is in `prompt_of_turn.py`. This file joins rooms and knows no wire format. It runs on web threads
and never touches an array.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ContentToken,
    Finished,
    GenerationRequest,
    ReasoningDelta,
    ThinkingLimit,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    ToolSpec,
    Turn,
    Waiting,
    offered_tools,
)
from kvserve.errors import ContextOverflow, EngineFailure
from kvserve.output.answer import AnswerReader
from kvserve.output.content_tokens import ContentTokens
from kvserve.output.grammar import AnswerStart, Promise, build_grammar, build_raw_grammar
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from kvserve.requests.answer_facts import Submitted
from kvserve.requests.drafts import drafter_of
from kvserve.requests.prompt_of_turn import looked_at, prompt_of, readable
from kvserve.requests.request_facts import LengthLimit
from kvserve.requests.running_answer import RunningTurn
from kvserve.requests.served_model import ServedModel, has_rows
from kvserve.requests.turn_facts import Prompt


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
    turn = looked_at(turn, served)
    reading = served.conversations.bring(turn, partial(has_rows, served)) if turn.raw_prompt is None else None
    prompt = prompt_of(turn, reading, served)
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
        drafter=(drafter := drafter_of(turn, prompt, max_tokens, served)),
    )
    generation = served.engine.submit(request)
    submitted = Submitted(
        turn=turn,
        served=served,
        reading=reading,
        prompt=prompt,
        generation=generation,
        cut_by=cut_by,
        raw_before=served.conversations.raw_before(prompt.text, owner) if reading is None else None,
        unread=served.engine.digest.status.reason,
        drafter=drafter,
    )
    return RunningTurn(submitted, _answer_reader(turn, offered, served, prompt))


def count_tokens(turn: Turn, served: ServedModel) -> int:
    """The prompt's tokens as `serve_turn` would submit them; the engine hears nothing of it. Raises BadRequest."""
    with served.keeping(turn):
        turn = looked_at(turn, served)
        return len(readable(turn, served.conversations.read(turn), served)[1].ids)


def preview(turn: Turn, served: ServedModel) -> Prompt:
    """The prompt as `serve_turn` would submit it now; the engine hears nothing of it. Raises BadRequest,
    ContextOverflow."""
    with served.keeping(turn):
        turn = looked_at(turn, served)
        reading = served.conversations.read(turn) if turn.raw_prompt is None else None
        prompt = prompt_of(turn, reading, served)
        _max_tokens(turn, served, len(prompt.tokens))
        return prompt


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
    return build_grammar(
        tools=tools,
        tool_choice=turn.tool_choice,
        parallel_tool_calls=turn.parallel_tool_calls,
        response_format=turn.response_format,
        output_format=served.output_format,
        added_tokens=served.added_tokens,
        start=AnswerStart(
            opens_thinking=prompt.opens_reasoning,
            closing_ids=served.closing_ids,
            may_think=served.is_thinking(turn),
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
    if turn.raw_prompt is not None or bounds is None or not served.closing_ids:
        return None
    may_begin = served.is_thinking(turn) or served.template.thinks_unasked((bounds.opening, bounds.closing))
    if not (prompt.opens_reasoning or may_begin):
        return None
    limits = [max(1, max_tokens // 2)] if promise.is_whole else []
    if not (served.is_thinking(turn) or (prompt.opens_reasoning and prompt.continues)):
        limits.append(0)
    if turn.thinking.max_num_tokens is not None:
        limits += [turn.thinking.max_num_tokens, max(0, max_tokens - len(served.closing_ids) - 1)]
    if not limits:
        return None
    return ThinkingLimit(
        max_num_tokens=min(limits),
        opening=bounds.opening,
        closing=bounds.closing,
        closing_ids=served.closing_ids,
        anywhere=bounds.anywhere,
        is_open=prompt.opens_reasoning,
        decode=served.tokenizer.decode,
    )
