#!/usr/bin/env python3
"""One command from a fresh checkout to a running server: find a Python 3.12, make `.venv`, install the pins, exec.

It knows interpreters, `.venv`, pip and the stamp that says "finished"; of the server it knows only the name of its
start script, its flags and what it refuses at once (`kvserve/settings/`). Standard library only, every line must run
under Python 3.9, and all of it is this one file and that package with what it imports, because it runs before anything
is installed.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvserve-setup.json"
LOCK = VENV / "kvserve-setup.lock"
ENV_FILE = Path(".env")
RUNTIME_FILES = ("requirements.txt", "constraints.txt")
DEV_FILES = ("requirements-dev.txt",)

MINOR = "3.12"
LIB = VENV / "lib" / f"python{MINOR}"
SITE_PACKAGES = LIB / "site-packages"
OWN_TAG = ".cpython-" + MINOR.replace(".", "")
STAMP_FORMAT = 1
NUM_NAMED_FILES = 8
NUM_TAIL_LINES = 12
PROGRESS_SECONDS = 5.0
PROBE_TIMEOUT_SECONDS = 20
BROKEN_PIPE = 141  # as shells say it of a program that ended because nobody read what it wrote

OWN_FLAGS = frozenset(("--test", "--setup-only", "--dev"))
USAGE = f"""usage: python3 install_and_run.py [--demo [tiny]] [--test | --setup-only] [--dev] [server flags]

  --demo        serve the demo model, fetched once; --demo tiny: without a download (handed on to the server)
  --test        set up, then run the tests; further arguments go to pytest
  --setup-only  set up and stop
  --dev         also install what tests and lint need (--test implies it)

Without --test or --setup-only the server is started in {VENV}; every other flag is its own."""

# Where interpreters live that are not on PATH; `{home}` and `{NAME:-default}` are filled in by `expand`.
PLACES = (
    "{PYENV_ROOT:-{home}/.pyenv}/versions/3.12*/bin/python3.12",
    "{UV_PYTHON_INSTALL_DIR:-{home}/.local/share/uv/python}/cpython-3.12*/bin/python3.12",
    "{XDG_DATA_HOME:-{home}/.local/share}/uv/python/cpython-3.12*/bin/python3.12",
    "{home}/.local/share/mise/installs/python/3.12*/bin/python3.12",
    "{home}/.asdf/installs/python/3.12*/bin/python3.12",
    "{home}/.local/bin/python3.12",
    "/opt/homebrew/bin/python3.12",
    "/opt/homebrew/opt/python@3.12/bin/python3.12",
    "/usr/local/opt/python@3.12/bin/python3.12",
    "/home/linuxbrew/.linuxbrew/opt/python@3.12/bin/python3.12",
    "/Library/Frameworks/Python.framework/Versions/3.12/bin/python3.12",
    "/usr/local/bin/python3.12",
    "/usr/bin/python3.12",
)
NO_PYTHON = (
    "kvserve needs CPython 3.12 and none was found on PATH, in pyenv, uv, mise or Homebrew: install one with "
    "`uv python install 3.12`, `pyenv install 3.12`, `brew install python@3.12` or your system's packages, "
    "then run the same command again."
)

PROBE = """
import importlib.util, json, platform, sys
base = getattr(sys, "_base_executable", None) or sys.executable
has = [importlib.util.find_spec(name) is not None for name in ("ensurepip", "pip")]
print(json.dumps([platform.python_implementation(), "%d.%d" % sys.version_info[:2], platform.machine(), base] + has))
"""


class SetupError(Exception):
    """The set-up cannot go on; the message tells the user what to do."""


class Request(NamedTuple):
    """What the command line asks of the bootstrap; `rest` belongs to the program that is started."""

    test: bool
    setup_only: bool
    dev: bool
    rest: list[str]


class Interpreter(NamedTuple):
    """What an interpreter said about itself when it was run."""

    implementation: str
    minor: str
    machine: str
    base_executable: str
    has_ensurepip: bool
    has_pip: bool

    def objection(self) -> str | None:
        """Why this interpreter cannot carry the server's environment, or None."""
        if self.implementation != "CPython" or self.minor != MINOR:
            return f"{self.implementation} {self.minor}"
        if sys.platform == "darwin" and self.machine != "arm64":
            return f"built for {self.machine}, MLX needs arm64"
        return None


