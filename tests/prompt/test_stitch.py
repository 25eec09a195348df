"""Stitched ids against those of the whole text, where messages begin, and what is tokenised again."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from tests.laws import num_examples, sampled
from tests.prompt.samples import byte_level_backend, conversations, tokenizer_of
from tests.prompt.test_cuts import IN_EVERY_RUN, added_names, texts_with
from tests.prompt.turns import FAMILIES, HEADERS, LOOK, Talk, family


@pytest.mark.parametrize("name", sampled(FAMILIES, IN_EVERY_RUN))
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    """Any text at all, cold and warm, and even with nothing remembered: ids and message starts are the same."""
    of = family(name)
    forgetful = Stitcher.of(of.tokenizer, of.template, of.markers)
    forgetful._known._max_bytes = 0

    @settings(max_examples=num_examples(24), deadline=None)
    @given(texts_with(added_names(of.tokenizer)), st.booleans(), st.booleans())
    def check(text: str, opens_reasoning: bool, continues: bool) -> None:
        prompt = PromptText(text, opens_reasoning, continues=continues)
        ids = of.tokenizer.encode(text)
        for stitcher in (of.stitcher, of.stitcher, forgetful):
            stitched = stitcher.tokens(prompt)
            assert stitched.ids == ids
            assert stitched.message_starts == of.markers.message_starts(ids)
            assert ids[len(ids) - len(stitched.tail_ids) :] == stitched.tail_ids

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_rendered_conversations_have_the_ids_of_their_text(name: str) -> None:
    """What templates make of agents' conversations, users who write special tokens included."""
    of = family(name)

    @settings(max_examples=num_examples(10), deadline=None)
    @given(conversations(), st.booleans(), texts_with(added_names(of.tokenizer)))
    def check(messages: tuple[Message, ...], thinking: bool, text: str) -> None:
        said = (*messages, Message("user", (TextBlock(text),)))
        rendered = of.template.render(said, (LOOK,), thinking=thinking)
        prompt = of.template.write(said, (LOOK,), thinking=thinking)
        stitched = of.stitcher.tokens(prompt)
        assert (prompt.shown, prompt.notes) == (rendered.text, rendered.notes)
        assert stitched.ids == rendered.ids.ids
        assert stitched.message_starts == of.markers.message_starts(stitched.ids)

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tail_is_the_message_that_the_model_goes_on_with(name: str) -> None:
    """Behind a user's message the generation tail; behind an unfinished answer that answer, from its header on."""
    of = family(name)
    talk = Talk(of, thinking=False)
    talk.say("Amber lake")
    tail = of.tokenizer.decode(talk.stitched().tail_ids)
    assert tail.startswith(HEADERS[name]) and talk.prompt().text.endswith(tail) and "Amber" not in tail
    talk.say("the answer begi", role="assistant")
    prompt = talk.prompt()
    assert prompt.continues
    tail = of.tokenizer.decode(of.stitcher.tokens(prompt).tail_ids)
    assert tail.startswith(HEADERS[name]) and tail.endswith("the answer begi") and "Amber" not in tail


def test_behind_a_tool_result_in_an_open_turn_the_tail_is_that_result() -> None:
    """gemma4 writes a tool loop as one message: its answer goes on right behind the last result."""
    of = family("gemma4")
    talk = Talk(of)
    talk.say("hi")
    talk.messages += [
        Message("assistant", tuple(ToolCallBlock(i, "look", '{"q":"x"}') for i in ("c1", "c2"))),
        Message("tool", (ToolResultBlock("c1", (TextBlock("one"),)),)),
        Message("tool", (ToolResultBlock("c2", (TextBlock("two"),)),)),
    ]
    tail = of.tokenizer.decode(talk.stitched().tail_ids)
    assert tail == '<|tool_response>response:look{value:<|"|>two<|"|>}<tool_response|>'


@pytest.mark.parametrize("name", FAMILIES)
def test_only_new_text_is_tokenised(name: str) -> None:
    """A turn later only the new messages are, and nothing at all when the prompt is sent again."""
    of = family(name)
    stitcher = Stitcher.of(of.tokenizer, of.template, of.markers)
    talk = Talk(of, thinking=False)
    for number in range(20):
        talk.say(f"question {number} " + "words " * 50)
        talk.say(f"answer {number} " + "words " * 50, role="assistant")
    talk.say("last")
    before = talk.prompt()
    assert stitcher.tokens(before).num_tokenised_chars > 0.9 * len(before.text)
    assert stitcher.tokens(before).num_tokenised_chars == 0
    talk.messages += [Message("assistant", (ThinkingBlock("hm"), TextBlock("so"))), Message("user", (TextBlock("ok"),))]
    after = stitcher.tokens(talk.prompt())
    assert 0 < after.num_tokenised_chars < 150
    assert after.ids == of.tokenizer.encode(talk.prompt().text)


def test_without_a_template_the_whole_text_is_tokenised() -> None:
    """Labelled plain text gets the tokenizer's own special tokens and has no message starts."""
    tokenizer = tokenizer_of(byte_level_backend())
    template = ChatTemplate(tokenizer)
    stitcher = Stitcher.of(tokenizer, template, learn_markers(tokenizer, template))
    said = (Message("user", (TextBlock("hello <|im_end|> there"),)),)
    stitched = stitcher.tokens(template.write(said, thinking=False))
    assert stitched.ids == template.render(said, thinking=False).ids.ids
    assert (stitched.message_starts, stitched.tail_ids) == ((), ())
    gemma = family("gemma3")
    text = PromptText("plain", opens_reasoning=False, adds_special_tokens=True)
    assert gemma.stitcher.tokens(text).ids == gemma.tokenizer.encode("plain", add_special_tokens=True)


def test_threads_share_one_stitcher() -> None:
    """Several web threads at once, with hardly any room to remember: every prompt has its own ids."""
    of = family("qwen3")
    stitcher = Stitcher(of.tokenizer, of.markers, of.stitcher._layout, max_bytes=20_000)
    texts = []
    for number in range(40):
        talk = Talk(of)
        for turn in range(6):
            talk.say(f"{number % 7} question {turn}")
            talk.say(f"{number % 5} answer {turn}", role="assistant")
        texts.append(talk.prompt())
    wanted = [of.tokenizer.encode(prompt.text) for prompt in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert [stitched.ids for stitched in pool.map(stitcher.tokens, texts)] == wanted


def test_a_marker_inside_the_users_header_does_not_mislead() -> None:
    """Where the user's header holds a token that texts are cut at, starts are read off the whole prompt."""
    source = (
        "{% for m in messages %}<|im_end|>{{ m.role }}<｜end▁of▁text｜>{{ m.content }}{% endfor %}"
        "<|im_end|>assistant<｜end▁of▁text｜>"
    )
    tokenizer = tokenizer_of(byte_level_backend(), source)
    inner = tokenizer.token_id("<｜end▁of▁text｜>")
    tokenizer = replace(tokenizer, stop_token_ids=frozenset({inner}))
    template = ChatTemplate(tokenizer)
    markers = learn_markers(tokenizer, template)
    assert inner in markers.user_header
    stitcher = Stitcher.of(tokenizer, template, markers)
    prompt = template.write((Message("user", (TextBlock("a"),)), Message("user", (TextBlock("b"),))), thinking=False)
    stitched = stitcher.tokens(prompt)
    assert stitched.ids == tokenizer.encode(prompt.text)
    assert stitched.message_starts == markers.message_starts(stitched.ids)
