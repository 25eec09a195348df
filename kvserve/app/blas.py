"""A fast BLAS for MLX's wheel on Linux, which brings the reference one: looked for, tried and preloaded before MLX is.

    setting -> files -> a trial in a process of its own -> this process again, with the library preloaded -> put back

It knows libraries and processes, no models. A library is preloaded by the loader (LD_PRELOAD) before any code runs, so
the process executes itself once more, in place. What that needs in the environment is taken out again before anything
else is started. `start.py` calls it before it imports anything that is slow.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvserve.errors import SettingError, StartupError
from kvserve.settings.blas_files import computes_on_gpu, how_to_install, library_files
from kvserve.settings.env_file import read_text
from kvserve.settings.flags import SETTING_OF_FLAG, FlagError, parse_flags
from kvserve.settings.start_checks import known_settings

SENTINEL = "KVSERVE_BLAS_PRELOADED"
"""In the environment of the process that was executed again, and of nothing else: what is to be put back."""

BEGAN_AT = time.monotonic()
"""When this module was imported: nothing that is slow is before it."""

KERNEL_VARIABLES = re.compile(r"(MLX|OPENBLAS|BLIS|MKL|CUDA|CUBLAS|CUDNN|NVIDIA)_.*")
"""In the environment: they choose kernels, or how operations are put together."""

TRIAL = Path(__file__).with_name("blas_trial.py")
TRIAL_SECONDS = 20.0
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Blas:
    """A BLAS that this process has preloaded: its name with its version, and its file."""

    name: str
    path: str

    @property
    def build(self) -> str:
        """Tells it from another one of the same name: what a machine computes with it may differ."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            return f"{self.name} {self.path} {found.st_size} {found.st_mtime_ns}"
        return f"{self.name} {self.path}"


@dataclass(frozen=True, slots=True)
class Preloading:
    """What the search for a fast BLAS left to be told: `refused` where the one that was asked for cannot be had.
    `began_at`: when this program was started, before it was executed again (`time.monotonic`)."""

    warnings: tuple[str, ...] = ()
    refused: SettingError | None = None
    began_at: float = field(default=BEGAN_AT, compare=False)


# --- before anything else ---------------------------------------------------------------------------------------------


def preload_blas(
    argv: Sequence[str], environ: MutableMapping[str, str], env_file: Path = Path(".env"), trial: Path = TRIAL
) -> Preloading:
    """Find a fast BLAS and become this program again with it, or return what is to be told. The second time the
    environment is put back as it was found."""
    if sys.platform != "linux":
        return Preloading()
    if (left := environ.pop(SENTINEL, None)) is not None:
        return _arrived(left, environ)
    if {"-h", "--help"}.intersection(argv):
        return Preloading()
    try:
        setting = _setting(argv, environ, env_file)
    except (StartupError, FlagError):  # `main` reads the same again and says so
        return Preloading()
    if setting is None:
        return Preloading(("BLAS_LIBRARY is not read from a .env that is a pipe: it counts in the environment.",))
    if setting == "auto" and (active_blas() is not None or computes_on_gpu(Path(sys.prefix))):
        return Preloading()  # whoever started the process has preloaded one, or none is needed
    return _tried(setting, environ, trial)


def _setting(argv: Sequence[str], environ: Mapping[str, str], env_file: Path) -> str | Path | None:
    """BLAS_LIBRARY, None where only a pipe knows it, which can be read once. Raises StartupError for any setting that
    cannot be used, FlagError for such a flag."""
    flags = parse_flags(argv)
    from_flags = {name: value for name in SETTING_OF_FLAG if (value := getattr(flags, name)) is not None}
    text = read_text(env_file)
    known = known_settings(from_flags, environ, text)
    if "blas_library" in known:
        found: str | Path = known["blas_library"]
        return found
    if text is None:
        return None
    from kvserve.config import load_launch  # python-dotenv knows what stands there; it takes a fifth of a second

    return load_launch(argv, env_file=env_file).settings.blas_library


def _tried(setting: str | Path, environ: Mapping[str, str], trial: Path) -> Preloading:
    """Become this program again with the first library that passes its trial. Returns only where there is none."""
    warnings: list[str] = []
    for path in library_files(setting, Path(sys.prefix)):
        fault = fault_of(path, environ, trial)
        if fault is None:
            fault = _restart(path, environ, warnings)
        if setting != "auto":
            return Preloading(
                refused=SettingError("BLAS_LIBRARY", str(path), f"auto, off or a BLAS that works ({fault})")
            )
        warnings.append(f"{path} is not used: {fault}.")
    if setting == "auto":
        install = how_to_install(platform.machine(), f"{sys.executable} -m pip")
        warnings.append(
            f"MLX multiplies with the slow BLAS of its wheel, which matters for models in float32. Faster: {install}. "
            "BLAS_LIBRARY=off says no more of it."
        )
    return Preloading(tuple(warnings))


# --- the trial --------------------------------------------------------------------------------------------------------


