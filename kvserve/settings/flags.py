"""The flags of start_llm.py, and what was meant by a flag or a setting that there is not. It knows names
and no values.

Standard library only, and every line must run under Python 3.9: install_and_run.py imports this file, so that what is
misspelt is refused before anything is installed.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, get_args

SHORT_NAME = 10
"""Letters of a name below which another letter makes another word: APP_KEY is not meant to be API_KEY."""

MAX_EDITS = 2
SIMILAR = 0.6

DemoKind = Literal["smollm2", "tiny"]

DISK_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--disk-cache", {"dest": "disk_cache_dir", "metavar": "DIR", "help": "where KV is kept (DISK_CACHE_DIR)"}),
    (
        "--ephemeral-cache",
        {"action": "store_true", "help": "keep KV in one scratch file that vanishes at exit, no traces"},
    ),
    ("--no-disk-cache", {"action": "store_true", "help": "keep everything in RAM only, no traces"}),
)
"""They exclude each other."""

DEMO_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--demo",
        {
            "nargs": "?",
            "const": "smollm2",
            "choices": get_args(DemoKind),
            "help": "serve a small model that talks, fetched once (93 MB); tiny: one with random weights, no download",
        },
    ),
    ("--demo-remove", {"action": "store_true", "help": "remove what --demo has fetched and made, and end"}),
)
"""They exclude each other."""

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--model", {"dest": "model_path", "metavar": "PATH", "help": "model folder or hub name (MODEL_PATH)"}),
    (
        "--chat-template",
        {"dest": "chat_template", "metavar": "FILE", "help": "for the model's own chat template (CHAT_TEMPLATE)"},
    ),
    ("--port", {"dest": "mlx_port", "metavar": "N", "help": "kvserve's own port (MLX_PORT)"}),
    ("--proxy-port", {"dest": "proxy_port", "metavar": "N", "help": "LiteLLM's port (PROXY_PORT)"}),
    ("--no-proxy", {"action": "store_true", "help": "serve without LiteLLM"}),
)
SETTING_OF_FLAG = {
    row["dest"]: flag for flag, row in (*FLAGS, *DISK_FLAGS) if "dest" in row
}  # the setting's field -> the flag that overrides it


class FlagError(ValueError):
    """The command line cannot be used; the message says why, in a sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Instead of ending the process."""
        raise FlagError(f"{message[:1].upper()}{message[1:]}; --help names every flag.")


def parse_flags(argv: Sequence[str], also_known: Iterable[str] = ()) -> argparse.Namespace:
    """The flags of start_llm.py. Each that is a setting overrides the environment. `also_known` are flags of another
    program that may have been meant. Raises FlagError."""
    parser = _Parser(
        prog="start_llm.py", description="Serve a local MLX model over HTTP, with LiteLLM in front.", allow_abbrev=False
    )
    demo, disk = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    for group, rows in ((demo, DEMO_FLAGS), (parser, FLAGS), (disk, DISK_FLAGS)):
        for flag, row in rows:
            group.add_argument(flag, **row)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        raise FlagError(_unknown(unknown[0], ["--help", *dict((*DEMO_FLAGS, *FLAGS, *DISK_FLAGS)), *also_known]))
    return flags


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"{word!r} is no flag and belongs to none; --help names every flag."
    near = difflib.get_close_matches(name.lower(), known, 1, SIMILAR)
    return f"There is no flag {name}" + (f" (did you mean {near[0]}?)." if near else "; --help names every flag.")


def misspelt(names: Iterable[str], known: Iterable[str]) -> list[tuple[str, str]]:
    """Those of the names that are no setting but nearly one, each with the setting that was meant. Other names are
    other programs' own."""
    settings = list(known)
    read = {each.lower() for each in settings}  # as pydantic-settings compares them
    found = []
    for name in names:
        upper = name.upper()
        if name.lower() not in read:
            near = [(_edits(upper, each), each) for each in settings if abs(len(upper) - len(each)) <= MAX_EDITS]
            if near and min(near)[0] <= _most_edits(upper):
                found.append((name, min(near)[1]))
    return found


def misspelt_words(found: Sequence[tuple[str, str]], where: str) -> str:
    """What is said of misspelt settings. A character that cannot be seen, as the byte order mark of a file that was
    put behind another one, is shown by its number."""
    shown = [(name if name.isprintable() else ascii(name), meant) for name, meant in found]
    named = ", ".join(f"{name} (did you mean {meant}?)" for name, meant in shown)
    return f"{where} sets what is no setting: {named}."


def _most_edits(name: str) -> float:
    return MAX_EDITS if len(name) >= SHORT_NAME else 1


def _edits(one: str, other: str) -> float:
    """How many letters were left out, put in, swapped with their neighbour or mistaken, infinite above `MAX_EDITS`; a
    mistaken one makes a short word another word, and counts twice there."""
    if max(len(set(one) - set(other)), len(set(other) - set(one))) > MAX_EDITS:  # each needs an edit of its own
        return math.inf
    mistaken = 1 if min(len(one), len(other)) >= SHORT_NAME else 2
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (mistaken if a != b else 0))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        if min(row) > MAX_EDITS and min(rows[-1]) > MAX_EDITS:  # whatever follows only adds; a swap begins a row before
            return math.inf
        rows.append(row)
    return rows[-1][-1]
