"""The column of the template matrix for replay: what the model wrote stands in the next prompt with its own ids.

Turns in the template's own form come in odd tokens; an agent echoes what it was sent: content, calls, reasoning.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.template_calls import TOOLS
from benchmarks.template_cases import call, result, user
from benchmarks.template_cell import Cell, Dropped, Judged, judged
from benchmarks.template_model import Model, as_sent
from benchmarks.template_reference import Conversation, NotRendered, Reference, Rendered, Wire, texts_of
from benchmarks.template_turns import common, native_turn, odd_ids, spoken
from kvserve.core import (
    ContentDelta,
    Message,
    OutputDelta,
    ReasoningDelta,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolCallEnd,
    Written,
)
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.prompt.stitch import Stitched
from kvserve.prompt.template import PromptText

_THINKS = re.compile(r"<[^<>\s]{0,8}think[^<>\s]*>|\[THINK\]|<\|channel|inner_prefix", re.IGNORECASE)
"""Of a template that knows thinking, whatever it calls it."""

_TAG = re.compile(r"<[^<>\s]{2,}|\[[A-Z_]{2,}\]")

THOUGHT = "Hm, let me see:\nkwthought."
_LINES = "# Title\n\n- one  two\n  - three\n\n```py\nx = 1\n```"


@dataclass(frozen=True, slots=True)
class Case:
    """What the model says, turn by turn: behind calls come their results, behind an answer another question."""

    turns: tuple[Wire, ...]
    thinking: bool = False


def _look(number: int) -> Wire:
    return call(f"call{number}aaaa", "read_file", {"path": f"src/a  b{number}.py", "lines": 10 + number})


REPLAYED: Mapping[str, Case] = {
    "answer": Case((spoken("It is fine, so far."),)),
    "answer of lines": Case((spoken(_LINES),)),
    "three answers": Case((spoken("It is one."), spoken("It is one."), spoken("It is three, really."))),
    "call": Case((spoken(None, _look(1)),)),
    "text before a call": Case((spoken("I look at it.", _look(1)),)),
    "parallel calls": Case((spoken(None, _look(1), _look(2)),)),
    "tool loop": Case((spoken(None, _look(1)), spoken(None, _look(2)), spoken(None, _look(3)))),
    "answer to a result": Case((spoken(None, _look(1)), spoken("It has twelve lines."))),
    "thinking, answer": Case((spoken("It is fine.", reasoning=THOUGHT),), thinking=True),
    "thinking, call": Case((spoken(None, _look(1), reasoning=THOUGHT),), thinking=True),
}


@dataclass
class Talk:
    """A conversation as an agent holds it, and what the model wrote in it."""

    model: Model
    tools: tuple[Wire, ...]
    thinking: bool
    messages: list[Wire] = field(default_factory=list)
    written: list[Written | None] = field(default_factory=list)

    def prompt(self) -> PromptText:
        """The next prompt, as the server writes it by default."""
        messages, tools = as_sent(Conversation(tuple(self.messages), self.tools))
        template = self.model.template
        return template.write(
            messages,
            tools,
            thinking=self.thinking,
            preserve_thinking=True,
            call_ids=self.model.call_ids.of(messages, self.written, is_one_client=True),
        )

    def stitched(self, prompt: PromptText) -> Stitched:
        """Its ids."""
        tools = as_sent(Conversation(tuple(self.messages), self.tools))[1]
        return self.model.stitcher.tokens(prompt, self.written, MessageReader.under(self.model.output_format, tools))

    def answer(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The model writes `ids`, and its client echoes what it was sent; the ids of the prompt and of the answer."""
        prompt = self.prompt()
        before = self.stitched(prompt)
        detokenizer = self.model.tokenizer.detokenizer(before.ids)
        text = "".join([detokenizer.add(token) for token in ids] + [detokenizer.finish()])
        tools = as_sent(Conversation(tuple(self.messages), self.tools))[1]
        splitter = Splitter(self.model.output_format, starts_in_reasoning=prompt.opens_reasoning, tools=tools)
        deltas = [*splitter.feed(text), *splitter.finish(cut=False)]
        said = _message(deltas)
        self.messages.append(_echo(said))
        self.written.append(Written(said, before.tail_ids, ids, prompt.opens_reasoning))
        return before.ids + ids


def _message(deltas: Sequence[OutputDelta]) -> Message:
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    thought = [ThinkingBlock(reasoning)] if reasoning else []
    text = [TextBlock(content)] if content else []
    return Message("assistant", (*thought, *text, *(delta.call for delta in deltas if isinstance(delta, ToolCallEnd))))


def _echo(said: Message) -> Wire:
    """The message as a client of `/v1/chat/completions` sends it back."""
    content = "".join(block.text for block in said.blocks if isinstance(block, TextBlock))
    reasoning = "".join(block.text for block in said.blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
        for block in said.blocks
        if isinstance(block, ToolCallBlock)
    ]
    return spoken(content or None, *calls, reasoning=reasoning or None)


