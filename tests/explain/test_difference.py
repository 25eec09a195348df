"""Where two conversations part: the right message, the right character, short excerpts; nothing where one goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import ImageBlock, Message, TextBlock, ToolResultBlock
from kvserve.explain.difference import (
    MAX_EXCERPT_CHARACTERS,
    common_length,
    first_difference,
    text_form,
)
from tests.sessions.samples import assistant, call, user

TALK = [
    Message("system", (TextBlock("Be brief."),)),
    user("List the files."),
    assistant("I look.", call('{"command": "ls"}'), thinking="Which?"),
    Message("tool", (ToolResultBlock("c1", (TextBlock("a.txt\nb.txt"), ImageBlock("data:1"))),)),
]


def test_going_on_is_no_difference() -> None:
    """Equal conversations, an appended one, and anything after nothing."""
    assert first_difference(TALK, TALK) is None
    assert first_difference(TALK, [*TALK, user("Thanks.")]) is None
    assert first_difference([], TALK) is None


def test_the_first_changed_character_is_named() -> None:
    """One character of an old result: its message, its place in the text, both sides around it."""
    edited = [*TALK[:3], Message("tool", (ToolResultBlock("c1", (TextBlock("a.txt\nc.txt"), ImageBlock("data:1"))),))]
    found = first_difference(TALK, edited)
    assert found is not None and (found.message_index, found.role) == (3, "tool")
    assert text_form(TALK[3])[found.char] == "b" and text_form(edited[3])[found.char] == "c"
    assert "b.txt" in found.before and "c.txt" in found.after


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, Message("system", (TextBlock("Be brief"),))),
        (1, Message("assistant", (TextBlock("List the files."),))),
        (1, Message("user", (TextBlock("List the files."),), name="Ann")),
        (1, Message("user", (TextBlock("List the "), TextBlock("files.")))),
        (2, assistant("I look.", call('{"command": "la"}'), thinking="Which?")),
        (2, assistant("I look.", call('{"command": "ls"}', name="sh"), thinking="Which?")),
        (2, assistant("I look.", call('{"command": "ls"}'))),
        (3, Message("tool", (ToolResultBlock("c1", (TextBlock("a.txt\nb.txt"), ImageBlock("data:2"))),))),
        (3, Message("tool", (ToolResultBlock("c1", (TextBlock("a.txt\nb.txt"), ImageBlock("data:1")), True),))),
    ],
    ids=["shorter", "role", "name", "blocks", "argument", "tool", "thinking", "image", "error"],
)
def test_every_kind_of_change_is_found(index: int, changed: Message) -> None:
    """Whatever a model can read of a message counts; both excerpts show something that differs."""
    found = first_difference(TALK, [*TALK[:index], changed, *TALK[index + 1 :]])
    assert found is not None and found.message_index == index and found.role == changed.role
    assert found.before != found.after


def test_call_ids_are_no_difference() -> None:
    """They are new in every answer of some clients."""
    renamed = [
        *TALK[:2],
        assistant("I look.", call('{"command": "ls"}', call_id="other"), thinking="Which?"),
        Message("tool", (ToolResultBlock("other", (TextBlock("a.txt\nb.txt"), ImageBlock("data:1"))),)),
    ]
    assert first_difference(TALK, renamed) is None


def test_a_message_that_is_gone_is_a_difference() -> None:
    """A rewound conversation, and a carrier that stood in one request only."""
    found = first_difference(TALK, TALK[:2])
    assert found is not None
    assert (found.message_index, found.role, found.char, found.after) == (2, "assistant", 0, "")
    carrier = user("CARRIER")
    found = first_difference([*TALK[:2], carrier], [*TALK[:2], TALK[2]])
    assert found is not None and (found.message_index, found.before) == (2, "CARRIER")


def test_excerpts_are_short() -> None:
    """A change in the middle of a long text: 80 characters around it, the changed one among them."""
    text = "".join(f"{number:06d} " for number in range(20_000))
    place = 70_003
    found = first_difference([user(text)], [user(text[:place] + "#" + text[place + 1 :])])
    assert found is not None and found.char == place
    assert len(found.before) == len(found.after) == MAX_EXCERPT_CHARACTERS and "#" in found.after


@given(st.text(max_size=30), st.text(max_size=10), st.text(max_size=10), st.sampled_from([0, 1, 4_090, 4_096, 8_200]))
def test_common_length_is_what_counting_gives(shared: str, one: str, other: str, padding: int) -> None:
    """Also at the borders of the pieces in which texts are compared."""
    left, right = "p" * padding + shared + one, "p" * padding + shared + other
    expected = next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_length(left, right) == expected


words = st.text("ab", max_size=3)
talks = st.lists(
    st.one_of(words.map(user), st.builds(assistant, words, st.builds(call, words), thinking=words)), max_size=5
)


@given(talks, talks)
def test_none_exactly_where_it_goes_on(before: list[Message], after: list[Message]) -> None:
    """No difference if and only if the first conversation is the beginning of the second."""
    found = first_difference(before, after)
    assert (found is None) == (after[: len(before)] == before)
    if found is not None:
        assert before[: found.message_index] == after[: found.message_index]
        assert len(found.before) <= MAX_EXCERPT_CHARACTERS and len(found.after) <= MAX_EXCERPT_CHARACTERS
