"""The bootstrap, run for real on copies of it in temporary folders, with hand-made wheels and no network.

One set-up is made per session and copied; only the tests about interruption make a `.venv` of their own.
"""

import ast
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.laws import IS_FULL, sampled, sampled_cells
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "install_and_run.py"
SITE_PACKAGES = Path("lib/python3.12/site-packages")
SERVER_EXIT_CODE = 7
NUM_SLOW_MODULES = 600
SERVER = f"import json, sys\nprint('SERVER', json.dumps(sys.argv[1:]))\nsys.exit({SERVER_EXIT_CODE})\n"
FAKE_PYTEST = "import json, os, sys\nprint('PYTEST', json.dumps([os.getcwd(), *sys.argv[1:]]))\nsys.exit(3)\n"
OF_SERVER = tuple(
    f"kvserve/{name}.py"
    for name in (
        *("__init__", "errors", "settings/__init__", "settings/env_file", "settings/flags", "settings/kinds"),
        *("settings/backend_list", "settings/redis_address"),
        *("settings/blas_files", "settings/model_config", "settings/ports", "settings/rule_policies"),
        *("settings/rank_variables", "settings/start_checks"),
    )
)
"""What the bootstrap imports of the server before anything is installed."""
MENDING = "rm -rf .venv && python3 install_and_run.py"


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a py3-none-any wheel by hand, so that pip has something real to install without a network."""
    info = f"{name}-{version}.dist-info"
    # pip unpacks in this order; with the metadata first, a half-copied package looks installed to the next pip.
    contents = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@dataclass(frozen=True, slots=True)
class Checkout:
    """A copy of the bootstrap with its own requirement files, wheels, and log of every pip call."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / "kvserve-setup.json"

    @property
    def environ(self) -> dict[str, str]:
        pip = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.root / "wheels"),
            "PIP_LOG": str(self.root / "pip.log"),
            "PIP_EXTRA_INDEX_URL": "",
        }
        return {**os.environ, **pip}

    def start(self, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, "install_and_run.py", *arguments],
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, python=python)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def require(self, *lines: str) -> None:
        (self.root / "requirements.txt").write_text("".join(f"{line}\n" for line in lines))

    def num_pip_calls(self) -> int:
        log = self.root / "pip.log"
        return log.read_text().count("Looking in links:") if log.exists() else 0


def make_checkout(root: Path) -> Checkout:
    """A checkout that has never been set up and needs `alpha`, which has a foreign-looking library of its own."""
    wheels = root / "wheels"
    wheels.mkdir(parents=True)
    shutil.copy(SCRIPT, root)
    for module in OF_SERVER:
        (root / module).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / module, root / module)
    (root / "start_llm.py").write_text(SERVER)
    (root / "constraints.txt").write_text("")
    (root / "requirements-dev.txt").write_text("pytest==0.0.1\n")
    make_wheel(wheels, "alpha", "1.0", {"alpha/__init__.py": "", "alpha/_lib.cpython-39-x86_64-linux-gnu.so": "x"})
    make_wheel(wheels, "alpha", "2.0", {"alpha/__init__.py": ""})
    make_wheel(wheels, "pytest", "0.0.1", {"pytest/__init__.py": "", "pytest/__main__.py": FAKE_PYTEST})
    checkout = Checkout(root)
    checkout.require("alpha==1.0")
    return checkout


