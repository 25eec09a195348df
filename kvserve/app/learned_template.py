"""What is found out about a model's tokenizer and chat template before its weights are there: all that writes prompts
and reads answers, and why what could not be found out was not.

It joins what `prompt/` and `output/` find by rendering and, where that is no form of calls, the parser that mlx-lm
has. Whether calls are read and held in the form that the template writes is found out by writing one. It starts no
engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvserve.core import CallRow, ToolSpec
from kvserve.engine.tool_parser import library_tool_parser
from kvserve.output.formats import OutputFormat, may_spell_values, own_call_tag, select_format
from kvserve.output.said import GeneratedMessage, MessageReader
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.prompt.answer_tags import reading_tags
from kvserve.prompt.boundaries import MessageMarkers, learn_markers
from kvserve.prompt.call_row import NoRow, call_row
from kvserve.prompt.call_words import ARGUMENT, EXAMPLES, FUNCTION
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.reading_back import reads_back
from kvserve.prompt.result_proof import lost_behind_results
from kvserve.prompt.stitch import MEMO_BYTES, Stitcher
from kvserve.prompt.template import MEMORY_BYTES, ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.told_row import told_row
from kvserve.requests.call_ids import CallIds

CALLED = ToolSpec(FUNCTION, "", {"type": "object", "properties": {ARGUMENT: {"type": "string"}}})


@dataclass(frozen=True, slots=True)
class LearnedTemplate:
    """What writes a model's prompts and reads its answers. `unheld_calls` is why promises of calls are not kept in the
    model's own form, None where they are."""

    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    output_format: OutputFormat
    unheld_calls: str | None

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the tokenizer's added tokens by their text."""
        return {token.content: id for id, token in self.tokenizer.backend.get_added_tokens_decoder().items()}

    @property
    def call_ids(self) -> CallIds:
        """What gives calls the ids that the model reads."""
        counts = self.stitcher.replays and self.template.counts_calls
        return CallIds(self.output_format, self.tokenizer.decode, counts)

    def notes(self) -> Iterator[str]:
        """What is worth knowing of it at a start, a line each."""
        if self.unheld_calls is not None:
            yield f"calls are not held in the model's own form: {self.unheld_calls}"
        if self.template.parts_words:
            yield "words before a call stand in a message of their own: it has no place for them"
        if self.stitcher.unreplayed is not None:
            yield f"answers do not keep their own tokens in the next prompt: {self.stitcher.unreplayed}"
        says = MessageReader.under(self.output_format, (PROBE_TOOL,))
        if (lost := lost_behind_results(self.tokenizer, self.template, self.stitcher, says)) is not None:
            yield f"answers to tools' results do not keep their own tokens in the next prompt: {lost}"


def learn_template(
    tokenizer: Tokenizer,
    folder: Path | None,
    *,
    family: str = "auto",
    placed_bytes: int = MEMORY_BYTES,
    memo_bytes: int = MEMO_BYTES,
) -> LearnedTemplate:
    """Render, read back and cut with the tokenizer's template.

    Of a form of calls that cannot be told, mlx-lm is asked for the model in `folder`, if one is given; `family` is the
    form of answers if it is not to be found out. What is remembered of conversations takes at most `placed_bytes`
    (where their messages were placed) and `memo_bytes` (ids of known text).
    """
    row = row_of_calls(tokenizer)
    output_format = _output_format(family, folder, tokenizer, row)
    template = ChatTemplate(
        tokenizer,
        placed_bytes,
        output_format.tags,
        output_format.row,
        row_behind_words=partial(row_behind_words, tokenizer, row),
        silent=output_format.silent_tags,
    )
    markers = learn_markers(tokenizer, template)
    stitcher = Stitcher.of(tokenizer, template, markers, memo_bytes)
    unheld = unheld_calls(template, output_format, row)
    return LearnedTemplate(tokenizer, template, markers, stitcher, output_format, unheld)


def read_calls(row: CallRow, tools: Sequence[ToolSpec], text: str) -> GeneratedMessage:
    """What `text` says to a model that writes calls in this row's form."""
    return MessageReader.under(select_format("auto", "", (), None, row), tools)(text)


def row_of_calls(tokenizer: Tokenizer) -> CallRow | NoRow | None:
    """How the template writes calls, or asks for them in words, or why that could not be told; None where they are read
    anyway."""
    template = tokenizer.chat_template or ""
    if own_call_tag(template) is None:
        found = call_row(tokenizer, read_calls)
        told = told_row(tokenizer, read_calls) if isinstance(found, NoRow) else None
        return found if told is None else told
    row = call_row(tokenizer, read_calls) if may_spell_values(template) else None
    return row if isinstance(row, CallRow) else None


def row_behind_words(tokenizer: Tokenizer, row: CallRow | NoRow | None) -> CallRow | None:
    """How the template writes calls, if words before them are read as words; `row` is that of `row_of_calls`."""
    found = call_row(tokenizer, read_calls) if row is None else row
    return found if isinstance(found, CallRow) and reads_back(found, read_calls, "I look.") else None


def _output_format(family: str, folder: Path | None, tokenizer: Tokenizer, row: CallRow | NoRow | None) -> OutputFormat:
    """How the model marks its output. `row` is how its template writes calls, None where they are read anyway."""
    template, tags = tokenizer.chat_template or "", reading_tags(tokenizer)
    added_tokens = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    own = (tags.thinking, tags.around, tags.between)
    if not isinstance(row, NoRow):
        return select_format(family, template, added_tokens, None, row, *own)
    parser = library_tool_parser(folder, tokenizer.chat_template) if folder is not None else None
    foreign = ForeignCallForm(parser.open_tag, parser.close_tag, parser.parse) if parser else None
    return select_format(family, template, added_tokens, foreign, None, *own)


def unheld_calls(template: ChatTemplate, output_format: OutputFormat, row: CallRow | NoRow | None) -> str | None:
    """Why promises of calls are not kept in the form of the template, None where they are; `row` is what was derived,
    None where a form that is read anyway stands in the template, if only in its words.

    Where a template has no words for tools, the server's own name the form that is held.
    """
    why = row.reason if isinstance(row, NoRow) else "it does not read back"
    if output_format.tool_forms[0].name == "foreign":
        return f"only mlx-lm reads the form of its chat template ({why})"
    text = template.shown_call
    if text is None:
        is_unknown = isinstance(row, NoRow) and template.accepts_tools
        return f"its chat template lists tools and shows no call ({why})" if is_unknown else None
    said = MessageReader.under(output_format, (CALLED,))(text)
    if said.calls != ((FUNCTION, EXAMPLES[0].arguments),):
        return f"what its chat template writes of a call is content here ({why})"
    if said.content:
        return f"what its chat template writes around a call is content here: {said.content!r}"
    around = next((tag for tag in output_format.silent_tags if tag in text), None)
    return f"its chat template writes {around} around a call, and forced calls come without" if around else None
