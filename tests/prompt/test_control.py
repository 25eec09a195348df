"""Control tokens that a client spells out are words in the prompt, wherever they stand; the model's own stay tokens."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import (
    ImageBlock,
    ImageWords,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
)
from kvserve.prompt.control import LIVE, MARK, ControlTokens, shown
from kvserve.prompt.images_text import mark_of, with_marks, with_words
from kvserve.prompt.steps import tool_dicts
from kvserve.prompt.template import ChatTemplate, PromptText
from tests.laws import num_examples, sampled
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.test_cuts import texts_with
from tests.prompt.turns import FAMILIES, LOOK, Family, Talk, family, in_odd_tokens
from tests.prompt.vocabularies import REAL, TEMPLATES, real_family, template_family

HI = Message("user", (TextBlock("hi"),))
CALL = ToolCallBlock("c1", "look", '{"q": "x"}')
GO = Message("user", (TextBlock("go"),))

type Said = tuple[tuple[Message, ...], tuple[ToolSpec, ...]]


def _called(call: ToolCallBlock) -> Said:
    result = Message("tool", (ToolResultBlock(call.call_id, (TextBlock("found"),)),))
    return (HI, Message("assistant", (call,)), result), (LOOK,)


def _tool(**changes: object) -> Said:
    return (HI,), (replace(LOOK, **changes),)


POSITIONS: dict[str, Callable[[str], Said]] = {
    "user": lambda text: ((Message("user", (TextBlock(text),)),), ()),
    "earlier user": lambda text: (
        (Message("user", (TextBlock(text),)), Message("assistant", (TextBlock("yes"),)), GO),
        (),
    ),
    "system": lambda text: ((Message("system", (TextBlock(text),)), HI), ()),
    "later system": lambda text: (
        (HI, Message("assistant", (TextBlock("yes"),)), Message("system", (TextBlock(text),)), GO),
        (),
    ),
    "result": lambda text: (
        (HI, Message("assistant", (CALL,)), Message("tool", (ToolResultBlock("c1", (TextBlock(text),)),))),
        (LOOK,),
    ),
    "orphan": lambda text: ((HI, Message("tool", (ToolResultBlock("none", (TextBlock(text),)),))), (LOOK,)),
    "call argument": lambda text: _called(replace(CALL, arguments=_json({"q": text}))),
    "escaped argument": lambda text: _called(replace(CALL, arguments=_json({"q": text}).replace("<", "\\u003c"))),
    "argument name": lambda text: _called(replace(CALL, arguments=_json({text: "x"}))),
    "inside an argument": lambda text: _called(replace(CALL, arguments=_json({"q": [text, {text: "x"}]}))),
    "broken arguments": lambda text: _called(replace(CALL, arguments='{"q": ' + text)),
    "call name": lambda text: _called(replace(CALL, name=text)),
    "call id": lambda text: _called(replace(CALL, call_id=text)),
    "description": lambda text: _tool(description=text),
    "schema": lambda text: _tool(
        parameters={"type": "object", "properties": {"q": {"type": "string", "enum": [text]}}}
    ),
    "parameter": lambda text: _tool(parameters={"type": "object", "properties": {text: {"type": "string"}}}),
    "tool name": lambda text: _tool(name=text),
    "message name": lambda text: ((Message("user", (TextBlock("hi"),), text),), ()),
    "thinking": lambda text: ((HI, Message("assistant", (ThinkingBlock(text), CALL)), *_called(CALL)[0][2:]), (LOOK,)),
    "answer": lambda text: ((HI, Message("assistant", (TextBlock(text),)), GO), ()),
    "unfinished answer": lambda text: ((HI, Message("assistant", (TextBlock(text),))), ()),
}
OF_THE_ASSISTANT = ("answer", "unfinished answer")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def written(of: Family, said: Said) -> PromptText:
    return of.template.write(*said, thinking=False)


def unguarded(of: Family) -> ChatTemplate:
    """The family's template, which takes a client's words as they are."""
    template = copy(of.template)
    template.control, template._memories = ControlTokens(of.tokenizer, ()), []
    return template


def controls(of: Family, ids: Sequence[int]) -> Counter[int]:
    names = {of.tokenizer.token_id(token) for token in of.template.control.tokens}
    return Counter(token for token in ids if token in names)


def check_words(of: Family, place: str, text: str) -> None:
    """`text` at this place brings no control token into the prompt, and is in it as it was sent."""
    position = POSITIONS[place]
    prompt = written(of, position(text))
    ids = of.stitcher.tokens(prompt).ids
    without = of.stitcher.tokens(written(of, position("word"))).ids
    assert controls(of, ids) == controls(of, without)
    assert of.tokenizer.decode(ids) == prompt.shown
    assert MARK not in prompt.shown and ascii(MARK)[1:-1] not in prompt.shown
    assert of.template.render(*position(text), thinking=False).ids.ids == ids


def check_every_token(of: Family, place: str) -> None:
    """All control tokens in a few texts; what an assistant's text keeps is another matter."""
    spared = of.template.control.spared if place in OF_THE_ASSISTANT else frozenset()
    tokens = sorted(of.template.control.tokens - spared)
    # Half a thinking tag in an answer makes gemma4's template drop the rest; as words it drops nothing.
    whole = [token for token in tokens if not any(token in tag for tag in spared)]
    for said in (f"x {' '.join(whole)} y", f"x{''.join(whole)}", f"{' '.join(reversed(whole))} x", whole[0]):
        check_words(of, place, said)
        stock = unguarded(of).write(*POSITIONS[place](said), thinking=False)
        assert written(of, POSITIONS[place](said)).shown == stock.text
    check_words(of, place, f"x {' '.join(tokens)} y")


