"""Answers that stand in one piece with a tool's result, behind other words than their prompt ended in."""

from dataclasses import replace
from functools import cache

import pytest

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, Message, TextBlock, ToolResultBlock, ToolSpec
from kvserve.output.formats import select_format
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.call_row import find_call_row
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.result_proof import lost_behind_results
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from tests.prompt.test_turn_layout import small
from tests.prompt.turns import Family, Talk, in_odd_tokens, num_common

CALLED = (
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}<|called|>{% endfor %}"
)
SOURCES = {
    "one_turn": "{% set ns = namespace(open=false, tool=false) %}{% for m in messages %}"
    "{% if ns.tool and m.role != 'tool' %}]{% set ns.tool = false %}{% endif %}"
    "{% if m.role == 'user' %}{% if ns.open %}<|over|>{% endif %}{% set ns.open = false %}<|user|>{{ m.content }}"
    "<|said|>{% elif m.role == 'tool' %}{{ ', ' if ns.tool else '[' }}{% set ns.tool = true %}{{ m.content }}"
    "{% else %}{% if not ns.open %}<|assistant|>{% set ns.open = true %}{% endif %}" + CALLED + "{% endif %}"
    "{% endfor %}{% if ns.tool %}]{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "thought": "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}\n"
    "<result>{{ m.content }}</result>\n\n{% else %}{% if loop.previtem.role == 'user' %}<|assistant|>{% endif %}"
    "</think>" + CALLED + "<|over|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'user' %}<|assistant|>{% endif %}<think></think>{% endif %}",
    "ended": "{% for m in messages %}<|user|>{{ m.role }}\n{% if m.role == 'tool' %}<result>{{ m.content }}</result>"
    "{{ '' if loop.last else '\n' }}<|over|>{% else %}" + CALLED + "<|over|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}",
}
"""As Apertus writes a whole loop as one turn, as DeepSeek V3.2 closes thinking in a prompt's end, and as Hermes 3 ends
a result otherwise once something follows."""

LIKE_THOUGHT = {
    "read_whole": SOURCES["thought"].replace("<think></think>", "").replace("</think>", ""),
    "unclosed": SOURCES["thought"]
    .replace("</result>\n\n", "")
    .replace("</think>{{", "{{ '\nIt says: ' if loop.previtem.role == 'tool' else '' }}{{")
    .replace("%}<think></think>{%", "%}{% if messages[-1].role == 'tool' %}\nIt said: <|assistant|>{% endif %}{%"),
}
"""A prompt ends as history goes on; and nothing ends a result but the words before its answer."""

TAILS = {
    "one_turn": {("]<|assistant|>", "]")},
    "thought": {("</result>\n\n<think></think>", "</result>\n\n</think>")},
    "ended": {("</result><|over|>", "</result>\n<|over|>")},
}
TOKENS = ("<|user|>", "<|assistant|>", "<|said|>", "<|over|>", "<|call|>", "<|called|>", "<think>", "</think>")
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {"q": {"type": "string"}}})
every_template = pytest.mark.parametrize("name", SOURCES)


@cache
def family(name: str) -> Family:
    source = (SOURCES | LIKE_THOUGHT)[name]
    tokenizer = small(source, *TOKENS, stops=("<|over|>", "<|called|>") if name == "one_turn" else ("<|over|>",))
    row = find_call_row(CompiledTemplate(source, {}), read_calls)
    assert isinstance(row, CallRow), row
    output_format = select_format("auto", source, TOKENS, None, row)
    template = ChatTemplate(tokenizer, tags=output_format.tags, row=row)
    markers = learn_markers(tokenizer, template)
    return Family(name, tokenizer, template, markers, Stitcher.of(tokenizer, template, markers), output_format)


def call(name: str, q: str) -> str:
    """A call as the model ends it: the token that stops it is no part of its answer."""
    return f'<|call|>look {{"q": "{q}"}}' + ("" if name == "one_turn" else "<|called|>")


def answered(name: str, result: str = "found") -> tuple[Talk, tuple[int, ...]]:
    """A conversation up to an answer to a result, and all that was read and written in it."""
    talk = Talk(family(name), thinking=False, tools=(LOOK,))
    talk.say("Where?")
    talk.answer(in_odd_tokens(talk.family.tokenizer, call(name, "a b")))
    assert talk.results(result) == 1
    return talk, talk.answer(in_odd_tokens(talk.family.tokenizer, "It is over there."))


@every_template
def test_both_ends_behind_a_result_are_found(name: str) -> None:
    """What a prompt ends in, and what history has there."""
    layout = family(name).stitcher.layout
    assert {*layout.result_tails, *layout.result_ends} == TAILS[name]


@every_template
def test_a_tool_loop_keeps_what_was_written_behind_results(name: str) -> None:
    """Calls and answers, in odd tokens, behind the end of the prompt that the model read."""
    talk = Talk(family(name), thinking=False, tools=(LOOK,))
    talk.say("Where?")
    kept: tuple[int, ...] = ()
    for number, text in enumerate((call(name, "a b"), call(name, "c"), "It is over there.", "So it is.")):
        assert talk.stitched().ids[: len(kept)] == kept
        kept = talk.answer(in_odd_tokens(talk.family.tokenizer, text))
        if number < 2:
            assert talk.results(f"found ] {number}") == 1
        else:
            talk.say("And then?")
    after = talk.stitched()
    assert after.ids[: len(kept)] == kept and after.num_replayed_turns == 4


@every_template
@pytest.mark.parametrize(
    "result", ["]", "x]It is over there.", "]It is over there.]It is", "</result>\n\n</think>It is"]
)
def test_a_result_that_looks_like_an_answer_stays_whole(name: str, result: str) -> None:
    """The answer is what stands behind all of it."""
    talk, kept = answered(name, result)
    talk.say("And then?")
    assert talk.stitched().ids[: len(kept)] == kept


