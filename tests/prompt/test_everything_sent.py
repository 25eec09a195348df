"""What a client sends reaches the model, also where a chat template has no place of its own for it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import Message, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.prompt.call_arguments import parsed_arguments
from kvserve.prompt.template import ChatTemplate
from tests.laws import num_examples
from tests.prompt.samples import HOSTILE, byte_level_backend, tokenizer_of
from tests.prompt.turns import FAMILIES, LOOK, family

LOSSY = (
    '{"q":"a","q":"b"}',
    '{"n":1e400}',
    '{"n":-1E999}',
    '{"q":{"r":1,"r":2}}',
    '{"n":0.1000000000000000055}',
    '{"n":NaN}',
)
HI = Message("user", (TextBlock("hi"),))


@pytest.mark.parametrize("arguments", LOSSY)
@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_that_a_dict_cannot_hold_are_written_as_they_were_sent(name: str, arguments: str) -> None:
    """Equal keys and numbers that are no double: the text stands in the prompt, in whatever form the template has."""
    call = Message("assistant", (ToolCallBlock("c1", "look", arguments),))
    result = Message("tool", (ToolResultBlock("c1", (TextBlock("found"),)),))
    text = family(name).template.write((HI, call, result), (LOOK,), thinking=False).shown
    assert arguments in text.replace('\\"', '"')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=num_examples(60), deadline=None)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_what_a_dict_can_hold_is_read(value: dict[str, object]) -> None:
    """Every object that JSON writes comes back as it was, so that templates can go through it."""
    assert parsed_arguments(json.dumps(value)) == value


@pytest.mark.parametrize("arguments", [*LOSSY, "[1]", "none", "{"])
def test_what_a_dict_cannot_hold_is_not_read(arguments: str) -> None:
    """Nothing is rounded, and no key is dropped."""
    assert parsed_arguments(arguments) is None


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_messages_name_is_in_the_prompt(name: str, role: str) -> None:
    """None of these templates has a place for it: it stands before the text, and a note says so."""
    said = Message(role, (TextBlock("my words"),), "alice")  # type: ignore[arg-type]
    talk = {"system": (said, HI), "user": (said,), "assistant": (HI, said, HI)}[role]
    prompt = family(name).template.write(talk, thinking=False)
    assert "[name: alice]\nmy words" in prompt.shown
    assert any(note.startswith("name put before the text") for note in prompt.notes)


def test_a_template_that_writes_names_is_given_them() -> None:
    """Where there is a place the text stays as it was sent."""
    source = "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}{% endfor %}<assistant>"
    template = ChatTemplate(tokenizer_of(byte_level_backend(), source))
    talk = (HI, Message("user", (TextBlock("my words"),), "alice"))
    prompt = template.write(talk, thinking=False)
    assert (prompt.text, prompt.notes) == ("<user>hi<alice>my words<assistant>", ())


@pytest.mark.parametrize("source", [None, HOSTILE["drops_tools"], HOSTILE["system_first"]])
def test_a_name_survives_plainer_forms(source: str | None) -> None:
    """Without a template, and in a system message that had to become a user's."""
    template = ChatTemplate(tokenizer_of(byte_level_backend(), source))
    talk = (HI, Message("system", (TextBlock("my words"),), "alice"), HI)
    assert "[name: alice]\nmy words" in template.write(talk, thinking=False).shown


def test_an_orphaned_result_keeps_the_name_of_its_tool() -> None:
    """A result whose call is not in the conversation is told by the name that its message gives."""
    source = "{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.content }}{% endfor %}<assistant>"
    template = ChatTemplate(tokenizer_of(byte_level_backend(), source))
    result = Message("tool", (ToolResultBlock("c1", (TextBlock("found"),)),), "look")
    assert "look" in template.write((HI, result), thinking=False).shown
