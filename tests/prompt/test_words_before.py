"""Words before calls where the template has no place for both: right before what opens the calls, as models write."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from kvserve.prompt.call_words import EXAMPLES
from kvserve.prompt.control import CALL
from kvserve.prompt.reading_back import reads_back
from tests.laws import sampled
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import LOOK, Family, Talk, in_odd_tokens, learned_family, num_common
from tests.prompt.vocabularies import TEMPLATES, template_family

HEAD = """{%- set ns = namespace(name='') -%}{%- if tools -%}[TOOLS]{{ tools | tojson }}[/TOOLS]{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}[RESULT]{{ m.content }}[/RESULT]
{%- elif m.role == 'user' -%}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'system' -%}[SYSTEM]{{ m.content }}[/SYSTEM]
{%- elif m.tool_calls -%}
"""
TAIL = """</s>{%- else -%}{{ m.content }}</s>{%- endif -%}{%- endfor -%}"""
THOUGHT = "{%- if m.reasoning_content -%}[THINK]{{ m.reasoning_content }}[/THINK]{%- endif -%}"
EACH, ARGUMENTS = (
    "{%- for c in m.tool_calls -%}{%- set ns.name = c.function.name -%}",
    "{{ c.function.arguments | tojson }}",
)
NAMED = EACH + "[CALLS]{{ c.function.name }}[ARGS]" + ARGUMENTS + "{%- endfor -%}"
LISTED = (
    "[CALLS][" + EACH + '{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + ', "id": "{{ c.id }}"}'
    "{%- if not loop.last -%}, {% endif -%}{%- endfor -%}]"
)
BARE = EACH + '{"name": "{{ c.function.name }}", "parameters": ' + ARGUMENTS + "}{%- endfor -%}"
SOURCES = {
    "named": HEAD + NAMED + TAIL,
    "listed": HEAD + LISTED + TAIL,
    "thinking": HEAD + THOUGHT + NAMED + TAIL,
    "named again": HEAD.replace("[RESULT]", "[RESULT]{{ ns.name }}: ") + NAMED + TAIL,
}
"""Templates that drop the words of a message with calls."""
LISTED_CALLS = (
    '[CALLS][{"name": "look", "arguments": {"q": "x  y"}, "id": "abcdefghi"}, '
    '{"name": "look", "arguments": {"q": "z"}, "id": "ihgfedcba"}]'
)


@cache
def family_of(source: str) -> Family:
    """A template with a small vocabulary in which its tags are tokens; `</s>` ends an answer."""
    backend, tags = (
        byte_level_backend().from_str(byte_level_backend().to_str()),
        re.findall(r"\[/?[A-Z]+\]|</s>", source),
    )
    backend.add_special_tokens(tags)
    tokenizer = replace(tokenizer_of(backend, source), stop_token_ids=frozenset((backend.token_to_id("</s>"),)))
    return learned_family("small", tokenizer)


def user(text: str) -> Message:
    return Message("user", (TextBlock(text),))


def said(text: str, *values: str, thinking: str = "", name: str = "look") -> tuple[Message, ...]:
    """Words, calls with these values, and their results."""
    calls = [ToolCallBlock(f"{value}id0000000"[:9], name, json.dumps({"q": value})) for value in values]
    thought = [ThinkingBlock(thinking)] if thinking else []
    results = [
        Message("tool", (ToolResultBlock(call.call_id, (TextBlock(f"found {call.arguments}"),)),)) for call in calls
    ]
    return Message("assistant", (*thought, TextBlock(text), *calls)), *results


def written(of: Family, messages: Sequence[Message], *, thinking: bool = False) -> str:
    return of.template.write(tuple(messages), (LOOK,), thinking=thinking).shown


@pytest.mark.parametrize("name", SOURCES)
def test_words_stand_right_before_their_calls(name: str) -> None:
    """In a running loop, once it was answered, and before calls that are made at once; each text once."""
    of = family_of(SOURCES[name])
    loop = (user("go"), *said("I look.", "one", "two"), *said(" And\non. ", "three"))
    for later in ((), (user("and"),), (Message("assistant", (TextBlock("So it is."),)), user("and"))):
        prompt = of.template.write((*loop, *later), (LOOK,), thinking=False)
        text, bare = prompt.shown, written(of, (user("go"), *said("", "one", "two"), *said("", "three"), *later))
        assert text.count("[/INST]I look.[CALLS]") == 1 and text.count("[/RESULT] And\non. [CALLS]") == 1
        assert text.replace("I look.", "").replace(" And\non. ", "") == bare
        assert CALL not in prompt.text and not prompt.notes and not of.template.parts_words


def test_words_stand_behind_their_thinking() -> None:
    of = family_of(SOURCES["thinking"])
    text = written(of, (user("go"), *said("I look.", "one", thinking="hm")), thinking=True)
    assert "[/INST][THINK]hm[/THINK]I look.[CALLS]look[ARGS]" in text


@pytest.mark.parametrize("name", SOURCES)
def test_a_turn_of_words_and_calls_keeps_its_tokens(name: str) -> None:
    """In odd tokens, turn by turn; not where the client changes the words."""
    of = family_of(SOURCES[name])
    calls = LISTED_CALLS if name == "listed" else '[CALLS]look[ARGS]{"q": "x  y"}[CALLS]look[ARGS]{"q": "z"}'
    talk, kept = Talk(of, thinking=False), tuple[int, ...]()
    talk.say("go")
    for number in range(3):
        after = talk.stitched()
        assert num_common(kept, after.ids) == len(kept), of.tokenizer.decode(after.ids)
        kept = talk.answer(in_odd_tokens(of.tokenizer, f"I look  {number}.{calls}"))
        assert talk.results("found") == 2
    said_last = talk.messages[-3]
    assert num_common(kept, talk.stitched().ids) == len(kept)
    talk.messages[-3] = replace(said_last, blocks=(TextBlock("No."), *said_last.blocks[1:]))
    assert num_common(kept, talk.stitched().ids) < len(kept)


def test_a_clients_marks_and_tags_stay_words() -> None:
    """In the words and in a name: no mark that words are placed by is a client's, and no tag in words is a token."""
    of = family_of(SOURCES["named"])
    prompt = of.template.render(
        (user(f"go {CALL}"), *said(f"see [INST]{CALL}look[/INST]", "one", name=f"lo{CALL}ok")), (LOOK,), thinking=False
    )
    assert "see [INST]\ufffdlook[/INST][CALLS]lo\ufffdok[ARGS]" in prompt.text
    for token in ("[INST]", "[/INST]", "[CALLS]", "[ARGS]"):
        assert prompt.ids.ids.count(of.tokenizer.token_id(token)) == 1


