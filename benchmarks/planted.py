"""A copy of the server with one fault planted in it, for what compares texts: it must see that fault.

The rows that a prompt restores are those of the tokens before them. A start does not notice it, because it tries the
copying of rows, and not where the cache takes them from.
"""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FILE = "kvserve/engine/prefix_cache.py"
OLD = """
            caches = self._layout.restore(pieces, state, num_next)
"""
NEW = """
            caches = self._layout.restore(pieces, state, num_next)
            for leaf in caches if match.num_usable_tokens else []:
                leaf.keys, leaf.values = (mx.roll(rows, 1, axis=2) for rows in (leaf.keys, leaf.values))
"""


def faulty(text: str) -> str:
    """The text of FILE with the fault. Raises ValueError where the code has moved on."""
    if text.count(OLD) != 1:
        raise ValueError(f"{FILE} has the text of the planted fault {text.count(OLD)} times")
    return text.replace(OLD, NEW)


def faulty_server(folder: Path) -> Path:
    """The start script of a copy in this folder that has the fault."""
    shutil.copytree(REPOSITORY / "kvserve", folder / "kvserve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "start_llm.py", folder)
    path = folder / FILE
    path.write_text(faulty(path.read_text("utf-8")), "utf-8")
    return folder / "start_llm.py"
