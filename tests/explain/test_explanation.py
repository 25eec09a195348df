"""Why a request reused what it did: each cause from a pair of requests, and what is told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvserve.core import (
    NOBODY,
    Message,
    Principal,
    RequestId,
    Reuse,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolResultBlock,
)
from kvserve.core.keeping import Scope
from kvserve.errors import Conflict
from kvserve.explain.book import Explained, ExplanationBook
from kvserve.explain.explanation import Asked, Circumstances, RulesFired, explain
from kvserve.explain.words import remedy, summary
from kvserve.sessions.seen import PathNode, TurnRecord, pack_ids

MESSAGES = (Message("system", (TextBlock("S"),)), Message("user", (TextBlock("question"),)))
ANSWER = Message("assistant", (TextBlock("answer"),))
PROMPT, EMITTED = tuple(range(300)), tuple(range(1000, 1020))


def before(**changes: Any) -> TurnRecord:
    """A request of 300 tokens, its messages at 0, 100 and the tail at 290, and its answer of 20."""
    values: dict[str, Any] = {
        "request_id": RequestId("one"),
        "session": None,
        "leaf": PathNode(None, b"c", MESSAGES[0], None, 0),
        "messages": (*MESSAGES, ANSWER),
        "tools": (),
        "tools_digest": b"t",
        "packed_ids": pack_ids(PROMPT, EMITTED),
        "num_prompt_tokens": len(PROMPT),
        "starts": (0, 100, 290),
        "template_arguments": {},
        "fired": frozenset(),
    }
    return TurnRecord(**(values | changes))


def asked(
    messages: Sequence[Message] = (*MESSAGES, ANSWER, MESSAGES[1]),
    ids: Sequence[int] = (*PROMPT, *EMITTED, *range(2000, 2030)),
    arguments: Mapping[str, object] | None = None,
    tools: bytes = b"t",
) -> Asked:
    return Asked(RequestId("two"), messages, ids, tools, arguments or {})


def edited(offset: int) -> tuple[int, ...]:
    """The prompt with one other token."""
    return (*PROMPT[:offset], 9999, *PROMPT[offset + 1 :])


NEW = range(2000, 2030)
OTHER = (MESSAGES[0], Message("user", (TextBlock("quest!on"),)), ANSWER)


@pytest.mark.parametrize(
    ("request_now", "rules", "num_cached", "cause"),
    [
        (asked(), RulesFired(), 320, "nothing lost"),
        (asked(), RulesFired(), 100, "evicted"),
        (asked(OTHER, edited(120)), RulesFired(), 100, "message changed"),
        (asked(MESSAGES, PROMPT[:200]), RulesFired(), 199, "nothing lost"),
        (asked(MESSAGES[:1], (*PROMPT[:100], 77)), RulesFired(), 100, "nothing lost"),
        (
            asked(OTHER, edited(120)),
            RulesFired(as_sent=frozenset({"clock"}), num_known_messages=2),
            100,
            "volatile value",
        ),
        (asked(OTHER, edited(120)), RulesFired(dropped={1: "carrier"}), 100, "volatile value"),
        (asked(ids=edited(50), tools=b"u"), RulesFired(), 48, "tools changed"),
        (asked(ids=edited(50), arguments={"x": 1}), RulesFired(), 48, "template arguments changed"),
        (asked(ids=edited(50), arguments={"x": None}), RulesFired(), 48, "template arguments changed"),
        (asked(ids=edited(50), arguments={"thinking": (True, None, None)}), RulesFired(), 48, "thinking switched"),
        (asked(OTHER, edited(120), arguments={"x": 1}), RulesFired(), 100, "message changed"),
        (
            asked(OTHER, edited(120)),
            RulesFired(as_sent=frozenset({"clock"}), num_known_messages=2, changed=frozenset({"clock"})),
            100,
            "setting",
        ),
        (asked((*MESSAGES, MESSAGES[1]), (*edited(299), *NEW)), RulesFired(), 290, "message changed"),
        (asked(MESSAGES[:1] + OTHER[1:2], edited(120)), RulesFired(), 100, "new conversation"),
        (asked(ids=edited(120)), RulesFired(), 100, "written differently by the template"),
    ],
)
def test_the_cause(request_now: Asked, rules: RulesFired, num_cached: int, cause: str) -> None:
    """Each difference has its name."""
    assert explain(request_now, before(), rules, num_cached).cause == cause


@pytest.mark.parametrize("is_result", [False, True])
def test_a_tool_that_came_later_and_is_another_one_now_is_named(is_result: bool) -> None:
    """With the message that brings it in; a message in which anything else differs too is a changed message."""

    def brings(description: str, said: str = "question") -> tuple[Message, ...]:
        tool = ToolBlock("look", description, "{}")
        brought = ToolResultBlock("c", (tool,)) if is_result else tool
        return (MESSAGES[0], Message("user", (TextBlock(said), brought)), ANSWER)

    was = before(messages=brings("looks"))
    edit = explain(asked(brings("sees"), edited(120)), was, RulesFired(), 100)
    assert edit.cause == "tools changed" and edit.first_difference is not None
    place = edit.first_difference
    assert (place.tool, place.message_index, place.role) == ("look", 1, "user")
    assert explain(asked(brings("sees", "quest!on"), edited(120)), was, RulesFired(), 100).cause == "message changed"


def test_an_answer_that_is_not_replayed_is_told_however_short_it_is() -> None:
    """Where the model's answers are never replayed; elsewhere a few tokens are no loss, and the token that ends an
    answer is none anywhere."""
    around = Circumstances(unreplayed="no token ends one")
    again = asked(ids=(*PROMPT, *range(3000, 3018), *NEW))
    told = explain(again, before(), RulesFired(), 300, around=around)
    assert (told.cause, told.num_lost_tokens, told.decided_by) == ("not replayed", 20, "no token ends one")
    assert "no token ends one" in summary(told) and remedy(told)
    assert explain(again, before(), RulesFired(), 300).cause == "nothing lost"
    ended = asked(ids=(*PROMPT, *EMITTED[:-1], 3000, *NEW))
    assert explain(ended, before(), RulesFired(), 319, around=around).cause == "nothing lost"


def test_a_missing_checkpoint_is_named() -> None:
    """What was known and could not be used is told apart from what has left, and from what could never be kept."""
    missed = explain(asked(), before(), RulesFired(), 100, reuse=Reuse("ram", 320, "user", is_trim_miss=True))
    assert (missed.cause, missed.reuse.is_trim_miss) == ("no checkpoint", True)
    assert explain(asked(), before(), RulesFired(), 0, around=Circumstances(can_keep=False)).cause == "not kept"


def test_a_first_request_has_nothing_before_it() -> None:
    """Nothing known; tokens that are there all the same come from somewhere else."""
    first = asked(MESSAGES, PROMPT)
    fresh = explain(first, None, RulesFired(), 0)
    assert (fresh.cause, fresh.source, fresh.before) == ("new conversation", "nothing", None)
    assert explain(first, None, RulesFired(), 50).source == "another request with the same beginning"
    warmed = explain(first, None, RulesFired(), 50, reuse=Reuse("warmed", 50))
    assert warmed.source == "what was computed ahead"


@pytest.mark.parametrize(
    ("around", "num_cached", "cause"),
    [
        (Circumstances(), 0, "not seen since the start"),
        (Circumstances(was_cleared=True), 0, "cache cleared"),
        (Circumstances(was_cleared=True, names_session=False), 0, "no session"),
        (Circumstances(looks_at_records=False), 0, "setting"),
        (Circumstances(), 300, "nothing lost"),
    ],
)
def test_a_history_that_nobody_knows(around: Circumstances, num_cached: int, cause: str) -> None:
    """Answers that are not known: named by what is known of the server; KV that is there all the same counts."""
    history = replace(asked(), starts=(0, 100, 290, 330, 350))
    assert explain(history, None, RulesFired(), num_cached, around=around).cause == cause


def test_a_request_whose_client_left_is_the_cause() -> None:
    """Its prompt was computed in part, or its answer is not what the client goes on with."""
    part = before(num_computed_tokens=120, packed_ids=pack_ids(PROMPT), messages=MESSAGES)
    assert explain(asked(), part, RulesFired(), 100).cause == "aborted"
    assert explain(asked(), part, RulesFired(), 300).cause == "nothing lost"
    again = asked((*MESSAGES, MESSAGES[1]), (*PROMPT[:290], *range(2000, 2030)))
    assert explain(again, before(num_computed_tokens=320), RulesFired(), 290).cause == "aborted"


def test_thinking_that_is_gone() -> None:
    """Left out by the client or by the template, told from any other change of the message."""
    thought = Message("assistant", (ThinkingBlock("hm"), *ANSWER.blocks))
    was = before(messages=(*MESSAGES, thought))
    assert explain(asked(ids=(*PROMPT, *EMITTED[:2], *NEW)), was, RulesFired(), 290).cause == "thinking dropped"
    kept = asked((*MESSAGES, thought, MESSAGES[1]), (*PROMPT, *EMITTED[:5], *range(2000, 2030)))
    assert explain(kept, was, RulesFired(), 300).cause == "nothing lost"


def test_a_rule_that_is_off_is_the_cause() -> None:
    """Two messages that a rule of the table would have known as one: the setting that switched it off is named."""
    around = Circumstances(rules_off=lambda was, now: frozenset({"clock"}))
    off = RulesFired(policies={"ids": "always"}, changed=frozenset({"clock"}))
    told = explain(asked(OTHER, edited(120)), before(), off, 100, around=around)
    assert (told.cause, told.decided_by) == ("setting", "CACHE_RULE_POLICIES (clock=off)")
    assert told.policies == {"clock": "off"} and told.first_difference is not None
    none = explain(asked(OTHER, edited(120)), before(), RulesFired(), 100, around=around)
    assert none.decided_by == "CACHE_CANONICALIZE_TOOL_CONTEXT"


def test_the_difference_and_the_rules_are_told() -> None:
    """Message, character and texts of the first difference; the rules that let it count as the same."""
    rules = RulesFired(replayed=frozenset({"ids"}), as_sent=frozenset({"clock"}), num_known_messages=2)
    told = explain(asked(OTHER, edited(120)), before(), rules, 100)
    assert told.first_difference is not None and told.first_difference.message_index == 1
    assert told.rules == ("clock", "ids") and told.source == "request one" and told.num_shared_tokens == 120


def test_an_identity_that_promised_too_much_is_counted() -> None:
    """Equal canonically, not for the model, and no rule says why: a rejection, if tokens were lost by it."""
    lost = explain(asked(OTHER, edited(120)), before(), RulesFired(num_known_messages=3, num_rejected=1), 100)
    kept = explain(asked(), before(), RulesFired(num_known_messages=3, num_rejected=1), 320)
    assert lost.is_rejection and not kept.is_rejection
    book = ExplanationBook(max_entries=1)
    for explanation in (lost, replace(kept, request_id=RequestId("three"))):
        book.put(Explained(explanation))
    assert book.num_rejections == 1 and book.get("two", "") is None and isinstance(book.get("three", ""), Explained)
    assert [each.request_id for each in book.newest(5)] == ["three"]


# --- whose they are --------------------------------------------------------------------------------------------------

ANN, BEN, STRANGER = Principal("key1", "ann"), Principal("key1", "ben"), Principal("key2", "ann")
BOOKED = {
    "one": (ANN, "s1"),
    "two": (BEN, "s1"),
    "three": (STRANGER, "s2"),
    "four": (NOBODY, None),
    "five": (ANN, None),
}


def book() -> ExplanationBook:
    """Five requests, the last one the newest."""
    made, told = ExplanationBook(), explain(asked(), before(), RulesFired(), 320)
    for name, (principal, session) in BOOKED.items():
        made.put(Explained(replace(told, request_id=RequestId(name)), principal, session))
    return made


@pytest.mark.parametrize(
    ("key", "known", "last"),
    [
        ("key1", {"one", "two", "five"}, None),
        ("key2", {"three"}, None),
        ("", {"four"}, "four"),
        ("key3", set(), None),
    ],
)
def test_an_explanation_is_there_for_its_key(key: str, known: set[str], last: str | None) -> None:
    """By its id; as the newest one where it named no user, whom nobody names who asks; an operator sees everybody's."""
    kept = book()
    assert {name for name in BOOKED if kept.get(name, key) is not None} == known
    newest = kept.last(key)
    assert (newest.explanation.request_id if newest is not None else None) == last
    assert [each.request_id for each in kept.newest(2)] == ["five", "four"]


