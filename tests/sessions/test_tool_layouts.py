"""Where tools stood in conversations: what is kept of it, for how long, and what outlives the process."""

import dataclasses

import pytest

from kvserve.sessions.journal import UNWRITTEN, Rows
from kvserve.sessions.seen import PathNode
from kvserve.sessions.tool_layouts import (
    MAX_LAYOUTS,
    AddedTools,
    ToolLayout,
    ToolLayouts,
    layout_of,
    layout_row,
)
from kvserve.sessions.turns import TurnStore
from tests.integrity import check_integrity
from tests.sessions import samples
from tests.sessions.samples import Notebook, steps_of

A, B, C = (bytes([number]) * 32 for number in range(3))


def remembered(store: TurnStore, letters: str, layout: ToolLayout, until: float | None = 100.0) -> PathNode:
    """A conversation whose second message is an answer, rendered with this layout."""
    steps = steps_of(letters)
    answer = samples.assistant(letters[1])
    steps[1] = dataclasses.replace(steps[1], message=answer, written=samples.written(answer, 1))
    leaf = store.extend(None, steps, until)
    record = dataclasses.replace(samples.record_of(leaf), tool_layout=layout)
    store.remember(record, is_lasting=until is not None)
    check_integrity(store)
    return leaf


def grown(letters: str, index: int) -> ToolLayout:
    return ToolLayout((A,), (AddedTools(samples.chains_of(letters)[index], (B, C)),))


def test_a_layout_holds_from_its_last_tools_on() -> None:
    """Before them the front alone does, and before the first answer nothing."""
    store = TurnStore()
    layout = grown("abcd", 2)
    remembered(store, "abcd", layout)
    chains = samples.chains_of("abcd")
    assert store.tool_layouts(chains) == [(2, layout), (1, ToolLayout((A,)))]
    assert store.tool_layouts(chains[:2]) == [(1, ToolLayout((A,)))]
    assert store.tool_layouts(chains[:1]) == store.tool_layouts(samples.chains_of("xbcd")) == []


def test_what_was_in_force_last_is_noted_at_the_end() -> None:
    """Tools came and went: behind that the first ones are in force again."""
    store = TurnStore()
    remembered(store, "abcd", grown("abcd", 2))
    remembered(store, "abcde", ToolLayout((A,)))
    remembered(store, "abcdef", ToolLayout((A,)))
    found = store.tool_layouts(samples.chains_of("abcdef"))
    assert found == [(4, ToolLayout((A,))), (2, grown("abcd", 2)), (1, ToolLayout((A,)))]


def test_no_tools_in_front_leave_nothing() -> None:
    store = TurnStore()
    remembered(store, "abcd", ToolLayout())
    assert store.tool_layouts(samples.chains_of("abcd")) == []


def test_layouts_outlive_the_process_with_their_messages() -> None:
    """What was not to be written down is not, what is forgotten has no row, a row without its message is dropped."""
    book = Notebook()
    store = TurnStore(journal=book)
    layout = grown("abcd", 2)
    remembered(store, "abcd", layout)
    remembered(store, "vwxy", ToolLayout((C,)), until=None)
    again = TurnStore(journal=Notebook())
    again.load(book.rows())
    check_integrity(again)
    assert again.tool_layouts(samples.chains_of("abcd")) == store.tool_layouts(samples.chains_of("abcd"))
    assert again.tool_layouts(samples.chains_of("vwxy")) == []
    anew = Notebook()
    again._layouts._journal = anew
    again.put_all()
    assert {key for key in anew.bodies if key[0] == "layouts"} == {key for key in book.bodies if key[0] == "layouts"}
    lone: Rows = {"layouts": book.rows()["layouts"]}
    empty = TurnStore()
    empty.load(lone)
    assert empty.tool_layouts(samples.chains_of("abcd")) == []
    store.forget(lambda _: True)
    assert not [key for key in book.bodies if key[0] == "layouts"]


def test_clearing_leaves_no_row() -> None:
    book = Notebook()
    store = TurnStore(journal=book)
    remembered(store, "abcd", grown("abcd", 2))
    store.clear()
    assert not book.bodies


def test_layouts_are_bounded() -> None:
    """Of one message the newest are kept, of all messages those that were used last."""
    layouts = ToolLayouts(max_digests=40)
    for number in range(MAX_LAYOUTS + 3):
        layouts.put(A, ToolLayout((bytes([number]),)), is_lasting=False)
    assert [layout.front[0][0] for layout in layouts.at(A)] == list(range(MAX_LAYOUTS + 2, 2, -1))
    for chain in (B, C):
        layouts.put(chain, ToolLayout(tuple(bytes([number]) for number in range(18))), is_lasting=False)
        check_integrity(layouts)
    assert layouts.at(A) == () and layouts.at(B) and layouts.at(C)


@pytest.mark.parametrize("layout", [ToolLayout(), ToolLayout((A, B)), grown("abc", 1)])
def test_a_layout_comes_back_from_its_row(layout: ToolLayout) -> None:
    assert layout_of(layout_row(layout)) == layout
    assert layout.continues(dataclasses.replace(layout, added=()))


def test_only_more_behind_it_continues_a_layout() -> None:
    front, later = ToolLayout((A,)), grown("abc", 1)
    assert later.continues(front) and not front.continues(later)
    assert not later.continues(ToolLayout((A, B, C))) and not grown("abc", 2).continues(later)


def test_nothing_is_written_down_of_what_is_not_to_last() -> None:
    layouts = ToolLayouts(journal=UNWRITTEN)
    layouts.put(A, ToolLayout((B,)), is_lasting=False)
    layouts.drop_row(A)
    check_integrity(layouts)
    assert layouts.at(A) == (ToolLayout((B,)),)