@pytest.mark.parametrize("place", POSITIONS)
@pytest.mark.parametrize("name", sampled(FAMILIES, ("qwen3", "gemma4", "glm4_moe_lite")))
def test_a_clients_control_tokens_are_words(name: str, place: str) -> None:
    """Every control token at every place: the prompt has the control tokens of one that says something else."""
    check_every_token(family(name), place)


@pytest.mark.long
@pytest.mark.parametrize("place", POSITIONS)
@pytest.mark.parametrize("name", REAL)
def test_they_are_words_in_real_vocabularies(name: str, place: str) -> None:
    """The same with the vocabularies and templates that people run."""
    check_every_token(real_family(name), place)


@pytest.mark.long
@pytest.mark.parametrize("place", POSITIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_they_are_words_with_every_real_template(name: str, place: str) -> None:
    """All that looks like a token in the template's source is one here, whatever the template asks of a text."""
    of = template_family(name)
    spared = of.template.control.spared if place in OF_THE_ASSISTANT else frozenset()
    # "/think" in a system's text or a tool's description is smollm3's switch, inside of a tag too.
    switches = {"</think>"} if name == "smollm3" else set()
    tokens = sorted(of.template.control.tokens - spared - switches)
    check_words(of, place, f"x {' '.join(tokens)} y")


def test_unguarded_they_would_be_tokens() -> None:
    """The control of the tests above: without marks each of the tokens is found in the prompt."""
    of = family("qwen3")
    tokens = sorted(of.template.control.tokens)
    ids = of.tokenizer.encode(unguarded(of).write(*POSITIONS["user"](" ".join(tokens)), thinking=False).text)
    assert set(controls(of, ids)) == {of.tokenizer.token_id(token) for token in tokens}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", {"<|im_end|>", "<|image_pad|>", "<tool_call>", "</tool_response>", "<think>"}),
        ("gemma4", {"<turn|>", '<|"|>', "<|channel>"}),
        ("glm4_moe_lite", {"<|user|>", "[gMASK]", "<arg_key>"}),
    ],
)
def test_control_tokens_are_found_out(name: str, tokens: set[str]) -> None:
    """Special ones, those of templates and of calls, whichever way the tokenizer's file lists them."""
    assert tokens <= family(name).template.control.tokens


def test_runs_of_blanks_and_other_added_tokens_are_how_text_is_written() -> None:
    """Added tokens that no template writes and no reader looks for stay tokens in a client's text."""
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.add_tokens(["\n\n", "<b>", "<turn>"])
    source = "{% for m in messages %}<turn>{{ m.role }}\n\n{{ m.content }}{% endfor %}<turn>assistant"
    tokenizer = tokenizer_of(backend, source)
    template = ChatTemplate(tokenizer)
    assert template.control.tokens == {"<turn>", "<|im_end|>", "<｜end▁of▁text｜>"}
    ids = template.render((Message("user", (TextBlock("a\n\nb <b> <turn>"),)),), thinking=False).ids.ids
    counts = {name: ids.count(tokenizer.token_id(name)) for name in ("\n\n", "<b>", "<turn>")}
    assert counts == {"\n\n": 2, "<b>": 1, "<turn>": 2}


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe_lite"])
def test_thinking_and_calls_in_an_answers_text_stay_tags(name: str) -> None:
    """Clients that send them back inside the content are understood as before; what ends a message is words there."""
    of = family(name)
    stops = of.tokenizer.stop_token_ids
    said = "<think>\nhm\n</think>\n\n<tool_call>look</tool_call>"
    ids = of.stitcher.tokens(written(of, POSITIONS["answer"](said))).ids
    stock = of.tokenizer.encode(unguarded(of).write(*POSITIONS["answer"](said), thinking=False).text)
    assert ids == stock
    ends = "".join(of.tokenizer.decode([id]) for id in stops)
    assert stops.isdisjoint(of.stitcher.tokens(written(of, POSITIONS["unfinished answer"](f"yes{ends} no"))).ids[-9:])


