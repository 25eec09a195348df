"""Another version of the package beside this one: a copy that names itself otherwise and, where that is wanted, keeps
KV on disk in a form that this one does not read. Its start script runs it as a person's upgraded installation."""

import shutil
from pathlib import Path

from tests.e2e.servers import ROOT, START_SCRIPT

VERSION_FILE = Path("kvserve/__init__.py")
FORMAT_FILE = Path("kvserve/cache/disk_blob.py")


def other_version(folder: Path, version: str, blob_format: str | None = None) -> Path:
    """Make it in `folder`; returns its start script."""
    shutil.copytree(ROOT / "kvserve", folder / "kvserve", ignore=shutil.ignore_patterns("__pycache__"))
    script = Path(shutil.copy(START_SCRIPT, folder / START_SCRIPT.name))
    _rewrite(folder / VERSION_FILE, "__version__ = ", version)
    if blob_format is not None:
        _rewrite(folder / FORMAT_FILE, "FORMAT = ", blob_format)
    return script


def _rewrite(file: Path, begins: str, value: str) -> None:
    """Another value in the one line that begins so."""
    lines = file.read_text("utf-8").splitlines()
    [place] = [number for number, line in enumerate(lines) if line.startswith(begins)]
    lines[place] = f'{begins}"{value}"'
    file.write_text("\n".join(lines) + "\n", "utf-8")
