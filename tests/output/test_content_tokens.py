"""Which tokens are told with an answer's content: those that wrote it, each once, with the text that they begin."""

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.core import ContentDelta, ContentToken, GenerationDone, GenerationTiming, TokenLogprobs, ToolSpec
from kvserve.output.answer import AnswerReader
from kvserve.output.content_tokens import ContentTokens
from kvserve.output.formats import select_format
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from tests.laws import num_examples

TOOL = ToolSpec("look", None, {"type": "object", "properties": {}})
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
DONE = GenerationDone("stop", 5, 2, 0, GenerationTiming(0, 0, 0))


class Bytes:
    """A detokenizer whose tokens are numbers of runs of bytes, as those of byte-level BPE are."""

    def __init__(self, runs: Sequence[bytes]) -> None:
        self._runs = runs
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(self._runs[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class Bursts:
    """One that says nothing until a run of parts of characters is over, as decoders with byte tokens do."""

    def __init__(self, runs: Sequence[bytes]) -> None:
        self._runs = runs
        self._held = b""

    def add(self, token: int) -> str:
        self._held += self._runs[token]
        return self.finish() if self._runs[token].isascii() else ""

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class Answered:
    """An answer of these tokens, which arrive in groups of `at_once`, and what was told with each piece of content."""

    def __init__(
        self,
        runs: Sequence[bytes],
        *stops: str,
        at_once: int = 1,
        raw: bool = False,
        bursts: bool = False,
        many_calls: bool = True,
    ) -> None:
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        self.runs = runs
        self.splitter = Splitter(select_format("auto", "", tags, None), starts_in_reasoning=False, tools=(TOOL,))
        reader = AnswerReader(
            (Bursts if bursts else Bytes)(runs),
            StopScanner(stops),
            None if raw else self.splitter,
            allows_many_calls=many_calls,
            content_tokens=ContentTokens(runs.__getitem__, None if raw else self.splitter.written_from),
        )
        events: list[object] = []
        for start in range(0, len(runs), at_once):
            numbers = [*range(start, min(start + at_once, len(runs)))]
            events += reader.feed(numbers, [TokenLogprobs(-float(number), ((number, -1.0),)) for number in numbers])
        self.deltas = [event for event in [*events, *reader.finish(DONE)] if isinstance(event, ContentDelta)]
        self.content = "".join(delta.text for delta in self.deltas)
        self.tokens = [token for delta in self.deltas for token in delta.tokens]

    @property
    def numbers(self) -> list[int]:
        """Which tokens were told."""
        return [int(-token.logprob) for token in self.tokens]

    @property
    def joined(self) -> str:
        return b"".join(token.text_bytes for token in self.tokens).decode("utf-8", "replace")


def cut(text: str, *sizes: int) -> list[bytes]:
    """The text's UTF-8 in runs of these sizes, in turns."""
    data, runs = text.encode(), []
    while data:
        size = sizes[len(runs) % len(sizes)]
        runs.append(data[:size])
        data = data[size:]
    return runs


def words(text: str) -> list[bytes]:
    """Tokens with borders around tags and white space."""
    return [part.encode() for part in text.replace("<", "\0<").replace(">", ">\0").split("\0") if part]


def test_content_only() -> None:
    """Neither thinking nor its tags nor calls nor the white space that only forms the page; the rest joined is it."""
    runs = [*words("<think>\nhm\n</think>"), b"\n\n", b"Hello", b" there", b".", b"\n", *words(CALL), b"\n", b"Bye"]
    answered = Answered(runs)
    assert answered.content == answered.joined == "Hello there.\n\nBye"
    assert [token.text_bytes for token in answered.tokens] == [b"Hello", b" there", b".", b"\n", b"\n", b"Bye"]
    assert [token.offset for token in answered.tokens] == [0, 5, 11, 12, 13, 14]


def test_an_answer_without_content_tells_nothing() -> None:
    """Thinking and a call."""
    assert Answered(words("<think>\nhm\n</think>\n" + CALL)).tokens == []


def test_a_token_that_belongs_partly_to_content_is_told_whole() -> None:
    """Its likelihood is that of all of it."""
    answered = Answered([b"<think>", b"hm", b"</think>", b"\n\nHello", b" you<tool", CALL[5:].encode()])
    assert (answered.content, answered.joined) == ("Hello you", "\n\nHello you<too" + "l")
    assert [token.offset for token in answered.tokens] == [0, 5]


def test_a_stop_string_ends_what_is_told() -> None:
    """A token that begins before the stop string is told whole, one that lies in it or behind it is not."""
    answered = Answered([b"some ", b"text EN", b"D", b" more"], "END")
    assert (answered.content, answered.joined) == ("some text ", "some text EN")
    assert Answered([b"some ", b"E", b"N", b"D"], "END").joined == "some "


def test_what_looked_like_a_stop_string_or_a_call_is_told_when_it_goes_out() -> None:
    """Held back with its text, not lost."""
    answered = Answered([b"an E", b"N", b"T", b" <tool_", b"call", b">no", b"ne"], "END")
    assert answered.content == answered.joined == "an ENT <tool_call>none"
    held = [(delta.text, [token.text_bytes for token in delta.tokens]) for delta in answered.deltas]
    assert held[0] == ("an ", [b"an E"]) and held[1] == ("ENT", [b"N", b"T"])


def test_parts_of_a_character_are_told_with_it() -> None:
    """Each with its own bytes, all at the character's place."""
    runs = [b"a", *cut("🫠", 1), b" b"]
    for bursts in (False, True):
        answered = Answered(runs, raw=True, bursts=bursts)
        assert answered.content == answered.joined == "a🫠 b"
        assert [token.offset for token in answered.tokens] == [0, 1, 1, 1, 1, 2]
        assert [token.text_bytes for token in answered.tokens] == runs


def test_what_ends_inside_a_character_is_told_too() -> None:
    """The bytes that are no character, with the sign that stands for them."""
    answered = Answered([b"a", "🫠".encode()[:2], "🫠".encode()[2:3]], raw=True)
    assert answered.content == "a\ufffd" and answered.numbers == [0, 1, 2]


def test_a_tag_behind_a_broken_character_is_none_of_its_tokens() -> None:
    """Where the next token begins another character the broken one is over."""
    answered = Answered([b"a", "🫠".encode()[:2], *words(CALL), b"b"])
    assert answered.content == "a\ufffdb" and [token.text_bytes for token in answered.tokens][-1] == b"b"
    assert len(answered.tokens) == 3


def test_a_token_without_a_text_is_not_told() -> None:
    """It wrote nothing."""
    assert Answered([b"a", b"", b"b", b""], raw=True).numbers == [0, 2]


def test_the_likeliest_come_as_bytes() -> None:
    """Each alternative is spelt like the token itself."""
    assert Answered([b"a"], raw=True).tokens == [ContentToken(b"a", -0.0, ((b"a", -1.0),), 0)]


PARTS = ("<think>", "</think>", CALL, "<tool_call>", "END", "E", "é", "🫠", "word ", "\n\n", " ", "x" * 7)


@pytest.mark.parametrize("raw", [False, True])
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    at_once=st.integers(1, 4),
    bursts=st.booleans(),
    stops=st.sampled_from([(), ("END",), ("word", "ENE")]),
)
@example(parts=["</think>", "é"], sizes=[3], at_once=1, bursts=False, stops=())  # a token ends inside é
@settings(max_examples=num_examples(150))
def test_each_token_that_writes_content_is_told_once_with_its_first_character(
    raw: bool, parts: list[str], sizes: list[int], at_once: int, bursts: bool, stops: tuple[str, ...]
) -> None:
    """However the text is cut and arrives: the tokens told are those whose bytes touch the content, in order, and each
    comes with the delta that has its first character of content."""
    text = "".join(parts)
    answered = Answered(cut(text, *sizes), *stops, at_once=at_once, raw=raw, bursts=bursts)
    places = content_places(answered, text, raw)
    owner = [place for place, character in enumerate(text) for _ in character.encode()]
    expected, start = {}, 0
    for number, run in enumerate(answered.runs):
        touched = [place for place in owner[start : start + len(run)] if place in places]
        start += len(run)
        if touched:
            expected[number] = places.index(touched[0])
    assert answered.numbers == [*expected]
    if not bursts:
        assert [token.offset for token in answered.tokens] == [*expected.values()]
    num_out = 0
    for delta in answered.deltas:
        assert all(num_out <= token.offset < num_out + len(delta.text) for token in delta.tokens)
        num_out += len(delta.text)


def content_places(answered: Answered, text: str, raw: bool) -> list[int]:
    """Which characters of the text are the content that went out."""
    kinds = ["content"] * len(text)
    if not raw:
        kinds = [piece.kind for piece in answered.splitter.pieces for _ in piece.text]
    places = [place for place, kind in enumerate(kinds) if kind == "content"][: len(answered.content)]
    assert "".join(text[place] for place in places) == answered.content
    return places
