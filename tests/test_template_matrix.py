"""Real chat templates, cell by cell as `template_cells.toml` holds them, and that each column can fail."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import template_replay
from benchmarks.real_templates import row_of_template
from benchmarks.template_calls import call_cells
from benchmarks.template_cell import Cell
from benchmarks.template_folders import TEMPLATES, WHOLE_VOCABULARIES, write_folder
from benchmarks.template_load import load_cells
from benchmarks.template_loops import Loop, loop_cells, looping
from benchmarks.template_matrix import COLUMNS, LOOPS, Row, count, details, row_of, table
from benchmarks.template_model import Model, load_model
from benchmarks.template_reference import Reference, Wire
from benchmarks.template_render import CONTROL, render_cells
from benchmarks.template_replay import replay_cells
from kvserve.core import Message, TextBlock
from kvserve.demo.build import TEMPLATE_FOLDER
from kvserve.demo.families import FAMILIES
from kvserve.demo.vocabulary import QWEN
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.output.tool_parsers.json_text import read_json
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.turn_layout import TurnLayout
from tests.laws import sampled

CELLS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("template_cells.toml").read_text("utf-8"))
CAUSES = CELLS.pop("causes")
IN_EVERY_RUN = ("gpt_oss", "llama3_1", "minimax_m2")
"""Three that differ in all: roles and tokens, thinking, and forms of calls, with tags and without."""

here = pytest.mark.skipif(not TEMPLATES, reason="the real templates (shared/templates) are not here")


type Outcome = tuple[dict[str, int], set[str], set[str]]
"""How many cases of each column came out right, what the template drops, what misses."""


def outcome(row: Row, columns: Sequence[str]) -> Outcome:
    """Of a row that was made."""
    told = {
        verdict: {f"{c.column}: {c.case}" for c in row.cells if c.verdict == verdict} for verdict in ("dropped", "miss")
    }
    right = {column: sum(cell.verdict == "ok" for cell in row.of(column)) for column in columns}
    return right, told["dropped"], told["miss"]


def held(name: str, columns: Sequence[str]) -> Outcome:
    """Of the file."""
    row = CELLS[name]
    misses = {case for cases in row.get("misses", {}).values() for case in cases}
    dropped, missed = (
        {case for case in cases if case.startswith(tuple(columns))} for cases in (row.get("dropped", []), misses)
    )
    return {column: row["right"][column] for column in columns}, dropped, missed


@here
@pytest.mark.parametrize("name", sampled((*TEMPLATES, *WHOLE_VOCABULARIES), IN_EVERY_RUN))
def test_the_cells_of_a_real_template_are_those_that_are_held(name: str) -> None:
    """What came out right, what the template drops, what misses: no more, and no less either, so that a cell that is
    mended is seen."""
    row = row_of_template(name)
    assert outcome(row, tuple(COLUMNS)) == held(name, tuple(COLUMNS)), "\n".join(details(row))


@here
@pytest.mark.long
@pytest.mark.parametrize("name", (*TEMPLATES, *WHOLE_VOCABULARIES))
def test_the_closed_loops_of_a_real_template_are_those_that_are_held(name: str) -> None:
    """Six turns over HTTP, in the template's own form."""
    row = row_of_template(name, (LOOPS,))
    assert outcome(row, (LOOPS,)) == held(name, (LOOPS,)), "\n".join(details(row))


def test_every_miss_has_a_cause_that_is_said() -> None:
    """And no cause is left that nothing misses by."""
    assert {cause for held in CELLS.values() for cause in held.get("misses", {})} == set(CAUSES)


@here
def test_every_template_is_held() -> None:
    """Those that are here are those of the file."""
    assert list(CELLS) == [*TEMPLATES, *WHOLE_VOCABULARIES]


# --- that a cell can fail --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template that is always here, which all columns read whole."""
    made = tmp_path_factory.mktemp("template")
    return write_folder(made, (TEMPLATE_FOLDER / "qwen3.jinja").read_text("utf-8"), QWEN)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Model, Reference]:
    return load_model(folder), Reference(folder)


@cache
def stripping_format() -> OutputFormat:
    """A reader of calls that is right but for the white space around its values."""

    def parse(text: str, _tools: object) -> dict[str, Any]:
        call: Any = read_json(text)
        values = {key: value.strip() if isinstance(value, str) else value for key, value in call["arguments"].items()}
        return {"name": call["name"], "arguments": values}

    right = select_format("auto", "", ("<think>",), None)
    return replace(right, tool_forms=(ForeignCallForm("<tool_call>", "</tool_call>", parse).form(),))


