"""The table: every rule has a recorded pair that it, and only it, makes equal; policies can be set per rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve.canonical.canonicalise import canonical_tools, canonicalise, chain
from kvserve.canonical.message_replay import replay
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import DEFAULT_RULES, RULES, select
from kvserve.core import Message, TextBlock, ToolSpec
from kvserve.errors import SettingError
from kvserve.protocols.fields import Fields
from kvserve.protocols.openai_messages import read_message
from kvserve.protocols.openai_tools import read_tools

PAIRS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(__file__).parent.glob("pairs/*.json"))}
READ_AS_EQUAL = {rule.name for rule in RULES if rule.scope == "wire"} | {"empty_content"}
"""What the reader of the protocol already makes equal."""


def messages(wire: list[dict[str, Any]]) -> list[Message]:
    return [read_message(value, f"messages[{i}]") for i, value in enumerate(wire)]


def identity(wire: list[dict[str, Any]], rules: RuleSet = DEFAULT_RULES) -> bytes:
    return chain(b"", [canonicalise(message, rules) for message in messages(wire)])[-1]


def tools(pair: dict[str, Any], key: str) -> tuple[ToolSpec, ...]:
    return read_tools(Fields({"tools": pair[key]}, ""))


def test_every_rule_has_a_recorded_pair() -> None:
    """A row without a pair, or a pair without a row, is a mistake."""
    assert set(PAIRS) == {rule.name for rule in RULES}
    assert all(pair["rule"] == name and pair["source"] for name, pair in PAIRS.items())


@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("tools_")])
def test_both_forms_of_a_pair_have_one_identity(name: str) -> None:
    """What the rule was made for continues the same turn, whichever form is sent first."""
    pair = PAIRS[name]
    assert pair["seen"] != pair["sent"]
    assert identity(pair["seen"]) == identity(pair["sent"])


@pytest.mark.parametrize(
    "name", [name for name in PAIRS if name not in READ_AS_EQUAL | {"tools_order", "tools_added", "message_id"}]
)
def test_without_its_rule_a_pair_has_two_identities(name: str) -> None:
    """No rule is there for nothing, and none does another one's work."""
    rules = select({name: "off"})
    assert identity(PAIRS[name]["seen"], rules) != identity(PAIRS[name]["sent"], rules)


@pytest.mark.parametrize("name", sorted(READ_AS_EQUAL))
def test_what_the_reader_makes_equal_is_one_message(name: str) -> None:
    """Keys and fields that the protocol forgets never reach a rule."""
    assert messages(PAIRS[name]["seen"]) == messages(PAIRS[name]["sent"])


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair["rendered"] is not None])
def test_a_pair_is_rendered_as_its_policy_says(name: str) -> None:
    """In messages that the model has read: what it read, or what is sent now; and the report names the rule."""
    pair = PAIRS[name]
    results = [
        replay(sent, seen, wrote=seen, in_history=True)
        for sent, seen in zip(messages(pair["sent"]), messages(pair["seen"]), strict=True)
    ]
    assert [result.message for result in results] == messages(pair[pair["rendered"]])
    assert {rule for result in results for rule in result.fired} == set(pair["fired"])
    assert {rule for result in results for rule in result.as_sent} == set(pair["as_sent"])


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair["rendered"] == "seen"])
def test_only_always_reaches_the_newest_messages(name: str) -> None:
    """A rule of history leaves the newest message as it is sent; one without a meaning does not."""
    pair = PAIRS[name]
    always = {rule.name for rule in RULES if rule.policy == "always"} >= set(pair["fired"])
    results = [
        replay(sent, seen, wrote=seen, in_history=False).message
        for sent, seen in zip(messages(pair["sent"]), messages(pair["seen"]), strict=True)
    ]
    assert results == messages(pair["seen" if always else "sent"])


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair["rendered"] == "seen"])
def test_a_policy_set_to_never_renders_what_is_sent(name: str) -> None:
    """The operator's policy replaces the table's; identity stays."""
    pair = PAIRS[name]
    rules = select({rule: "never" for rule in pair["fired"]})
    assert identity(pair["seen"], rules) == identity(pair["sent"], rules)
    for sent, seen in zip(messages(pair["sent"]), messages(pair["seen"]), strict=True):
        assert replay(sent, seen, wrote=seen, in_history=True, rules=rules).message == sent


def test_a_policy_can_be_widened() -> None:
    """Somebody who does not need the time in history gets the reuse instead."""
    seen, sent = (messages(PAIRS["current_time"][key])[0] for key in ("seen", "sent"))
    assert replay(sent, seen, wrote=seen, in_history=True, rules=select({"current_time": "history"})).message == seen
    assert replay(sent, seen, wrote=seen, in_history=False, rules=select({"current_time": "history"})).message == sent
    assert replay(sent, seen, wrote=seen, in_history=False, rules=select({"current_time": "always"})).message == seen


