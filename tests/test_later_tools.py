"""Where a request's tools stand, decided from what is known of its conversation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise, chain, tool_digest
from kvserve.core import (
    Message,
    TextBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
    known_tools,
    offered_tools,
)
from kvserve.identity.later_tools import PlacedTools, PlacementFacts, place_tools, unplaced
from kvserve.sessions.tool_layouts import AddedTools, ToolLayout

A, B, C, D = (ToolSpec(name, f"does {name}", {"type": "object"}) for name in "abcd")
EDITED = replace(B, description="does another thing")


def said(role: str, *blocks: TextBlock | ToolResultBlock | ToolCallBlock | ToolBlock) -> Message:
    return Message(role, blocks)  # type: ignore[arg-type]


TALK = (
    said("user", TextBlock("hi")),
    said("assistant", TextBlock("hello")),
    said("user", TextBlock("more")),
    said("assistant", ToolCallBlock("c", "a", "{}")),
    said("tool", ToolResultBlock("c", (TextBlock("done"),))),
)


def digests(*tools: ToolSpec) -> tuple[bytes, ...]:
    return tuple(map(tool_digest, tools))


def told(
    *layouts: tuple[int, ToolLayout], messages: tuple[Message, ...] = TALK, num_known: int = 4, newest: int = 4
) -> PlacementFacts:
    canonical = tuple(map(canonicalise, messages))
    return PlacementFacts(messages, canonical, chain(b"", canonical), layouts, num_known, newest)


CHAINS = told().chains
FRONT = (1, ToolLayout(digests(A)))
LATER = (2, ToolLayout(digests(A), (AddedTools(CHAINS[2], digests(B)),)))


def places(found: PlacedTools) -> dict[int, str]:
    """The tools by their messages, -1 in front."""
    return {-1: "".join(tool.name for tool in found.front)} | {
        index: "".join(tool.name for tool in tools) for index, tools in found.added.items()
    }


@pytest.mark.parametrize(
    ("tools", "layouts", "expected"),
    [
        ((A, B), (), {-1: "ab"}),
        ((A,), (FRONT,), {-1: "a"}),
        ((A, B), (FRONT,), {-1: "a", 4: "b"}),
        ((A, B), (LATER, FRONT), {-1: "a", 2: "b"}),
        ((B, A), (LATER, FRONT), {-1: "a", 2: "b"}),
        ((A, B, C, D), (LATER, FRONT), {-1: "a", 2: "b", 4: "cd"}),
        ((A,), (LATER, FRONT), {-1: "a"}),
        ((A, EDITED), (LATER, FRONT), {-1: "a", 4: "b"}),
        ((EDITED, C), (LATER, FRONT), {-1: "bc"}),
        ((A, B), ((1, ToolLayout(digests(A, B))), FRONT), {-1: "ab"}),
        ((A, B), ((3, ToolLayout(digests(A))), LATER, FRONT), {-1: "a", 4: "b"}),
        ((A,), ((3, ToolLayout(digests(A))), LATER, FRONT), {-1: "a"}),
        ((A, B, A), (FRONT,), {-1: "aba"}),
        ((A, B, EDITED), (FRONT,), {-1: "abb"}),
        ((A, B), ((4, ToolLayout(digests(A))),), {-1: "ab"}),
    ],
)
def test_tools_stand_where_they_stood(
    tools: tuple[ToolSpec, ...], layouts: tuple[tuple[int, ToolLayout], ...], expected: dict[int, str]
) -> None:
    """What is new stands at the first new message; a list that the known part does not begin stands in front."""
    assert places(place_tools(tools, told(*layouts), keeps_order=False)) == expected


def test_where_order_counts_only_a_beginning_is_kept() -> None:
    for tools, expected in (
        ((A, B, C), {-1: "a", 2: "b", 4: "c"}),
        ((B, A), {-1: "ba"}),
        ((A, C, B), {-1: "a", 4: "cb"}),
    ):
        assert places(place_tools(tools, told(LATER, FRONT), keeps_order=True)) == expected


def test_a_message_that_says_something_of_the_tool_itself_decides() -> None:
    """It may have removed it before the place that it would have."""
    removed = said("user", ToolBlock("b", is_removed=True), TextBlock("more"))
    messages = (*TALK[:2], removed, *TALK[3:])
    found = place_tools((A, B), told(FRONT, messages=messages), keeps_order=False)
    assert places(found) == {-1: "ab"}


def test_an_answer_and_a_message_without_identity_bring_nothing() -> None:
    """They are the model's, and gone in the next request; where no other is left the list stands in front."""
    for messages, expected in (((*TALK[:3], TALK[3]), {-1: "ab"}), (TALK, {-1: "a", 4: "b"})):
        found = place_tools((A, B), told(FRONT, messages=messages, num_known=3), keeps_order=False)
        assert places(found) == expected
    dropped = told(FRONT)
    dropped = replace(dropped, canonical=[*dropped.canonical[:4], replace(dropped.canonical[4], message=None)])
    assert places(place_tools((A, B), dropped, keeps_order=False)) == {-1: "ab"}


def test_tools_stand_before_words_and_behind_results() -> None:
    """Nothing of a message is lost."""
    found = place_tools((A, B), told(FRONT), keeps_order=False)
    result = found.in_messages(TALK)[4].blocks[0]
    assert isinstance(result, ToolResultBlock) and result.blocks == (TextBlock("done"), ToolBlock.of(B))
    found = place_tools((A, B), told(LATER, FRONT), keeps_order=False)
    assert found.in_messages(TALK)[2].blocks == (ToolBlock.of(B), TextBlock("more"))
    assert unplaced((A, B)).in_messages(TALK) == TALK


LAYOUTS = st.lists(
    st.builds(
        lambda front, later, place: (place, ToolLayout(front, (AddedTools(CHAINS[place], later),) if later else ())),
        st.lists(st.sampled_from(digests(A, B, EDITED, C)), min_size=1, unique=True).map(tuple),
        st.lists(st.sampled_from(digests(D)), unique=True).map(tuple),
        st.sampled_from([1, 2, 4]),
    ),
    max_size=4,
)


@given(st.lists(st.sampled_from([A, B, EDITED, C, D]), max_size=5), LAYOUTS, st.booleans(), st.integers(0, 5))
def test_whatever_is_known_a_prompt_has_the_tools_of_its_request(
    tools: list[ToolSpec], layouts: list[tuple[int, ToolLayout]], keeps_order: bool, num_known: int
) -> None:
    """Each of them once, as it was sent, and no other: nothing comes from what is remembered."""
    found = place_tools(tools, told(*layouts, num_known=num_known), keeps_order=keeps_order)
    assert sorted([*found.front, *found.later], key=repr) == sorted(tools, key=repr)
    rendered = found.in_messages(TALK)
    if len({tool.name for tool in tools}) == len(tools):
        for view in (offered_tools, known_tools):
            assert sorted(view(found.front, rendered), key=repr) == sorted(tools, key=repr)
