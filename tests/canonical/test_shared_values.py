"""Telemetry at the front of prompts: what came first is said by all, and nothing that anybody could have written."""

import pytest

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.rules import DEFAULT_RULES, select
from kvserve.canonical.substitutions import with_shared_values
from kvserve.core import Message, Role, TextBlock

HEADER = "x-anthropic-billing-header: cc_version={}; cc_entrypoint={}; cch={};"


class First:
    """What came first under each key."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def __call__(self, key: str, text: str) -> str:
        return self.texts.setdefault(key, text)


def system(*texts: str, role: Role = "system") -> Message:
    return Message(role, tuple(TextBlock(text) for text in texts))


def test_the_first_value_stands_in_all_and_the_rest_as_sent() -> None:
    """Also where it is glued to the text behind it; the rules whose values moved are named."""
    first = First()
    one = system(HEADER.format("2.1.330.ab", "cli", "00f1"), "You help.")
    assert with_shared_values(one, DEFAULT_RULES, first) == (one, frozenset())
    other = system(HEADER.format("2.1.330.ab", "cli", "99aa"), "You help Bob.")
    assert with_shared_values(other, DEFAULT_RULES, first) == (system(one.blocks[0].text, "You help Bob."), {"cch"})
    glued = system(HEADER.format("3", "sdk-ts", "1") + "\nYou help.")
    said, fired = with_shared_values(glued, DEFAULT_RULES, first)
    assert said == system(HEADER.format("2.1.330.ab", "cli", "00f1") + "\nYou help.")
    assert fired == {"cch", "billing_header"}
    assert canonicalise(said).digest == canonicalise(glued).digest


@pytest.mark.parametrize("version", ["my PIN is 4711", "x" * 41, "a;b", "1<2"])
def test_what_could_be_words_is_nobodys_telemetry(version: str) -> None:
    """It stays in the prompt of who sent it, and another's value in that place is the other's."""
    first = First()
    with_shared_values(system(HEADER.format(version, "cli", "0")), DEFAULT_RULES, first)
    mine = system(HEADER.format("2.1.330", "cli", "0"))
    assert with_shared_values(mine, DEFAULT_RULES, first) == (mine, frozenset())


@pytest.mark.parametrize("policy", ["history", "never", "off"])
def test_a_policy_decides_here_too(policy: str) -> None:
    """Only a rule that always lets the model read what came first lets it read another's; each for its own part."""
    first, rules = First(), select({"cch": policy})
    with_shared_values(system(HEADER.format("1", "cli", "0a")), rules, first)
    later = system(HEADER.format("2", "cli", "0b"))
    said, fired = with_shared_values(later, rules, first)
    assert "cch=0b" in repr(said) and "cch" not in fired
    assert with_shared_values(system(HEADER.format("2", "cli", "0a")), rules, first)[1] == {"billing_header"}


def test_other_roles_and_other_texts_are_left_alone() -> None:
    """The header is a system prompt's; the same object comes back."""
    first = First()
    for message in (system("You help."), system(HEADER.format("1", "cli", "0"), role="user")):
        assert with_shared_values(message, DEFAULT_RULES, first)[0] is message
    assert not first.texts


def test_wording_tells_apart_every_word_that_may_come_back() -> None:
    """A moved id in a block that clients leave out means the same and is another wording; a clock, which is always read
    as it is sent, is none."""
    block = 'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\n\nhi'
    one, other = (canonicalise(system(block.format(number), role="user")) for number in (1, 2))
    assert (one.digest, one.meaning) == (other.digest, other.meaning) and one.wording != other.wording
    early, late = (canonicalise(system(f"Current time is {hour}:00", role="user")) for hour in (10, 11))
    assert early.wording == late.wording == early.meaning
