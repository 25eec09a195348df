"""Ids of pieces against ids of whole texts, on the families' tokenizers and on such as would break it."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from kvserve.prompt.cuts import Cutter
from kvserve.prompt.tokenizer import Tokenizer
from tests.laws import num_examples, sampled
from tests.prompt.samples import byte_level_backend, sentencepiece_backend, tokenizer_of
from tests.prompt.turns import FAMILIES, family

MARK = "<|mark|>"
PRIVATE = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"
"""In a rendered text they are the server's own, whatever clients send (tests/test_control_tokens.py)."""


IN_EVERY_RUN = ("qwen3", "gemma3", "gpt_oss", "glm4_moe_lite")
"""Tokenizers that differ in their normalisers and in their tokens."""


def added_names(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]


def texts_with(tokens: list[str]) -> st.SearchStrategy[str]:
    """Any text, with tokens written out in it, whole or broken off, and white space around them."""
    part = st.one_of(
        st.text(st.characters(exclude_characters=PRIVATE), max_size=8),
        st.sampled_from(tokens),
        st.sampled_from(tokens).map(lambda token: token[:-1]),
        st.sampled_from([" ", "\n", "\n\n", "  ", "\t", "<", "<|", "e\u0301", "word", "東京", "🫠", "Ġ", "▁"]),
    )
    return st.lists(part, max_size=14).map("".join).map(lambda text: text.encode("utf-8", "replace").decode())


def pieced(tokenizer: Tokenizer, cutter: Cutter, text: str) -> tuple[int, ...]:
    pieces = cutter.cut(text)
    assert "".join(token + body for token, body in pieces) == text
    return tuple(token for opener, body in pieces for token in tokenizer.encode(opener + body))


@pytest.mark.parametrize("name", sampled(FAMILIES, IN_EVERY_RUN))
def test_pieces_have_the_ids_of_the_whole_text(name: str) -> None:
    """For every family's tokenizer, cut at every added token that it has."""
    tokenizer = family(name).tokenizer
    names = added_names(tokenizer)
    cutter = Cutter(tokenizer, names)
    assert cutter.tokens == set(names)

    @settings(max_examples=num_examples(24), deadline=None)
    @given(texts_with(names))
    def check(text: str) -> None:
        assert pieced(tokenizer, cutter, text) == tokenizer.encode(text)

    check()


def marked(token: AddedToken, change: Callable[[tokenizers.Tokenizer], None] = lambda backend: None) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    change(backend)
    backend.add_special_tokens([token]) if not token.normalized else backend.add_tokens([token])
    return tokenizer_of(backend)


def lower(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Lowercase()


def nothing(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Sequence([])])


def nothing_and_lower(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Sequence([]), normalizers.Lowercase()])


def add(*names: str, **flags: bool) -> Callable[[tokenizers.Tokenizer], None]:
    return lambda backend: backend.add_special_tokens([AddedToken(name, **flags) for name in names]) and None


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (marked(AddedToken(MARK, lstrip=True)), f"word {MARK}"),
        (marked(AddedToken(MARK, single_word=True)), f"word{MARK}"),
        (marked(AddedToken("<|MARK|>", normalized=True), lower), "x<|mark|>"),
        (marked(AddedToken("<|MARK|>", normalized=True), nothing_and_lower), "x<|mark|>"),
        (marked(AddedToken(MARK), add("x<|mark|>y", rstrip=True)), f"x{MARK}y"),
        (marked(AddedToken(MARK), add("hello<|m", single_word=True)), f"hello{MARK}"),
        (marked(AddedToken("mark"), add("the", single_word=True)), "the mark themark"),
        (marked(AddedToken(MARK, normalized=True), add("ark|>tail")), f"{MARK}tail"),
    ],
    ids=[
        *("lstrip", "single_word", "normalized", "normalized_by_one_of_a_list"),
        *("inside", "overlapped", "single_word_before", "found_later"),
    ],
)
def test_a_token_that_depends_on_what_precedes_it_is_no_cut(tokenizer: Tokenizer, text: str) -> None:
    """Flags that eat white space or look at neighbours, tokens in tokens, normalised ones: no cut there."""
    cutter = Cutter(tokenizer, [MARK, "<|MARK|>", "mark"])
    assert cutter.tokens == frozenset()
    assert pieced(tokenizer, cutter, text) == tokenizer.encode(text)


OVERLAPPING = ("]~!b[", "[e~[", "~[[e", "<|a|>", "x<|a|>y", "x<|", "]~b]")
"""MiniMax's tokens, of which one ends as the next begins, and such as hide others or stand in them."""


