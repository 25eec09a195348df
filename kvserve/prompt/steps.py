"""Cuts a conversation into steps: each is one message of a chat template, with its parts in their order.

It knows the blocks of core/ and the dicts that Hugging Face templates read, not what one template accepts.
"""

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from kvserve.core import (
    Block,
    CallParts,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
)
from kvserve.errors import BadRequest
from kvserve.prompt.call_arguments import parsed_arguments, plain_data
from kvserve.prompt.compiled import MessageDict, ToolDict
from kvserve.prompt.control import CALL, NOTHING

# `start` and `end` stand for the borders of a conversation; `later_system` is a system message after anything else,
# `calls` an assistant message with tool calls, `result` a tool result right behind its call, `orphan` any other one.
Kind = Literal["start", "system", "later_system", "user", "assistant", "calls", "result", "orphan", "end"]

# Who spoke last in plain text: templates with alternating roles count these and skip calls and results.
Speaker = Literal["nobody", "user", "assistant"]

ROLES: Mapping[Kind, str] = {
    "system": "system",
    "later_system": "system",
    "user": "user",
    "assistant": "assistant",
    "calls": "assistant",
    "result": "tool",
    "orphan": "tool",
}

_NINE_CHARACTERS = re.compile(r"[A-Za-z0-9]{9}")
type ThinkTags = tuple[str, str]
"""The tag that opens thinking and the one that closes it."""

THINK_CLOSE = "</think>"
THINK_TAGS: ThinkTags = ("<think>", THINK_CLOSE)


@dataclass(frozen=True, slots=True)
class PromptStep:
    """One message as a template knows it; `index` is that of the message it came from.

    A template writes `reasoning`, `text` and `calls` in this order. `call_id` and `call_name` are a tool result's.
    `call_number` is the number, in the conversation, of the first of `calls` or of the answered call, whose index in
    its message is `call_place`.
    `own` are half-open runs of the text that are the template's words, not a client's.
    """

    kind: Kind
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallBlock, ...] = ()
    call_id: str = ""
    call_name: str = ""
    call_number: int = 0
    call_place: int = 0
    name: str | None = None
    index: int = 0
    own: tuple[tuple[int, int], ...] = ()


type DescribeTools = Callable[[Sequence[ToolBlock]], str]
"""Writes the text for consecutive blocks that add or remove tools."""


type Author = Literal["client", "server", "template"]
"""Whose words a text is. What the server tells may be a file's contents, so only the template's may hold its tags."""

NO_JOINTS: Mapping[str, str] = MappingProxyType({})
"""Each text of a message gets a line of its own."""


def speaker_after(speaker: Speaker, kind: Kind) -> Speaker:
    """Who spoke last after a step of this kind."""
    if kind == "user":
        return "user"
    return "assistant" if kind == "assistant" else speaker


CallIds = Literal["given", "nine_characters", "numbered", "numbered_in_message"]

# Reasoning without a field of its own: inside the content's text, or as a part of a content list.
INLINE = "inline"
THINKING_PART = "thinking part"


@dataclass(frozen=True, slots=True)
class Preamble:
    """Words before a call as a message of their own behind the thinking: `end` ends that, `header` begins the words.

    The template takes all of it for thinking; `unthought` is what it writes before the words where that is NOTHING.
    """

    end: str
    header: str
    unthought: str

    def behind(self, reasoning: str, words: str) -> str:
        """The thinking for the template."""
        return f"{reasoning or NOTHING}{self.end}{self.header}{words}"


@dataclass(frozen=True, slots=True)
class WireForm:
    """How one template wants message dicts.

    `reasoning` is the name of the field that it reads, `INLINE` or `THINKING_PART`; None: it takes no reasoning.
    `keeps_think_tags`: an empty reasoning saves a literal closing tag in the content. `wraps_raw_arguments`: arguments
    that are not a JSON object are put into one. `empty_text` is the replacement of empty text per role, `fills_calls`
    whether it is also used beside calls, `nulls_empty_content` whether calls alone have the content None instead.
    The messages of `named_roles` are written with their names.
    `describes_every_tool`: the template fails for a tool without a description. `joints` is what it writes between two
    texts of a message, per role; texts of other roles get a line each. `cuts_inline`: for these kinds, behind a result
    or not, the template cuts inline reasoning off as soon as something follows. `think_tags` are those of reasoning in
    a text. `preamble` is for words before a call until an answer follows, for which the template forgets thinking.
    `joins_system`: it writes a system's text as the beginning of the question behind it, and no mark of it.
    `call_opening` stands before the first name of calls, words of their message before that (`words_before.py`).
    """

    content_as_list: bool = False
    reasoning: str | None = None
    keeps_think_tags: bool = False
    omits_empty_content: bool = False
    nulls_empty_content: bool = False
    call_ids: CallIds = "given"
    arguments_as_text: bool = False
    wraps_raw_arguments: bool = False
    empty_text: Mapping[str, str] = field(default_factory=dict)
    fills_calls: bool = False
    named_roles: frozenset[str] = frozenset()
    describes_every_tool: bool = False
    joints: Mapping[str, str] = field(default_factory=dict)
    cuts_inline: frozenset[tuple[Kind, bool]] = frozenset()
    think_tags: ThinkTags = THINK_TAGS
    preamble: Preamble | None = None
    joins_system: bool = False
    call_opening: CallParts | None = None

    def as_question(self, step: PromptStep) -> PromptStep:
        """A system's step as a user's, marked where the template would not write the same of it."""
        is_joined = step.kind == "system" and self.joins_system
        return replace(step, kind="user", text=step.text if is_joined else f"[system]\n{step.text}")


