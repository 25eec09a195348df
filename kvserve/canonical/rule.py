"""Defines a canonical rule: a named row with its place, its replay policy and, for rules about text, its strict form.

It knows no particular client; `rules.py` has the table, the files beside it apply the rules.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvserve.core import Role
from kvserve.settings.rule_policies import Policy

Scope = Literal["message", "text", "line", "field", "tools", "wire"]
"""Where a rule applies.

`message`: the structure of one message; `text`: a span in one text block; `line`: a span within one line of one text
block; `field`: a volatile part inside the spans of other rules; `tools`: the list of tools; `wire`: what the reader
of the protocol already makes equal (so there is nothing to set here).
"""

Place = Literal["start", "line_start", "last_line", "anywhere", "end", "whole"]
"""Where in a text block a span may stand.

`start`: at the beginning, or directly after another span that does; `line_start`: at the beginning of a line;
`last_line`: of the last line that begins with the opener; `anywhere`; `end`: the last occurrence of the opener, up to
the end of the block; `whole`: the span is the block.
"""


@dataclass(frozen=True, slots=True)
class Form:
    """The recorded form of a span; text that does not match strictly is left alone.

    `opener` is the literal beginning of the span and of `pattern`: a rule that does not apply costs only a substring
    search. `volatile` maps a rule's name (this one's or that of a `field` rule) to the parts that may change without a
    change of meaning. `is_json`: the group `json` must be a JSON object. `holds` must, and `lacks` must not, be found
    in the span; the text behind the block's leading spans must begin with `heading`. `is_omitted`: the canonical form
    is "", so that the span may be left out; otherwise it is the span without its volatile parts.
    """

    opener: str
    pattern: re.Pattern[str]
    place: Place
    volatile: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    is_omitted: bool = False
    is_json: bool = False
    holds: re.Pattern[str] | None = None
    lacks: re.Pattern[str] | None = None
    heading: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: what is normalised where, what the model reads instead, and why.

    `drops`: a message that consists of the form has no identity. `is_personal` False: telemetry without a person's
    words, so that the first value sent may be in every client's prompt. `rule_policies.py` has the policies that an
    operator may set.
    """

    name: str
    scope: Scope
    policy: Policy
    roles: frozenset[Role]
    normalises: str
    why: str
    form: Form | None = None
    drops: bool = False
    is_personal: bool = True


class RuleSet:
    """The rules that are switched on, with their policies; looked up by name, and by a message's role: the `names` of
    all, the `span_rules` that find spans in its text blocks (first match first), the `impersonal_openers` of those
    whose spans hold no person's words, the `dropping_rules` that take a whole message out of identity.

    `tells_images_apart`: a message's identity includes which image it shows, not only that it shows one.
    """

    def __init__(self, rules: tuple[Rule, ...], *, tells_images_apart: bool = True) -> None:
        self.rules = rules
        self.tells_images_apart = tells_images_apart
        self.policies: Mapping[str, Policy] = {rule.name: rule.policy for rule in rules}
        self._named = {rule.name: rule for rule in rules}
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
        finding = [rule for rule in rules if rule.form is not None and not rule.drops]
        self.span_rules = {role: tuple(r for r in finding if role in r.roles) for role in roles}
        self.dropping_rules = {role: tuple(r for r in rules if r.drops and role in r.roles) for role in roles}
        self.names = {role: frozenset(r.name for r in rules if role in r.roles) for role in roles}
        self.impersonal_openers = {
            role: tuple(r.form.opener for r in self.span_rules[role] if r.form is not None and not r.is_personal)
            for role in roles
        }

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def is_shared(self, name: str) -> bool:
        """Whether the rule's values are no person's words, and its policy lets one value replace all of them."""
        return not self._named[name].is_personal and self.replays(name, in_history=False)

    def is_hidden(self, name: str) -> bool:
        """Whether a person's own words that the rule takes out may come back although the client did not send them."""
        return self._named[name].is_personal and self.replays(name, in_history=True)

    def replays(self, name: str, *, in_history: bool) -> bool:
        """Whether the rule's policy lets the model read the earlier text."""
        policy = self._named[name].policy
        return policy == "always" or (policy == "history" and in_history)
