"""Whose words the drafts of a turn come from: those of its principal, and never of another."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvserve.core import AGENTS, NOBODY, Principal, SessionHint
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.texts import DraftTexts
from kvserve.requests.drafts import text_owner

ANN, BOB = Principal(key="a" * 16), Principal(key="b" * 16)
PROMPT, ANSWER = tuple(range(100, 140)), tuple(range(200, 240))

SAME = [
    (SessionHint("s", ANN), SessionHint("t", ANN)),
    (SessionHint(None, ANN), SessionHint("t", ANN)),
    (SessionHint("s", NOBODY), SessionHint("s", NOBODY)),
    (SessionHint("agent:x", AGENTS), SessionHint("agent:x", AGENTS)),
]
"""Who are the same, so that one is drafted from the other's words."""

OTHERS = [
    (SessionHint("s", ANN), SessionHint("s", BOB)),
    (SessionHint("s", ANN), SessionHint("s", replace(ANN, user="u"))),
    (SessionHint("s", ANN), SessionHint("s", NOBODY)),
    (SessionHint("s", NOBODY), SessionHint("t", NOBODY)),
    (SessionHint(None, NOBODY), SessionHint(None, NOBODY)),
    (SessionHint("s", NOBODY, is_shared_id=True), SessionHint("s", NOBODY, is_shared_id=True)),
    (SessionHint("agent:x", AGENTS), SessionHint("agent:y", AGENTS)),
]
"""Who may be two people."""


type Owner = Callable[[SessionHint, str], TextOwner]


def drafted(one: SessionHint, other: SessionHint, owner: Owner = text_owner) -> tuple[int, ...]:
    """What is drafted for `other`, whose prompt is another and whose answer begins as `one`'s did."""
    texts = DraftTexts(2**20)
    first = texts.begin(owner(one, ""), PROMPT, (), keep=True)
    first.follow(ANSWER)
    texts.end(first)
    second = texts.begin(owner(other, ""), (*range(300, 340), *ANSWER[:8]), (), keep=True)
    draft = second.propose(4)
    return draft.tokens if draft is not None else ()


@pytest.mark.parametrize(("one", "other"), SAME)
def test_who_is_the_same_is_drafted_from_what_was_said_before(one: SessionHint, other: SessionHint) -> None:
    """From the answer to another prompt."""
    assert drafted(one, other) == ANSWER[8:12]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_nobody_is_drafted_from_the_words_of_another(one: SessionHint, other: SessionHint) -> None:
    """Not even who begins as the other one did."""
    assert drafted(one, other) == ()


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_words_of_another_would_be_seen(one: SessionHint, other: SessionHint) -> None:
    """The control: where owners are not told apart the drafts above are there."""
    assert drafted(one, other, lambda _session, _partition: TextOwner("anybody")) == ANSWER[8:12]
