"""Finds one chat template's description of a tool and its form of a call, at load, by rendering some, so that text in
other places has the same form. `tool_words.py` knows the text around them.
"""

import re
from dataclasses import dataclass, replace

from kvserve.core import ToolSpec
from kvserve.prompt.call_words import ARGUMENT, EXAMPLES, FUNCTION, VALUE
from kvserve.prompt.compiled import MessageDict, ToolDict
from kvserve.prompt.conform import Dialect
from kvserve.prompt.probe import Prober, in_order, talk
from kvserve.prompt.steps import PromptStep, WireForm, function_dict, message_dict, tool_dicts
from kvserve.prompt.tool_words import OPENING


def _example(letter: str) -> ToolSpec:
    """A tool to render: its words begin with a letter of its own, so that what two tools have in common is the form."""
    properties = {f"{letter}pkw": {"type": "string", "description": f"{letter}parameter"}}
    return ToolSpec(f"{letter}kwtool", f"{letter}description", {"type": "object", "properties": properties})


_FIRST, _LAST, _BETWEEN = _example("f"), _example("z"), _example("m")
_PLAIN = "kwanswer"
_OPEN_TAG = re.compile(r"<[^<>\s]*\Z")
_INDENTED = re.compile(r"\A(?P<stray>[^\n]*\S[^\n]*)\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ProbedForm:
    """One template's description of a tool, cut out from between two other tools.

    `first` and `last` are these two tools' own texts, `behind` is the text between the first and the described tool,
    `before` between that and the last. `opening` and `closing` surround descriptions in the middle of a conversation:
    the template's own text, if it has a place for them, else our words and its tags.
    """

    prober: Prober
    form: WireForm
    first: str
    last: str
    behind: str
    before: str
    opening: str = OPENING
    closing: str = ""

    def describe(self, tool: ToolSpec) -> str | None:
        """The template's text for the tool; None if it differs from the probed form."""
        text = _rendered(self.prober, self.form, _FIRST, tool, _LAST)
        start, end = text.find(self.first), text.rfind(self.last)
        between = text[start + len(self.first) : end] if 0 <= start < end else ""
        if not between.startswith(self.behind) or not between.endswith(self.before):
            return None
        said = between[len(self.behind) : len(between) - len(self.before)].strip("\n")
        return said if tool.name in said else None


def find_tool_form(prober: Prober, form: WireForm) -> ProbedForm | None:
    """The prober's template's form of tool descriptions; None if it is unknown."""
    one, other = _rendered(prober, form, _FIRST), _rendered(prober, form, _LAST)
    both = _rendered(prober, form, _FIRST, _LAST)
    head = _common_prefix(one, other)
    tail = _common_suffix(one[len(head) :], other[len(head) :])
    first, last = one[len(head) : len(one) - len(tail)], other[len(head) : len(other) - len(tail)]
    if not first or not both.startswith(head + first) or not both.endswith(last + tail):
        return None
    between = both[len(head + first) : len(both) - len(last + tail)]
    begins = _common_suffix(between, head)  # how a description begins, with what stands before it
    if (stray := _INDENTED.match(begins)) is not None:
        begins = begins[len(stray["stray"]) :]  # the end of a line that is the same by chance: the bracket of two tags
    ends = _common_prefix(between[: len(between) - len(begins)], tail)
    separator = between[len(ends) : len(between) - len(begins)]
    found = ProbedForm(prober, form, first, last, ends + separator, separator + begins)
    if found.describe(_BETWEEN) is None:
        return None
    return _framed(found, head.removesuffix(begins), tail.removeprefix(ends))


def _framed(found: ProbedForm, head: str, tail: str) -> ProbedForm:
    """The form with the text around descriptions in a conversation."""
    if (own := _own_place(found)) is not None:
        return replace(found, opening=own[0], closing=own[1])
    opened = re.search(r"<(\w+)>\s*\Z", head)
    if opened is None or not tail.lstrip().startswith(f"</{opened[1]}>"):
        return found
    return replace(found, opening=f"{OPENING}<{opened[1]}>\n", closing=f"\n</{opened[1]}>")


def _own_place(found: ProbedForm) -> tuple[str, str] | None:
    """The template's own text around descriptions that a tool's result refers to, if it knows such results."""
    lead = [message_dict(step, found.form) for step in talk(["user", "calls", "result"])]
    deferred = {**function_dict(_BETWEEN), "defer_loading": True}
    tools: list[ToolDict] = [*tool_dicts((_FIRST,)), {"type": "function", "function": deferred}]

    def answered(content: object) -> str:
        result: MessageDict = {**lead[-1], "content": content}
        text = found.prober.template.render([*lead[:-1], result], tools, add_generation_prompt=True, arguments={})
        return text if isinstance(text, str) else ""

    reference = {"type": "tool_reference", "name": _BETWEEN.name, "tool_name": _BETWEEN.name}
    before, mark, behind = answered("kwresult").partition("kwresult")
    said, description = answered([reference]), found.describe(_BETWEEN)
    if not mark or description is None or not said.startswith(before) or not said.endswith(behind):
        return None
    opening, found_it, closing = said[len(before) : len(said) - len(behind)].partition(description)
    return (opening, closing) if found_it and description not in before else None


def shown_call(prober: Prober, dialect: Dialect) -> str | None:
    """The prober's template's rendering of the first of `EXAMPLES`; None if it writes no calls."""
    user, [call, *_] = talk(["user"]), EXAMPLES
    said = prober.render([*user, PromptStep("calls", calls=(call,))], dialect.form, tail=False)
    plain = prober.render([*user, PromptStep("assistant", _PLAIN)], dialect.form, tail=False)
    if not dialect.calls or not isinstance(said, str) or not isinstance(plain, str):
        return None
    before, _, behind = plain.partition(_PLAIN)
    own = said.removeprefix(_common_prefix(said, before))
    end = len(own) - len(_common_suffix(own, behind))
    if _OPEN_TAG.search(own, 0, end):  # the ends of two tags are the same by chance
        end = own.find(">", end) + 1
    own = own[:end].strip("\n")
    return own if in_order(own, (FUNCTION, ARGUMENT, VALUE)) else None


def _rendered(prober: Prober, form: WireForm, *tools: ToolSpec) -> str:
    text = replace(prober, tools=tools).render(talk(["user"]), form)
    return text if isinstance(text, str) else ""


def _common_prefix(one: str, other: str) -> str:
    length = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]