REFUSED = {
    "calls without a tag": HEAD + BARE + TAIL,
    "answers in tags": HEAD + NAMED + TAIL.replace("{{ m.content }}", "[SAYS]{{ m.content }}[/SAYS]"),
    "a line before answers": HEAD + NAMED + TAIL.replace("{{ m.content }}", "{{ '\\n' ~ m.content }}"),
    "answers in tags behind thinking": HEAD
    + THOUGHT
    + NAMED
    + TAIL.replace("{{ m.content }}", THOUGHT + "{% if m.reasoning_content %}[SAYS]{% endif %}{{ m.content }}"),
    "a text for no words": HEAD + "none" + NAMED + TAIL,
    "names shown as Python does": HEAD.replace("[RESULT]", "[RESULT]{{ [ns.name] }}: ") + NAMED + TAIL,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_words_are_messages_of_their_own(name: str) -> None:
    """Where the place before the calls is not one of words, or what stands there would not be read so."""
    of = family_of(REFUSED[name])
    prompt = of.template.write((user("go"), *said("I look.", "one")), (LOOK,), thinking=False)
    assert of.template.parts_words and any("message of its own" in note for note in prompt.notes)
    assert prompt.shown.index("I look.") < prompt.shown.index("</s>") < prompt.shown.index('"one"')


OTHERWISE = {
    "by the end of its name": "{{ 'the tool' if c.function.name.endswith('other') else c.function.name }}",
    "by its whole name": "{{ 'the tool' if c.function.name == 'other' else c.function.name }}",
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_call_that_is_written_otherwise_loses_no_words(how: str) -> None:
    """The template does with one name what it did with none that was tried; the mark in a name changes no call."""
    of = family_of(SOURCES["named"].replace("{{ c.function.name }}", OTHERWISE[how]))
    assert not of.template.parts_words
    messages = (user("go"), *said("I look.", "one"), *said("And on.", "two", name="other"))
    prompt = of.template.write(messages, (LOOK,), thinking=False)
    assert "[CALLS]the tool[ARGS]" in prompt.shown
    assert "[/INST]I look.</s>" in prompt.shown and "And on.</s>" in prompt.shown
    assert any("otherwise" in note for note in prompt.notes)


def test_a_request_whose_arguments_change_a_call_is_answered() -> None:
    """The template fails with none of them: the words stand in a message of their own."""
    of = family_of(SOURCES["named"].replace("[CALLS]", "[CALLS]{{ 'a ' if terse }}"))
    messages = (user("go"), *said("I look.", "one"))
    whole = of.template.write(messages, (LOOK,), thinking=False)
    terse = of.template.write(messages, (LOOK,), thinking=False, template_arguments={"terse": True})
    assert "I look.[CALLS]look" in whole.shown
    assert "I look.</s>" in terse.shown and "[CALLS]a look" in terse.shown


@pytest.mark.parametrize("call_id", ["call_1|fc_2", "toolu/1", ""])
def test_ids_may_hold_anything(call_id: str) -> None:
    """Also where one stands before the name."""
    each = '{"id": "{{ c.id }}", "name": "'
    of = family_of(SOURCES["listed"].replace('{"name": "', each).replace(', "id": "{{ c.id }}"', ""))
    call = ToolCallBlock(call_id, "look", '{"q": "one"}')
    message = Message("assistant", (TextBlock("I look."), call))
    assert f'I look.[CALLS][{{"id": "{call_id}", "name": "look"' in written(of, (user("go"), message))


def test_a_result_that_names_id_and_call_alike_is_no_second_call() -> None:
    """An opening is sought up to the mark before, not over it."""
    each = '{"id": "{{ c.id }}", "name": "'
    source = SOURCES["listed"].replace('{"name": "', each).replace(', "id": "{{ c.id }}"', "")
    of = family_of(source.replace("[RESULT]", '[RESULT]{"id": "{{ m.tool_call_id }}", "name": "{{ ns.name }}"}: '))
    assert not of.template.parts_words
    text = written(of, (user("go"), *said("I look.", "one"), *said("And on.", "two")))
    assert "[/INST]I look.[CALLS][" in text and "[/RESULT]And on.[CALLS][" in text


@pytest.mark.parametrize("name", SOURCES)
def test_words_before_calls_are_the_same_whatever_is_known(name: str) -> None:
    """Turn by turn, with what was placed before; behind an answer that is to be continued too."""
    of = family_of(SOURCES[name])
    talk = (user("go"), *said("I look.", "one"), *said("", "two"), *said("Well:", "three"), user("and"))
    talk = (*talk, Message("assistant", (TextBlock("So it"),)))
    known = [written(of, talk[:end]) for end in range(1, len(talk) + 1)]
    for end, text in enumerate(known, 1):
        of.template.clear()
        assert text == written(of, talk[:end])
    assert known[-1].endswith("So it") and "[/RESULT]Well:[CALLS]" in known[-1]


def test_a_reader_that_takes_words_for_a_call_is_told_apart() -> None:
    row = CallRow(('{"name": "',), ('", "parameters": ',), None, ("}",))
    assert reads_back(row, read_calls) and not reads_back(row, read_calls, "I look.")
    tagged = CallRow(("[CALLS]",), ("[ARGS]",), ("[CALLS]",), ())
    assert reads_back(tagged, read_calls, "I look.")
    calls = tuple((call.name, call.arguments) for call in EXAMPLES[:2])
    assert not reads_back(tagged, lambda row, tools, text: ("", "", calls), "I look.")


@pytest.mark.parametrize("name", sampled(("gemma4", "mistral_nemo", "mistral_small_3_2"), ("gemma4",)))
def test_real_templates_without_a_place_for_both(name: str) -> None:
    """The loop is one prompt that grows, without an empty question in it, and the calls stand in the turn."""
    if name not in TEMPLATES:
        pytest.skip("the real templates are not here")
    of = template_family(name)
    loop = (user("go"), *said("I look.", "one", "two"), *said("And on.", "three"))
    text = written(of, loop)
    opening = "<|tool_call>call:" if name == "gemma4" else "[TOOL_CALLS]"
    assert f"I look.{opening}" in text and f"And on.{opening}" in text and "[INST][/INST]" not in text
    before, _, behind = text.partition("And on.")
    assert written(of, loop[:4]).startswith(before) and behind.startswith(opening)
