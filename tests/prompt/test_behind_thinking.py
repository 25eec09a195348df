"""Answers whose thinking a template drops from history: what stood behind it keeps the ids that the model wrote."""

from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.output.tool_parsers.form import ParsedCall
from kvserve.prompt.behind_thinking import own_end
from kvserve.prompt.control import shown
from tests.laws import num_examples
from tests.prompt.samples import byte_level_backend, sentencepiece_backend, tokenizer_of
from tests.prompt.turns import CALL, Talk, answer_text, family, in_odd_tokens, learned_family

DROPS = ("qwen3", "gpt_oss", "gemma4", "qwen3_next")
"""Families whose templates leave out the thinking of earlier answers."""

TEXTS = st.one_of(st.text(max_size=30), st.text(alphabet="ab \n</think>", max_size=12))


def holds(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def said(name: str, talk: Talk, *, thinking: str, content: str, calls: tuple[ParsedCall, ...] = ()) -> tuple[int, ...]:
    """An answer in odd tokens, whose parts each have their own: what stands behind thinking begins with a token."""
    opened = talk.prompt().opens_reasoning
    text = answer_text(name, thinking=thinking, content=content, calls=calls, opened=opened)
    ids = in_odd_tokens(talk.family.tokenizer, text)
    talk.answer(ids)
    talk.results("found")
    talk.say("and now?")
    return ids


@pytest.mark.parametrize("name", DROPS)
def test_what_stands_behind_dropped_thinking_keeps_its_ids(name: str) -> None:
    """An answer's words, cut where the tokenizer would not cut them."""
    of = family(name)
    talk = Talk(of)
    talk.say("hi")
    opened = talk.prompt().opens_reasoning
    before = answer_text(name, thinking="secret", content="", calls=(), opened=opened)
    words = of.tokenizer.encode("Gra") + of.tokenizer.encode("nite is st") + of.tokenizer.encode("one")
    assert words != of.tokenizer.encode("Granite is stone")
    channel = "<|end|><|start|>assistant<|channel|>final<|message|>" if name == "gpt_oss" else ""
    talk.answer(of.tokenizer.encode(before + channel) + words)
    talk.say("and now?")
    after = talk.stitched()
    text = of.tokenizer.decode(after.ids)
    assert "secret" not in text and text == shown(talk.prompt().text)
    assert holds(after.ids, words) and after.num_replayed_turns == 0
    talk.writings[0] = None  # the control: of an answer of which nothing is known the tokenizer's ids stand there
    assert not holds(talk.stitched().ids, words)


def test_another_answer_with_the_same_words_has_its_own_ids() -> None:
    """What is remembered of one is not taken for the other."""
    of = family("qwen3")
    talk = Talk(of)
    rows = []
    for place in (3, 5):
        talk.say("hi")
        words = of.tokenizer.encode("Granite"[:place]) + of.tokenizer.encode("Granite"[place:])
        talk.answer(of.tokenizer.encode("<think>\nsecret\n</think>\n\n") + words)
        rows.append(words)
    talk.say("and now?")
    assert rows[0] != rows[1]
    for _ in range(2):
        assert all(holds(talk.stitched().ids, words) for words in rows)


@pytest.mark.parametrize("name", DROPS)
def test_the_prompt_is_letter_by_letter_what_the_template_writes(name: str) -> None:
    """Whatever was thought and said, and however the client's echo differs."""
    of = family(name)

    @settings(max_examples=num_examples(12), deadline=None)
    @given(TEXTS, TEXTS, st.booleans(), st.booleans())
    def check(thought: str, content: str, calls: bool, echoes: bool) -> None:
        talk = Talk(of, echoes_thinking=echoes)
        talk.say("hi")
        said(name, talk, thinking=thought, content=content, calls=(CALL,) if calls else ())
        after, text = talk.stitched(), talk.prompt().text
        assert after.message_starts == of.markers.message_starts(after.ids)
        if not after.num_replayed_turns:
            assert of.tokenizer.decode(after.ids) == shown(text)

    check()


DROPPED = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}END<|over|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("decoder", ["strip", "metaspace", "keep"])
def test_a_tokenizer_that_begins_each_text_with_a_blank_adds_none(decoder: str, end: str) -> None:
    """Neither before the words nor before what the template writes behind them."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend(decoder).to_str())
    tokens = ("<|turn|>", "<|over|>", "<think>", "</think>")
    backend.add_special_tokens(list(tokens))
    tokenizer = tokenizer_of(backend, DROPPED.replace("END", end))
    tokenizer = replace(tokenizer, stop_token_ids=frozenset({backend.token_to_id("<|over|>")}))
    of = learned_family("small", tokenizer)
    assert of.stitcher.replays
    for words in ("hello.", "the hello, the", "he"):
        talk = Talk(of, tools=())
        talk.say("hi")
        talk.answer(tokenizer.encode("<think>hm</think>") + tokenizer.encode(words))
        talk.say("and now?")
        after, whole = talk.stitched().ids, of.template.control.encode(talk.prompt().text)
        assert "hm" not in tokenizer.decode(after) and tokenizer.decode(after) == tokenizer.decode(whole)


def test_the_ids_begin_with_a_word() -> None:
    """White space before them is as the template writes it, and a token that holds both is not cut."""
    tokenizer = tokenizer_of(byte_level_backend(), "")
    ids = tokenizer.encode("hm</think>\n\nIt") + tokenizer.encode(" is fi") + tokenizer.encode("ne.\n")
    text = tokenizer.decode(ids)
    own = own_end(tokenizer, ids, text, "<think>\n\n</think>\n\nIt is fine.")
    assert tokenizer.decode(own).lstrip("</think>\n") == "It is fine.\n"
    assert tokenizer.decode(own_end(tokenizer, ids, text, "It is fine.")) == "It is fine.\n"
    assert tokenizer.decode(own_end(tokenizer, ids, text, "t is fine.")).strip() in ("is fine.", "t is fine.")
    assert own_end(tokenizer, ids, text, "It is fine!") == own_end(tokenizer, ids, text, "") == ()
    assert own_end(tokenizer, (), "", "It") == ()