def bootstrap_of(checkout: Checkout) -> ModuleType:
    """The checkout's copy of the bootstrap, imported."""
    spec = importlib.util.spec_from_file_location("bootstrap_copy", checkout.root / "install_and_run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that a real run has set up."""
    checkout = make_checkout(tmp_path_factory.mktemp("finished") / "checkout")
    result = checkout.run("--setup-only")
    assert result.returncode == 0, result.stdout + result.stderr
    assert checkout.num_pip_calls() == 1
    (checkout.root / "pip.log").unlink()
    return checkout


@pytest.fixture
def finished(finished_once: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the finished checkout that the test may spoil, all but pip's own modules, which no set-up touches."""
    pip = next(finished_once.venv.glob("lib/*/site-packages/pip"))

    def all_but_pip(folder: str, names: list[str]) -> list[str]:
        return [pip.name] if Path(folder) == pip.parent else []

    shutil.copytree(finished_once.root, tmp_path / "copy", symlinks=True, ignore=all_but_pip)
    (tmp_path / "copy" / pip.relative_to(finished_once.root)).symlink_to(pip)
    return Checkout(tmp_path / "copy")


@pytest.fixture
def untouched(tmp_path: Path) -> Checkout:
    """A checkout that has never been set up."""
    return make_checkout(tmp_path / "fresh")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the path exists while the process still runs."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.005)


# --- starting the program ---


def test_flags_and_exit_code_pass_through(finished: Checkout) -> None:
    """Flags that are not the bootstrap's reach the server in order, and its exit status is the command's."""
    result = finished.run("--demo", "--port", "9", "--no-proxy")
    assert result.stdout == 'SERVER ["--demo", "--port", "9", "--no-proxy"]\n'
    assert result.returncode == SERVER_EXIT_CODE


def test_a_finished_set_up_is_recognised(finished: Checkout) -> None:
    """The second run calls no pip, says nothing of a set-up and costs less than a second of a processor."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = finished.run()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime < 1.0
    assert result.stdout == "SERVER []\n"
    assert finished.num_pip_calls() == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hlep"], "--help"),
        (["--demo", "--prot", "9"], "--port"),
        (["--setup-onyl"], "--setup-only"),
        (["--tset"], "--test"),
        (["--port", "abc"], "--port='abc'"),
    ],
)
def test_a_flag_that_nobody_knows_is_refused_before_anything_is_installed(
    tmp_path: Path, arguments: list[str], named: str
) -> None:
    """At once, naming the flag that was meant; no `.venv` is begun and no pip is called."""
    checkout = make_checkout(tmp_path / "fresh")
    result = checkout.run(*arguments)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("[kvserve] error: ") and named in result.stderr, result.stderr
    assert not checkout.venv.exists() and checkout.num_pip_calls() == 0
    assert list(checkout.root.rglob("__pycache__")) == []


UNUSABLE = [
    ("PROMPT_CACHE_MAX_BYTES", "abc", "AUTO or a positive size such as 8GB"),
    ("MLX_PORT", "99999", "a port, a whole number from 0 to 65535 (0 takes a free one)"),
    ("MODEL_FAMILY", "llama", "'auto', 'qwen3', 'glm4' or 'generic'"),
    ("DEFAULT_THINKING", "maybe", "a boolean, true or false"),
    ("IMAGE_HOSTS", "127.0.0.1", "host names by comma, such as images.example.com or cdn.example.com:8443"),
    ("DEFAULT_TOP_P", "2", "a number greater than 0 and less than or equal to 1"),
    ("CACHE_RULE_POLICIES", "cch", "rule=policy pairs, by comma"),
    ("MODEL_FOLDERS", "/nope", "folders that are there, by comma"),
]


@pytest.mark.parametrize("minor", ["3.9", "3.12"])
def test_a_value_that_cannot_be_used_is_refused_before_anything_is_installed(tmp_path: Path, minor: str) -> None:
    """From the environment, `.env` and a flag alike, under the oldest Python too."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"needs Python {minor} in pyenv")
    checkout = make_checkout(tmp_path / "fresh")
    for key, value, expected in UNUSABLE if IS_FULL else UNUSABLE[:2]:
        (checkout.root / ".env").write_text(f"OTHER=1\n{key} = '{value}' # a note\n")
        result = checkout.run("--demo", python=python)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr == f"[kvserve] error: {key}={value!r} cannot be used: expected {expected}.\n"
    (checkout.root / ".env").write_text("")
    result = checkout.run("--model", "./absent", python=python)
    assert result.returncode == 1 and "MODEL_PATH='./absent' is not a folder" in result.stderr
    assert not checkout.venv.exists() and checkout.num_pip_calls() == 0
    assert list(checkout.root.rglob("__pycache__")) == []


@pytest.mark.parametrize("flag", ["--port", "--proxy-port"])
def test_a_taken_port_is_told_before_anything_is_installed(tmp_path: Path, flag: str) -> None:
    """Of both servers; who holds it is left alone."""
    checkout = make_checkout(tmp_path / "fresh")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        other = f"--{'proxy-' if flag == '--port' else ''}port"
        result = checkout.run("--demo", "--no-disk-cache", f"{flag}={port}", f"{other}={free_port()}")
    assert result.returncode == 1 and result.stdout == ""
    assert f"Port {port} " in result.stderr and " is taken by " in result.stderr and "left alone" in result.stderr
    assert not checkout.venv.exists()


def test_what_only_a_start_needs_is_not_asked_of_a_set_up(finished: Checkout) -> None:
    """A set-up alone needs no port and no model; a set-up that is finished leaves the judgement to the start."""
    (finished.root / ".env").write_text("MODEL_PATH=./absent\n")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        arguments = "--no-disk-cache", f"--port={holder.getsockname()[1]}", f"--proxy-port={free_port()}"
        assert finished.run(*arguments).returncode == SERVER_EXIT_CODE
        finished.require("alpha==2.0")
        assert finished.run(*arguments).returncode == 1
        assert finished.run(*arguments, "--setup-only").returncode == 0
    assert (finished.venv / SITE_PACKAGES / "alpha-2.0.dist-info").is_dir()


def test_a_misspelt_setting_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    """By the names of the settings; of a file that cannot be read that is said, as by the start."""
    checkout = make_checkout(tmp_path / "fresh")
    (checkout.root / ".env").write_text("OTHER_PROGRAM=1\nMODLE_PATH=x\n")
    result = checkout.run("--demo")
    assert result.returncode == 1 and "MODLE_PATH (did you mean MODEL_PATH?)" in result.stderr
    assert "OTHER" not in result.stderr and not checkout.venv.exists()
    (checkout.root / ".env").write_bytes(b"MODLE_PATH=\xe9\n")
    result = checkout.run("--demo")
    assert result.returncode == 1 and "error: .env cannot be read: 'utf-8' codec" in result.stderr
    assert not checkout.venv.exists()


def test_a_line_of_a_quoted_text_is_no_setting(finished: Checkout) -> None:
    """What stands in a value of several lines is that value's own."""
    (finished.root / ".env").write_text("NOTES='first\nMODLE_PATH=x\n'\n")
    assert finished.run("--no-proxy").returncode == SERVER_EXIT_CODE


def test_the_exec_keeps_the_process(finished: Checkout) -> None:
    """The server replaces the bootstrap, so that a signal to the command reaches the server itself."""
    (finished.root / "start_llm.py").write_text("import os\nprint(os.getpid())\n")
    process = finished.start()
    out, _ = process.communicate(timeout=60)
    assert int(out) == process.pid


def test_setup_only_does_not_start_the_server(finished: Checkout) -> None:
    """--setup-only ends with status 0 and one line that says where the environment is."""
    result = finished.run("--setup-only", "--demo")
    assert (result.returncode, result.stdout) == (0, f"[kvserve] Ready: {finished.venv}\n")


def test_test_flag_installs_dev_requirements_and_runs_pytest(finished: Checkout) -> None:
    """--test adds the development requirements once and becomes pytest in the checkout's folder."""
    first = finished.run("--test", "-k", "one")
    assert first.stdout.splitlines()[-1] == "PYTEST " + json.dumps([str(finished.root), "-k", "one"])
    assert first.returncode == 3
    assert finished.num_pip_calls() == 1
    assert finished.run("--test").stdout == "PYTEST " + json.dumps([str(finished.root)]) + "\n"
    assert bootstrap_of(finished).is_ready(dev=False)
    assert finished.num_pip_calls() == 1


def test_help_names_the_own_flags_then_asks_the_server(finished: Checkout) -> None:
    """--help explains the bootstrap's flags and hands on to the server when it can be started."""
    out = finished.run("--help").stdout
    assert "--setup-only" in out
    assert out.endswith('SERVER ["--help"]\n')


def test_help_sets_nothing_up(untouched: Checkout) -> None:
    """--help in a fresh checkout only prints."""
    result = untouched.run("--help")
    assert result.returncode == 0
    assert not untouched.venv.exists()


# --- what makes a set-up stale ---


@pytest.mark.long
def test_changed_requirements_are_installed(finished: Checkout) -> None:
    """Another pin is installed by the next start, into the same environment."""
    finished.require("alpha==2.0")
    result = finished.run()
    assert result.stdout.splitlines()[-1] == "SERVER []"
    assert (finished.venv / SITE_PACKAGES / "alpha-2.0.dist-info").is_dir()
    assert finished.num_pip_calls() == 1


def remove_alpha(checkout: Checkout) -> None:
    """Uninstall it by hand."""
    shutil.rmtree(checkout.venv / SITE_PACKAGES / "alpha")
    shutil.rmtree(checkout.venv / SITE_PACKAGES / "alpha-1.0.dist-info")


def test_a_removed_package_is_missed(finished: Checkout) -> None:
    """Where a distribution was uninstalled the set-up is not finished: what pip does then, other stale ones show."""
    bootstrap = bootstrap_of(finished)
    assert bootstrap.is_ready(dev=False)
    remove_alpha(finished)
    assert not bootstrap.is_ready(dev=False)


@pytest.mark.long
def test_a_removed_package_comes_back(finished: Checkout) -> None:
    """A distribution that was uninstalled by hand is installed again."""
    remove_alpha(finished)
    finished.run()
    assert (finished.venv / SITE_PACKAGES / "alpha/__init__.py").exists()


@pytest.mark.long
def test_a_venv_made_by_hand_is_adopted(finished: Checkout) -> None:
    """A healthy 3.12 environment without a stamp is kept, completed and stamped."""
    finished.stamp.unlink()
    mine = finished.venv / "mine"
    mine.touch()
    assert finished.run().returncode == SERVER_EXIT_CODE
    assert mine.exists()
    assert json.loads(finished.stamp.read_text())["state"] == "finished"


def leave_dangling(checkout: Checkout) -> None:
    """Take away the Python under the environment."""
    for link in (checkout.venv / "bin").glob("python*"):
        link.unlink()
    (checkout.venv / "bin/python3.12").symlink_to(checkout.root / "gone")
    (checkout.venv / "bin/python").symlink_to("python3.12")


def test_an_environment_with_a_dangling_interpreter_is_not_used(finished: Checkout) -> None:
    """When the Python under the environment was uninstalled, neither does the program start nor pip complete it."""
    bootstrap = bootstrap_of(finished)
    stamp = bootstrap.read_stamp()
    assert bootstrap.is_ready(dev=False) and bootstrap.is_usable(stamp)
    leave_dangling(finished)
    assert not bootstrap.is_ready(dev=False) and not bootstrap.is_usable(stamp)


@pytest.mark.long
def test_a_dangling_interpreter_is_replaced(finished: Checkout) -> None:
    """The environment is made anew."""
    leave_dangling(finished)
    result = finished.run()
    assert result.returncode == SERVER_EXIT_CODE, result.stderr


def test_a_folder_that_is_no_environment_is_left_alone(untouched: Checkout) -> None:
    """Somebody's files under the name .venv are not deleted: an error says what to do."""
    untouched.venv.mkdir()
    (untouched.venv / "thesis.txt").touch()
    result = untouched.run()
    assert result.returncode == 1
    assert "not a virtual environment" in result.stderr and MENDING in result.stderr
    assert (untouched.venv / "thesis.txt").exists()


# --- contamination ---


@pytest.mark.parametrize(
    "planted",
    [
        "lib/python3.11/site-packages/alpha/__init__.py",
        "lib/python3.12/site-packages/alpha/deep/down/_core.cpython-311-darwin.so",
        "lib/python3.12/site-packages/alpha/__pycache__/__init__.cpython-313.pyc",
        "bin/python3.11",
    ],
)
@pytest.mark.parametrize("is_stamped", [True, False])
@sampled_cells(lambda planted, is_stamped: is_stamped is not planted.startswith("lib/python3.12"))
def test_a_contaminated_environment_is_refused(finished: Checkout, planted: str, is_stamped: bool) -> None:
    """A trace of another minor version stops the start: the file is named, and the command that mends it."""
    if not is_stamped:
        finished.stamp.unlink()
    path = finished.venv / planted
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    result = finished.run("--demo")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"\n  .venv/{planted}\n" in result.stderr
    assert result.stderr.endswith(f"{MENDING}\n")
    assert finished.num_pip_calls() == 0


@pytest.mark.parametrize(
    "line", sampled(("version = 3.11.7", "version_info = 3.13.0.final.0"), {"version_info = 3.13.0.final.0"})
)
def test_an_environment_of_another_version_is_refused(finished: Checkout, line: str) -> None:
    """pyvenv.cfg of another minor version is named, in the spelling of venv and of uv."""
    (finished.venv / "pyvenv.cfg").write_text(f"home = /nowhere\n{line}\n")
    result = finished.run()
    assert result.returncode == 1
    assert "pyvenv.cfg (version 3.1" in result.stderr


def test_many_offending_files_are_counted(finished: Checkout) -> None:
    """The first few files are named and the rest is a number."""
    folder = finished.venv / "lib/python3.11"
    folder.mkdir()
    for index in range(20):
        (folder / f"module_{index:02}.py").touch()
    result = finished.run()
    assert "20 offending file(s)" in result.stderr
    assert "module_07.py" in result.stderr and "module_08.py" not in result.stderr
    assert "and 12 more" in result.stderr


def test_a_foreign_name_inside_a_compatible_wheel_is_no_contamination(finished: Checkout) -> None:
    """A py3 wheel may bring a library named for any Python; with the stamp or without, it is not refused."""
    assert list(finished.venv.glob("lib/python3.12/site-packages/alpha/*.cpython-39-*.so"))
    bootstrap = bootstrap_of(finished)
    for stamp in (bootstrap.read_stamp(), {}):
        bootstrap.refuse_contamination(stamp)
    (finished.venv / "lib/python3.12/site-packages/other.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(bootstrap.SetupError):
        bootstrap.refuse_contamination({})


# --- interruption, locking, failure ---


def stopped_in_pip(checkout: Checkout) -> tuple[subprocess.Popen[str], str]:
    """A set-up whose processes stand still in the middle of pip's copying, and the name of the package.

    It has so many modules that pip can be caught. On a busy machine pip may have finished before: then there is another
    package to install.
    """
    for attempt in range(1, 6):
        name = f"slow{attempt}"
        files = {f"{name}/module_{index:04}.py": f"value = {index}\n" for index in range(NUM_SLOW_MODULES)}
        make_wheel(checkout.root / "wheels", name, "1.0", files)
        checkout.require("alpha==1.0", *(f"slow{each}==1.0" for each in range(1, attempt + 1)))
        process = checkout.start("--setup-only")
        wait_for(checkout.venv / SITE_PACKAGES / name / "module_0002.py", process)
        os.killpg(process.pid, signal.SIGSTOP)
        if not record_of(checkout, name).exists():
            return process, name
        os.killpg(process.pid, signal.SIGCONT)
        process.communicate(timeout=100)
    pytest.fail("pip was never caught")


def record_of(checkout: Checkout, name: str) -> Path:
    """The last file that pip writes of a package."""
    return checkout.venv / SITE_PACKAGES / f"{name}-1.0.dist-info/RECORD"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["untouched", "finished"])
def test_an_interrupted_set_up_is_mended(request: pytest.FixtureRequest, name: str) -> None:
    """Killed in the middle of pip's copying, the next run completes it."""
    checkout: Checkout = request.getfixturevalue(name)
    process, package = stopped_in_pip(checkout)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert json.loads(checkout.stamp.read_text())["state"] == "begun"

    result = checkout.run()
    assert result.returncode == SERVER_EXIT_CODE, result.stdout + result.stderr
    assert len(list((checkout.venv / SITE_PACKAGES / package).glob("module_*.py"))) == NUM_SLOW_MODULES
    assert record_of(checkout, package).exists()


@pytest.mark.slow
@pytest.mark.long
def test_an_environment_that_was_never_finished_is_made(untouched: Checkout) -> None:
    """Killed while it is being made."""
    process = untouched.start("--setup-only")
    wait_for(untouched.venv / "pyvenv.cfg", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert json.loads(untouched.stamp.read_text())["state"] == "begun"
    assert untouched.run().returncode == SERVER_EXIT_CODE


def test_sigterm_ends_pip_too(finished: Checkout) -> None:
    """A terminated bootstrap leaves no pip behind, and its status is that of the signal."""
    process, _ = stopped_in_pip(finished)
    process.terminate()
    os.killpg(process.pid, signal.SIGCONT)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@contextmanager
def orphaned_pip(checkout: Checkout) -> Iterator[int]:
    """A pip that stands still in the middle of its work, and whose bootstrap was killed; yields its process group."""
    process, _ = stopped_in_pip(checkout)
    try:
        process.kill()
        process.wait()
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_an_orphaned_pip_is_waited_for(finished: Checkout) -> None:
    """When only the bootstrap was killed, its pip holds the lock and the next run waits before it touches anything."""
    with orphaned_pip(finished):
        with (finished.venv / "kvserve-setup.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = (finished.stamp.read_text(), finished.num_pip_calls())
        waiting = finished.start()
        try:
            assert waiting.stdout
            assert "waiting for it to finish" in waiting.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(1)
            assert (finished.stamp.read_text(), finished.num_pip_calls()) == before
        finally:
            with suppress(ProcessLookupError):
                os.killpg(waiting.pid, signal.SIGKILL)
            waiting.communicate()


@pytest.mark.long
def test_once_an_orphaned_pip_has_ended_the_next_run_completes_the_set_up(finished: Checkout) -> None:
    """That one was waited for; what it left is made anew."""
    with orphaned_pip(finished) as group:
        waiting = finished.start()
        assert waiting.stdout
        assert "waiting for it to finish" in waiting.stdout.readline()
        os.killpg(group, signal.SIGCONT)
        _, err = waiting.communicate(timeout=100)
    assert waiting.returncode == SERVER_EXIT_CODE, err


def test_the_second_of_two_waits_and_sets_nothing_up(finished: Checkout) -> None:
    """While another bootstrap holds the lock the second says so; then it finds the work done."""
    stamp = finished.stamp.read_text()
    finished.stamp.write_text('{"state": "begun"}')
    with (finished.venv / "kvserve-setup.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = finished.start()
        assert process.stdout
        assert "waiting for it to finish" in process.stdout.readline()
        finished.stamp.write_text(stamp)
    out, _ = process.communicate(timeout=60)
    assert out == "SERVER []\n"
    assert finished.num_pip_calls() == 0


def test_pips_failure_is_shown_and_mended_in_place(finished: Checkout) -> None:
    """What pip cannot get is an error with pip's last lines; with the cause gone the same environment is completed."""
    mine = finished.venv / "mine"
    mine.touch()
    finished.require("alpha==1.0", "absent==9.9")
    result = finished.run()
    assert result.returncode == 1
    assert "| ERROR: No matching distribution found for absent==9.9" in result.stderr
    assert "offline" in result.stderr and "SERVER" not in result.stdout
    finished.require("alpha==1.0")
    assert finished.run().returncode == SERVER_EXIT_CODE
    assert mine.exists()


# --- finding an interpreter ---


@pytest.fixture
def bootstrap(untouched: Checkout, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The bootstrap on a machine that has nothing but what the test puts on PATH or into HOME."""
    module = bootstrap_of(untouched)
    monkeypatch.setattr(module, "PLACES", tuple(place for place in module.PLACES if place.startswith("{")))
    monkeypatch.setattr(sys, "executable", "")
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (untouched.root / "bin").mkdir()
    monkeypatch.setenv("PATH", str(untouched.root / "bin"))
    monkeypatch.setenv("HOME", str(untouched.root / "home"))
    handler = signal.getsignal(signal.SIGTERM)
    yield module
    signal.signal(signal.SIGTERM, handler)
    del sys.modules[module.__name__]


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


BASE_PYTHON = os.path.realpath(sys.executable)


def test_without_a_312_one_sentence_says_what_to_do(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """No interpreter anywhere: exit status 1 and one sentence that names ways to get one."""
    assert bootstrap.main(["--demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "CPython 3.12" in captured.err and "uv python install 3.12" in captured.err


def test_a_candidate_is_believed_only_after_running_it(bootstrap: ModuleType, untouched: Checkout) -> None:
    """A shim that fails, a python3.12 that is no 3.12 and one that talks nonsense are passed over."""
    bin_folder = untouched.root / "bin"
    write_program(bin_folder / "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    write_program(bin_folder / "python3", """echo '["CPython", "3.11", "arm64", "/x", true, true]'""")
    write_program(bin_folder / "python", "echo hello")
    with pytest.raises(bootstrap.SetupError):
        bootstrap.find_python(os.environ)
    write_program(bin_folder / "python", f'exec {BASE_PYTHON} "$@"')
    assert os.path.realpath(bootstrap.find_python(os.environ)) == BASE_PYTHON


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.12.1/bin/python3.12",
        ".local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3.12",
        ".local/bin/python3.12",
    ],
)
def test_interpreters_beside_path_are_found(bootstrap: ModuleType, untouched: Checkout, place: str) -> None:
    """pyenv's, uv's and the user's own interpreters are found without being on PATH."""
    write_program(untouched.root / "home" / place, f'exec {BASE_PYTHON} "$@"')
    assert os.path.realpath(bootstrap.find_python(os.environ)) == BASE_PYTHON


def test_moved_homes_of_pyenv_and_uv_are_respected(bootstrap: ModuleType, untouched: Checkout) -> None:
    """PYENV_ROOT and UV_PYTHON_INSTALL_DIR replace the usual folders."""
    write_program(untouched.root / "py/versions/3.12.4/bin/python3.12", f'exec {BASE_PYTHON} "$@"')
    environ = {"PATH": "", "HOME": "/nowhere", "PYENV_ROOT": str(untouched.root / "py")}
    assert os.path.realpath(bootstrap.find_python(environ)) == BASE_PYTHON


def test_a_312_that_cannot_make_environments_is_named(bootstrap: ModuleType, untouched: Checkout) -> None:
    """A 3.12 without ensurepip (Debian splits it off) is not used, and the sentence says which package is missing."""
    answer = '["CPython", "3.12", "arm64", "/x", false, false]'
    write_program(untouched.root / "bin/python3.12", f"echo '{answer}'")
    with pytest.raises(bootstrap.SetupError, match=r"python3\.12-venv"):
        bootstrap.find_python(os.environ)


# --- which Python may start it, and what it installs ---


def interpreter(minor: str) -> str | None:
    """An interpreter of that version on this machine."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return next((str(path) for path in sorted(root.glob(f"versions/{minor}.*/bin/python"))), None)


@pytest.mark.long
@pytest.mark.parametrize("minor", ["3.9", "3.13"])
def test_other_versions_may_start_it(finished: Checkout, minor: str) -> None:
    """The bootstrap itself runs under the oldest and the newest Python; the server always under 3.12."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"needs Python {minor} in pyenv")
    (finished.root / "start_llm.py").write_text("import sys\nprint('%d.%d' % sys.version_info[:2])\n")
    finished.stamp.unlink()
    result = finished.run(python=python)
    assert result.stdout.splitlines()[-1] == "3.12", result.stderr
    assert finished.run(python=python).stdout == "3.12\n"


def test_it_is_written_for_python_39_and_the_standard_library() -> None:
    """The source parses with the grammar of 3.9, imports only the standard library and names no address."""
    for file in (SCRIPT, *(ROOT / module for module in OF_SERVER)):
        source = file.read_text()
        tree = ast.parse(source, feature_version=(3, 9))
        imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        own = {name for name in imports if name.partition(".")[0] == "kvserve"}
        assert {f"{name.replace('.', '/')}.py" for name in own} <= set(OF_SERVER), file
        assert {name.partition(".")[0] for name in imports - own} <= sys.stdlib_module_names, file
        assert re.search(r"https?://[a-z0-9]", source) is None


def pins(name: str) -> dict[str, str]:
    """The requirement lines of a file as normalised name -> version, extras and markers dropped."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[\w+\])?==([A-Za-z0-9.]+)(?:; sys_platform == \"\w+\")?", line)
            assert match, f"{name}: not an exact pin: {line}"
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def test_requirements_are_exact_and_agree() -> None:
    """Every requirement is an exact pin of a plain name, the constraints repeat them, and torch is not among them."""
    constraints = pins("constraints.txt")
    for name, version in {**pins("requirements.txt"), **pins("requirements-dev.txt")}.items():
        assert constraints.get(name) == version, name
    assert not {"torch", "torchvision"} & constraints.keys()


def test_what_is_tested_is_what_is_pinned() -> None:
    """The packages in this environment have the pinned versions."""
    installed = {}
    for distribution in importlib.metadata.distributions():
        installed[re.sub(r"[-_.]+", "-", distribution.name).lower()] = distribution.version
    constraints = pins("constraints.txt")
    assert {name: installed[name] for name in constraints if name in installed} == {
        name: version for name, version in constraints.items() if name in installed
    }
    assert pins("requirements.txt").keys() <= installed.keys()