def steps_of(
    message: Message, index: int, describe: DescribeTools, joints: Mapping[str, str] = NO_JOINTS
) -> Iterator[PromptStep]:
    """The steps of one message, in the order of its blocks. Raises BadRequest for an image."""
    of_role = _assistant_steps if message.role == "assistant" else _other_steps
    steps = of_role(message, index, describe, joints)
    first = next(steps, None)
    if first is None:
        yield PromptStep("orphan" if message.role == "tool" else message.role, name=message.name, index=index)
        return
    yield first
    yield from steps


def _assistant_steps(
    message: Message, index: int, describe: DescribeTools, joints: Mapping[str, str]
) -> Iterator[PromptStep]:
    """Steps cut wherever the template would write a block before an earlier one, e.g. text behind a call."""
    thinking: list[str] = []
    texts: list[str] = []
    calls: list[ToolCallBlock] = []

    def cut() -> Iterator[PromptStep]:
        if thinking or texts or calls:
            kind: Kind = "calls" if calls else "assistant"
            # An assistant's text in several blocks is one text in pieces (citations cut it so): nothing goes between.
            yield PromptStep(kind, "".join(texts), "\n\n".join(thinking), tuple(calls), name=message.name, index=index)
        for parts in (thinking, texts, calls):
            parts.clear()

    for block in message.blocks:
        match block:
            case ThinkingBlock(text=text):
                if texts or calls:
                    yield from cut()
                if text:
                    thinking.append(text)
            case TextBlock(text=text):
                if calls and text.strip():
                    yield from cut()
                if text and not calls:
                    texts.append(text)
            case ToolCallBlock():
                calls.append(block)
            case ToolResultBlock():
                yield from cut()
                yield _result_step(block, index, message.name, describe, joints)
            case ToolBlock():  # not the assistant's words
                yield from cut()
                yield _with_text(PromptStep("system", index=index), (block,), describe, joints)
            case ImageBlock():
                raise _no_images()
    yield from cut()


