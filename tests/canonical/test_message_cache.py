"""The memo of messages: its answers are those of `canonicalise` and `replay`, and it stays within its bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.message_cache import CanonicalMessageCache
from kvserve.canonical.message_replay import replay
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from tests.laws import num_examples

CALL_TEXTS = ('{"a": 1}', '{"a":1}', '{"a": 2}', "broken")
TEXTS = ("Look.", " Look. ", "Current time is 10:00", "Current time is 11:00", "")


def answer(thought: str, said: str, arguments: str) -> Message:
    blocks = (ThinkingBlock(thought), TextBlock(said), ToolCallBlock("c1", "look", arguments))
    return Message("assistant", blocks if thought else blocks[1:])


MESSAGES = st.one_of(
    st.builds(answer, st.sampled_from(("", "Hm.")), st.sampled_from(TEXTS), st.sampled_from(CALL_TEXTS)),
    st.builds(lambda text: Message("user", (TextBlock(text),)), st.sampled_from(TEXTS)),
    st.builds(lambda text: Message("tool", (ToolResultBlock("c1", (TextBlock(text),)),)), st.sampled_from(TEXTS)),
)


@given(
    st.lists(st.tuples(MESSAGES, MESSAGES, st.booleans(), st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 4_000),
)
@settings(max_examples=num_examples(50), deadline=None)
def test_its_answers_are_those_of_the_functions(
    asked: list[tuple[Message, Message, bool, bool, bool]], max_bytes: int
) -> None:
    """Whatever was asked before, and whatever had to be forgotten."""
    familiar = CanonicalMessageCache(DEFAULT_RULES, max_bytes)
    for fresh, seen, is_written, in_history, may_put_back in asked * 2:
        [known] = familiar.recall([fresh])
        assert known.message == fresh
        assert known.canonical == canonicalise(fresh)
        wrote = seen if is_written else None
        options = {"wrote": wrote, "in_history": in_history, "rules": DEFAULT_RULES, "may_put_back": may_put_back}
        assert familiar.replay(known.message, seen, **options) == replay(fresh, seen, **options)
        assert familiar.num_bytes <= max_bytes


def test_an_equal_message_is_the_same_object_and_its_replay_too() -> None:
    """So whoever looks at it next need not read it again; another clock is another question."""
    familiar = CanonicalMessageCache(DEFAULT_RULES)
    seen = answer("Hm.", "Look.", '{"a":1}')
    options = {"wrote": seen, "in_history": True, "rules": DEFAULT_RULES, "may_put_back": True}
    first, second = (familiar.recall([answer("", "Look.", '{"a": 1}')])[0] for _ in range(2))
    assert first is second
    replayed = familiar.replay(first.message, seen, **options)
    assert familiar.replay(first.message, seen, **options) is replayed
    other = answer("Oh.", "Look.", '{"a":1}')
    options["wrote"] = other
    assert familiar.replay(first.message, other, **options).message == replay(first.message, other, **options).message
    assert familiar.replay(first.message, other, **options).message != replayed.message


def test_what_was_not_used_for_longest_goes_first() -> None:
    """And everything goes when it is cleared."""
    said = [Message("user", (TextBlock(f"{number}" * 1_000),)) for number in range(3)]
    familiar = CanonicalMessageCache(DEFAULT_RULES, max_bytes=3_500)
    kept = familiar.recall(said[:2])
    familiar.recall(said[:1])
    familiar.recall(said[2:])
    again = Message("user", (TextBlock("0" * 1_000),))
    gone = Message("user", (TextBlock("1" * 1_000),))
    assert familiar.recall([again])[0] is kept[0]
    assert familiar.recall([gone])[0] is not kept[1]
    familiar.clear()
    assert familiar.num_bytes == 0
    assert familiar.recall([again])[0] is not kept[0]
