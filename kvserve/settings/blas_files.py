"""Where a fast BLAS may lie on a Linux machine, and what is said where there is none. It knows names of files and
folders and loads nothing.

Standard library only, and every line must run under Python 3.9: `start_checks.py` refuses a BLAS_LIBRARY that is not
there by it.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Union

from kvserve.errors import SettingError

LIBRARIES = (
    # Fedora's libopenblas.so.0 computes on one core, its libopenblasp on all.
    ("libopenblasp.so.0", "libopenblas.so.0", "libopenblaso.so.0", "libopenblas.so"),
    ("libblis-mt.so.4", "libblis.so.4", "libblis-mt.so.3", "libblis.so.3", "libblis-mt.so", "libblis.so"),
    ("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so.1", "libmkl_rt.so"),
)
"""OpenBLAS, BLIS and MKL, the best first: MKL is used on one core (see `app/blas.py`)."""

FOLDERS = (
    "usr/lib/*-linux-gnu/openblas-pthread",
    "usr/lib/*-linux-gnu/openblas-openmp",
    "usr/lib/*-linux-gnu/blis-pthread",
    "usr/lib/*-linux-gnu/blis-openmp",
    "usr/lib/*-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib64",
    "usr/local/lib",
    "opt/OpenBLAS/lib",
    "opt/intel/oneapi/mkl/latest/lib",
    "opt/intel/oneapi/mkl/latest/lib/intel64",
    "home/linuxbrew/.linuxbrew/opt/openblas/lib",
)
FOLDERS_OF_VENV = ("lib", "lib/python3.*/site-packages/*/lib")
"""`pip install mkl` puts its libraries into `lib`."""


def library_files(setting: Union[str, Path], venv: Path, root: Path = Path("/")) -> list[Path]:  # noqa: UP007
    """The files to try for BLAS_LIBRARY, the best first, each once, whatever links lead to it."""
    if setting == "off":
        return []
    if setting != "auto":
        return [Path(os.path.realpath(setting))] if os.path.isfile(setting) else []
    folders = [folder for pattern in FOLDERS_OF_VENV for folder in _folders(venv, pattern)]
    folders += [folder for pattern in FOLDERS for folder in _folders(root, pattern)]
    found: dict[str, Path] = {}
    for names in LIBRARIES:
        for folder in folders:
            for file in (folder / name for name in names):
                if file.is_file():
                    found.setdefault(os.path.realpath(file), file)
    return list(map(Path, found))


def computes_on_gpu(venv: Path) -> bool:
    """Whether MLX is installed for CUDA: then no BLAS of the CPU has anything to do."""
    return any(_folders(venv, "lib/python3.*/site-packages/mlx_cuda*.dist-info"))


def _folders(base: Path, pattern: str) -> Iterator[Path]:
    yield from map(Path, sorted(glob.glob(os.path.join(glob.escape(str(base)), pattern))))


def refuse_absent_library(setting: Union[str, Path]) -> None:  # noqa: UP007
    """Raises SettingError where BLAS_LIBRARY names a file that is not there."""
    if isinstance(setting, Path) and not setting.is_file():
        raise SettingError("BLAS_LIBRARY", str(setting), "auto, off or a library file that is there")


def how_to_install(machine: str, pip: str) -> str:
    """The command that installs a fast BLAS here; `pip` is how the server's own pip is called."""
    commands = []
    if shutil.which("apt-get"):
        commands.append("`sudo apt-get install libopenblas0-pthread`")
    if machine == "x86_64":
        commands.append(f"without root `{pip} install --no-deps mkl` (221 MB)")
    return " or ".join(commands) or "your system's package of OpenBLAS"
