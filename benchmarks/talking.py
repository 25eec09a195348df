"""The demo's model that talks, for benchmarks: fetched and converted where `--demo` keeps it, served, killed and
started again on what it left. It knows no prompt and measures nothing.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.client import BenchmarkError
from benchmarks.rig import START_SCRIPT, free_port, serving
from kvserve.app.blas import fault_of
from kvserve.config import Settings, setting_key
from kvserve.demo.gguf import Precision
from kvserve.demo.smollm2 import TellBytes, build_smollm2
from kvserve.errors import ModelUnreachable
from kvserve.settings.blas_files import library_files
from kvserve.settings.start_checks import DEMO_NAMES


def talking_model(precision: Precision) -> Path | None:
    """The model's folder, made first where it is not there; None, and a line of why, where nothing can be fetched."""
    given = os.environ.get(setting_key("state_dir")) or str(Settings.model_fields["state_dir"].default)
    state_dir = Path(given).expanduser()
    state_dir.mkdir(parents=True, exist_ok=True)
    try:
        return build_smollm2(state_dir, DEMO_NAMES["smollm2"], precision, os.environ, _told)
    except ModelUnreachable as error:
        print(f"nothing is measured on real text: {error}", file=sys.stderr)
        return None


@contextlib.contextmanager
def _told(work: str) -> Iterator[TellBytes]:
    print(work, file=sys.stderr, flush=True)
    yield lambda _done, _of: None


def fast_library(wanted: str) -> Path | None:
    """The first BLAS for `auto`, `off` or a file's name that passes its trial; None where there is none. Raises
    BenchmarkError for a file that does not work."""
    files = library_files(wanted if wanted in ("auto", "off") else Path(wanted), Path(sys.prefix))
    found = next((file for file in files if fault_of(file, os.environ) is None), None)
    if found is None and wanted not in ("auto", "off"):
        raise BenchmarkError(f"{wanted} is no BLAS that works: {fault_of(Path(wanted), os.environ)}")
    return found


class TalkingServer:
    """A server on a folder for its state, until the end of the block; after a kill it goes on with what lies there."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        given: Mapping[str, str],
        *,
        script: Path = START_SCRIPT,
        with_proxy: bool = False,
    ) -> None:
        self._model, self._scratch, self._given, self._script = model, scratch, given, script
        self.proxy_port = free_port() if with_proxy else None
        self.port, self._pid = 0, 0
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()

    def kill_and_start(self) -> None:
        """End it as a crash does, start it anew, and wait until it answers."""
        os.kill(self._pid, signal.SIGKILL)
        self._running.close()
        self._start()

    def _start(self) -> None:
        served = serving(self._model, self._scratch, self._given, script=self._script, proxy_port=self.proxy_port)
        self.port, self._pid = self._running.enter_context(served)
