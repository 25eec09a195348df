"""A fast BLAS is found, tried, preloaded once, named, and leaves nothing in the environment; one that does not work is
refused with its reason."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvserve.app.server
from kvserve.app import blas
from kvserve.app.blas import (
    SENTINEL,
    Blas,
    Preloading,
    active_blas,
    fault_of,
    preload_blas,
    usable_cores,
    what_computes,
)
from kvserve.app.catalogue import ModelSource
from kvserve.app.process import main
from kvserve.errors import SettingError
from kvserve.prompt.tokenizer import load_tokenizer
from kvserve.settings.blas_files import how_to_install, library_files, refuse_absent_library
from kvserve.settings.kinds import KINDS
from tests.app.fake_blas import fake_blas
from tests.e2e.servers import ROOT, serving, wait_until
from tests.models import tiny_model
from tests.serving import unstarted_app

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux' wheel brings a BLAS of its own")

SECONDS = 100.0
"""Far more than anything here takes."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_blas(tmp_path_factory.mktemp("blas"))


def passing(folder: Path) -> Path:
    """A trial that finds nothing wrong."""
    trial = folder / "passing.py"
    trial.write_text("", "utf-8")
    return trial


# --- the setting and the search ---------------------------------------------------------------------------------------


def test_a_setting_is_a_word_or_a_file(tmp_path: Path) -> None:
    """In any case of letters; a file must be there when the server starts."""
    read = KINDS["blas_library"].read
    assert [read(word) for word in ("auto", " AUTO ", "Off")] == ["auto", "auto", "off"]
    assert read("~/libblas.so") == Path.home() / "libblas.so"
    for word in ("", "a\0b", "~nosuchuser/x"):
        with pytest.raises(ValueError):  # readers say nothing, their kind does
            read(word)
    there = tmp_path / "lib.so"
    there.touch()
    for setting in ("auto", "off", there):
        refuse_absent_library(setting)
    for absent in (tmp_path, tmp_path / "gone.so", Path("on")):
        with pytest.raises(SettingError, match=r"BLAS_LIBRARY=.*auto, off or a library file that is there"):
            refuse_absent_library(absent)


def test_a_file_that_is_not_there_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the start itself, in one line; what looks for it before says nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLAS_LIBRARY", "gone.so")
    assert preload_blas(["--demo"], os.environ) == Preloading()
    assert main(["--demo", "--no-proxy", "--no-disk-cache", "--port=0"]) == 1
    assert "error: BLAS_LIBRARY='gone.so' cannot be used" in capsys.readouterr().err


def test_the_best_library_comes_first(tmp_path: Path) -> None:
    """OpenBLAS before BLIS before MKL, wherever they lie; the virtual environment is looked through too, and a file to
    which several links lead is tried once."""
    root, venv = tmp_path / "root", tmp_path / "venv [1]"
    debian = root / "usr/lib/x86_64-linux-gnu"
    files = [
        debian / "openblas-pthread/libopenblasp-r0.3.21.so",
        root / "usr/lib64/libopenblas.so.0",
        debian / "blis-pthread/libblis.so.4",
        venv / "lib/libmkl_rt.so.3",
        venv / "lib/python3.12/site-packages/mkl/lib/libmkl_rt.so.2",
        root / "opt/intel/oneapi/mkl/latest/lib/libmkl_rt.so.2",
    ]
    for file in [*files, debian / "libblas.so.3", debian / "libopenblas64.so.0"]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for link in (files[0].with_name("libopenblas.so.0"), debian / "libopenblas.so.0"):
        link.symlink_to(files[0])
    assert library_files("auto", venv, root) == files
    assert library_files("off", venv, root) == []
    assert library_files(debian / "libopenblas.so.0", venv, root) == files[:1]
    assert library_files(debian / "gone.so", venv, root) == []  # the start says so
    assert library_files("auto", tmp_path / "none", tmp_path / "none") == []


