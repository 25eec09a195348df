"""Whose process is it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.proxy import ownership
from kvserve.proxy.generate import ProxyFiles
from kvserve.proxy.ownership import PidFile, ProcessIdentity, find_stale_proxy, identify, is_port_free


def test_this_process_is_identified_alike_by_both_ways() -> None:
    """/proc and ps agree about the command, and each about the start time of two looks."""
    by_proc, by_ps = ownership._identify_by_proc(os.getpid()), ownership._identify_by_ps(os.getpid())
    assert by_proc is not None
    assert by_ps is not None
    assert by_proc.command.split()[0] == by_ps.command.split()[0]
    assert by_proc == ownership._identify_by_proc(os.getpid())
    assert by_ps == ownership._identify_by_ps(os.getpid())


def test_a_process_that_ended_is_nobody() -> None:
    """Not even as a zombie that nobody has waited for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        alive = identify(process.pid)
        assert alive is not None
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ownership._identify_by_proc(process.pid) is None
        assert ownership._identify_by_ps(process.pid) is None


def test_a_port_with_a_listener_is_not_free() -> None:
    """It is once the listener is gone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)


def written(files: ProxyFiles, proxy: ProcessIdentity, parent: ProcessIdentity) -> None:
    files.folder.mkdir(parents=True, exist_ok=True)
    PidFile(proxy, parent).write(files.pid)


GONE = ProcessIdentity(2**22 + 1, "0", "gone")


def test_proof_needs_start_time_and_command_line(tmp_path: Path) -> None:
    """A recycled pid, or a process without our configuration on its command line, is nobody's proxy."""
    files = ProxyFiles(tmp_path / "state")
    command = [sys.executable, "-c", "input(print('up', flush=True))", str(files.config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # only then is its command line surely in place
            ours = identify(process.pid)
            assert ours is not None
            written(files, ours, GONE)
            assert find_stale_proxy(files) == ours
            written(files, ProcessIdentity(ours.pid, "1", ours.command), GONE)
            assert find_stale_proxy(files) is None
            me = identify(os.getpid())
            assert me is not None
            written(files, me, GONE)
            assert find_stale_proxy(files) is None
        finally:
            process.kill()
    assert find_stale_proxy(files) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"proxy": {"pid": "x"}}', '{"proxy": 1, "parent": 2}'])
def test_a_broken_pid_file_proves_nothing(tmp_path: Path, text: str) -> None:
    """It is as if there were none."""
    files = ProxyFiles(tmp_path)
    files.pid.write_text(text)
    assert PidFile.read(files.pid) is None
    assert find_stale_proxy(files) is None


def test_the_pid_file_is_private_and_complete(tmp_path: Path) -> None:
    """What was written is read."""
    files = ProxyFiles(tmp_path)
    pair = PidFile(ProcessIdentity(1, "a", "b c"), ProcessIdentity(2, "d", "e"))
    pair.write(files.pid)
    assert PidFile.read(files.pid) == pair
    assert files.pid.stat().st_mode & 0o077 == 0
    assert set(json.loads(files.pid.read_text())) == {"proxy", "parent"}