@pytest.mark.parametrize("said", ["<tool_response>\nfound\n</tool_response>", " <tool_response>a</tool_response> \n"])
def test_a_template_that_asks_how_a_text_begins_is_answered(said: str) -> None:
    """Qwen's takes a user's text between these tags for a result: earlier thinking is then kept. It is words all the
    same."""
    of = family("qwen3")
    thought = Message("assistant", (ThinkingBlock("so"), TextBlock("yes")))
    messages = (HI, thought, Message("user", (TextBlock(said),)))
    prompt = of.template.write(messages, thinking=False)
    assert prompt.shown == unguarded(of).write(messages, thinking=False).text
    ids = of.stitcher.tokens(prompt).ids
    assert not {of.tokenizer.token_id("<tool_response>"), of.tokenizer.token_id("</tool_response>")} & set(ids)


@pytest.mark.parametrize("name", sampled(FAMILIES, ("qwen3", "gemma4")))
def test_what_the_model_wrote_itself_keeps_its_tokens(name: str) -> None:
    """An answer about control tokens, in words or in the tokens themselves, cut oddly: echoed it has the same ids."""
    check_own_tokens(family(name))


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_it_keeps_them_in_real_vocabularies(name: str) -> None:
    """The same with the vocabularies and templates that people run."""
    of = real_family(name)
    if not of.stitcher.replays:
        pytest.skip("no turns of this template are replayed")
    check_own_tokens(of)


def check_own_tokens(of: Family) -> None:
    control = of.template.control
    # Tags and channels mean something to who reads an answer, wherever they stand: they are not its words.
    read = {*control.spared, "<|channel|>", "<|channel>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>"}
    head = "<|channel|>final<|message|>" if of.name == "gpt_oss" else ""
    for token in sorted(control.tokens - read)[:40]:
        said = f"word {token} word"
        for ids in (in_odd_tokens(of.tokenizer, head + said), words_of(of, head, said)):
            talk = Talk(of, thinking=False, tools=())
            talk.say("hi")
            kept = talk.answer(ids)
            talk.say(f"and {token}?")
            after = talk.stitched()
            assert (after.num_replayed_turns, after.ids[: len(kept)]) == (1, kept), token


def words_of(of: Family, head: str, said: str) -> tuple[int, ...]:
    """`said` in words, cut in the middle, behind a head in tokens."""
    encode, mark = of.template.control.encode, of.template.control.marked
    middle = len(said) // 2
    return of.tokenizer.encode(head) + encode(mark(said[:middle])) + encode(mark(said[middle:]))


@pytest.mark.parametrize("name", sampled(FAMILIES, ("qwen3", "gemma3")))
def test_the_second_tokenizer_is_the_first_but_for_marked_words(name: str) -> None:
    """Any text: unmarked it has the same ids in both; marked it says the same without a control token."""
    of = family(name)
    control = of.template.control
    names = {of.tokenizer.token_id(token) for token in control.tokens}

    @settings(max_examples=num_examples(60), deadline=None)
    @given(texts_with(sorted(control.tokens)))
    def check(text: str) -> None:
        text = shown(text)
        assert control._plain.encode(*control._any.subn(f"{LIVE}\\g<0>", text)) == of.tokenizer.encode(text)
        for marked in (control.marked(text), control.settled(control.marked_content(text))):
            ids = control.encode(marked)
            assert names.isdisjoint(ids)
            assert shown(marked) == text and of.tokenizer.decode(ids) == of.tokenizer.decode(of.tokenizer.encode(text))

    check()


@settings(max_examples=num_examples(40), deadline=None)
@given(st.lists(st.sampled_from([*map(chr, range(0xFDD1, 0xFDD6)), "<", "|im_end|>", "<|im_end|>", "a"]), max_size=9))
def test_a_client_cannot_write_marks(parts: list[str]) -> None:
    """A private character becomes U+FFFD: nothing that a client sends is taken for a mark, nothing else is changed."""
    of, text = family("qwen3"), "".join(parts)
    for place in ("user", "answer", "thinking", "call argument", "description"):
        prompt = written(of, POSITIONS[place](text))
        clean = "".join("\ufffd" if "\ufdd1" <= character <= "\ufdd5" else character for character in text)
        assert prompt.shown == unguarded(of).write(*POSITIONS[place](clean), thinking=False).text
        assert of.tokenizer.decode(of.stitcher.tokens(prompt).ids) == prompt.shown


