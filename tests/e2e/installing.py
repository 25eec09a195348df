"""Where the real clients come from: the versions that are tried, and how npm and pip bring them. It knows programs, and
not how they are configured or asked.

They are installed into CLIENTS_HOME or a folder below the user's cache, and kept there until another version is wanted.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {
    "node24": ("node@24", "node"),
    "pi": ("@earendil-works/pi-coding-agent@0.87.1", "pi"),
    "openclaw": ("openclaw@2026.9.6", "openclaw"),
    "codex": ("@openai/codex@0.169.0", "codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
    "claude": ("@anthropic-ai/claude-code@2.1.331", "claude"),
    "qwen": ("@qwen-code/qwen-code@0.24.4", "qwen"),
    "kilo": ("@kilocode/cli@7.7.7", "kilo"),
    "continue": ("@continuedev/cli@1.5.47", "cn"),
    "cline": ("cline@3.0.65", "cline"),
}
"""Folder -> what npm installs there, and the program that is wanted of it. The newest that could be installed: of Kilo
7.8.1 the program for Linux was not to be had, of PI 0.99.1 to 1.5.2 packages of its own that it asks for."""
PYTHON_PACKAGES = {
    "aider": (("aider-chat==0.86.2",), "aider"),
    "llm": (("llm==0.36",), "llm"),
    "mini": (("mini-swe-agent==2.4.6", "mcp"), "mini"),
}
"""Folder -> what pip installs into an environment of its own there, and the program that is wanted of it."""
LIBRARIES = {"axe": ("axe-core@4.14.1", "axe-core/axe.min.js")}
"""Folder -> what npm installs there that is no program, and its file."""
NPM = {folder: package for folder, (package, _) in (PACKAGES | LIBRARIES).items()}
INSTALL_SECONDS = 400


def clients_home() -> Path:
    """Where the clients are installed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CLIENTS_HOME") or caches / "kvserve-clients")


def run(
    command: list[str], typed: str | None = None, *, seconds: float, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; `typed` is its input."""
    stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if typed is None else {"input": typed}
    return subprocess.run(command, timeout=seconds, capture_output=True, text=True, check=False, **stdin, **options)


def programs(folder: str) -> Path:
    """Where npm put the programs of one of the packages."""
    return clients_home() / folder / "node_modules" / ".bin"


def python_program(folder: str) -> Path:
    """The program that is wanted of what pip installed there."""
    return clients_home() / folder / "bin" / PYTHON_PACKAGES[folder][1]


def wanted_version(folder: str) -> str:
    """The version that is tried."""
    if folder in NPM:
        return NPM[folder].rpartition("@")[2]
    return PYTHON_PACKAGES[folder][0][0].rpartition("==")[2]


def install(folder: str) -> None:
    """Install one of npm's packages unless its version is there. Skips the test where no registry gives it, fails
    without npm.

    Packages that ask for a newer Node than the machine's are installed with ours.
    """
    _install_by_npm(folder, programs(folder) / PACKAGES[folder][1])


def library(folder: str) -> Path:
    """The file of one of npm's libraries, installed like a program."""
    file = clients_home() / folder / "node_modules" / LIBRARIES[folder][1]
    _install_by_npm(folder, file)
    return file


def _install_by_npm(folder: str, wanted: Path) -> None:
    package = NPM[folder]
    if wanted.exists() and _is_of(wanted_version(folder), _npm_version(folder)):
        return
    npm = shutil.which("npm")
    assert npm is not None, f"no npm to install {package}: apt-get install npm (macOS: brew install node)"
    target = clients_home() / folder
    target.mkdir(parents=True, exist_ok=True)
    path = f"{programs('node24')}{os.pathsep}{os.environ['PATH']}"
    command = [npm, "install", "--no-audit", "--no-fund", package]
    done = run(command, seconds=INSTALL_SECONDS, cwd=target, env={**os.environ, "PATH": path})
    if done.returncode != 0:
        pytest.skip(f"npm could not install {package}: {done.stderr[-600:]}")


def _npm_version(folder: str) -> str:
    name = NPM[folder].rpartition("@")[0]
    package = clients_home() / folder / "node_modules" / name / "package.json"
    return str(json.loads(package.read_text("utf-8"))["version"]) if package.exists() else ""


def _is_of(wanted: str, version: str) -> bool:
    return version == wanted or version.startswith(f"{wanted}.")


def install_python(folder: str) -> None:
    """Install one of pip's packages unless its version is there. Skips the test where pip cannot install it."""
    packages, _ = PYTHON_PACKAGES[folder]
    target = clients_home() / folder
    name = re.sub(r"[-.]+", "_", packages[0].partition("==")[0])
    found = target.glob(f"lib/python*/site-packages/{name}-{wanted_version(folder)}.dist-info")
    if python_program(folder).exists() and any(found):
        return
    done = run([sys.executable, "-m", "venv", str(target)], seconds=INSTALL_SECONDS)
    if done.returncode == 0:
        command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        done = run(command, seconds=INSTALL_SECONDS)
    if done.returncode != 0:
        pytest.skip(f"pip could not install {packages[0]}: {done.stderr[-600:]}")
