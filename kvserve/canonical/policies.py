"""Compares the operator's rules with the table, for explanations. It does not change what the rules do."""

from collections.abc import Mapping
from functools import lru_cache

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import Message


@lru_cache(maxsize=8)
def policies(rules: RuleSet) -> Mapping[str, str]:
    """The policy of every rule that is switched on."""
    return {rule.name: rule.policy for rule in rules.rules}


@lru_cache(maxsize=8)
def changed(rules: RuleSet) -> frozenset[str]:
    """The rules whose policy differs from the table's, switched-off ones included."""
    return frozenset(rule.name for rule in DEFAULT_RULES.rules if policies(rules).get(rule.name, "off") != rule.policy)


def rules_off(rules: RuleSet, was: Message, now: Message) -> frozenset[str]:
    """The rules, switched off in `rules`, under which both messages would have one identity."""
    one, other = canonicalise(was, DEFAULT_RULES), canonicalise(now, DEFAULT_RULES)
    if one.digest != other.digest:
        return frozenset()
    return frozenset(name for name in one.fired | other.fired if name not in rules)