def test_what_installs_one_is_said_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command for whoever is root, one for everybody where there are wheels; `off` wants to hear of none."""
    monkeypatch.setattr(blas, "library_files", lambda setting, venv: [])
    found = preload_blas([], {}, tmp_path / ".env")
    assert found.refused is None and len(found.warnings) == 1
    assert "slow BLAS" in found.warnings[0] and "BLAS_LIBRARY=off" in found.warnings[0]
    overridden = {"MLX_PORT": "none"}  # a flag says otherwise
    assert preload_blas(["--port=0"], overridden, tmp_path / ".env") == found
    assert preload_blas([], {"BLAS_LIBRARY": "off"}, tmp_path / ".env") == Preloading()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert how_to_install("x86_64", "PIP") == "without root `PIP install --no-deps mkl` (221 MB)"
    assert how_to_install("aarch64", "PIP") == "your system's package of OpenBLAS"
    (tmp_path / "apt-get").write_text("")
    (tmp_path / "apt-get").chmod(0o700)
    assert how_to_install("aarch64", "PIP") == "`sudo apt-get install libopenblas0-pthread`"


# --- the trial --------------------------------------------------------------------------------------------------------


def test_a_library_that_works_passes_its_trial(library: Path) -> None:
    assert fault_of(library, {}) is None


@pytest.mark.parametrize(
    ("fault", "said", "seconds"),
    [
        ("crashes", "its trial was ended by SIGABRT", SECONDS),
        ("hangs", "its trial had no end within 0.2 s", 0.2),
        ("errs", "a product of 33 x 130 by 130 x 70 was wrong", SECONDS),
        ("reads", "a product of 1 x 64 by 64 x 48 was wrong", SECONDS),
    ],
)
def test_a_library_with_a_fault_is_refused_with_its_reason(
    library: Path, fault: str, said: str, seconds: float
) -> None:
    """One wrong number of the biggest product is enough; what a result is written over counts for nothing."""
    assert fault_of(library, {"FAKE_BLAS": fault}, seconds=seconds) == said


def test_a_library_whose_dependency_is_missing_is_refused(tmp_path: Path) -> None:
    """It ends Python in the loader, before any code: only another process can find that out."""
    needed = tmp_path / "needed"
    needed.mkdir()
    other = fake_blas(needed).rename(needed / "libfortran.so")
    broken = fake_blas(tmp_path, other)
    other.unlink()
    assert "libfortran.so: cannot open shared object file" in str(fault_of(broken, {}))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    """A file of another kind, and a path that the loader would take for two."""
    text = tmp_path / "libopenblas.so.0"
    text.write_text("no library", "utf-8")
    assert fault_of(text, {}) == "it was not loaded, or has no cblas_sgemm"
    assert "a space or a colon" in str(fault_of(tmp_path / "a b.so", {}))


def test_one_that_is_refused_is_told_and_the_next_one_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason comes along to the process that has the next one; with one that was asked for by name there is no next
    one, and no start."""
    bad, good = tmp_path / "bad.so", tmp_path / "good.so"
    for file in (bad, good):
        file.touch()
    monkeypatch.setattr(blas, "library_files", lambda setting, venv: [bad, good] if setting == "auto" else [setting])
    monkeypatch.setattr(blas, "fault_of", lambda path, environ, trial: "it is bad" if path == bad else None)
    restarts = restarts_of(monkeypatch)
    with pytest.raises(Restarted):
        preload_blas([], {}, tmp_path / ".env")
    left = json.loads(restarts[0][SENTINEL])
    assert (left["path"], left["warnings"]) == (str(good), [f"{bad} is not used: it is bad."])
    assert left["began_at"] == Preloading().began_at <= time.monotonic()
    found = preload_blas([], {"BLAS_LIBRARY": str(bad)}, tmp_path / ".env")
    assert "it is bad" in str(found.refused) and len(restarts) == 1
    monkeypatch.setattr(os, "execve", too_long)
    assert (
        preload_blas([], {}, tmp_path / ".env")
        .warnings[1]
        .startswith(f"{good} is not used: Python could not be executed again: Argument list too long")
    )


