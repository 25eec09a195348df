"""What the plan of a prefill is told of a prompt."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.checkpoints import MessageEnd, PromptOutline, plan_stops
from kvserve.core import ImageSpan, MessageStart, TokenSequence
from kvserve.engine.rows import outline
from tests.laws import num_examples

SYSTEM, USER, ANSWER = MessageStart(0, is_user=False), MessageStart(4, is_user=True), MessageStart(7, is_user=False)


def test_a_message_ends_where_the_next_one_begins() -> None:
    """And the system prompt before the first user's message."""
    told = outline(TokenSequence(tuple(range(9))), (SYSTEM, USER, ANSWER), needs_checkpoints=True)
    ends = (MessageEnd(4, "assistant", False), MessageEnd(7, "user", True))
    assert told == PromptOutline(9, ends, system_end=4)


@given(st.lists(st.tuples(st.integers(1, 3_000), st.booleans()), max_size=12), st.data())
@settings(max_examples=num_examples(50), deadline=None)
def test_without_checkpoints_no_stop_depends_on_the_ends_of_messages(
    messages: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """So they are not put together for every message of a long history."""
    starts, num_tokens = [], 0
    for size, is_user in messages:
        starts.append(MessageStart(num_tokens, is_user))
        num_tokens += size
    num_tokens += 1
    image = data.draw(st.integers(0, num_tokens - 1))
    tokens = TokenSequence((0,) * num_tokens, (ImageSpan(image, num_tokens, "a"),))
    usable = data.draw(st.integers(0, num_tokens - 1))
    matched = data.draw(st.integers(usable, num_tokens - 1))
    whole, short = (outline(tokens, starts, needs_checkpoints=needs) for needs in (True, False))
    assert short.message_ends == () and short.system_end == whole.system_end
    planned, asked = (
        plan_stops(each, num_usable_tokens=usable, num_matched_tokens=matched, needs_checkpoints=False)
        for each in (whole, short)
    )
    assert planned == asked
