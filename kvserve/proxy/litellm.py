"""Runs LiteLLM as a child process: start, readiness, log, restart with backoff, stop. It knows processes and one URL,
no requests.
"""

import http.client
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any, Literal

from kvserve.errors import StartupError
from kvserve.proxy.generate import ProxySettings, child_command, child_environment, write_files
from kvserve.proxy.ownership import claim_port, is_port_free, record_child
from kvserve.settings.ports import local_host

type ProxyStatus = Literal["starting", "ready", "restarting", "stopped"]

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 1.0
_DRAIN_SECONDS = 2.5
_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 30.0
# After this long in readiness the next restart waits only the short delay again.
_SETTLED_SECONDS = 60.0
_NUM_LAST_WORDS = 5
_MAX_REASON_CHARS = 600
_MAX_TAIL_LINES = 20
_MAX_LINE_BYTES = 2000


@dataclass(frozen=True, slots=True)
class ProxyState:
    """The proxy's state. `last_error` is why it died last, None if it never did."""

    status: ProxyStatus
    pid: int | None = None
    num_restarts: int = 0
    last_error: str | None = None


class ChildLog:
    """The child's output: a file, rotated to `<name>.1` at `max_bytes`, and the last lines for messages. If the disk is
    full only the file stops."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = path.stat().st_size if path.exists() else 0
        self._tail: deque[bytes] = deque(maxlen=_MAX_TAIL_LINES)
        self._unfinished = b""

    def write(self, chunk: bytes) -> None:
        """Adds a piece of output, cut anywhere."""
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        self._tail.extend(line[:_MAX_LINE_BYTES] for line in lines if line.strip())
        self._unfinished = self._unfinished[:_MAX_LINE_BYTES]
        try:
            self._append(chunk)
        except OSError as error:
            self._tail.append(f"{self._path} cannot be written: {error}".encode())

    def tail(self, num_lines: int) -> list[str]:
        """The last lines that are not blank, oldest first."""
        lines = [*self._tail, self._unfinished] if self._unfinished.strip() else list(self._tail)
        return [line.decode("utf-8", errors="replace").strip() for line in lines[-num_lines:]]

    def forget(self) -> None:
        """Empties the tail for the next child."""
        self._tail.clear()
        self._unfinished = b""

    def _append(self, chunk: bytes) -> None:
        if self._num_bytes and self._num_bytes + len(chunk) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._num_bytes = 0
        with self._path.open("ab") as file:
            self._path.chmod(0o600)
            file.write(chunk)
        self._num_bytes += len(chunk)


class LitellmProxy:
    """Owns the child process from `start` to `stop`.

    A thread reads the child's output, polls its readiness, and restarts it when it dies. It calls `report` with one
    sentence per event.
    """

    def __init__(
        self,
        settings: ProxySettings,
        base_environment: Mapping[str, str],
        report: Callable[[str], None],
        command: Sequence[str] | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """The watcher's thread calls `on_ready` whenever a child begins to answer."""
        self._settings = settings
        self._environment = child_environment(base_environment, settings.files)
        self._report = report
        self._on_ready = on_ready
        self._command = list(command) if command is not None else child_command(settings)
        self._changed = Condition()
        self._state = ProxyState("stopped")
        self._stopping = Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: Thread | None = None

    @property
    def state(self) -> ProxyState:
        """A snapshot, for any thread."""
        with self._changed:
            return self._state

    def start(self) -> None:
        """Ends a stale proxy of a former run, launches the child and returns at once. Raises PortTaken if another
        process listens on the port, StartupError if the child cannot be started."""
        replaced = claim_port(self._settings)
        if replaced is not None:
            self._report(f"Replaced the LiteLLM proxy of a former run (pid {replaced}).")
        self._stopping.clear()
        self._set_state(status="starting", num_restarts=0, last_error=None)
        try:
            write_files(self._settings)
            self._child = self._launch()
        except OSError as error:
            raise StartupError(f"The LiteLLM proxy could not be started: {error}") from error
        self._watcher = Thread(target=self._watch, name="litellm-watcher", daemon=True)
        self._watcher.start()

    def wait_until_ready(self, timeout_seconds: float | None = None) -> None:
        """Returns once the proxy answers. Raises StartupError if it dies or `timeout_seconds` pass before."""
        limit = self._settings.startup_timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._changed:
            self._changed.wait_for(lambda: self._state.status != "starting", limit)
            state = self._state
        if state.status == "ready":
            return
        reason = state.last_error or f"it gave no answer within {limit:g} seconds"
        raise StartupError(f"The LiteLLM proxy did not start: {reason} (log: {self._settings.files.log})")

    def stop(self) -> None:
        """Ends the child within three seconds: SIGTERM, time to drain, SIGKILL. Idempotent."""
        self._stopping.set()
        child, watcher = self._child, self._watcher
        if child is not None:
            _end(child)
        if watcher is not None:
            watcher.join()
        # The watcher may have launched another child just before it saw `_stopping`.
        if self._child is not None and self._child is not child:
            _end(self._child)
            _close_pipes(self._child)
        if child is not None:
            self._settings.files.pid.unlink(missing_ok=True)
        self._child = self._watcher = None
        self._set_state(status="stopped", pid=None)

    def _set_state(self, **changes: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()

    def _launch(self) -> subprocess.Popen[bytes]:
        """Starts the child in its own session, so that a terminal's Ctrl-C reaches only us. Its standard input is a
        pipe whose other end only this process holds: when this process ends, the pipe closes and the child ends
        itself."""
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._settings.files.folder,
            start_new_session=True,
        )
        record_child(child.pid, self._settings.files)
        self._set_state(pid=child.pid)
        return child

    def _watch(self) -> None:
        """The watcher thread: runs one child after the other until `stop`."""
        log = ChildLog(self._settings.files.log, self._settings.max_log_bytes)
        delay_seconds = _FIRST_DELAY_SECONDS
        child = self._child
        while child is not None and not self._stopping.is_set():
            log.forget()
            ready_seconds = self._attend(child, log)
            if self._stopping.is_set():
                return
            if ready_seconds > _SETTLED_SECONDS:
                delay_seconds = _FIRST_DELAY_SECONDS
            reason = _describe_death(child.returncode, log)
            self._set_state(status="restarting", pid=None, last_error=reason)
            self._report(f"The LiteLLM proxy died: {reason}. It is started again in {delay_seconds:g} s.")
            child = self._relaunch(delay_seconds)
            delay_seconds = min(2 * delay_seconds, _LONGEST_DELAY_SECONDS)

    def _relaunch(self, delay_seconds: float) -> subprocess.Popen[bytes] | None:
        """The next child after the delay, or None if `stop` came first. Retries until port and system allow it."""
        while not self._stopping.wait(delay_seconds):
            delay_seconds = _LONGEST_DELAY_SECONDS
            if not is_port_free(self._settings.host, self._settings.port):
                self._set_state(last_error=f"port {self._settings.port} is taken by another process")
                continue
            try:
                self._child = self._launch()
            except OSError as error:
                self._set_state(last_error=f"it could not be started: {error}")
                continue
            self._set_state(num_restarts=self.state.num_restarts + 1)
            return self._child
        return None

    def _attend(self, child: subprocess.Popen[bytes], log: ChildLog) -> float:
        """Logs the child's output until it ends; returns for how many seconds it was ready. A child that is not ready
        in time is killed."""
        assert child.stdout is not None
        launched = time.monotonic()
        ready_at: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while _keep_output(selector, child.stdout.fileno(), log):
                if child.poll() is not None:
                    if not selector.select(0):  # a process that the child started holds the pipe
                        break
                elif ready_at is not None or self._stopping.is_set():
                    continue
                elif self._answers():
                    ready_at = time.monotonic()
                    self._set_state(status="ready")
                    self._on_ready()
                elif time.monotonic() - launched > self._settings.startup_timeout_seconds:
                    log.write(b"\nkvserve: not ready in time, killed\n")
                    child.kill()
        child.wait()
        _close_pipes(child)
        return time.monotonic() - ready_at if ready_at is not None else 0.0

    def _answers(self) -> bool:
        """Whether the readiness URL answers 200; LiteLLM's /health would run a generation."""
        connection = http.client.HTTPConnection(
            local_host(self._settings.host), self._settings.port, timeout=_PROBE_SECONDS
        )
        try:
            connection.request("GET", "/health/readiness")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _keep_output(selector: selectors.BaseSelector, descriptor: int, log: ChildLog) -> bool:
    """Waits briefly for output and logs it; False at its end."""
    if not selector.select(_POLL_SECONDS):
        return True
    chunk = os.read(descriptor, 65536)
    if chunk:
        log.write(chunk)
    return bool(chunk)


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM and time to drain, then SIGKILL; returns when the child is gone."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _describe_death(return_code: int, log: ChildLog) -> str:
    """The exit code or signal and the last lines of output, on one line."""
    how = f"signal {signal.Signals(-return_code).name}" if return_code < 0 else f"exit code {return_code}"
    last_words = " | ".join(log.tail(_NUM_LAST_WORDS))[-_MAX_REASON_CHARS:]
    return f"{how}: {last_words}" if last_words else how
