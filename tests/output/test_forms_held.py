"""Strict tools under `auto` are held in every form of calls that is read: behind its opening no text is free."""

import pkgutil
from dataclasses import replace
from importlib import import_module

import pytest

from kvserve.core import ToolChoice
from kvserve.output import tool_parsers
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.tool_parsers.derived import PYTHON_TAG, is_bare
from kvserve.output.tool_parsers.form import CallForm
from tests.laws import sampled, sampled_cells
from tests.output.test_grammar import SETUPS, STRICT, TEMPLATES, Setup, byte_tokenizer, content
from tests.prompt.call_forms import PAIRS, SMALL, found_row

NAMES = [module.name for module in pkgutil.iter_modules(tool_parsers.__path__, f"{tool_parsers.__name__}.")]
KNOWN = {
    value.name for module in map(import_module, NAMES) for value in vars(module).values() if isinstance(value, CallForm)
}
"""The forms that are no template's own."""

FORMATS = (*TEMPLATES, "harmony", *SMALL, *PAIRS)
IN_EVERY_RUN = {*TEMPLATES, "harmony", "list", "bare", "told"}


def format_of(name: str) -> OutputFormat:
    """A family's format, or that of a template with a form of its own."""
    if (name, False) in SETUPS:
        return SETUPS[name, False].format
    return select_format("auto", "", {PYTHON_TAG}, None, found_row(name))


def opening(form: CallForm, called: str) -> str:
    """What a call in this form begins with: its tag and, where the row of the call has none, all up to its arguments;
    Llama's tag may stand before code, which is text."""
    if form.row is None or not is_bare(form.row):
        return form.open_tag
    whole = "".join(str(part) for part in (*form.row.opening, called, *form.row.middle))
    return whole if form.at_start else form.open_tag + whole


def free_forms(output_format: OutputFormat, *, tokens: bool) -> list[str]:
    """The forms behind whose opening any text may stand."""
    tags = [tag for tag in output_format.tags if tag[0] in "<["] if tokens else []
    case = Setup(byte_tokenizer(tags), output_format)
    grammar = case.grammar(ToolChoice(), tools=STRICT)
    name = "harmony" if output_format.channels == "harmony" else ""
    assert case.accepts(grammar, content(name, "~ any text"))
    return [
        form.name
        for form in output_format.tool_forms
        if case.accepts(grammar, content(name, f"{opening(form, STRICT[0].name)}~ any text"))
    ]


@sampled_cells(lambda name, tokens: tokens is (name in ("hermes", "list")))
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", sampled(FORMATS, IN_EVERY_RUN))
def test_no_form_that_is_read_is_free_where_tools_are_strict(name: str, tokens: bool) -> None:
    """Its tags may be tokens or text."""
    assert free_forms(format_of(name), tokens=tokens) == []


def test_every_form_there_is_was_looked_at() -> None:
    """Those of the files of `tool_parsers`, and a template's own of each kind with what models vary of it."""
    forms = [form for name in sorted(IN_EVERY_RUN) for form in format_of(name).tool_forms]
    looked_at = {form.name for form in forms}
    assert len(KNOWN) > 3 and {*KNOWN, "derived", "derived list"} <= looked_at
    assert any(form.at_start for form in forms) and any(form.open_tag == PYTHON_TAG for form in forms)


def test_a_form_without_a_grammar_is_noticed() -> None:
    """One that is read and that no grammar opens."""
    unheard = CallForm("unheard", "<unheard>", lambda tools, draft: iter(()))  # type: ignore[arg-type, return-value]
    known = format_of("glm")
    assert free_forms(replace(known, tool_forms=(*known.tool_forms, unheard)), tokens=False) == ["unheard"]
