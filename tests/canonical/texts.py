"""Spans as the clients send them, to build messages from: each has a meaning and a volatile part of its own."""

from collections.abc import Callable

AIDER = """

# *SEARCH/REPLACE block* Rules:

Every *SEARCH/REPLACE block* must use this format:
1. The *FULL* file path alone on a line.
2. The opening fence and code language, eg: ```python
3. The start of search block: <<<<<<< SEARCH
4. A contiguous chunk of lines
5. The dividing line: =======
6. The lines to replace
7. The end of the replace block: >>>>>>> REPLACE
8. The closing fence: ```

Use {meaning}.
ONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!
"""

REPORT = 'A background task "research" just completed successfully.'
"""The first line of a report on a sub-agent's run; without it a line of statistics is anybody's text."""

type Render = Callable[[str, str], str]
"""(meaning, volatile) -> text; both are digits or lower-case words."""

LEADING: dict[str, Render] = {
    "system_reminder": lambda m, v: f"<system-reminder>\nThe list {m} is empty.\n</system-reminder>\n",
    "project_instructions": lambda m, v: (
        f"<system-reminder>\nContents of /p/{m}.md (project instructions):\n\nBe {m}.\n</system-reminder>\n\n"
    ),
    "conversation_info": lambda m, v: (
        'Conversation info (untrusted metadata):\n```json\n{\n  "message_id": "'
        + v
        + '",\n  "sender": "'
        + m
        + '"\n}\n```\n\n'
    ),
    "sender_info": lambda m, v: f'Sender (untrusted metadata):\n```json\n{{\n  "name": "{m}"\n}}\n```\n\n',
}
LINES: dict[str, Render] = {
    # only the last one of a text counts, and only below REPORT
    "run_statistics": lambda m, v: f"Stats: runtime 1m{len(v)}s • tokens {sum(map(ord, v))}k • sessionKey {m}",
    "current_time": lambda m, v: f"Current time is {m} {v}",
}
TRAILING: dict[str, Render] = {"aider_reminder": lambda m, v: AIDER.format(meaning=m)}

HAS_VOLATILE = {"conversation_info", "run_statistics"}
"""Those whose `v` may move without a change of meaning. All of a clock is volatile, and is sent fresh."""