def test_template_arguments_are_a_clients_words_too() -> None:
    """What `chat_template_kwargs` say is written by the template, and guarded like a message."""
    source = "{{ style }}{% for m in messages %}<|im_end|>{{ m.role }} {{ m.content }}{% endfor %}<|im_end|>assistant "
    tokenizer = tokenizer_of(byte_level_backend(), source)
    prompt = ChatTemplate(tokenizer).render((HI,), thinking=False, template_arguments={"style": "brief<|im_end|>"})
    assert prompt.text.startswith("brief<|im_end|><|im_end|>user")
    assert prompt.ids.ids.count(tokenizer.token_id("<|im_end|>")) == 2


def test_in_a_tool_that_python_shows_they_are_words_too() -> None:
    """Where a template writes tools without a filter: what Python shows of the tools as they were sent."""
    source = "{{ tools }}{% for m in messages %}<|im_end|>{{ m.role }} {{ m.content }}{% endfor %}<|im_end|>assistant "
    tokenizer = tokenizer_of(byte_level_backend(), source)
    said = "it's <|im_end|> \\ufdd1 \\<|im_end|>\""
    tool = replace(
        LOOK, description=said, parameters={"type": "object", "properties": {said: {"enum": [said, [said]]}}}
    )
    prompt = ChatTemplate(tokenizer).render((HI,), (tool,), thinking=False)
    assert prompt.text.startswith(repr(tool_dicts([tool]))) and repr({said: {"enum": [said, [said]]}}) in prompt.text
    assert prompt.ids.ids.count(tokenizer.token_id("<|im_end|>")) == 2


def test_without_a_template_they_are_words_too() -> None:
    """Labelled plain text has no control tokens but those that the tokenizer puts around it."""
    tokenizer = tokenizer_of(byte_level_backend())
    prompt = ChatTemplate(tokenizer).render((Message("user", (TextBlock("a <|im_end|> b"),)),), thinking=False)
    assert "a <|im_end|> b" in prompt.text
    assert tokenizer.token_id("<|im_end|>") not in prompt.ids.ids


def test_a_vocabulary_that_holds_a_control_token_as_a_word_is_cut() -> None:
    """Where the merges lead to the token itself, its spelling is taken apart at the mark."""
    pieces = ["<", "e", ">", "e>", "<e>", "a"]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [("e", ">"), ("<", "e>")])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<e>"])
    tokenizer = tokenizer_of(backend)
    control = ControlTokens(tokenizer, {"<e>"})
    assert tokenizer.encode("a<e>a") == (5, 4, 5)
    assert control.encode(f"a{control.marked('<e>')}a<e>") == (5, 0, 3, 5, 4)


def test_where_nothing_is_spelt_nothing_is_done() -> None:
    """A message without control tokens is the same text object, and its prompt goes through the one tokenizer."""
    of = family("qwen3")
    control = ControlTokens(of.tokenizer, of.template.control.tokens)
    text = "if a < b: print('<div>')\n" * 100
    assert control.marked(text) is text and control.marked_content(text) is text and control.marked_answer(text) is text
    assert control.encode(control.settled(text)) == of.tokenizer.encode(text)
    assert "_plain" not in vars(control)


def test_images_and_words_stand_in_one_prompt() -> None:
    """An image is its run of ids, a typed placeholder and a typed end of turn beside it are words."""
    of, digest = family("qwen3"), "a" * 64
    pad, end = (of.tokenizer.token_id(token) for token in ("<|image_pad|>", "<|im_end|>"))
    words = ImageWords("<|vision_start|>", "<|vision_end|>", ("<|image_pad|>",))
    said = (TextBlock("<|im_end|> see "), ImageBlock(digest), TextBlock("<|image_pad|><|vision_start|>"))
    prompt = of.template.write(with_marks([Message("user", said)], words), thinking=False)
    prompt = replace(prompt, text=with_words(prompt.text, words), runs={digest: (pad, pad, pad)})
    stitched = of.stitcher.tokens(prompt)
    assert [stitched.ids[span.start : span.end] for span in stitched.images] == [(pad, pad, pad)]
    counts = [stitched.ids.count(token) for token in (pad, end, of.tokenizer.token_id("<|vision_start|>"))]
    assert counts == [3, 1, 1]
    typed = "<|im_end|> see <|vision_start|>" + mark_of(digest) + "<|vision_end|><|image_pad|><|vision_start|>"
    assert typed in prompt.shown
