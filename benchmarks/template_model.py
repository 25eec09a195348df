"""A model's folder as the server has it before its weights are there: tokenizer, template, markers, stitcher, format of
answers; and conversations as its clients send them.

It joins what `app/model_factory.py` joins of these; it judges nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.template_reference import Conversation, Wire
from kvserve.app.model_factory import read_calls, row_behind_words, row_of_calls, unheld_calls
from kvserve.core import CallRow, Message, RequestDefaults, RequestId, SamplingParams, ToolSpec
from kvserve.engine.tool_parser import library_tool_parser
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.prompt.answer_tags import reading_tags
from kvserve.prompt.boundaries import MessageMarkers, learn_markers
from kvserve.prompt.call_row import NoRow
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
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    source = tokenizer.chat_template or ""
    row = row_of_calls(tokenizer)
    derived = row if isinstance(row, CallRow) else None
    parser = library_tool_parser(folder, tokenizer.chat_template) if isinstance(row, NoRow) else None
    foreign = ForeignCallForm(parser.open_tag, parser.close_tag, parser.parse) if parser else None
    tags = reading_tags(tokenizer)
    output_format = select_format("auto", source, added, foreign, derived, tags.thinking, tags.around, tags.between)
    behind_words = partial(row_behind_words, tokenizer, row)
    template = ChatTemplate(
        tokenizer,
        tags=output_format.tags,
        row=output_format.row,
        row_behind_words=behind_words,
        silent=output_format.silent_tags,
    )
    markers = learn_markers(tokenizer, template)
    stitcher = Stitcher.of(tokenizer, template, markers)
    return Model(
        tokenizer,
        template,
        markers,
        stitcher,
        output_format,
        CallIds(output_format, tokenizer.decode, stitcher.replays and template.counts_calls),
        unheld_calls(template, output_format, row),
        CallWords(derived) if derived is not None and derived == told_row(tokenizer, read_calls) else None,
    )


def as_sent(said: Conversation) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """Messages and tools as the server reads them from a body of `/v1/chat/completions`."""
    body = {"messages": list(said.messages), **({"tools": list(said.tools)} if said.tools else {})}
    turn = parse_chat(body, {}, _DEFAULTS, RequestId("matrix")).turn
    return turn.messages, turn.tools


def messages_of(messages: Sequence[Wire]) -> tuple[Message, ...]:
    """The same without tools."""
    return as_sent(Conversation(tuple(messages)))[0]
