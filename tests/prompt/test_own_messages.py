"""Turns before which a template itself says something, in a message of its own that history has not."""

from dataclasses import replace
from functools import cache

import pytest

from kvserve.core import Message, TextBlock
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.turn_layout import TurnLayout
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import Family, Talk, in_odd_tokens, learned_family, num_common

TOKENS = ("<|turn|>", "<|end|>", "<|calls|>", "<|stop|>", "<muse>", "<say>", "<|look|>", "<|/look|>")
SOURCE = """{% for m in messages %}{% if m.role == 'assistant' %}
{%- if m.reasoning and loop.last %}<|turn|>assistant<muse>{{ m.reasoning }}<|end|>{% endif %}
{%- if m.tool_calls %}<|turn|>assistant{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- else %}<|turn|>assistant<say>{{ m.content }}<|end|>{% endif %}
{%- else %}<|turn|>{{ m.role }}<say>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}
{{- '<|turn|>assistant<muse><|end|>' }}{% endif %}<|turn|>assistant{% endif %}"""
"""With thinking off a prompt ends with an empty message of thinking; `<|end|>` ends each message of a turn."""

EMPTY = "<|turn|>assistant<muse><|end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"q":"x  y"}}\n</tool_call>'


THINKING_ON = SOURCE.replace("and not enable_thinking", "and enable_thinking")
INSTRUCTED = SOURCE.replace("'<|turn|>assistant<muse><|end|>'", "'<|turn|>system<say>Do not think.<|end|>'")
CALLS_END = SOURCE.replace("{% endfor %}<|end|>", "{% endfor %}<|calls|>").replace("tool_call>", "|look|>")


@cache
def family_of(*stops: str, source: str = SOURCE) -> Family:
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens([*TOKENS])
    ids = frozenset(backend.token_to_id(stop) for stop in stops)
    return learned_family("own_messages", replace(tokenizer_of(backend, source), stop_token_ids=ids))


def told(of: Family, *, thinking: bool, layout: TurnLayout | None = None) -> list[bool]:
    """Of a talk of an answer, two calls and an answer: for each turn whether all before it was kept."""
    stitcher = (
        of.stitcher if layout is None else Stitcher(of.tokenizer, of.markers, layout, control=of.template.control)
    )
    talk, kept, are_kept = Talk(replace(of, stitcher=stitcher), thinking=thinking), tuple[int, ...](), list[bool]()
    talk.say("hi")
    for said in ("<say>So it  is.", CALL, CALL * 2, "<say>Two.", "<say>Again."):
        after = talk.stitched()
        are_kept.append(num_common(kept, after.ids) == len(kept))
        kept = talk.answer(in_odd_tokens(of.tokenizer, said))
        if not talk.results("found"):
            talk.say("and?")
    return are_kept[1:]


def test_what_a_prompt_ends_with_before_an_answer_is_found() -> None:
    of = family_of("<|stop|>")
    assert of.stitcher.layout.own_messages == {EMPTY}
    asked = (Message("user", (TextBlock("hi"),)),)
    assert of.template.write(asked, thinking=False).shown.endswith(f"{EMPTY}<|turn|>assistant")


@pytest.mark.parametrize("stops", [("<|stop|>",), ("<|stop|>", "<|end|>")])
@pytest.mark.parametrize("source", [SOURCE, THINKING_ON])
def test_turns_keep_what_the_template_said_before_them(stops: tuple[str, ...], source: str) -> None:
    """In one mode of thinking; in the other one there is nothing, and no turn gets any."""
    of = family_of(*stops, source=source)
    assert told(of, thinking=False) == [True] * 4
    assert told(of, thinking=True) == [True] * 4


def test_without_it_no_such_turn_is_kept() -> None:
    of = family_of("<|stop|>")
    layout = replace(of.stitcher.layout, own_messages=frozenset())
    assert told(of, thinking=False, layout=layout) == [False] * 4


def test_a_turn_whose_end_the_model_wrote_is_kept() -> None:
    """The template's end is no stop token: the model writes it, then what stops it."""
    of = family_of("<|stop|>")
    talk = Talk(of, thinking=False)
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(of.tokenizer, "<say>So it is.") + of.tokenizer.encode("<|end|>"))
    talk.say("and?")
    assert num_common(kept, talk.stitched().ids) == len(kept)
    assert talk.messages[1].blocks == (TextBlock("So it is."),)


def test_a_call_that_the_model_ended_otherwise_than_its_template_stands_as_the_template_writes_it() -> None:
    """Its tokens without an end would make one message of two."""
    of = family_of("<|stop|>", source=CALLS_END)
    talk = Talk(of, thinking=False)
    talk.say("hi")
    talk.answer(in_odd_tokens(of.tokenizer, CALL.replace("tool_call>", "|look|>")) + of.tokenizer.encode("<|end|>"))
    assert talk.results("found")
    after = talk.stitched()
    assert (after.num_replayed_turns, of.tokenizer.decode(after.ids)) == (0, talk.prompt().shown)


def test_an_answer_that_is_continued_keeps_what_the_template_said_before_it() -> None:
    of = family_of("<|stop|>")
    talk = Talk(of, thinking=False)
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(of.tokenizer, "<say>So it  is"), cut=True)
    after = talk.stitched()
    assert talk.prompt().continues and num_common(kept, after.ids) == len(kept)


def test_a_clients_turn_with_the_same_words_gets_none_of_it() -> None:
    """The tokens go to the turn that the model wrote, the empty message of the prompt's end is no turn."""
    of = family_of("<|stop|>")
    talk = Talk(of, thinking=False)
    talk.say("hi")
    talk.messages.append(Message("assistant", (TextBlock("So it is."),)))
    talk.writings.append(None)
    talk.say("and?")
    kept = talk.answer(in_odd_tokens(of.tokenizer, "<say>So it is."))
    talk.say("go")
    assert num_common(kept, talk.stitched().ids) == len(kept)


def test_an_instruction_before_an_answer_is_no_part_of_the_turn() -> None:
    """What is another's message costs no turn its tokens."""
    of = family_of("<|stop|>", source=INSTRUCTED)
    talk = Talk(of, thinking=False)
    talk.say("hi")
    said = in_odd_tokens(of.tokenizer, "<say>So it  is.")
    talk.answer(said)
    talk.say("and?")
    after = talk.stitched()
    assert of.stitcher.layout.own_messages == frozenset() and after.num_replayed_turns == 1
    assert of.tokenizer.decode(after.ids).endswith("<|turn|>system<say>Do not think.<|end|><|turn|>assistant")
