"""Calls and results have the model's own ids in its prompts, and the tokens that it wrote them with."""

from dataclasses import replace

import pytest

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, Message, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.output.formats import select_format
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.call_row import find_call_row
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from tests.prompt.call_forms import ANY, READ, SMALL, VARIABLES
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.test_result_ids import BY_CONVERSATION, BY_MESSAGE
from tests.prompt.turns import Family, Talk, in_odd_tokens, num_common
from tests.prompt.vocabularies import tokens_in

NAMED_RESULT = (
    "{{ m.content or '' }}",
    "{% if m.role == 'tool' %}Of {{ m.tool_call_id }}: {% endif %}{{ m.content or '' }}",
)
WITH_IDS = {name: SMALL[name].replace(*NAMED_RESULT) for name in ("names", "list")}
WRITTEN = {
    "names": '[CALLS]read_file[ID]abc.1[ARGS]{"path": "a b"}[CALLS]any[ID]z-2[ARGS]{}',
    "list": '[CALLS][{"name": "read_file", "arguments": {"path": "a b"}, "id": "abc.1"}, '
    '{"name": "any", "arguments": {}, "id": "z-2"}]',
}
NUMBERED = (
    '<|calls|><|call|>functions.read_file:5<|args|>{"path": "a b"}<|call_end|>'
    "<|call|>functions.any:7<|args|>{}<|call_end|><|calls_end|>"
)


def family_of(source: str) -> Family:
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(source))
    row = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    assert isinstance(row, CallRow)
    tokenizer = tokenizer_of(backend, source)
    output_format = select_format("auto", source, tokens_in(source), None, row)
    template = ChatTemplate(tokenizer, tags=output_format.tags, row=row)
    markers = learn_markers(tokenizer, template)
    return Family("small", tokenizer, template, markers, Stitcher.of(tokenizer, template, markers), output_format)


def answered(talk: Talk, text: str) -> tuple[int, ...]:
    """The model writes two calls, and their results come in the other order; what the KV holds."""
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(talk.family.tokenizer, text))
    for call, said in reversed(list(zip(calls_of(talk), ("Rain.", "Noon."), strict=True))):
        talk.messages.append(Message("tool", (ToolResultBlock(call.call_id, (TextBlock(said),)),)))
    return kept


def calls_of(talk: Talk) -> list[ToolCallBlock]:
    return [block for block in talk.messages[1].blocks if isinstance(block, ToolCallBlock)]


@pytest.mark.parametrize("name", WITH_IDS)
def test_results_name_the_ids_that_the_model_wrote(name: str) -> None:
    """The next prompt begins with all of its tokens; to the client the ids are the server's."""
    talk = Talk(family_of(WITH_IDS[name]), thinking=False, tools=(READ, ANY))
    kept = answered(talk, WRITTEN[name])
    assert all(len(call.call_id) == 28 for call in calls_of(talk))
    after = talk.stitched()
    assert num_common(kept, after.ids) == len(kept) and after.num_replayed_turns == 1
    text = talk.prompt().shown
    assert "Of abc.1: Rain." in text and "Of z-2: Noon." in text
    assert not any(call.call_id in text for call in calls_of(talk))


@pytest.mark.parametrize("name", WITH_IDS)
def test_what_the_model_wrote_to_others_stays_with_them(name: str) -> None:
    """Where clients share their records, one that has other ids has its own in calls and results: the model's id, which
    it may have guessed from the same call, is not put there, nor the tokens that it stands in."""
    talk = Talk(family_of(WITH_IDS[name]), thinking=False, tools=(READ, ANY), is_one_client=False)
    answered(talk, WRITTEN[name])
    assert talk.stitched().num_replayed_turns == 1, "the control: with the ids that were given"
    ids = {call.call_id: f"other{number}" for number, call in enumerate(calls_of(talk))}
    talk.messages[1] = Message("assistant", tuple(replace(call, call_id=ids[call.call_id]) for call in calls_of(talk)))
    for index, message in enumerate(talk.messages[2:], 2):
        [block] = message.blocks
        assert isinstance(block, ToolResultBlock)
        talk.messages[index] = Message("tool", (replace(block, call_id=ids[block.call_id]),))
    after = talk.stitched()
    text = talk.family.tokenizer.decode(after.ids)
    assert after.num_replayed_turns == 0 and "abc.1" not in text and "z-2" not in text
    assert "Of other0: Rain." in text and "Of other1: Noon." in text and text.count("other0") == 2