def test_a_start_with_a_library_that_was_refused_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why in one line and returns 1."""
    monkeypatch.chdir(tmp_path)
    refused = SettingError("BLAS_LIBRARY", "x.so", "auto, off or a BLAS that works (it is bad)")
    assert main(["--demo", "--no-proxy", "--no-disk-cache", "--port=0"], Preloading(refused=refused)) == 1
    assert "error: BLAS_LIBRARY='x.so' cannot be used" in capsys.readouterr().err


# --- the start over again ---------------------------------------------------------------------------------------------


class Restarted(Exception):
    """Stands for the end of a process that became another program."""


def too_long(*_: object) -> None:
    raise OSError(errno.E2BIG, "Argument list too long")


def restarts_of(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments with which this process would have been executed again."""
    found: list[dict[str, str]] = []

    def execve(path: str, arguments: list[str], environ: dict[str, str]) -> None:
        assert (path, arguments) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
        found.append(environ)
        raise Restarted

    monkeypatch.setattr(os, "execve", execve)
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/h"},
        {"LD_PRELOAD": "/x/libjemalloc.so", "OPENBLAS_NUM_THREADS": "3", "MKL_THREADING_LAYER": "TBB"},
        {"OMP_NUM_THREADS": "2", "LD_PRELOAD": ""},
    ],
)
def test_the_environment_comes_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    """What was set by hand holds meanwhile: another library that is preloaded, numbers of threads. When the first start
    began comes along."""
    library = tmp_path / "blas.so"
    library.touch()
    given = {**environ, "BLAS_LIBRARY": str(library)}
    restarts = restarts_of(monkeypatch)
    with pytest.raises(Restarted):
        preload_blas([], dict(given), tmp_path / ".env", passing(tmp_path))
    meanwhile = restarts[0]
    assert meanwhile["LD_PRELOAD"].split(":") == [str(library), *filter(None, [environ.get("LD_PRELOAD")])]
    assert {name: meanwhile[name] for name in environ if name != "LD_PRELOAD"}.items() <= environ.items()
    cores = environ.get("OMP_NUM_THREADS", str(usable_cores()))
    assert meanwhile["OPENBLAS_NUM_THREADS"] == environ.get("OPENBLAS_NUM_THREADS", cores)
    assert meanwhile["BLIS_NUM_THREADS"] == cores
    assert meanwhile["MKL_THREADING_LAYER"] == environ.get("MKL_THREADING_LAYER", "SEQUENTIAL")
    meanwhile[SENTINEL] = json.dumps({**json.loads(meanwhile[SENTINEL]), "began_at": 12.5})
    told = preload_blas([], meanwhile, tmp_path / ".env")
    assert meanwhile == given and len(restarts) == 1 and told.began_at == 12.5
    assert told.warnings == (f"{library} passed its trial and was not preloaded all the same.",)


def test_a_sentinel_of_somebody_else_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there, the process is not executed once more, and it says so."""
    restarts = restarts_of(monkeypatch)
    for text in ("1", "", "{}", '{"path": 1, "before": 2, "warnings": 3}'):
        environ = {SENTINEL: text, "BLAS_LIBRARY": "auto"}
        assert [SENTINEL in warning for warning in preload_blas([], environ).warnings] == [True]
        assert SENTINEL not in environ
    assert restarts == []


def test_nothing_is_looked_for_where_nothing_will_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, a setting or flag that the start refuses, a `.env` that can be read once, another system, MLX for CUDA, a
    BLAS that is there."""
    monkeypatch.setattr(blas, "library_files", lambda setting, venv: pytest.fail("it was looked for"))
    assert preload_blas(["--help"], {}, tmp_path / ".env") == Preloading()
    assert preload_blas([], {"MLX_PORT": "x"}, tmp_path / ".env") == Preloading()
    assert preload_blas(["--misspelt"], {}, tmp_path / ".env") == Preloading()
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in preload_blas([], {}, tmp_path / "pipe").warnings[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert preload_blas([], {}, tmp_path / ".env") == Preloading()
        assert active_blas() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "prefix", str(tmp_path))
        (tmp_path / "lib/python3.12/site-packages/mlx_cuda_13-0.32.4.dist-info").mkdir(parents=True)
        assert preload_blas([], {}, tmp_path / ".env") == Preloading()
    monkeypatch.setattr(blas, "active_blas", lambda: Blas("mine", "/x"))
    assert preload_blas([], {}, tmp_path / ".env") == Preloading()


def test_the_file_env_is_read_as_the_start_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only python-dotenv knows what stands in it."""
    asked: list[object] = []
    monkeypatch.setattr(blas, "library_files", lambda setting, venv: asked.append(setting) or [])
    monkeypatch.setenv("BLAS_LIBRARY", "")
    library = tmp_path / "blas.so"
    library.touch()
    for text in (f"BLAS_LIBRARY={library}\n", f'A="{tmp_path}"\nBLAS_LIBRARY="${{A}}/blas.so"\n', "BLAS_LIBRARY=\n"):
        (tmp_path / ".env").write_text(text, "utf-8")
        preload_blas([], {}, tmp_path / ".env")
    assert asked == [library, library, "auto"]


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "1600000 100000\n"}, 8),
    ],
)
def test_a_container_is_given_as_many_threads_as_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], num_cores: int
) -> None:
    """On a machine of eight cores: the quota counts where it is smaller, and there is always one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "ascii")
    assert usable_cores(tmp_path) == num_cores


