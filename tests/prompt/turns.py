"""Answers as each family writes them, and a conversation that goes on without a model, for the tests of stitching."""

from dataclasses import dataclass, field, replace
from functools import cache

from kvserve.app.learned_template import learn_template
from kvserve.core import (
    ContentDelta,
    Message,
    ReasoningDelta,
    TextBlock,
    ThinkingBlock,
    ToolCallEnd,
    ToolResultBlock,
    ToolSpec,
    Written,
)
from kvserve.engine.tool_parser import library_tool_parser
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.output.tool_parsers.form import ParsedCall
from kvserve.prompt.boundaries import MessageMarkers, learn_markers
from kvserve.prompt.stitch import Stitched, Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.requests.call_ids import CallIds
from tests.models import tiny_model
from tests.prompt.samples import FAMILIES as EIGHT_FAMILIES
from tests.prompt.samples import family_tokenizer

FAMILIES = (*EIGHT_FAMILIES, "qwen3_5_moe")
LOOK = ToolSpec(
    "look",
    "Looks a thing up.",
    {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "s": {"type": "string"}}},
)
CALL = ParsedCall("look", {"q": "x  y", "n": 1})

# What the templates write before and behind an assistant's message, said here once more by hand.
HEADERS = {
    "qwen3": "<|im_start|>assistant\n",
    "qwen3_5": "<|im_start|>assistant\n",
    "qwen3_5_moe": "<|im_start|>assistant\n",
    "qwen3_next": "<|im_start|>assistant\n",
    "gemma3": "<start_of_turn>model\n",
    "gemma4": "<|turn>model\n",
    "gpt_oss": "<|start|>assistant",
    "glm4_moe_lite": "<|assistant|>",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
ENDS = {
    "qwen3": "<|im_end|>\n",
    "qwen3_5": "<|im_end|>\n",
    "qwen3_5_moe": "<|im_end|>\n",
    "qwen3_next": "<|im_end|>\n",
    "gemma3": "<end_of_turn>\n",
    "gemma4": "<turn|>\n",
    "gpt_oss": "<|end|>",
    "glm4_moe_lite": "",
    "llama": "<|eot_id|>",
}


@dataclass(frozen=True)
class Family:
    """Everything that a prompt of one family is made with."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    output_format: OutputFormat

    def says(self, tools: tuple[ToolSpec, ...] = (LOOK,)) -> MessageReader:
        return MessageReader.under(self.output_format, tools)


def learned_family(name: str, tokenizer: Tokenizer) -> Family:
    """All that the server finds out about a tokenizer and its template; mlx-lm is not asked for a form of calls."""
    of = learn_template(tokenizer, None)
    return Family(name, tokenizer, of.template, of.markers, of.stitcher, of.output_format)


@cache
def family(name: str) -> Family:
    tokenizer = family_tokenizer(name)
    output_format = _output_format(name, tokenizer)
    template = ChatTemplate(tokenizer, tags=output_format.tags)
    markers = learn_markers(tokenizer, template)
    return Family(name, tokenizer, template, markers, Stitcher.of(tokenizer, template, markers), output_format)


def _output_format(name: str, tokenizer: Tokenizer) -> OutputFormat:
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    foreign = None
    if name == "gemma4":
        parser = library_tool_parser(tiny_model(name))
        assert parser is not None
        foreign = ForeignCallForm(parser.open_tag, parser.close_tag, parser.parse)
    return select_format("auto", tokenizer.chat_template or "", added, foreign)


# --- answers as models write them ------------------------------------------------------------------------------------


def call_text(name: str, call: ParsedCall) -> str:
    """A call as a model of this family writes it, in another spacing than its template's where the form has any."""
    if name == "gpt_oss":
        body = hermes.write_json(dict(call.arguments)).replace(": ", ":")
        return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{body}"
    if name == "gemma4":
        pairs = (f'{key}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{key}:{v}" for key, v in call.arguments.items())
        return f"<|tool_call>call:{call.name}{{{','.join(pairs)}}}<tool_call|>"
    if name == "glm4_moe_lite":
        return glm.render(call, (LOOK,)).replace("</arg_key><arg_value>", "</arg_key>\n<arg_value>")
    if name in ("qwen3_5", "qwen3_5_moe"):
        return qwen_coder.render(call, (LOOK,)).replace("</function>\n", "</function>")
    return hermes.render(call, (LOOK,)).replace('"name": ', '"name":')


def answer_text(name: str, *, thinking: str, content: str, calls: tuple[ParsedCall, ...], opened: bool) -> str:
    """A whole answer; `opened`: the prompt ended inside thinking."""
    if name == "gpt_oss":
        parts = [f"<|channel|>analysis<|message|>{thinking}"] if thinking else []
        channel = "commentary" if calls else "final"
        parts += [f"<|channel|>{channel}<|message|>{content}"] if content else []
        return "<|end|><|start|>assistant".join(parts + [call_text(name, call) for call in calls[:1]])
    before = ""
    if name == "gemma4":
        before = f"<|channel>thought\n{thinking}\n<channel|>" if thinking else ""
    elif thinking or opened:
        before = ("" if opened else "<think>\n") + f"{thinking}\n</think>\n\n"
    return before + content + "".join(f"\n{call_text(name, call)}" for call in calls)


@dataclass
class Talk:
    """A conversation that each answer is added to as the client would echo it: parsed, with or without thinking."""

    family: Family
    thinking: bool = True
    echoes_thinking: bool = True
    tools: tuple[ToolSpec, ...] = (LOOK,)
    is_one_client: bool = True
    messages: list[Message] = field(default_factory=list)
    writings: list[Written | None] = field(default_factory=list)

    def say(self, text: str, role: str = "user") -> None:
        self.messages.append(Message(role, (TextBlock(text),)))  # type: ignore[arg-type]

    def prompt(self) -> PromptText:
        keeps = True if self.family.template.accepts_preserve_thinking else None
        messages = tuple(self.messages)
        template, decode = self.family.template, self.family.tokenizer.decode
        known = CallIds(self.family.output_format, decode, template.counts_calls)
        call_ids = known.of(messages, self.writings, is_one_client=self.is_one_client)
        return template.write(messages, self.tools, thinking=self.thinking, preserve_thinking=keeps, call_ids=call_ids)

    def stitched(self, prompt: PromptText | None = None) -> Stitched:
        prompt = prompt or self.prompt()
        return self.family.stitcher.tokens(prompt, self.writings, self.family.says(self.tools))

    def answer(self, ids: tuple[int, ...], *, cut: bool = False) -> tuple[int, ...]:
        """The model writes `ids`; what the KV of this turn now holds: the prompt and these ids."""
        prompt = self.prompt()
        before = self.stitched(prompt)
        detokenizer = self.family.tokenizer.detokenizer(before.ids)
        text = "".join([detokenizer.add(token) for token in ids] + [detokenizer.finish()])
        splitter = Splitter(
            self.family.output_format,
            starts_in_reasoning=prompt.opens_reasoning,
            tools=self.tools,
            allow_calls=bool(self.tools),
        )
        deltas = [*splitter.feed(text), *splitter.finish(cut=cut)]
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        calls = [delta.call for delta in deltas if isinstance(delta, ToolCallEnd)]
        said = [TextBlock(content)] if content else []
        thought = [ThinkingBlock(thinking)] if thinking and self.echoes_thinking else []
        message = Message("assistant", (*thought, *said, *calls))
        self.messages.append(message)
        self.writings.append(Written(message, before.tail_ids, tuple(ids), prompt.opens_reasoning))
        return before.ids + tuple(ids)

    def results(self, text: str) -> int:
        """A result for every call of the last message; how many there were."""
        calls = [block for block in self.messages[-1].blocks if hasattr(block, "call_id")]
        for call in calls:
            self.messages.append(Message("tool", (ToolResultBlock(call.call_id, (TextBlock(text),)),)))
        return len(calls)


def in_odd_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The ids of `text` as a model may write it: words cut where the tokenizer would not."""
    middle = len(text) // 2
    return tokenizer.encode(text[:middle]) + tokenizer.encode(text[middle:])


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many ids two prompts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def loop(of: Family, *, thinking: str, content: str, num_turns: int, echoes_thinking: bool = True) -> list[bool]:
    """A tool loop of calls alone; for each turn after the first whether the whole KV before it was kept."""
    talk = Talk(of, thinking=bool(thinking), echoes_thinking=echoes_thinking)
    talk.say("hi")
    kept, is_kept = (), []
    for number in range(num_turns):
        after = talk.stitched()
        is_kept.append(num_common(kept, after.ids) == len(kept))
        call = replace(CALL, arguments={"q": f"x  {number % 3}", "n": number % 2})
        opened = talk.prompt().opens_reasoning
        text = answer_text(of.name, thinking=thinking, content=content, calls=(call,), opened=opened)
        kept = talk.answer(in_odd_tokens(of.tokenizer, text))
        assert talk.results("found") == 1 or of.name == "llama"
    return is_kept[1:]


def with_ids(talk: Talk, written: Written, num_split: int) -> Written:
    """The same turn with its text in other ids, told apart by where it was split."""
    text = talk.family.tokenizer.decode(written.ids)
    encode = talk.family.tokenizer.encode
    return replace(written, ids=encode(text[:num_split]) + encode(text[num_split:]))
