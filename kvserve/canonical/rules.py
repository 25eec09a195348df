"""The table of canonical rules: rules about text are in `text_rules.py`, rules about messages' structure here.

A new rule is one row, here or there, its line in `settings/rule_policies.py` and one recorded pair in
tests/canonical/pairs/.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast

from kvserve.canonical.rule import Rule, RuleSet
from kvserve.canonical.text_rules import TEXT_RULES
from kvserve.core import Role
from kvserve.settings.rule_policies import Policy, check_policies

_ASSISTANT: Final[frozenset[Role]] = frozenset({"assistant"})
_ANY: Final[frozenset[Role]] = frozenset({"system", "user", "assistant", "tool"})

RULES: tuple[Rule, ...] = (
    *TEXT_RULES,
    # --- the structure of messages -----------------------------------------------------------------------------------
    Rule(
        "thinking",
        "message",
        "always",
        _ASSISTANT,
        "the thinking of an assistant's turn",
        "Clients strip it or echo it as they like; where it is missing the model reads again what it wrote.",
    ),
    Rule(
        "answer_edges",
        "message",
        "never",
        _ASSISTANT,
        "white space at both ends of an assistant's text",
        "Servers and clients trim it as they like; where nothing else moved it is the same answer.",
    ),
    Rule(
        "call_arguments",
        "message",
        "always",
        _ASSISTANT,
        "the JSON text of a call's arguments, as long as it parses to the same",
        "Clients serialise what they parsed: other spacing, escapes and order of keys than the model wrote.",
    ),
    Rule(
        "call_ids",
        "message",
        "never",
        _ANY,
        "the ids of calls and of their results",
        "Clients rewrite them; a result refers to its call by the ids of its own request.",
    ),
    Rule(
        "empty_content",
        "message",
        "never",
        _ANY,
        'text blocks without text: "" and null are the same content',
        "Clients send one for the other beside tool calls.",
    ),
    Rule(
        "tools_order",
        "tools",
        "always",
        _ANY,
        "the order of an equal set of tools",
        "Some clients list their tools in the order in which servers answered.",
        is_personal=False,
    ),
    Rule(
        "tools_added",
        "tools",
        "always",
        _ANY,
        "nothing: tools that are added to the list during a conversation stand where they came",
        "Clients add tools in the middle; in front of the conversation they would change the whole prompt.",
    ),
    # --- equal once they are read ------------------------------------------------------------------------------------
    Rule(
        "cache_control",
        "wire",
        "always",
        _ANY,
        "`cache_control` keys, and a list with one text block instead of a string",
        "They mark the newest messages and move on with every request.",
    ),
    Rule(
        "reasoning_field",
        "wire",
        "always",
        _ASSISTANT,
        "the name of the field with the thinking: `reasoning_content`, `reasoning`, `reasoning_text`",
        "Clients echo it under a name of their own.",
    ),
)

DEFAULT_RULES = RuleSet(RULES)


def select(policies: Mapping[str, str], enabled: bool = True, *, tells_images_apart: bool = True) -> RuleSet:
    """The rules with the operator's policies (rule name -> `always`, `history`, `never` or `off`).

    `enabled` False switches all of them off: a message's identity is then exactly what was sent. Raises SettingError
    for an unknown rule, one that cannot be set, or another policy.
    """
    check_policies(policies)
    if not enabled:
        return RuleSet((), tells_images_apart=tells_images_apart)
    chosen = ((rule, policies.get(rule.name, rule.policy)) for rule in RULES)
    rules = (replace(rule, policy=cast(Policy, policy)) for rule, policy in chosen if policy != "off")
    return RuleSet(tuple(rules), tells_images_apart=tells_images_apart)


def changed_policies(rules: RuleSet) -> frozenset[str]:
    """The rules whose policy differs from the table's, switched-off ones included."""
    return frozenset(rule.name for rule in RULES if rules.policies.get(rule.name) != rule.policy)
