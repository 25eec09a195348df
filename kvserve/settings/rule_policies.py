"""What an operator may set of the canonical rules, which are in `canonical/`: their names and policies.

Standard library only, and every line must run under Python 3.9: `start_checks.py` judges CACHE_RULE_POLICIES by it
before anything is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from kvserve.errors import SettingError

SETTING = "CACHE_RULE_POLICIES"

Policy = Literal["always", "history", "never"]
"""What the model reads where only the volatile part moved, or where the client left the span out:

`always`: what it first read; `history`: the same in messages that it has already read, what is sent in the newest
ones; `never`: what is sent.
"""

_OFF = ("off",)
"""Of a rule whose policy follows from what it is about: an operator can only switch it off."""

_ANY = (*get_args(Policy), *_OFF)

SETTABLE: Mapping[str, tuple[str, ...]] = {
    "cch": _ANY,
    "billing_header": _ANY,
    "total_tokens": _ANY,
    "project_instructions": _ANY,
    "system_reminder": _ANY,
    "aider_reminder": _ANY,
    "openclaw_carrier": _OFF,
    "openclaw_attempt": _ANY,
    "message_id": _ANY,
    "inbound_context": _ANY,
    "conversation_info": _ANY,
    "sender_info": _ANY,
    "run_statistics": _ANY,
    "current_time": _ANY,
    "claude_date": _ANY,
    "opencode_date": _ANY,
    "thinking": _ANY,
    "answer_edges": _OFF,
    "call_arguments": _ANY,
    "call_ids": _OFF,
    "empty_content": _OFF,
    "tools_order": _OFF,
    "tools_added": _OFF,
}
"""The rules in the order of their table, but for those that the readers of the protocols carry out."""


def policies_in(pairs: Sequence[str]) -> dict[str, str]:
    """The policy of each rule that is named. Raises SettingError for what is no pair, no rule or no policy of it."""
    found = {}
    for pair in pairs:
        name, separator, policy = (part.strip() for part in pair.partition("="))
        if not separator:
            raise SettingError(SETTING, pair, "rule=policy pairs, by comma")
        found[name] = policy
    check_policies(found)
    return found


def check_policies(policies: Mapping[str, str]) -> None:
    """Raises SettingError for a rule that there is not or another policy than it may have."""
    for name, policy in policies.items():
        if name not in SETTABLE:
            raise SettingError(SETTING, name, f"one of the rules {', '.join(SETTABLE)}")
        if policy not in SETTABLE[name]:
            raise SettingError(SETTING, f"{name}={policy}", f"one of the policies {', '.join(SETTABLE[name])}")
