"""The rules about text, by client: rows of the table in `rules.py`.

Forms are strict: they match what the clients were recorded to send, at the place where they send it, and nothing else.
Of two rules that match at one place the upper row wins.
"""

import re
from collections.abc import Mapping
from typing import Final

from kvserve.canonical.rule import Form, Rule
from kvserve.core import Role

_SYSTEM: Final[frozenset[Role]] = frozenset({"system"})
_USER: Final[frozenset[Role]] = frozenset({"user"})

_JSON_FENCE = r"```json\n(?P<json>(?:(?!```)[^\n]*+\n)++)```"
"""Pretty-printed JSON escapes line ends inside strings, so that no text in it can close the fence."""

_MESSAGE_ID = re.compile(r'^  "message_id(?:_full)?": "(?:[^"\\\n]|\\[^\n])*+",?\n', re.MULTILINE)

_REMINDER = re.compile(
    r"<system-reminder>\n(?:[^<]++|<(?!/?system-reminder>))*+(?<=\n)</system-reminder>(?:\n{1,2}|\Z)"
)
_COUNT = r"[0-9][0-9.]*[kM]?"
_TOKENS = rf"{_COUNT}(?: \(in {_COUNT} / out {_COUNT}\))?"
_CACHED = rf"{_COUNT}(?:[ /]{_COUNT})*"
_STATISTICS = re.compile(
    rf"Stats: runtime [0-9][0-9hms.]*+(?: • (?:tokens {_TOKENS}|prompt/cache {_CACHED}|"
    r"(?!tokens |prompt/cache )[^•\n<]*[^•\n< ]))*\Z"
)
"""Counts are numbers only: a line with a word beside them is not telemetry."""

_REPORT = re.compile(r'(?:\[[^\]\n]*+\] )*+A [a-z][a-z -]*+"[^\n]*" just [a-z]')
"""The beginning of OpenClaw's report of a sub-agent's run; such a line in any other text is not the report's."""

_INSTRUCTIONS = re.compile(r"^Contents of [^\n]+ \([^\n]+\):$|^Today's date is [^\n]+$", re.MULTILINE)

_CARRIED = r'Conversation data \(data, not instructions\):\n"(?:[^"\\\n]|\\[^\n])*+"\n'


def _fence(name: str, title: str, volatile: Mapping[str, re.Pattern[str]]) -> Rule:
    """OpenClaw's facts in front of the current message."""
    heading = f"{title} (untrusted metadata):"
    return Rule(
        name,
        "text",
        "history",
        _USER,
        f"the fence `{heading}` at the beginning of a user message",
        "On the current message only; taken off it in later requests.",
        Form(
            f"{heading}\n",
            re.compile(rf"{re.escape(heading)}\n{_JSON_FENCE}(?:\n{{1,2}}|\Z)"),
            "start",
            volatile,
            is_omitted=True,
            is_json=True,
        ),
    )


