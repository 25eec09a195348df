"""Answers that were cut in their thinking: in later prompts it is closed as the template closes it."""

import pytest

from tests.prompt.test_token_replay import KEEPS_PAST_THINKING
from tests.prompt.turns import Talk, family, in_odd_tokens


@pytest.mark.parametrize("ending", ["", "\n", " \n\n"])
@pytest.mark.parametrize("name", KEEPS_PAST_THINKING)
def test_an_answer_cut_in_its_thinking_is_closed(name: str, ending: str) -> None:
    """Its ids are kept, and behind them stands what the template closes thinking with: the model's next turn is none of
    its old thoughts."""
    of = family(name)
    talk = Talk(of)
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(of.tokenizer, f"hm so{ending}"), cut=True)
    talk.say("go")
    after = talk.stitched()
    assert (after.num_replayed_turns, after.ids[: len(kept)]) == (1, kept)
    closing = talk.prompt().text.rpartition("hm so")[2]
    assert closing.lstrip().startswith("</think>")
    assert of.tokenizer.decode(after.ids[len(kept) :]) == (closing.lstrip() if ending else closing)


@pytest.mark.parametrize("name", KEEPS_PAST_THINKING)
def test_thinking_that_is_to_be_continued_stays_open(name: str) -> None:
    """A cut answer that comes last is gone on with, right behind its own ids."""
    of = family(name)
    talk = Talk(of)
    talk.say("hi")
    kept = talk.answer(in_odd_tokens(of.tokenizer, "hm so"), cut=True)
    after = talk.stitched()
    assert (after.num_replayed_turns, after.ids) == (1, kept)


@pytest.mark.parametrize("name", KEEPS_PAST_THINKING)
def test_an_answer_cut_before_its_first_thought_leaves_nothing_open(name: str) -> None:
    """Nothing was thought and nothing said: the prompt says no more than the template does."""
    of = family(name)
    talk = Talk(of)
    talk.say("hi")
    talk.answer(of.tokenizer.encode("\n"), cut=True)
    talk.say("go")
    decoded = of.tokenizer.decode(talk.stitched().ids)
    assert "".join(decoded.split()) == "".join(talk.prompt().text.split())