def say(text: str) -> None:
    """One plain progress line."""
    print(f"[kvserve] {text}", flush=True)


# --- finding a Python 3.12 ---------------------------------------------------------------------------------------


def expand(pattern: str, environ: Mapping[str, str]) -> str:
    """Fill `{home}` and a leading `{NAME:-default}` of a row of PLACES."""
    pattern = pattern.replace("{home}", environ.get("HOME") or os.path.expanduser("~"))
    if pattern.startswith("{"):
        name, _, tail = pattern[1:].partition(":-")
        default, _, tail = tail.partition("}")
        return (environ.get(name) or default) + tail
    return pattern


def candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Paths that may be a Python 3.12, likeliest first, each once: the running one, PATH, then PLACES."""
    on_path = [
        os.path.join(folder, name)
        for name in ("python3.12", "python3", "python")
        for folder in environ.get("PATH", "").split(os.pathsep)
        if folder
    ]
    # On a Mac without the developer tools, running this stub opens an installer window; it is never a 3.12.
    on_path = [path for path in on_path if not (sys.platform == "darwin" and path.startswith("/usr/bin/"))]
    elsewhere = [path for place in PLACES for path in sorted(glob.glob(expand(place, environ)), reverse=True)]
    for path in dict.fromkeys([sys.executable, *on_path, *elsewhere]):
        if path and os.access(path, os.X_OK):
            yield path


def probe(path: str) -> Interpreter | None:
    """Run an interpreter and hear what it is; None when it does not run (a shim without a version, a broken link)."""
    import subprocess  # not needed, and not paid for, when the set-up is finished

    command = [path, "-I", "-c", PROBE]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, env=child_environment(), check=True
        )
        return Interpreter(*json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def find_python(environ: Mapping[str, str]) -> str:
    """The base executable of the first candidate that proves to be a usable CPython 3.12; SetupError when none is."""
    rejected = []
    for path in candidates(environ):
        found = probe(path)
        if found is None:
            continue
        objection = found.objection() or (None if found.has_ensurepip else "no ensurepip: install python3.12-venv")
        if objection is None:
            return found.base_executable
        if found.minor == MINOR:
            rejected.append(f"{path}: {objection}")
    unusable = f" (Found, but not usable: {'; '.join(rejected)}.)" if rejected else ""
    raise SetupError(NO_PYTHON + unusable)


# --- the stamp: is the set-up finished? --------------------------------------------------------------------------


def digest(names: Iterable[str]) -> str:
    """SHA-256 over the names and contents of requirement files."""
    sha = hashlib.sha256()
    for name in names:
        sha.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return sha.hexdigest()


def wanted(dev: bool) -> dict[str, object]:
    """The part of a finished stamp that follows from the checkout and the machine."""
    machine = "arm64" if sys.platform == "darwin" else os.uname().machine
    facts = {"format": STAMP_FORMAT, "platform": f"{sys.platform}-{machine}", "runtime": digest(RUNTIME_FILES)}
    return {**facts, "dev": digest(RUNTIME_FILES + DEV_FILES)} if dev else dict(facts)


def read_stamp() -> dict[str, object]:
    """The stamp, or {} when there is none or it is not ours."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(state: str, facts: Mapping[str, object]) -> None:
    """Replace the stamp in one step; `state` is begun, failed or finished."""
    fresh = STAMP.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"state": state, **facts}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, STAMP)