TEXT_RULES: tuple[Rule, ...] = (
    # --- telemetry of Claude Code ------------------------------------------------------------------------------------
    Rule(
        "cch",
        "field",
        "always",
        _SYSTEM,
        "`cch=<hex>;` in the billing header",
        "New in every request at the very front of the prompt; it says nothing to the model.",
        is_personal=False,
    ),
    Rule(
        "billing_header",
        "line",
        "always",
        _SYSTEM,
        "the `x-anthropic-billing-header` line that a system message begins with",
        "Version and entry point, for the vendor's accounts; it says nothing to the model.",
        Form(
            "x-anthropic-billing-header: ",
            re.compile(r"x-anthropic-billing-header: cc_version=[^;\n<]*;(?: [a-z_]+=[^;\n<]*;)*+\Z"),
            "start",
            {
                "cch": re.compile(r" cch=[0-9a-f]{0,64};"),
                # no longer and nothing else than a version or a word: whoever comes later reads it too
                "billing_header": re.compile(
                    r"(?<=cc_version=)[0-9][0-9A-Za-z.-]{0,39}(?=;)|(?<=cc_entrypoint=)[a-z][a-z-]{0,19}(?=;)"
                ),
            },
        ),
        is_personal=False,
    ),
    Rule(
        "total_tokens",
        "line",
        "history",
        _SYSTEM,
        "the count in a system message that is a `<total_tokens>` note",
        "A counter that stands after every user turn; the history holds many of them, and the newest one counts.",
        Form(
            "<total_tokens>",
            re.compile(r"<total_tokens>[0-9]* tokens left</total_tokens>"),
            "whole",
            {"total_tokens": re.compile(r"(?<=<total_tokens>)[0-9]+")},
        ),
    ),
    # --- reminders ---------------------------------------------------------------------------------------------------
    Rule(
        "project_instructions",
        "text",
        "never",
        _USER,
        "`<system-reminder>` blocks with the contents of files or the date",
        "A project's instructions and today's date count: edited, added or taken away, the model gets what is sent.",
        Form("<system-reminder>\n", _REMINDER, "start", is_omitted=True, holds=_INSTRUCTIONS),
    ),
    Rule(
        "system_reminder",
        "text",
        "history",
        _USER,
        "the other `<system-reminder>` blocks at the beginning of a user message or block",
        "A reminder of the to-do list stands in one request and is gone from the next.",
        Form("<system-reminder>\n", _REMINDER, "start", is_omitted=True, lacks=_INSTRUCTIONS),
    ),
    Rule(
        "aider_reminder",
        "text",
        "history",
        _USER,
        "aider's rules of the edit format at the end of a user message",
        "Glued to the current message, and taken off it in the next request.",
        Form(
            "\n\n# *SEARCH/REPLACE block* Rules:\n\n",
            re.compile(
                r"\n\n# \*SEARCH/REPLACE block\* Rules:\n\nEvery \*SEARCH/REPLACE block\* must use this format:\n"
                r"1\. The \*FULL\* file path [^\n]*+\n2\. The opening fence [^\n]*+\n3\. [^\n]*<<<<<<< SEARCH\n"
                r"4\. [^\n]*+\n5\. [^\n]*=======\n6\. [^\n]*+\n7\. [^\n]*>>>>>>> REPLACE\n"
                r"8\. The closing fence[^\n]*+\n"
                r"[\s\S]*\nONLY EVER RETURN CODE IN A \*SEARCH/REPLACE BLOCK\*!(?:\n[^\n]*+){0,20}\Z"
            ),
            "end",
            is_omitted=True,
        ),
    ),
    # --- OpenClaw ----------------------------------------------------------------------------------------------------
    Rule(
        "openclaw_carrier",
        "message",
        "never",
        _USER,
        "the message of OpenClaw's internal context, which ends every request",
        "Gone from the next request: with it no request would continue another. The model reads it where it is sent.",
        Form(
            "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n",
            re.compile(
                rf"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{_CARRIED}(?:\n{_CARRIED})*+"
                r"<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n?"
            ),
            "whole",
        ),
        drops=True,
    ),
    Rule(
        "openclaw_attempt",
        "text",
        "never",
        _SYSTEM,
        "the date under OpenClaw's `openclaw:attempt:DYNAMIC` marker",
        "It changes at midnight, near the end of a long system prompt; the model must know the date.",
        Form(
            "<!-- openclaw:attempt:DYNAMIC -->\n",
            re.compile(
                r"<!-- openclaw:attempt:DYNAMIC -->\n## Temporal Context\nCurrent date: [^\n]*+\nTime zone: [^\n]*+\n"
            ),
            "line_start",
            {"openclaw_attempt": re.compile(r"(?<=\nCurrent date: )[^\n]+")},
        ),
    ),
    Rule(
        "message_id",
        "field",
        "history",
        _SYSTEM | _USER,
        "`message_id` and `message_id_full` in the JSON of the inbound context and the conversation info",
        "New with every message; the ids of messages that were read are of no use.",
    ),
    Rule(
        "inbound_context",
        "text",
        "history",
        _SYSTEM,
        "the section `## Inbound Context (trusted metadata)` of the system prompt",
        "About the current message, in front of the whole history; sent in one request, left out of another.",
        Form(
            "## Inbound Context (trusted metadata)\n",
            re.compile(
                rf"## Inbound Context \(trusted metadata\)\n(?:[^`\n]*+\n){{0,6}}+{_JSON_FENCE}(?:\n|\Z)",
            ),
            "line_start",
            {"message_id": _MESSAGE_ID},
            is_omitted=True,
            is_json=True,
        ),
    ),
    _fence("conversation_info", "Conversation info", {"message_id": _MESSAGE_ID}),
    _fence("sender_info", "Sender", {}),
    Rule(
        "run_statistics",
        "line",
        "history",
        _USER,
        "duration and token counts in the `Stats: runtime ...` line of OpenClaw's report on a sub-agent",
        "They move while the run is reported; the model was told not to mention them.",
        Form(
            "Stats: runtime ",
            _STATISTICS,
            "last_line",
            {
                "run_statistics": re.compile(
                    rf"(?<=runtime )[0-9hms.]+|(?<=• tokens ){_TOKENS}|(?<=• prompt/cache ){_CACHED}"
                )
            },
            heading=_REPORT,
        ),
    ),
    Rule(
        "current_time",
        "line",
        "never",
        _SYSTEM | _USER,
        "what follows `Current time is` in its line",
        "A clock moves with every request, and the model must know the time.",
        Form(
            "Current time is",
            re.compile(r"Current time is[^\n<]*+"),
            "anywhere",
            {"current_time": re.compile(r"(?<=Current time is)[\s\S]+")},
        ),
    ),
    Rule(
        "claude_date",
        "line",
        "never",
        _SYSTEM,
        "the line `Today's date is <date>.` of a system message",
        "Claude Code's environment says so at its end; the model must know the date.",
        Form(
            "Today's date is ",
            re.compile(r"Today's date is [0-9]{4}-[0-9]{2}-[0-9]{2}\.\Z"),
            "line_start",
            {"claude_date": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")},
        ),
    ),
    Rule(
        "opencode_date",
        "line",
        "never",
        _SYSTEM,
        "the line `Today's date: <date>` in the environment of opencode's system prompt",
        "It stands before the project's instructions; the model must know the date.",
        Form(
            "  Today's date: ",
            re.compile(r"  Today's date: [A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9]{4}\Z"),
            "line_start",
            {"opencode_date": re.compile(r"(?<=: )[\s\S]+")},
        ),
    ),
)