def _other_steps(
    message: Message, index: int, describe: DescribeTools, joints: Mapping[str, str]
) -> Iterator[PromptStep]:
    """Steps of a system, user or tool message: one for each tool result and for each text between them."""
    kind: Kind = "orphan" if message.role == "tool" else message.role
    for is_result, group in groupby(message.blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            yield _with_text(PromptStep(kind, name=message.name, index=index), tuple(group), describe, joints)
            continue
        for block in group:
            if isinstance(block, ToolResultBlock):
                yield _result_step(block, index, message.name, describe, joints)


def _with_text(
    step: PromptStep, blocks: Sequence[Block], describe: DescribeTools, joints: Mapping[str, str], before: str = ""
) -> PromptStep:
    """The step with the blocks' text behind `before`; what is not the client's stands on lines of its own."""
    text, own, joint = before, list[tuple[int, int]](), joints.get(ROLES[step.kind], "\n")
    last: Author | None = None
    for part, author in _texts(blocks, describe):
        if last is not None:
            text += joint if author == last == "client" else "\n"
        if author == "template":
            own.append((len(text), len(text) + len(part)))
        text += part
        last = author
    return replace(step, text=text, own=tuple(own))


def _texts(blocks: Sequence[Block], describe: DescribeTools) -> Iterator[tuple[str, Author]]:
    """The blocks' texts, and whose words each is."""
    tools: list[ToolBlock] = []
    for block in blocks:
        if isinstance(block, ToolBlock):
            tools.append(block)
            continue
        if tools:
            yield describe(tools), "template"
            tools = []
        yield _text_of(block), "server" if isinstance(block, TextBlock) and block.is_ours else "client"
    if tools:
        yield describe(tools), "template"


def _text_of(block: Block) -> str:
    """The text of a block in a message that is not the assistant's."""
    match block:
        case TextBlock(text=text) | ThinkingBlock(text=text):
            return text
        case ToolCallBlock():
            return hermes_call(block)
        case _:
            raise _no_images()


def _result_step(
    block: ToolResultBlock, index: int, name: str | None, describe: DescribeTools, joints: Mapping[str, str]
) -> PromptStep:
    """The step of a tool result; an error is marked, since no template has a field for it. `name` is the message's name
    of the tool, which its call has too, if there is one."""
    step = PromptStep("result", call_id=block.call_id, call_name=name or "", index=index)
    return _with_text(step, block.blocks, describe, joints, "[error]\n" if block.is_error else "")


def named(text: str, name: str) -> str:
    """A message's text with its name, for templates without a place for names."""
    return f"[name: {name}]\n{text}"


def _no_images() -> BadRequest:
    return BadRequest("The model takes no images.", param="messages")


# --- dicts as templates read them ------------------------------------------------------------------------------------


def message_dict(step: PromptStep, form: WireForm) -> MessageDict:
    """The dict for the template. None, which many templates write out as "None", stands only where the form has it."""
    words_before = form.call_opening is not None and bool(step.text and step.calls)
    step = replace(step, text="") if words_before else step
    role = ROLES[step.kind]
    text = step.text or ("" if step.calls and not form.fills_calls else form.empty_text.get(role, ""))
    message: MessageDict = {"role": role}
    has_field = form.reasoning is not None and form.reasoning not in (INLINE, THINKING_PART)
    if step.reasoning and form.reasoning == INLINE:
        opening, closing = form.think_tags
        text = f"{opening}\n{step.reasoning}\n{closing}\n\n{text}"
    elif has_field and role == "assistant" and (step.reasoning or _guards_tags(text, form)):
        message[str(form.reasoning)] = step.reasoning
    if step.reasoning and form.reasoning == THINKING_PART:
        message["content"] = [{"type": "thinking", "thinking": step.reasoning}, {"type": "text", "text": text}]
    elif step.calls and not text and form.nulls_empty_content:
        message["content"] = None
    elif text or not (step.calls and form.omits_empty_content):
        message["content"] = [{"type": "text", "text": text}] if form.content_as_list else text
    if step.name is not None:
        message["name"] = step.name
    if step.calls:
        message["tool_calls"] = [
            _call_dict(call, step.call_number + i, i, form, mark=CALL if words_before and not i else "")
            for i, call in enumerate(step.calls)
        ]
    if role == "tool":
        number = step.call_place if form.call_ids == "numbered_in_message" else step.call_number
        message["tool_call_id"] = wire_id(form.call_ids, step.call_id, step.call_name, number)
        message["name"] = step.call_name
    return message


def _guards_tags(text: str, form: WireForm) -> bool:
    """Whether an empty reasoning is needed so that the template does not read text before a literal </think> as
    thinking.

    Text that opens with <think> is thinking that a client sends back; the template handles it.
    """
    opening, closing = form.think_tags
    return form.keeps_think_tags and closing in text and not text.lstrip().startswith(opening)


def _call_dict(call: ToolCallBlock, number: int, place: int, form: WireForm, mark: str = "") -> dict[str, object]:
    arguments: object = call.arguments
    if not form.arguments_as_text:
        parsed = parsed_arguments(call.arguments)
        if parsed is not None:
            arguments = parsed
        elif form.wraps_raw_arguments:
            arguments = {"arguments": call.arguments}
    number = place if form.call_ids == "numbered_in_message" else number
    call_id = wire_id(form.call_ids, call.call_id, call.name, number)
    return {"id": call_id, "type": "function", "function": {"name": mark + call.name, "arguments": arguments}}


def wire_id(form: CallIds, call_id: str, name: str, number: int) -> str:
    """A call's id as the template wants it.

    Kimi's templates write the id and not the name, so the id must hold the name; `number` is the call's in its
    conversation or in its message. Mistral's require nine alphanumeric characters; other ids are replaced, equal ids by
    equal ones.
    """
    if form == "given" or (form == "nine_characters" and _NINE_CHARACTERS.fullmatch(call_id)):
        return call_id
    if form in ("numbered", "numbered_in_message"):
        return f"functions.{name}:{number}"
    alphabet = string.ascii_letters + string.digits
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
    return "".join(alphabet[byte % len(alphabet)] for byte in digest[:9])


def tool_dicts(tools: Sequence[ToolSpec], form: WireForm | None = None) -> list[ToolDict]:
    """The tools as OpenAI-style schemas of plain dicts, as they were sent but for what the form demands."""
    functions = [function_dict(tool) for tool in tools]
    if form is not None and form.describes_every_tool:
        functions = [{"name": each["name"], "description": "", **each} for each in functions]
    return [{"type": "function", "function": function} for function in functions]


def function_dict(tool: ToolSpec) -> dict[str, object]:
    """One tool as a plain dict: what was not sent has no key. Missing parameters become empty ones."""
    function: dict[str, object] = {"name": plain_data(tool.name)}
    if tool.description is not None:
        function["description"] = plain_data(tool.description)
    function["parameters"] = plain_data(tool.parameters) or {"type": "object", "properties": {}}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


# --- the nearest form in plain text ----------------------------------------------------------------------------------


def hermes_call(call: ToolCallBlock) -> str:
    """A call as text, in the JSON form that Hermes models introduced and the server's parsers read back."""
    arguments = parsed_arguments(call.arguments)
    value = call.arguments if arguments is None else arguments
    body = json.dumps({"name": call.name, "arguments": value}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def hermes_result(text: str) -> str:
    """A tool result as text."""
    return f"<tool_response>\n{text}\n</tool_response>"
