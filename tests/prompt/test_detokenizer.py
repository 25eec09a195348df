"""The law of incremental decoding: the pieces joined are the text of all ids decoded at once."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from kvserve.errors import ModelLoadError
from kvserve.prompt.detokenizer import decoder_form
from tests.laws import num_examples
from tests.prompt.samples import FAMILIES, byte_level_backend, family_tokenizer, sentencepiece_backend, tokenizer_of

TOKENIZERS = {
    "byte_level": lambda: tokenizer_of(byte_level_backend()),
    **{kind: lambda kind=kind: tokenizer_of(sentencepiece_backend(kind)) for kind in ("metaspace", "strip", "keep")},
}


def pieces(tokenizer, ids, after=()) -> list[str]:
    detokenizer = tokenizer.detokenizer(after)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=num_examples(40))
def test_pieces_of_any_ids_are_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    """Random ids, special and unknown ones and broken characters included."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=num_examples(40))
def test_the_law_holds_for_the_families(family: str, data: st.DataObject) -> None:
    """The same for the tokenizers of real model folders."""
    tokenizer = family_tokenizer(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(alphabet="he llo 東é🫠\n", max_size=30))
@settings(max_examples=num_examples(40))
def test_no_piece_of_a_whole_text_holds_half_a_character(kind: str, text: str) -> None:
    """Characters of several tokens come when they are complete: no replacement character ever shows."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text)
    assert "\ufffd" not in "".join(pieces(tokenizer, ids))
    if kind == "byte_level":
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=num_examples(40))
def test_a_continued_text_keeps_its_leading_space(kind: str, data: st.DataObject) -> None:
    """Ids that follow others decode as what they add to them, even where a text's first blank is dropped."""
    tokenizer = TOKENIZERS[kind]()
    letters = st.sampled_from([i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).strip().isascii()])
    before = data.draw(st.lists(letters, min_size=1, max_size=5))
    ids = data.draw(st.lists(letters, max_size=10))
    if any((tokenizer.backend.id_to_token(i) or "").startswith("<0x") for i in (*before, *ids)):
        return
    assert "".join(pieces(tokenizer, ids, before)) == tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(alphabet="he llo 東é🫠\n", max_size=30), before=st.sampled_from(["h", "o e", "é"]))
@settings(max_examples=num_examples(40))
def test_the_bytes_of_tokens_joined_are_the_text_that_they_write(kind: str, text: str, before: str) -> None:
    """Inside a text, leading spaces and parts of characters included; without their own knowing of each other."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text)
    said = "".join(pieces(tokenizer, ids, tokenizer.encode(before)))
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == said
    assert kind != "byte_level" or said == text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_familys_tokens_joined_are_the_text(family: str) -> None:
    """With its special tokens by name; an id without a token has none."""
    tokenizer = family_tokenizer(family)
    text = "  Well, 東京é🫠\n\tdone" + "".join(sorted(tokenizer.special_tokens))
    ids = tokenizer.encode(text)
    first = tokenizer.encode("x")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "".join(pieces(tokenizer, ids, first))
    assert tokenizer.token_bytes(tokenizer.vocab_size + 3) == tokenizer.token_bytes(-1) == b""


def test_a_character_is_held_back_until_it_is_complete() -> None:
    """The bytes of one character say nothing until the last; cut off, they are one U+FFFD at the end."""
    tokenizer = tokenizer_of(byte_level_backend())
    ids = [i for i in tokenizer.encode("🦜")]
    assert len(ids) > 1
    assert pieces(tokenizer, ids) == [*[""] * (len(ids) - 1), "🦜", ""]
    assert pieces(tokenizer, ids[:-1]) == [*[""] * (len(ids) - 1), "\ufffd"]


def test_a_decoder_that_cannot_be_streamed_is_refused_at_load() -> None:
    """An unknown decoder is an error that names it, not wrong text later."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        decoder_form(backend)