# --- the column ------------------------------------------------------------------------------------------------------


def replay_cells(model: Model, reference: Reference) -> Iterator[Cell]:
    """One cell for each case."""
    for name, case in REPLAYED.items():
        yield judged("replay", name, lambda case=case: _judge(model, reference, case))  # type: ignore[misc]


def _judge(model: Model, reference: Reference, case: Case) -> Judged:
    has_calls = any(turn.get("tool_calls") for turn in case.turns)
    tools = TOOLS[:1] if has_calls else ()
    talk = Talk(model, tools, case.thinking)
    talk.messages.append(user("Do it."))
    for number, turn in enumerate(case.turns):
        prompt = talk.prompt()
        text = as_the_model_writes(model, reference, turn, tools, opens_reasoning=prompt.opens_reasoning)
        if isinstance(text, NotRendered):
            return text
        before, num_said = talk.stitched(prompt), len(talk.messages)
        kept = talk.answer(odd_ids(model, text, number))
        if (reason := misread(talk.messages[-1], turn)) is not None:
            return reason
        talk.messages += what_follows(talk.messages[-1], number)
        after = talk.stitched(talk.prompt())
        num_kept = num_common(kept, after.ids)
        if num_kept == len(kept):
            continue
        if num_kept >= len(before.ids) - len(before.tail_ids) and is_dropped(model, reference, talk):
            odd, turn_ids = (
                _own_ids(model, kept[len(before.ids) :]),
                after.ids[len(before.ids) - len(before.tail_ids) :],
            )
            if not odd or not _holds(turn_ids, odd):
                return f"behind the dropped thinking: {model.tokenizer.decode(after.ids[num_kept:])[:60]!r}"
            return Dropped("the template drops earlier thinking")
        same = moved(model, reference, Conversation(tuple(talk.messages), talk.tools, talk.thinking), num_said)
        if same is not None and model.tokenizer.decode(after.ids[:num_kept]).startswith(same):
            return Dropped("the template changes what stands before the turn")
        return _lost(model, kept, after.ids, num_kept)
    return None


def _own_ids(model: Model, answer: Sequence[int]) -> tuple[int, ...]:
    """The ids of an answer behind its thinking, from the first one on that begins with a word or a tag; a header that
    stands there is the template's."""
    closing, header, decode = _closing(model), model.stitcher.layout.header, model.tokenizer.decode
    behind = next((n for n in range(1, len(answer) + 1) if closing in decode(answer[:n])), 0)
    if decode(answer[behind:]).startswith(header):
        behind = next(n for n in range(behind, len(answer)) if len(decode(answer[behind:n])) >= len(header))
    first = next((n for n in range(behind, len(answer)) if decode(answer[n : n + 1])[:1].strip()), len(answer))
    return tuple(answer[first:])


def _holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    """Whether these ids stand among the others, in one piece."""
    return any(tuple(ids[start : start + len(part)]) == tuple(part) for start in range(len(ids) - len(part) + 1))


def misread(echoed: Wire, turn: Wire) -> str | None:
    """Whether what the client was sent is another message than the model's."""
    wanted = [each["function"]["name"] for each in turn.get("tool_calls") or ()]
    found = [each["function"]["name"] for each in echoed.get("tool_calls") or ()]
    if found != wanted:
        return f"{len(found)} of {len(wanted)} calls are read"
    for name in ("content", "reasoning_content"):
        mine, theirs = (str(each.get(name) or "").strip() for each in (echoed, turn))
        if mine != theirs:
            return f"{name} is read as {mine[:60]!r}"
    return None


def what_follows(echoed: Wire, number: int) -> list[Wire]:
    calls = echoed.get("tool_calls") or ()
    return [result(each["id"], f"result {number}") for each in calls] or [user(f"And then, {number}?")]


def is_dropped(model: Model, reference: Reference, talk: Talk) -> bool:
    """Whether transformers leaves the thinking out too, and the template has no switch to keep it."""
    if not any(message.get("reasoning_content") for message in talk.messages):
        return False
    told = reference.rendered(Conversation(tuple(talk.messages), talk.tools, talk.thinking))
    is_shown = isinstance(told, Rendered) and "kwthought" in told.text
    return not is_shown and not model.template.accepts_preserve_thinking