PROGRAM = """
import ctypes, json, os, signal, subprocess, sys
with open(os.environ["STARTS"], "a") as starts:
    starts.write("x")
from kvserve.app.blas import active_blas, preload_blas
told = preload_blas(sys.argv[1:], os.environ)
LOOK = "import ctypes, json, os; print(json.dumps([dict(os.environ), hasattr(ctypes.CDLL(None), 'cblas_sgemm')]))"
child = subprocess.run([sys.executable, "-S", "-c", LOOK], capture_output=True, check=True)
blas = active_blas()
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv, "stdin": sys.stdin.read(), "warnings": told.warnings,
    "blas": blas and [blas.name, blas.path], "is_deaf": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    "utf8": sys.flags.utf8_mode, "mlx": "mlx.core" in sys.modules, "child": json.loads(child.stdout),
}))
sys.exit(7)
"""


def test_the_process_is_the_same_with_the_library_and_hands_nothing_on(library: Path, tmp_path: Path) -> None:
    """Executed once more, in place: process id, arguments, flags of Python, what stands on its input, ignored signals
    and the exit code are those of one start, and what it starts itself is as if there had been no library."""
    program, starts = tmp_path / "program.py", tmp_path / "starts"
    program.write_text(PROGRAM, "utf-8")
    own = {"PYTHONPATH": str(ROOT), "STARTS": str(starts), "BLAS_LIBRARY": str(library), "PATH": os.environ["PATH"]}
    arguments = ["--disk-cache", "a b", "--port=1", "--model", "ü"]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with subprocess.Popen(
        [*shell, sys.executable, "-X", "utf8", str(program), *arguments],
        **{"cwd": tmp_path, "env": own, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
    ) as process:
        out, _ = process.communicate("said", SECONDS)
    told: dict[str, Any] = json.loads(out)
    environ, has_library = told.pop("child")
    assert process.returncode == 7 and starts.read_text() == "xx"
    assert told == {
        **{"pid": process.pid, "argv": [str(program), *arguments], "stdin": "said", "warnings": []},
        **{"blas": ["OpenBLAS 9.8.7", str(library)], "is_deaf": True, "utf8": 1, "mlx": False},
    }
    assert not has_library and {name: environ.get(name) for name in own} == own
    assert not {SENTINEL, "LD_PRELOAD", *blas.preloading(library, {})} & environ.keys()


# --- what is told -----------------------------------------------------------------------------------------------------


def test_health_and_banner_name_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its version; without one they say nothing of it. An engine is told which file it is: what was found out of a
    model with another one does not count."""
    with unstarted_app(tmp_path / "none") as under_test:
        assert under_test.app.health()[1]["blas"] is None
    monkeypatch.setattr(kvserve.app.server, "active_blas", lambda: Blas("OpenBLAS 9.8.7", "/x/libopenblas.so.0"))
    with unstarted_app(tmp_path / "one") as under_test:
        assert under_test.app.health()[1]["blas"] == "OpenBLAS 9.8.7"
        factory, folder = under_test.app._pool._factory, tiny_model("qwen3")
        factory.described[folder] = {}
        engine = factory._new_engine(ModelSource("model", folder), load_tokenizer(folder))
        found, environ = under_test.app._blas, under_test.app._launch.environment
        assert engine._settings.blas == what_computes(found, environ) != what_computes(None, environ)


@pytest.mark.long
def test_a_server_with_a_library_says_so_and_answers(library: Path, tmp_path: Path) -> None:
    """The real one, from its start script to its answer; its end is the one that it always has."""
    flags = (f"--model={tiny_model('qwen3')}", "--no-disk-cache")
    with serving(tmp_path, *flags, with_proxy=False, BLAS_LIBRARY=library) as server:
        server.wait_until_healthy()
        health = server.health()
        assert health is not None and health[1]["blas"] == "OpenBLAS 9.8.7"
        # The first screen is written right after the model can answer, so it may come a moment behind /health.
        line = f"  blas    OpenBLAS 9.8.7 ({library})"
        wait_until(lambda: line in server.screen.splitlines(), SECONDS, lambda: server.screen)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0