def test_message_ids_have_a_policy_of_their_own() -> None:
    """Without their rule, another message id in the inbound context is an edit."""
    seen, sent = (messages(PAIRS["message_id"][key])[0] for key in ("seen", "sent"))
    for policy in ("never", "off"):
        assert replay(sent, seen, wrote=seen, in_history=True, rules=select({"message_id": policy})).message == sent


def test_with_all_rules_off_a_message_is_known_by_what_was_sent() -> None:
    """CACHE_CANONICALIZE_TOOL_CONTEXT=false: no pair that reaches the rules has one identity any more."""
    rules = select({}, enabled=False)
    for name, pair in PAIRS.items():
        if name not in READ_AS_EQUAL | {"tools_order", "tools_added"}:
            assert identity(pair["seen"], rules) != identity(pair["sent"], rules), name
            for sent, seen in zip(messages(pair["sent"]), messages(pair["seen"]), strict=False):
                assert replay(sent, seen, wrote=seen, in_history=True, rules=rules).message == sent
    for wire in PAIRS["thinking"]["seen"]:
        message = messages([wire])[0]
        assert canonicalise(message, rules).message == message


@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ({"clock": "never"}, "clock"),
        ({"current_time": "sometimes"}, "current_time=sometimes"),
        ({"cache_control": "never"}, "cache_control"),
        ({"call_ids": "always"}, "call_ids=always"),
        ({"tools_order": "never"}, "tools_order=never"),
        ({"openclaw_carrier": "history"}, "openclaw_carrier=history"),
    ],
)
def test_a_policy_that_cannot_be_used_is_an_error(policies: dict[str, str], named: str) -> None:
    """No setting is silently ignored."""
    with pytest.raises(SettingError, match="CACHE_RULE_POLICIES") as caught:
        select(policies)
    assert named in str(caught.value)


def test_tools_in_another_order_are_one_set() -> None:
    """Order alone changes nothing; a changed description, schema or name does, and so does the order of its keys."""
    seen, sent = tools(PAIRS["tools_order"], "seen_tools"), tools(PAIRS["tools_order"], "sent_tools")
    assert canonical_tools(seen) == canonical_tools(sent)
    assert canonical_tools(seen, select({"tools_order": "off"})) != canonical_tools(
        sent, select({"tools_order": "off"})
    )
    first, *others = seen
    for changed in (
        ToolSpec(first.name, "another", first.parameters),
        ToolSpec(first.name, None, first.parameters),
        ToolSpec("another", first.description, first.parameters),
        ToolSpec(first.name, first.description, {**first.parameters, "required": []}),
        ToolSpec(first.name, first.description, dict(reversed(first.parameters.items()))),
        ToolSpec(first.name, first.description, first.parameters, strict=True),
        ToolSpec(first.name, first.description, first.parameters, strict=False),
    ):
        assert canonical_tools([changed, *others]) != canonical_tools(seen)
    assert canonical_tools(seen[:-1]) != canonical_tools(seen)


def test_a_carrier_leaves_the_chain_as_it_is() -> None:
    """The request after it continues the one before it."""
    user, carrier = messages(PAIRS["openclaw_carrier"]["seen"])
    known = canonicalise(carrier)
    assert (known.message, known.fired) == (None, {"openclaw_carrier"})
    links = chain(b"s", [canonicalise(user), known, canonicalise(user)])
    assert links[0] == links[1] != links[2]
    assert chain(b"other", [canonicalise(user)]) != links[:1]


def test_rules_say_where_and_why() -> None:
    """The table is documentation: every row says what it normalises and why, with names as settings can have them."""
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.name.replace("_", "").isalpha() and rule.name.islower()
        assert rule.normalises and rule.why.endswith(".") and rule.roles
        if rule.form is not None:
            assert rule.form.opener
            assert set(rule.form.volatile) <= set(names)


def test_only_declared_roles_are_touched() -> None:
    """The very text of a pair, said by another role, is that role's own text."""
    for rule in RULES:
        if rule.form is None:
            continue
        for wire in PAIRS[rule.name]["seen"]:
            texts = [b for b in read_message(wire, "").blocks if isinstance(b, TextBlock)]
            for role in {"system", "user", "assistant"} - rule.roles:
                message = Message(role, tuple(texts))  # type: ignore[arg-type]
                assert rule.name not in canonicalise(message).fired