def test_the_beginning_of_an_id_names_its_request() -> None:
    """As short as what no other request of the same key begins with; several are a conflict that names them; others'
    requests neither answer to it nor make it ambiguous."""
    kept, told = ExplanationBook(), explain(asked(), before(), RulesFired(), 320)
    ids = ("req12ab34", "req12ab99", "req1f", "req12")
    for name, principal in zip(ids, (ANN, BEN, STRANGER, NOBODY), strict=True):
        kept.put(Explained(replace(told, request_id=RequestId(name)), principal))

    def got(beginning: str, key: str) -> str | None:
        found = kept.get(beginning, key)
        return None if found is None else found.explanation.request_id

    assert (got("req12ab3", "key1"), got("req1", "key2"), got("req", "")) == ("req12ab34", "req1f", "req12")
    assert got("req1f", "key1") is None and got("", "key2") is None and got("req12ab345", "key1") is None
    with pytest.raises(Conflict, match=r"2 requests begin with 'req12'.*req12ab99, req12ab34"):
        got("req12", "key1")  # another's whole id
    assert got("req12", "") == "req12"


@pytest.mark.parametrize(
    ("session", "principal", "gone"),
    [
        ("s1", None, {"one", "two"}),
        (None, ANN, {"one", "five"}),
        ("s1", ANN, {"one"}),
        (None, NOBODY, {"four"}),
        ("s3", None, set()),
    ],
)
def test_explanations_can_be_forgotten(session: str | None, principal: Principal | None, gone: set[str]) -> None:
    """Those of a session, of a principal, of both; the others stay."""
    kept = book()
    assert kept.forget(Scope(session, None if principal is None else str(principal))) == len(gone)
    assert {each.request_id for each in kept.newest(9)} == set(BOOKED) - gone