def missing(cells: list[Cell]) -> set[str]:
    return {cell.case for cell in cells if cell.verdict == "miss"}


def test_calls_that_lose_white_space_are_red(whole: tuple[Model, Reference]) -> None:
    """Those cells where a value has some at its edge, and where a value holds the tag that a plain reader stops at."""
    model, reference = whole
    before = missing(list(call_cells(model, reference)))
    after = missing(list(call_cells(replace(model, output_format=stripping_format()), reference)))
    assert not before and after == {"lines", "edges", "empty lines", "tags in a value"}


def test_a_prompt_that_differs_in_a_letter_is_red(whole: tuple[Model, Reference], tmp_path: Path) -> None:
    """Every case that is rendered, and control text that is one where nothing is marked."""
    model, reference = whole
    assert not missing(list(render_cells(model, reference)))
    source = reference.source.replace("<|im_end|>", "<|im_end|> ")
    other = Reference(write_folder(tmp_path, source, QWEN))
    cells = list(render_cells(model, other))
    assert missing(cells) == {cell.case for cell in cells if cell.verdict != "not counted"}
    unguarded = Stitcher(model.tokenizer, model.markers, TurnLayout(frozenset(), frozenset()))
    assert CONTROL in missing(list(render_cells(replace(model, stitcher=unguarded), reference)))


def test_turns_that_are_not_replayed_are_red(whole: tuple[Model, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a layout of turns, and where the client changes a word, which must not be replayed."""
    model, reference = whole
    assert not missing(list(replay_cells(model, reference)))
    layout = TurnLayout(frozenset(), frozenset())
    blind = Stitcher(model.tokenizer, model.markers, layout, control=model.template.control)
    cells = list(replay_cells(replace(model, stitcher=blind), reference))
    assert missing(cells) == {cell.case for cell in cells if cell.verdict in ("ok", "miss")}
    echo = template_replay._echo
    monkeypatch.setattr(
        template_replay, "_echo", lambda said: echo(Message("assistant", (TextBlock("No."), *said.blocks)))
    )
    assert not [cell for cell in replay_cells(model, reference) if cell.verdict == "ok"]


def test_a_template_of_which_nothing_is_found_out_is_red(whole: tuple[Model, Reference], tmp_path: Path) -> None:
    """One that this server cannot use, one whose turns are not told apart, and a folder that is none."""
    model, reference = whole
    assert not missing(list(load_cells(model, reference)))
    bare = load_model(write_folder(tmp_path, "{{ raise_exception('no') }}", QWEN))
    assert missing(list(load_cells(bare, reference))) >= {"template", "tools", "turns"}
    row = row_of("nowhere", tmp_path / "nowhere")
    assert [cell.verdict for cell in row.cells] == ["miss"] and "is not a folder" in row.cells[0].reason


@pytest.mark.long
def test_a_loop_that_finds_less_again_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family that is always here every turn is found again, but for those that the client changes and those that
    the server forgets."""
    with looping(FAMILIES["qwen3"]) as (server, model, reference):
        ask = Loop.turn

        def forgets(loop: Loop, turn: Wire, number: int) -> tuple[Wire, int]:
            if number == 0:
                loop.messages[0] = {"role": "user", "content": "Do it again."}
            if number == 2:
                server.forget()
            message, num_cached = ask(loop, turn, number)
            return (message | {"content": "It has eleven lines."} if number == 3 else message), num_cached

        monkeypatch.setattr(Loop, "turn", forgets)
        cells = list(loop_cells(server, model, reference))
    assert [cell.verdict for cell in cells] == ["ok", "miss", "ok", "miss", "ok"], cells


def test_the_table_counts_what_counts() -> None:
    """Right of those that count, and what a template itself drops; reasons with marks stand as code."""
    cells = [Cell("replay", str(number), verdict, "a <b>") for number, verdict in enumerate(("ok", "miss", "dropped"))]
    row = Row("x", (*cells, Cell("render", "y", "not counted", "no")))
    assert count(row.of("replay")) == "1/2 + 1" and count(row.of("render")) == "none"
    assert list(table([row]))[2] == "| x | none | none | none | 1/2 + 1 |"
    assert next(details(row)) == "- replay, 1: `a <b>`"
