"""Qwen-coder's form: `<tool_call>` `<function=name>` `<parameter=key>` value `</parameter>` ... and the closing tags.

Each tag is on its own line; one line end on either side of a value belongs to the form, the rest is exact. Models may
leave the outer tags out. A value ends at the first `</parameter>` that a whole `<parameter=key>` or the closing tags
follow (white space aside), so a string value must not contain that sequence. At the end of the turn a closed function
is whole without `</tool_call>`.
"""

from collections.abc import Sequence
from functools import partial

from kvserve.core import JSON_SPELLING, Spelling, ToolSpec
from kvserve.output.tool_parsers.arguments import OwnLines, TypedArguments, write_argument
from kvserve.output.tool_parsers.chains import NextKey, end_of_call
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import (
    CallForm,
    Chain,
    NotACall,
    ParsedCall,
    Scan,
    one_of,
    parse_text,
    skip_space,
    text_until,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
_MORE = NextKey((PARAMETER_CLOSE, PARAMETER_OPEN), ((">",),))


def _scan(spelling: Spelling, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
    """Reads what follows `<tool_call>`."""
    yield from one_of((yield from skip_space((yield))), (FUNCTION_OPEN,))
    return (yield from _function(spelling, tools, (FUNCTION_CLOSE, CLOSE), draft))


def _scan_bare(spelling: Spelling, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
    """Reads what follows `<function=`."""
    return (yield from _function(spelling, tools, (FUNCTION_CLOSE,), draft))


def _function(spelling: Spelling, tools: Sequence[ToolSpec], closing: Chain, draft: CallDraft) -> Scan:
    name = (yield from text_until((yield), ">")).strip()
    if not name or any(char.isspace() for char in name):
        raise NotACall("no name")
    tag = yield from one_of((yield from skip_space((yield))), (PARAMETER_OPEN, FUNCTION_CLOSE))
    if tag == FUNCTION_CLOSE:
        for outer in closing[1:]:
            yield from end_of_call([(outer,)])
    arguments = TypedArguments(name, tools, draft, OwnLines(before=True, behind=True), spelling)
    last = (PARAMETER_CLOSE, *closing)
    if tag == PARAMETER_OPEN:
        key: str | None = yield from text_until((yield), ">")
        while key is not None:
            end = yield from arguments.read(key, more=_MORE, last=[last], may_lack_end=[last] * (len(closing) > 1))
            draft.num_behind = end.num_last if end.lacks_end else 0
            key = end.key.name if end.key is not None else None
    return [arguments.call()]


_INNER_TAGS = (PARAMETER_OPEN, PARAMETER_CLOSE, FUNCTION_CLOSE)


def forms(spelling: Spelling) -> tuple[CallForm, CallForm]:
    """The form with its outer tags and without, where what is no string is spelt like this."""
    outer = CallForm(
        "qwen_coder",
        OPEN,
        partial(_scan, spelling),
        inner_tags=(FUNCTION_OPEN, *_INNER_TAGS, CLOSE),
        close_tags=(CLOSE,),
        spelling=spelling,
    )
    bare = CallForm(
        "qwen_coder_bare",
        FUNCTION_OPEN,
        partial(_scan_bare, spelling),
        stray_close=CLOSE,
        inner_tags=_INNER_TAGS,
        close_tags=(FUNCTION_CLOSE,),
        spelling=spelling,
    )
    return outer, bare


QWEN_CODER, QWEN_CODER_BARE = forms(JSON_SPELLING)


def parse(text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The call in `text`, with or without the outer tags. Raises NotACall."""
    bare = text.lstrip().startswith(FUNCTION_OPEN)
    return parse_text(QWEN_CODER_BARE if bare else QWEN_CODER, text, tools)


def render(call: ParsedCall, tools: Sequence[ToolSpec]) -> str:
    """The call in the spelling of Qwen-coder's template."""
    pairs = (
        f"{PARAMETER_OPEN}{key}>\n{write_argument(value)}\n{PARAMETER_CLOSE}\n" for key, value in call.arguments.items()
    )
    return f"{OPEN}\n{FUNCTION_OPEN}{call.name}>\n{''.join(pairs)}{FUNCTION_CLOSE}\n{CLOSE}"
