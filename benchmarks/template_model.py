"""A model's folder as the server has it before its weights are there: tokenizer, template, markers, stitcher, format of
answers; and conversations as its clients send them.

It judges nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.template_reference import Conversation, Wire
from kvserve.app.learned_template import learn_template, read_calls
from kvserve.core import Message, RequestDefaults, RequestId, SamplingParams, ToolSpec
from kvserve.output.formats import OutputFormat
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.call_words import CallWords
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from kvserve.prompt.told_row import told_row
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.call_ids import CallIds

_DEFAULTS = RequestDefaults(SamplingParams(), max_tokens=1, thinking=True, preserve_thinking=True)


@dataclass(frozen=True, slots=True)
class Model:
    """All that makes prompts and reads answers. `unheld` is why calls are not held in the model's own form; `in_words`
    writes the calls that the template asks for in words and has no place for."""

    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    output_format: OutputFormat
    call_ids: CallIds
    unheld: str | None
    in_words: CallWords | None = None

    def prompt(self, said: Conversation) -> PromptText:
        """The prompt of a conversation that stands by itself."""
        messages, tools = as_sent(said)
        return self.template.write(messages, tools, thinking=said.thinking is not False)


def load_model(folder: Path, template_source: str | None = None) -> Model:
    """With the template in `template_source` in the place of the folder's own, if one is given. Raises ModelLoadError
    for a folder that cannot be served."""
    tokenizer = load_tokenizer(folder, template_source)
    learned = learn_template(tokenizer, folder)
    row = learned.output_format.row
    return Model(
        tokenizer,
        learned.template,
        learned.markers,
        learned.stitcher,
        learned.output_format,
        learned.call_ids,
        learned.unheld_calls,
        CallWords(row) if row is not None and row == told_row(tokenizer, read_calls) else None,
    )


def as_sent(said: Conversation) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """Messages and tools as the server reads them from a body of `/v1/chat/completions`."""
    body = {"messages": list(said.messages), **({"tools": list(said.tools)} if said.tools else {})}
    turn = parse_chat(body, {}, _DEFAULTS, RequestId("matrix")).turn
    return turn.messages, turn.tools


def messages_of(messages: Sequence[Wire]) -> tuple[Message, ...]:
    """The same without tools."""
    return as_sent(Conversation(tuple(messages)))[0]