def venv_version() -> str:
    """The version that pyvenv.cfg states (venv writes `version`, uv and virtualenv `version_info`); "" without one."""
    try:
        lines = (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    pairs = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    return pairs.get("version") or pairs.get("version_info") or ""


def distributions() -> list[str]:
    """The `name-version.dist-info` folders, less the installers that users update by hand."""
    names = os.listdir(SITE_PACKAGES) if SITE_PACKAGES.is_dir() else []
    return sorted(n for n in names if n.endswith(".dist-info") and not n.startswith(("pip-", "setuptools-")))


def is_recognised(stamp: Mapping[str, object], dev: bool) -> bool:
    """Whether the stamp is of a finished set-up of exactly these requirements and nothing has been taken away since."""
    if stamp.get("state") != "finished" or any(stamp.get(key) != value for key, value in wanted(dev).items()):
        return False
    installed = stamp.get("distributions")
    return (
        stamp.get("python") == venv_version()
        and os.access(VENV_PYTHON, os.X_OK)
        and isinstance(installed, list)
        and set(distributions()).issuperset(installed)
    )


# --- preflight: has another Python been in here? -----------------------------------------------------------------


def files_below(folder: Path) -> Iterator[str]:
    """Every file path below `folder`, without a stat call per file and without following links."""
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry.path


def foreign_tagged_files() -> list[str]:
    """Compiled files below site-packages that are named for another CPython, as paths relative to `.venv`."""
    base = len(str(VENV)) + 1
    return sorted(path[base:] for path in files_below(LIB) if ".cpython-" in path and OWN_TAG not in path)


def is_of_compatible_wheel(path: str) -> bool:
    """Whether an installed wheel that is not bound to another CPython owns the file.

    Wheels tagged py3 may carry one library under any name (one of our own pins does), so a name alone proves nothing.
    """
    record_line = str(VENV / path)[len(str(SITE_PACKAGES)) + 1 :] + ","
    for record in SITE_PACKAGES.glob("*.dist-info/RECORD"):
        if f"\n{record_line}" in "\n" + record.read_text(encoding="utf-8"):
            tags = (record.parent / "WHEEL").read_text(encoding="utf-8")
            return any(f"Tag: {tag}-" in tags for tag in ("py3", "cp312")) or "-abi3-" in tags
    return False


def tolerated_files(suspects: Iterable[str]) -> list[str]:
    """Those of the suspects that a compatible wheel brought; byte code of another Python never is."""
    return [path for path in suspects if not path.endswith(".pyc") and is_of_compatible_wheel(path)]


def offending_files(stamp: Mapping[str, object]) -> list[str]:
    """Traces of another Python minor version in `.venv`, as paths relative to it."""
    offending = []
    version = venv_version()
    if version and not f"{version}.".startswith(f"{MINOR}."):
        offending.append(f"pyvenv.cfg (version {version})")
    offending += sorted(f"bin/{p.name}" for p in VENV.glob("bin/python3.*") if p.name != f"python{MINOR}")
    for folder in sorted(VENV.glob("lib/python*")):
        if folder.name != f"python{MINOR}" and not folder.is_symlink():
            inside = sorted(path[len(str(VENV)) + 1 :] for path in files_below(folder))
            offending += inside or [f"lib/{folder.name}/"]
    tolerated = stamp.get("tolerated")
    suspects = [p for p in foreign_tagged_files() if not (isinstance(tolerated, list) and p in tolerated)]
    return offending + sorted(set(suspects).difference(tolerated_files(suspects)))


def mending_command() -> str:
    """What the user types to start over."""
    prefix = "" if Path.cwd() == ROOT else f"cd {shlex.quote(str(ROOT))} && "
    return f"{prefix}rm -rf .venv && python3 {Path(__file__).name}"


def refuse_contamination(stamp: Mapping[str, object]) -> None:
    """SetupError that names the offending files when `.venv` was touched by another Python minor version."""
    offending = offending_files(stamp)
    if not offending:
        return
    named = "".join(f"\n  .venv/{name}" for name in offending[:NUM_NAMED_FILES])
    more = f"\n  ... and {len(offending) - NUM_NAMED_FILES:,} more" if len(offending) > NUM_NAMED_FILES else ""
    raise SetupError(
        f"{VENV} was touched by another Python than {MINOR}; a mixture is not started. "
        f"{len(offending):,} offending file(s):{named}{more}\nMend it with:  {mending_command()}"
    )


# --- setting up --------------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """The environment without the two variables that make a venv's Python find another Python's library."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "__PYVENV_LAUNCHER__")}


@contextlib.contextmanager
def set_up_lock() -> Iterator[int]:
    """Hold the folder's set-up lock; yields its descriptor, which children inherit so that an orphan still holds it."""
    import fcntl  # absent on Windows, where `main` has already declined

    VENV.mkdir(exist_ok=True)
    with LOCK.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up of this folder is running; waiting for it to finish.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def progress_of(line: str) -> str:
    """What a line of pip's output says about its progress, short; "" for the other lines."""
    words = line.split()
    if words[:3] == ["Installing", "collected", "packages:"]:
        return f"Installing {len(words) - 3} packages (up to a minute or two)"
    return " ".join(words[:2]) if words and words[0] in ("Collecting", "Downloading", "Building") else ""


def run_step(command: Sequence[str], lock_descriptor: int, failure: str) -> None:
    """Run a child, show a line of its output every few seconds; SetupError with its last lines when it fails."""
    import subprocess  # see probe
    from collections import deque

    tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
    begun = shown = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=child_environment(),
        pass_fds=[lock_descriptor],
    )
    try:
        for line in process.stdout or ():
            tail.append(line.rstrip())
            now = time.monotonic()
            doing = progress_of(line)
            if doing and (now - shown >= PROGRESS_SECONDS or doing.startswith("Installing")):
                shown = now
                say(f"  {now - begun:4.0f} s  {doing}")
        if process.wait() != 0:
            lines = "".join(f"\n  | {line}" for line in tail)
            raise SetupError(f"{failure} (exit status {process.returncode}). Its last lines:{lines}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def is_half_installed() -> bool:
    """Whether pip was stopped between two files: it writes RECORD last and renames what it removes to `~name`."""
    names = os.listdir(SITE_PACKAGES) if SITE_PACKAGES.is_dir() else []
    return any(n.startswith("~") for n in names) or any(
        not (SITE_PACKAGES / name / "RECORD").exists() for name in distributions()
    )


def is_usable(stamp: Mapping[str, object]) -> bool:
    """Whether what stands in `.venv` can be completed by pip; if not it has to be made anew."""
    platform_changed = "platform" in stamp and stamp["platform"] != wanted(dev=False)["platform"]
    if stamp.get("state") == "begun" or platform_changed or not venv_version() or is_half_installed():
        return False
    found = probe(str(VENV_PYTHON))
    return found is not None and found.objection() is None and found.has_pip


def make_venv(lock_descriptor: int) -> None:
    """Empty `.venv`, less stamp and lock, and make it anew."""
    import shutil  # see probe

    kept = {STAMP, LOCK}
    leftovers = [path for path in VENV.iterdir() if path not in kept]
    if leftovers and not (read_stamp() or venv_version()):
        raise SetupError(f"{VENV} is not a virtual environment. If nothing in it is needed: {mending_command()}")
    python = find_python(os.environ)
    write_stamp("begun", {})
    if leftovers:
        say("What is in .venv is incomplete or from another machine; making it anew.")
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    say(f"Making .venv with {python}.")
    run_step([python, "-I", "-m", "venv", str(VENV)], lock_descriptor, "`python -m venv` failed")


def install(dev: bool, lock_descriptor: int) -> None:
    """Let pip install the pins with the user's own pip configuration."""
    files = ["-r", str(ROOT / RUNTIME_FILES[0])] + (["-r", str(ROOT / DEV_FILES[0])] if dev else [])
    command = [str(VENV_PYTHON), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", *files, "-c", str(ROOT / RUNTIME_FILES[1])]
    say(f"Installing {'runtime and development' if dev else 'runtime'} requirements (a few minutes the first time).")
    try:
        run_step(command, lock_descriptor, "pip could not install the requirements")
    except SetupError as error:
        write_stamp("failed", {})
        advice = "If this machine is offline, connect it and run the same command again; downloads are kept."
        raise SetupError(f"{error}\n{advice}") from None


def set_up(dev: bool, lock_descriptor: int) -> None:
    """Bring `.venv` to the wanted state. The stamp says begun meanwhile, and finished only as the very last act."""
    begun = time.monotonic()
    if not is_usable(read_stamp()):
        make_venv(lock_descriptor)
    write_stamp("begun", {})
    install(dev, lock_descriptor)
    facts = {"python": venv_version(), "distributions": distributions()}
    write_stamp("finished", {**wanted(dev), **facts, "tolerated": tolerated_files(foreign_tagged_files())})
    say(f"Set-up finished in {time.monotonic() - begun:.0f} s.")


def is_ready(dev: bool) -> bool:
    """Whether the program can be started as things stand; SetupError when `.venv` is contaminated."""
    stamp = read_stamp()
    if stamp.get("state") == "begun":
        return False
    refuse_contamination(stamp)
    return is_recognised(stamp, dev)


def ensure_ready(dev: bool) -> None:
    """Set up unless that is done already, by an earlier run or by one that held the lock just now."""
    if is_ready(dev):
        return
    with set_up_lock() as lock_descriptor:
        if not is_ready(dev):
            set_up(dev, lock_descriptor)


# --- the command -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> Request:
    """Take out the bootstrap's own flags; everything else, --demo included, is for the program."""
    given = OWN_FLAGS.intersection(arguments)
    rest = [argument for argument in arguments if argument not in OWN_FLAGS]
    return Request("--test" in given, "--setup-only" in given, bool(given & {"--test", "--dev"}), rest)


def of_server(name: str) -> ModuleType:
    """One of the modules of `kvserve/settings/`, which need the standard library only, from the checkout. This Python
    may not leave compiled files in the package."""
    import importlib

    sys.dont_write_bytecode = True
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"kvserve.settings.{name}")


def refuse_misspelt(request: Request) -> None:
    """SetupError for a flag that the server does not know, and for a name in `.env` that is nearly a setting: before
    minutes go into a set-up. What belongs to pytest, and a wish for help, is not looked at."""
    if not is_for_server(request):
        return
    flags = of_server("flags")
    try:
        flags.parse_flags(request.rest, OWN_FLAGS)
    except flags.FlagError as error:
        raise SetupError(str(error)) from None
    known = [name.upper() for name in of_server("kinds").KINDS]
    # Where a quotation goes on over lines only python-dotenv knows what is a name; the start looks again.
    values = of_server("env_file").values_in(env_text()) or {}
    found = flags.misspelt([name for name, value in values.items() if value is not None], known)
    if found:
        raise SetupError(flags.misspelt_words(found, ".env"))


def refuse_unusable(request: Request) -> None:
    """SetupError for what a start would refuse at once, in its own words: values that cannot be used, a taken port, a
    folder that is not there. Once a set-up is finished the start itself looks first."""
    if not is_for_server(request) or request.setup_only:
        return
    checks = of_server("start_checks")
    try:
        checks.refuse_unusable(request.rest, os.environ, ENV_FILE)
    except checks.StartupError as error:
        raise SetupError(str(error)) from None


def is_for_server(request: Request) -> bool:
    """Whether the arguments are the server's, to be looked at here."""
    return not request.test and not {"-h", "--help"}.intersection(request.rest)


def env_text() -> str:
    """The `.env` that the server will read, "" without one. Of one that cannot be read the first checks and the start
    say so, each before it looks at names."""
    env_file = of_server("env_file")
    try:
        return env_file.read_text(ENV_FILE) or ""
    except env_file.StartupError:
        return ""


def start(request: Request) -> None:
    """Become the tests or the server; never returns."""
    if request.test:
        os.chdir(ROOT)
    program = ["-m", "pytest"] if request.test else [str(ROOT / "start_llm.py")]
    sys.stdout.flush()
    os.execve(VENV_PYTHON, [str(VENV_PYTHON), *program, *request.rest], child_environment())


def stop_on_sigterm(signal_number: int, frame: object) -> None:
    """Unwind, so that a running pip is ended too."""
    raise SystemExit(128 + signal_number)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns an exit status unless it becomes the program."""
    request = parse(arguments)
    try:
        if not request.test and {"-h", "--help"}.intersection(request.rest):
            print(USAGE, flush=True)
            if not is_recognised(read_stamp(), request.dev):
                return 0
        if sys.platform not in ("darwin", "linux"):
            raise SetupError("kvserve runs on macOS (Apple Silicon) and on Linux; on Windows use WSL 2.")
        refuse_misspelt(request)
        signal.signal(signal.SIGTERM, stop_on_sigterm)
        if not is_ready(request.dev):
            refuse_unusable(request)
        ensure_ready(request.dev)
        if request.setup_only:
            say(f"Ready: {VENV}")
            return 0
        start(request)
    except BrokenPipeError:  # whoever reads this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (SetupError, OSError) as error:
        print(f"[kvserve] error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("[kvserve] interrupted; the next run mends what is half done.", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
