"""Whether the form in which a model's template writes calls is the one that is read and held, found out by writing one.

It joins `prompt/`, which writes, and `output/`, which reads; it knows no form.
"""

from kvserve.core import CallRow, ToolSpec
from kvserve.output.formats import OutputFormat
from kvserve.output.said import MessageReader
from kvserve.prompt.call_row import NoRow
from kvserve.prompt.call_words import ARGUMENT, EXAMPLES, FUNCTION
from kvserve.prompt.template import ChatTemplate

CALLED = ToolSpec(FUNCTION, "", {"type": "object", "properties": {ARGUMENT: {"type": "string"}}})


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
