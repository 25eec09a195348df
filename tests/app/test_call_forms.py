"""Which templates' calls are not held in their own form, and why."""

from dataclasses import replace

import pytest

from kvserve.app.learned_template import read_calls, row_of_calls, unheld_calls
from kvserve.core import CallRow
from kvserve.output.formats import select_format
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.prompt.call_row import NoRow, call_row
from kvserve.prompt.template import ChatTemplate
from tests.laws import sampled, sampled_cells
from tests.prompt.call_forms import SMALL
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import Family
from tests.prompt.vocabularies import TEMPLATES, template_family, tokens_in

UNHELD = {
    "kimi_k2": "(it refuses calls: SecurityError: access to attribute 'append' of 'list' object is unsafe.)",
    "lfm2": "lists tools and shows no call (it writes no calls)",
}


def row_of(of: Family) -> CallRow | NoRow | None:
    return row_of_calls(of.tokenizer)


def unheld(of: Family) -> str | None:
    """Of a real template, with all that looks like a token being one."""
    source, row = of.tokenizer.chat_template or "", row_of(of)
    derived = row if isinstance(row, CallRow) else None
    template = ChatTemplate(of.tokenizer, row=derived)
    return unheld_calls(template, select_format("auto", source, tokens_in(source), None, derived), row)


@sampled_cells(lambda name, **_: name in ("gemma4", "gpt_oss", "kimi_k2", "qwen3_coder", "seed_oss"))
@pytest.mark.parametrize(
    "name", sampled(TEMPLATES, {*UNHELD, "granite3_3", "gemma4", "gpt_oss", "llama3_1", "qwen3_coder"})
)
def test_what_is_not_read_back_is_found_with_its_reason(name: str) -> None:
    """By rendering a call and reading it, not by names."""
    found = unheld(template_family(name))
    if name in UNHELD:
        assert found is not None and UNHELD[name] in found
    else:
        assert found is None


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
def test_what_is_content_around_a_call_is_found() -> None:
    """As Seed's own tags are where they are no tokens."""
    of = template_family("seed_oss")
    found = unheld_calls(of.template, select_format("auto", of.tokenizer.chat_template or "", (), None), row_of(of))
    assert found is not None and "content here: '<seed:tool_call>" in found


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
def test_a_form_that_only_a_library_reads_is_not_held() -> None:
    """What it reads is no content, but no grammar is known."""
    of = template_family("minimax_m2")
    foreign = ForeignCallForm("<minimax:tool_call>", "</minimax:tool_call>", lambda *_: {"name": "x", "arguments": {}})
    output_format = select_format("auto", of.tokenizer.chat_template or "", (), foreign)
    found = unheld_calls(of.template, output_format, row_of(of))
    assert found is not None and found.startswith("only mlx-lm reads")


def test_a_reader_of_another_form_is_found() -> None:
    """The control: a small template's calls are held in its own form, and not in another one."""
    tokenizer = tokenizer_of(byte_level_backend(), SMALL["tags"])
    row = call_row(tokenizer, read_calls)
    assert isinstance(row, CallRow)
    template = ChatTemplate(tokenizer, row=row)
    assert unheld_calls(template, select_format("auto", SMALL["tags"], (), None, row), row) is None
    other = replace(row, middle=("<|with|>",))
    found = unheld_calls(template, select_format("auto", SMALL["tags"], (), None, other), row)
    assert found == "what its chat template writes of a call is content here (it does not read back)"
