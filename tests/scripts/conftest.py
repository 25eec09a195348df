"""The scripts against a server in this process; it knows their command line only.

`run_script` calls a script's `main` here, since an interpreter of its own takes longer than most of what is asked of
it; `start_script` starts it as a person does, which one test of each script needs.
"""

import contextlib
import functools
import importlib.util
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.serving import AppUnderTest, serving_app

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SECONDS = 100

type Done = subprocess.CompletedProcess[str]
"""A script's exit code and what it wrote."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A small dense model on a free port, without LiteLLM."""
    with serving_app(tmp_path_factory.mktemp("server"), "qwen3") as app:
        yield app


@functools.cache
def script(name: str) -> ModuleType:
    """A script as a module, its neighbours found as where it is started."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name.removesuffix('.py')}", SCRIPTS / name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        spec.loader.exec_module(module)
    return module


def run_script(name: str, *arguments: str) -> Done:
    """Run a script to its end in this process."""
    module, command = script(name), [str(SCRIPTS / name), *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])  # some imports wait until they are needed
        module.run(module.main)
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(command, ended.value.code, output.getvalue(), errors.getvalue())


def start_script(name: str, *arguments: str) -> Done:
    """Run a script to its end with the interpreter of the tests."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def addresses(server: AppUnderTest) -> list[str]:
    """The options that point a script at a server without a proxy."""
    url = f"http://127.0.0.1:{server.port}"
    return ["--base-url", url, "--server-url", url, "--timeout", "60"]