def moved(model: Model, reference: Reference, later_talk: Conversation, num_said: int) -> str | None:
    """What the template leaves alone where it changes what it wrote of the first messages; None where it does not.
    Words before calls that the template has no place for are not in it."""
    first = replace(later_talk, messages=later_talk.messages[:num_said])
    told = reference.rendered(first)
    if not isinstance(told, Rendered):
        later_talk = replace(later_talk, messages=tuple(map(_without_words, later_talk.messages)))
        first = replace(later_talk, messages=later_talk.messages[:num_said])
        told = reference.rendered(first)
    if not isinstance(told, Rendered):
        return None
    later = reference.text(later_talk, told.spelling)
    if not isinstance(later, str):
        return None
    same, last = common(model, told.text, later), str(texts_of(first.messages[-1])[0])
    return told.text[:same] if same < told.text.rfind(last) + len(last) else None


def _without_words(message: Wire) -> Wire:
    return message | {"content": None} if message.get("tool_calls") else message


def _lost(model: Model, kept: Sequence[int], after: Sequence[int], num_kept: int) -> str:
    """What stands where the ids part."""
    if not model.stitcher.replays:
        return "no turn is replayed: how the template begins or ends one was not found"
    mine, theirs = model.tokenizer.decode(kept[num_kept:])[:28], model.tokenizer.decode(after[num_kept:])[:28]
    return f"{len(kept) - num_kept} tokens: {theirs!r} for {mine!r}"


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two prompts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


# --- what the model writes -------------------------------------------------------------------------------------------


def as_the_model_writes(
    model: Model, reference: Reference, turn: Wire, tools: Sequence[Wire], *, opens_reasoning: bool
) -> str | NotRendered:
    """A turn in the template's own form, behind a prompt that ends inside thinking or not."""
    reasoning, tools = turn.get("reasoning_content"), tools if turn.get("tool_calls") else ()
    plain = {name: value for name, value in turn.items() if name != "reasoning_content"}
    if model.output_format.channels == "harmony" and turn.get("tool_calls") and turn.get("content"):
        text = _with_preamble(model, reference, plain, tools)
    else:
        native = native_turn(model, reference, plain, tools)
        text = native if isinstance(native, NotRendered) else native.text
        if isinstance(text, NotRendered) and turn.get("tool_calls") and turn.get("content"):
            text = _with_words(model, reference, plain, tools)
    if isinstance(text, NotRendered):
        return text
    said = _without_empty_thinking(model, text)
    if reasoning is None:
        return f"{_closing(model)}\n\n{said}" if opens_reasoning else said
    thought = native_turn(model, reference, turn, tools, thinking=True)
    is_shown = not isinstance(thought, NotRendered) and reasoning.strip() in thought.text
    if is_shown and thought.opens_reasoning == opens_reasoning:  # type: ignore[union-attr]
        return thought.text  # type: ignore[union-attr]
    if not _THINKS.search(reference.source):
        return NotRendered("the template knows no thinking")
    if model.output_format.channels == "harmony":  # the template writes the thinking of a later answer nowhere
        return f"{_opening(model)}{reasoning}{_closing(model)}<|start|>assistant{said}"
    opening = "" if opens_reasoning else f"{_opening(model)}\n"
    return f"{opening}{reasoning}\n{_closing(model)}\n\n{said}"


def _with_preamble(model: Model, reference: Reference, turn: Wire, tools: Sequence[Wire]) -> str | NotRendered:
    """Words before a call, which harmony's models write in a channel of their own; the template calls them thinking."""
    native = native_turn(model, reference, {**turn, "content": None}, tools)
    if isinstance(native, NotRendered):
        return native
    return f"<|channel|>commentary<|message|>{turn['content']}<|end|><|start|>assistant{native.text}"


def _with_words(model: Model, reference: Reference, turn: Wire, tools: Sequence[Wire]) -> str | NotRendered:
    """Words right before calls, where the template has no place for both: so models write them whose answers are words
    alone and whose calls begin with a tag."""
    calls = native_turn(model, reference, {**turn, "content": None}, tools)
    if isinstance(calls, NotRendered):
        return calls
    answers = (native_turn(model, reference, spoken(turn["content"]), offered) for offered in ((), tools))
    answer = next((each for each in answers if not isinstance(each, NotRendered)), None)
    if answer is None or _without_empty_thinking(model, answer.text).strip() != turn["content"]:
        return NotRendered("a model's words before a call have no form: its answers are not words alone")
    said = _without_empty_thinking(model, calls.text)
    if not _TAG.match(said):
        return NotRendered("a model's words before a call have no form: its calls begin with no tag")
    return f"{turn['content']}{said}"


def _opening(model: Model) -> str:
    bounds = model.output_format.thinking_bounds
    return bounds.opening if bounds is not None else "<think>"


def _closing(model: Model) -> str:
    bounds = model.output_format.thinking_bounds
    return bounds.closing if bounds is not None else "</think>"


def _without_empty_thinking(model: Model, text: str) -> str:
    """The turn without a block of thinking that says nothing."""
    opening, closing = re.escape(_opening(model)), re.escape(_closing(model))
    return re.sub(rf"\A\s*(?:{opening})?\s*{closing}\s*", "", text)