def test_an_id_that_two_calls_of_a_message_have_names_the_first_only() -> None:
    """Nobody could tell their results apart: what the model wrote of the second is computed again instead."""
    talk = Talk(family_of(WITH_IDS["names"]), thinking=False, tools=(READ, ANY))
    answered(talk, WRITTEN["names"].replace("z-2", "abc.1"))
    text, second = talk.family.tokenizer.decode(talk.stitched().ids), calls_of(talk)[1].call_id
    assert "Of abc.1: Rain." in text and f"Of {second}: Noon." in text
    assert text.count("abc.1") == 2 and text.count(second) == 2 and talk.stitched().num_replayed_turns == 0


@pytest.mark.parametrize("source", [BY_MESSAGE, BY_CONVERSATION])
def test_results_name_the_numbers_that_the_model_wrote(source: str) -> None:
    """A template that numbers calls itself has another number for them than the model; the model's tokens stay."""
    talk = Talk(family_of(source), thinking=False, tools=(READ, ANY))
    kept = answered(talk, NUMBERED)
    after = talk.stitched()
    assert num_common(kept, after.ids) == len(kept) and after.num_replayed_turns == 1
    text = talk.family.tokenizer.decode(after.ids)
    assert "Of functions.read_file:5: Rain." in text and "Of functions.any:7: Noon." in text


def test_a_call_that_was_edited_has_the_number_that_stands_in_it() -> None:
    """Its tokens are not the model's any more, so the template numbers it."""
    talk = Talk(family_of(BY_MESSAGE), thinking=False, tools=(READ, ANY))
    answered(talk, NUMBERED)
    edited = [replace(call, arguments='{"path": "c"}') for call in calls_of(talk)]
    talk.messages[1] = Message("assistant", tuple(edited))
    after = talk.stitched()
    text = talk.family.tokenizer.decode(after.ids)
    assert after.num_replayed_turns == 0
    assert "Of functions.read_file:0: Rain." in text and "Of functions.any:1: Noon." in text


def test_an_id_that_a_client_uses_again_keeps_what_it_stood_for() -> None:
    """Some count their calls anew in each message: the first call stays as it was written."""
    talk = Talk(family_of(WITH_IDS["names"]), thinking=False, tools=(READ, ANY))
    kept = ()
    for text in ('[CALLS]any[ID]one[ARGS]{"a": 1}', '[CALLS]any[ID]two[ARGS]{"a": 2}'):
        talk.say("hi")
        answer = talk.answer(talk.family.tokenizer.encode(text))
        kept = kept or answer
        [call] = talk.messages[-1].blocks
        assert isinstance(call, ToolCallBlock)
        talk.messages[-1] = Message("assistant", (replace(call, call_id="call_0"),))
        talk.messages.append(Message("tool", (ToolResultBlock("call_0", (TextBlock("x"),)),)))
    assert num_common(kept, talk.stitched().ids) == len(kept)


def test_a_conversation_is_written_anew_once_ids_are_known() -> None:
    """What is remembered of its beginning was written without them."""
    talk = Talk(family_of(WITH_IDS["names"]), thinking=False, tools=(READ, ANY))
    answered(talk, WRITTEN["names"])
    known, talk.writings = talk.writings, [None]
    assert "Of abc.1" not in talk.prompt().shown
    talk.writings = known
    assert "Of abc.1" in talk.prompt().shown
    talk.writings = [None]
    assert "abc.1" not in talk.prompt().shown