def fault_of(path: Path, environ: Mapping[str, str], trial: Path = TRIAL, seconds: float = TRIAL_SECONDS) -> str | None:
    """What is wrong with a library, found out by a process of its own: one whose dependency is missing ends Python in
    the loader, before any code. None where its products are right."""
    if re.search(r"[\s:]", str(path)):
        return "LD_PRELOAD takes no path with a space or a colon"
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(trial)],
            env={**environ, **preloading(path, environ)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its trial had no end within {seconds:g} s"
    if tried.returncode < 0:
        return f"its trial was ended by {signal.Signals(-tried.returncode).name}"
    if tried.returncode == 0:
        return None
    last_line = (tried.stderr.strip().splitlines() or [f"its trial ended with {tried.returncode}"])[-1]
    return last_line.rpartition("error while loading shared libraries: ")[2]


def preloading(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that preload a library, before those that are preloaded already, and tell it how many cores to use.
    What is set by hand stays."""
    before = environ.get("LD_PRELOAD")
    num_cores = str(usable_cores())
    defaults = {
        "OPENBLAS_NUM_THREADS": environ.get("OMP_NUM_THREADS", num_cores),
        "BLIS_NUM_THREADS": environ.get("OMP_NUM_THREADS", num_cores),
        "MKL_THREADING_LAYER": "SEQUENTIAL",  # its threads are Intel's OpenMP, which `pip install --no-deps` leaves out
    }
    wanted = {name: value for name, value in defaults.items() if name not in environ}
    return {**wanted, "LD_PRELOAD": f"{path}:{before}" if before else str(path)}


def usable_cores(cgroup: Path = CGROUP) -> int:
    """How many cores this process may use at once: a container on a big machine often may use a few, and a thread for
    each of the others would only wait for its turn."""
    num_cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, version 1
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such file; `max` where there is no limit
            quota, period = map(int, " ".join((cgroup / name).read_text("ascii") for name in names).split())
            num_cores = min(num_cores, max(1, quota // period)) if quota > 0 else num_cores
    return num_cores


# --- there and back ---------------------------------------------------------------------------------------------------


def _restart(path: Path, environ: Mapping[str, str], warnings: Sequence[str]) -> str:
    """Become the same program with the same arguments in the same process, with the library preloaded; returns only
    where that cannot be, with the reason."""
    added = preloading(path, environ)
    before = {name: environ.get(name) for name in added}
    left = {"path": str(path), "before": before, "warnings": list(warnings), "began_at": BEGAN_AT}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **added, SENTINEL: json.dumps(left)}
        )
    except OSError as error:
        return f"Python could not be executed again: {error.strerror}"


def _arrived(left: str, environ: MutableMapping[str, str]) -> Preloading:
    """Put the environment back, so that nothing that is started from here inherits the library."""
    try:
        facts = json.loads(left)
        path, before, warnings = str(facts["path"]), dict(facts["before"]), tuple(map(str, facts["warnings"]))
        began_at = float(facts["began_at"])
    except (ValueError, TypeError, KeyError):
        return Preloading((f"{SENTINEL} is set in the environment, so no BLAS was looked for.",))
    _use_once()
    for name, value in before.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    if active_blas() is None:
        warnings = (*warnings, f"{path} passed its trial and was not preloaded all the same.")
    return Preloading(warnings, began_at=began_at)


def _use_once() -> None:
    """MKL and BLIS read their variables at the first call."""
    blas, one = ctypes.CDLL(None), ctypes.c_float * 1
    if hasattr(blas, "cblas_sgemm"):
        ones = ctypes.c_float(1.0), one(1.0), 1, one(1.0), 1, ctypes.c_float(0.0), one(), 1
        blas.cblas_sgemm(101, 111, 111, 1, 1, 1, *ones)


# --- what is there ----------------------------------------------------------------------------------------------------


class _FunctionPlace(ctypes.Structure):
    """What `dladdr` says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def active_blas() -> Blas | None:
    """The BLAS that stands before the wheel's in this process, None where that one is used. The process itself is
    looked at, so one that was preloaded by hand is found too."""
    if sys.platform != "linux":
        return None
    process = ctypes.CDLL(None)
    if not hasattr(process, "cblas_sgemm"):
        return None
    place = _FunctionPlace()
    process.dladdr(ctypes.cast(process.cblas_sgemm, ctypes.c_void_p), ctypes.byref(place))
    path = os.fsdecode(place.file or b"")
    return Blas(_name(process) or Path(path).name, path)


def what_computes(found: Blas | None, environ: Mapping[str, str]) -> str:
    """Tells this BLAS from others, none among them, and what chooses kernels, its own or MLX's, from other choices."""
    chosen = sorted([name, value] for name, value in environ.items() if KERNEL_VARIABLES.fullmatch(name))
    return json.dumps([found.build if found is not None else "", chosen])


def _name(process: ctypes.CDLL) -> str | None:
    """What the library calls itself, with its version, None for a kind that is not known here."""
    if hasattr(process, "openblas_get_config"):
        process.openblas_get_config.restype = ctypes.c_char_p
        return " ".join(process.openblas_get_config().decode("ascii", "replace").split()[:2])
    if hasattr(process, "bli_info_get_version_str"):
        process.bli_info_get_version_str.restype = ctypes.c_char_p
        return f"BLIS {process.bli_info_get_version_str().decode('ascii', 'replace')}"
    if hasattr(process, "MKL_Get_Version_String"):
        told = ctypes.create_string_buffer(256)
        process.MKL_Get_Version_String(told, len(told))
        version = re.search(rb"Version ([\d.]+)", told.value)
        return f"MKL {version[1].decode('ascii')}" if version else "MKL"
    return None
