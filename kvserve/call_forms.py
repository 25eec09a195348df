"""Whether the form in which a model's template writes calls is the one that is read and held, found out by writing one.

It joins `prompt/`, which writes, and `output/`, which reads; it knows no form.
"""

import json

from kvserve.core import CallRow, ToolCallBlock
from kvserve.output.formats import OutputFormat
from kvserve.output.said import Says
from kvserve.prompt.call_row import NoRow
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.template import ChatTemplate

_ARGUMENTS = json.dumps({"kwparameter": "kwvalue"})


def unheld_calls(template: ChatTemplate, output_format: OutputFormat, row: CallRow | NoRow | None) -> str | None:
    """Why promises of calls are not kept in the form of the template, None where they are; `row` is what was derived,
    None where a form that is read anyway stands in the template, if only in its words.

    Where a template has no words for tools, the server's own name the form that is held.
    """
    why = row.reason if isinstance(row, NoRow) else "it does not read back"
    if output_format.tool_forms[0].name == "foreign":
        return f"only mlx-lm reads the form of its chat template ({why})"
    if isinstance(row, NoRow) and template.accepts_tools and not template.writes_calls:
        return f"its chat template lists tools and shows no call ({why})"
    if _reads_back(template, output_format):
        return None
    return f"what its chat template writes of a call is content here ({why})"


def _reads_back(template: ChatTemplate, output_format: OutputFormat) -> bool:
    call = ToolCallBlock("kwcall", PROBE_TOOL.name, _ARGUMENTS)
    said = Says.under(output_format, (PROBE_TOOL,))(template.written_call(call, PROBE_TOOL))
    return said.calls == ((call.name, call.arguments),)
