"""Signatures of thinking blocks: they carry the text, are stable, and nothing else passes for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.protocols.sealed_thinking import sign, signed_text

ANY_TEXT = st.text(st.characters(exclude_categories=[]))


@given(ANY_TEXT)
def test_a_signature_gives_its_text_back(text: str) -> None:
    """Whatever the thinking is, lone surrogates too; signing again makes the same signature."""
    assert signed_text(sign(text)) == text
    assert sign(text) == sign(text)
    assert sign(text).isascii() and not set(sign(text)) & set(' "\\\n')


@given(ANY_TEXT, st.data())
def test_a_damaged_signature_is_none(text: str, data: st.DataObject) -> None:
    """A letter changed, cut off or put in: the text does not come back, and never another one."""
    signature = sign(text)
    place = data.draw(st.integers(0, len(signature) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_=!"))
    for damaged in (
        signature[:place] + letter + signature[place + 1 :],
        signature[:place] + letter + signature[place:],
        signature[:place],
    ):
        assert signed_text(damaged) in (None, text)
    assert signed_text(signature[: len(signature) // 2]) is None


@pytest.mark.parametrize(
    "foreign", ["", "sig1==", "kv1", "kv1!!!", "EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrkzLoky3dl1pk", "kv1é"]
)
def test_a_foreign_signature_is_none(foreign: str) -> None:
    """Other servers' signatures, and what is none at all."""
    assert signed_text(foreign) is None
