"""Marks: images between text and ids, and placeholders that a user types."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import (
    ImageBlock,
    ImageSpan,
    ImageWords,
    Message,
    TextBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from kvserve.prompt.images_text import BARRIER, EDGE, encode_marked, mark_of, with_marks, with_words

DIGEST, OTHER = "a" * 64, "b" * 64
WORDS = ImageWords("<see>", "</see>", ("<pad>", "<see>"))


def encode(text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
    return ((1,) if add_special_tokens else ()) + tuple(map(ord, text))


def said(message: Message) -> list[str]:
    return [block.text for block in message.blocks if isinstance(block, TextBlock)]


def test_text_and_images_that_touch_are_one_text() -> None:
    """Nothing is written between the parts of a message with an image; text beside text stays apart."""
    parts = (TextBlock("a"), TextBlock("b "), ImageBlock(DIGEST), ImageBlock(OTHER), TextBlock(" c"), TextBlock("d"))
    [message] = with_marks([Message("user", parts)], WORDS)
    assert said(message) == ["a", f"b {mark_of(DIGEST)}{mark_of(OTHER)} c", "d"]


def test_what_the_server_tells_does_not_touch_an_image() -> None:
    """A file before or behind an image stays a text of its own, which gets its lines."""
    file = TextBlock("file <pad>", is_ours=True)
    [message] = with_marks([Message("user", (file, ImageBlock(DIGEST), file, TextBlock("c")))], WORDS)
    told = replace(file, text=f"file <{BARRIER}pad>")
    assert message.blocks == (told, TextBlock(mark_of(DIGEST)), told, TextBlock("c"))


def test_images_in_tool_results_are_marked() -> None:
    """A screenshot that a tool returns."""
    result = ToolResultBlock("c", (TextBlock("done"), ImageBlock(DIGEST)))
    [message] = with_marks([Message("tool", (result,))], WORDS)
    assert message.blocks == (ToolResultBlock("c", (TextBlock(f"done{mark_of(DIGEST)}"),)),)


def test_what_needs_no_mark_is_the_same_object() -> None:
    """A long history of text costs no new messages; a placeholder in a tool's result does."""
    plain = Message("user", (TextBlock("a < b"), TextBlock("c")))
    result = Message("tool", (ToolResultBlock("c", (TextBlock("done"),)),))
    assert all(a is b for a, b in zip(with_marks([plain, result], WORDS), (plain, result), strict=True))
    [guarded] = with_marks([Message("tool", (ToolResultBlock("c", (TextBlock("<pad>"),)),))], WORDS)
    assert guarded.blocks == (ToolResultBlock("c", (TextBlock(f"<{BARRIER}pad>"),)),)


def test_other_blocks_stay_where_they_are() -> None:
    """Calls and an assistant's words are not touched."""
    assistant = Message("assistant", (TextBlock("<pad>"), ToolCallBlock("c", "look", "{}")))
    assert with_marks([assistant], WORDS) == (assistant,)


def test_a_typed_placeholder_is_text() -> None:
    """Its ids are those of its characters, and nothing of it is lost."""
    [message] = with_marks([Message("user", (TextBlock("a <pad> b"),))], WORDS)
    [text] = said(message)
    assert "<pad>" not in text
    assert text.replace(BARRIER, "") == "a <pad> b"
    assert encode_marked(encode, text, {}).ids == encode("a <pad> b")


def test_words_stand_around_marks_only() -> None:
    """The family's words come with an image, never with a barrier."""
    assert with_words(f"x{BARRIER}y{mark_of(DIGEST)}z", WORDS) == f"x{BARRIER}y<see>{mark_of(DIGEST)}</see>z"


def test_ids_and_spans() -> None:
    """Each mark becomes its run; spans count from the text's start, special tokens included."""
    text = f"ab{mark_of(DIGEST)}c{mark_of(OTHER)}"
    marked = encode_marked(encode, text, {DIGEST: (7, 7, 7), OTHER: (7,)}, adds_special_tokens=True)
    assert marked.ids == (1, 97, 98, 7, 7, 7, 99, 7)
    assert marked.images == (ImageSpan(3, 6, DIGEST), ImageSpan(7, 8, OTHER))


def test_a_mark_that_names_no_image_is_text() -> None:
    """Whoever writes one out gets its characters."""
    assert encode_marked(encode, f"a{mark_of(DIGEST)}b", {}).ids == encode(f"a{mark_of(DIGEST)}b")


@given(st.text(alphabet=[EDGE, "<", "p", "a", "d", ">", " "], max_size=40))
def test_no_text_of_a_user_becomes_a_mark(text: str) -> None:
    """Whatever is typed, no image comes of it, and only noncharacters are replaced."""
    [message] = with_marks([Message("user", (TextBlock(text),))], WORDS)
    [marked] = said(message)
    assert "<pad>" not in marked
    assert encode_marked(encode, marked, {DIGEST: (7,)}).images == ()
    assert marked.replace(BARRIER, "") == text.replace(EDGE, "\ufffd")


def test_a_tool_that_a_result_brings_in_stays_in_it() -> None:
    """Beside an image and beside a text in which a placeholder is cut."""
    tool = ToolBlock("look", "looks", "{}")
    result = ToolResultBlock("c", (TextBlock(WORDS.guarded[0]), ImageBlock("0" * 64), tool))
    [message] = with_marks([Message("tool", (result,))], WORDS)
    [marked] = message.blocks
    assert isinstance(marked, ToolResultBlock) and marked.blocks[-1] == tool
    assert len(marked.blocks) == 2 and mark_of("0" * 64) in said(Message("tool", marked.blocks))[0]