@every_template
def test_what_a_client_changed_is_in_the_prompt(name: str) -> None:
    """Another answer stays as it is rendered; another result is the one that the model reads."""
    talk, _ = answered(name)
    talk.say("And then?")
    talk.messages[-2] = Message("assistant", (TextBlock("It is over by now."),))
    prompt = talk.prompt()
    assert talk.family.tokenizer.decode(talk.stitched(prompt).ids).endswith(prompt.shown.partition("found")[2])
    talk, _ = answered(name)
    talk.say("And then?")
    result = talk.messages[2].blocks[0]
    assert isinstance(result, ToolResultBlock)
    talk.messages[2] = replace(talk.messages[2], blocks=(replace(result, blocks=(TextBlock("lost"),)),))
    text = talk.family.tokenizer.decode(talk.stitched().ids)
    assert "lost" in text and "found" not in text and text.count("It is over there.") == 1


def test_a_result_that_is_read_with_its_answer_counts_letter_by_letter() -> None:
    """A call that it quotes is no call: where the client moves words around it, the model reads them where they are."""
    quoted = call("read_whole", "d")
    talk, kept = answered("read_whole", f"{quoted}old")
    talk.say("And then?")
    assert talk.stitched().ids[: len(kept)] == kept
    result = talk.messages[2].blocks[0]
    assert isinstance(result, ToolResultBlock)
    for moved in (f"old{quoted}", quoted.replace(": ", ":  ") + "old"):
        talk.messages[2] = replace(talk.messages[2], blocks=(replace(result, blocks=(TextBlock(moved),)),))
        prompt = talk.prompt()
        assert f"<result>{moved}</result>" in prompt.shown
        assert talk.family.tokenizer.decode(talk.stitched(prompt).ids) == prompt.shown


def test_a_result_that_nothing_ends_holds_no_answer() -> None:
    """Its own words would pass for what the model says behind it, and become a turn of the model's."""
    talk = Talk(family("unclosed"), thinking=False, tools=(LOOK,))
    talk.say("Where?")
    talk.answer(in_odd_tokens(talk.family.tokenizer, call("unclosed", "a b")))
    assert talk.results("found\nIt says: It is.") == 1
    talk.say("And?")
    talk.answer(in_odd_tokens(talk.family.tokenizer, "It is."))
    talk.say("So?")
    prompt = talk.prompt()
    assert "found\nIt says: It is.<|user|>And?" in prompt.shown
    assert talk.family.tokenizer.decode(talk.stitched(prompt).ids) == prompt.shown


def test_a_result_that_nobody_answered_here_ends_as_it_is_rendered() -> None:
    """What another one answered stands behind what the template writes."""
    talk, _ = answered("ended")
    talk.writings[-1] = None
    talk.say("And then?")
    rendered = talk.prompt().shown.partition("found")[2]
    assert "</result>\n<|over|>" in rendered and talk.family.tokenizer.decode(talk.stitched().ids).endswith(rendered)


def test_where_a_question_may_end_as_a_result_does_no_end_is_changed() -> None:
    """A client's words before the same token would pass for the template's, and lose a line end."""
    source = SOURCES["ended"].replace("<|over|>\n", "<|over|>")
    tokenizer = replace(family("ended").tokenizer, chat_template=source)
    template = ChatTemplate(tokenizer, row=family("ended").output_format.row)
    assert Stitcher.of(tokenizer, template, learn_markers(tokenizer, template)).layout.result_ends == ()


@pytest.mark.parametrize("name", ["one_turn", "thought"])
def test_an_answer_that_is_to_be_continued_stands_as_it_is_rendered(name: str) -> None:
    """What the model goes on with is what the template writes."""
    talk, kept = answered(name)
    prompt = talk.prompt()
    assert prompt.continues
    assert talk.family.tokenizer.decode(talk.stitched(prompt).ids).endswith(prompt.shown.partition("found")[2])
    assert num_common(kept, talk.stitched(prompt).ids) < len(kept)


def lost(name: str, source: str) -> str | None:
    of = family(name)
    tokenizer = replace(of.tokenizer, chat_template=source)
    template = ChatTemplate(tokenizer, tags=of.output_format.tags, row=of.output_format.row)
    stitcher = Stitcher.of(tokenizer, template, learn_markers(tokenizer, template))
    return lost_behind_results(tokenizer, template, stitcher, of.says((PROBE_TOOL,)))


@every_template
def test_a_start_knows_whether_answers_to_results_keep_their_tokens(name: str) -> None:
    """By trying it, whatever else a template changes: as Qwen3.5 drops a call's thinking behind a later question."""
    assert lost(name, SOURCES[name]) is None
    counted = (
        "{% set asked = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set asked.n = asked.n + 1 %}{% endif %}{% endfor %}"
    )
    moved = counted + SOURCES[name].replace("<|call|>", "{{ '' if asked.n > 1 else '.' }}<|call|>")
    assert lost(name, moved) is None


def test_a_start_knows_why_answers_to_results_lose_their_tokens() -> None:
    """A result begins otherwise once something follows; or history says nothing between it and an answer."""
    source = SOURCES["thought"]
    moves = source.replace("\n<result>", "\n<result{{ '' if loop.last else ' old' }}>")
    assert lost("thought", moves) == "its chat template writes what stands before them otherwise once something follows"
    bare = source.replace("</result>\n\n", "").replace("</think>{{ m.content", "{{ m.content")
    assert lost("thought", bare) == "its chat template begins them otherwise than a prompt ends"