@pytest.mark.parametrize("wanted", [("[e~[", "]~b]"), ("<|a|>",), OVERLAPPING])
def test_a_token_that_others_overlap_is_cut_at_where_the_tokenizer_finds_it(wanted: tuple[str, ...]) -> None:
    """What stands before it may hide it; the tokens that can are found as the tokenizer finds them."""
    tokenizer = tokenizer_of(tokenizers.Tokenizer.from_str(byte_level_backend().to_str()))
    tokenizer.backend.add_special_tokens(list(OVERLAPPING))
    cutter = Cutter(tokenizer, wanted)
    assert cutter.tokens == set(wanted)
    assert pieced(tokenizer, cutter, "a]~!b[e~[x<|a|>y[e~[") == tokenizer.encode("a]~!b[e~[x<|a|>y[e~[")

    @settings(max_examples=num_examples(60), deadline=None)
    @given(texts_with([*OVERLAPPING, *(token[1:] for token in OVERLAPPING)]))
    def check(text: str) -> None:
        assert pieced(tokenizer, cutter, text) == tokenizer.encode(text)

    check()


def test_a_token_that_others_hide_is_no_cut_where_they_hide_it() -> None:
    """The control: a cut there would give other ids."""
    tokenizer = tokenizer_of(tokenizers.Tokenizer.from_str(byte_level_backend().to_str()))
    tokenizer.backend.add_special_tokens(list(OVERLAPPING))
    assert Cutter(tokenizer, ["[e~["]).cut("a]~!b[e~[ [e~[") == [("", "a]~!b[e~[ "), ("[e~[", "")]
    assert tokenizer.encode("a]~!b") + tokenizer.encode("[e~[") != tokenizer.encode("a]~!b[e~[")


def test_a_normaliser_that_is_an_empty_list_changes_no_token() -> None:
    """As DeepSeek's tokenizer has it, whose role tokens are `normalized`."""
    tokenizer = marked(AddedToken(MARK, normalized=True), nothing)
    cutter = Cutter(tokenizer, [MARK])
    assert cutter.tokens == {MARK}
    for text in (f"x{MARK}y", f" {MARK}\n{MARK[:-1]}{MARK}"):
        assert pieced(tokenizer, cutter, text) == tokenizer.encode(text)


def test_what_a_flag_would_change() -> None:
    """The control: at a token with `lstrip` the pieces have other ids than the whole."""
    tokenizer = marked(AddedToken(MARK, lstrip=True))
    assert tokenizer.encode("word ") + tokenizer.encode(MARK) != tokenizer.encode(f"word {MARK}")


@pytest.mark.parametrize("kind", ["first", "always", "prepend", "lower", "prefix_space", "rstrip"])
def test_normalisers_and_prefixes_do_no_harm(kind: str) -> None:
    """Blanks put before a text, or before each stretch of it, and white space eaten behind a token: same ids."""
    backend = tokenizers.Tokenizer.from_str(
        (sentencepiece_backend("strip") if kind in ("first", "always", "prepend") else byte_level_backend()).to_str()
    )
    match kind:
        case "first" | "always":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        case "prepend":
            backend.pre_tokenizer = None
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        case "lower":
            backend.normalizer = normalizers.Lowercase()
        case "prefix_space":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.add_special_tokens([AddedToken(MARK, rstrip=kind == "rstrip"), AddedToken("<|other|>", lstrip=True)])
    tokenizer = tokenizer_of(backend)
    cutter = Cutter(tokenizer, [MARK, "<|other|>"])
    assert cutter.tokens == {MARK}

    @settings(max_examples=num_examples(32), deadline=None)
    @given(texts_with([MARK, "<|other|>"]))
    def check(text: str) -> None:
        assert pieced(tokenizer, cutter, text) == tokenizer.encode(text)

    check()


def test_a_tokenizer_that_breaks_the_rule_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rules overlook: a token at which the ids differ when tried is no cut."""
    tokenizer = marked(AddedToken(MARK, lstrip=True))
    monkeypatch.setattr("kvserve.prompt.cuts._stands_alone", lambda *_, **__: True)
    assert Cutter(tokenizer, [MARK]).tokens == frozenset()


def test_without_tokens_a_text_is_one_piece() -> None:
    """Nothing to cut at, or no such token."""
    cutter = Cutter(tokenizer_of(byte_level_backend()), ["<|unknown|>"])
    assert cutter.cut("a<|unknown|>b") == [("", "a<|unknown|>b")]
    assert cutter.cut("") == []
