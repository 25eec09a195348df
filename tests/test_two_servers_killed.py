"""Two servers on one folder of KV, one of which is killed at any moment, again and again: what either said to be
written is found after the restart, whoever wrote it, and every text is that of a server that remembers nothing."""

import contextlib
import http.client
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from kvserve.cache.disk_blob import DamagedBlob
from tests.cache.disks import Disk
from tests.disk_said import SaidOnDisk
from tests.disk_servers import (
    MAX_TOKENS,
    PATIENCE_SECONDS,
    Answered,
    Messages,
    Reference,
    ask,
    assert_found,
    cache_report,
    said,
    wait_until_ready,
)
from tests.e2e.servers import ROOT, START_SCRIPT, ServerProcess, wait_until
from tests.laws import TWO_KINDS
from tests.models import tiny_model
from tests.serving import serving_app

NUM_KILLS = int(os.environ.get("NUM_SERVER_KILLS", "10"))
NUM_TURNS = 3
NUM_OLDER = 6
"""So many prompts of earlier rounds are asked for after each kill too."""

MAX_PAUSE_SECONDS = 1.5
SYSTEM = ("system", said(8, 0))
COMPLAINTS = ("was damaged", "is gone", "could not be read", "could not be written")
"""Of the lines on a screen about faults of the disk."""


def conversation(round_number: int, number: int) -> list[Messages]:
    """What a client sends, turn after turn. The answers in it are not the model's own, so that a server that was there
    and one that was not write the same prompt."""
    seed, messages, prompts = 100 * (round_number + 1) + 10 * number, [SYSTEM], list[Messages]()
    for turn in range(NUM_TURNS):
        messages.append(("user", said(1 + number + turn, seed + turn)))
        prompts.append(tuple(messages))
        messages.append(("assistant", said(1, seed + turn + 5)))
    return prompts


SLOW_WRITES = """
import time
from kvserve.cache import disk_store, disk_tier
from kvserve.cache.disk_account import DiskAccount
from kvserve.cache.disk_store import FolderStore
write_all = disk_store.write_all
def write_slowly(descriptor, part):
    write_all(descriptor, part)
    time.sleep(0.005)
disk_store.write_all = write_slowly
"""
"""A disk on which a file stays half written for a moment: on a fast one hardly any kill meets such a file."""


def start_script(folder: Path, fault: str = "") -> Path:
    """The start of a server with this disk, and with a fault of its code."""
    script = folder / "start_llm.py"
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(path + SLOW_WRITES + fault + START_SCRIPT.read_text("utf-8"), "utf-8")
    return script


class Client(threading.Thread):
    """Asks for prompts one after the other, until all are answered or the server is dead."""

    def __init__(self, server: ServerProcess, prompts: Sequence[Messages]) -> None:
        super().__init__(daemon=True)
        self._server, self._prompts = server, prompts
        self.answered: list[tuple[Messages, Answered]] = []

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            for messages in self._prompts:
                self.answered.append((messages, ask(self._server, messages, MAX_TOKENS)))


class Pair:
    """Two servers of one model on the folder `kv`, each in a process of its own."""

    def __init__(self, folder: Path, family: str, script: Path) -> None:
        self.kv = folder / "kv"
        self.num_half_written = 0
        self._folder, self._model, self._script = folder, str(tiny_model(family)), script
        self.servers = [self._started(number) for number in range(2)]

    def _started(self, number: int) -> ServerProcess:
        """In steps so small that to read is always worth it, however slow a busy machine's disk was found to be."""
        settings = {"DISK_CACHE_DIR": self.kv, "PREFILL_STEP_SIZE": 16, "WARM_NEXT_TURN": "false"}
        place = self._folder / str(number)
        return ServerProcess(place, "--model", self._model, with_proxy=False, script=self._script, **settings)

    def wait_until_ready(self) -> None:
        for server in self.servers:
            wait_until_ready(server)

    def restart(self, number: int) -> None:
        self.servers[number] = self._started(number)

    def kill(self, number: int) -> None:
        """As it stands."""
        self.servers[number].end(signal.SIGKILL)

    def kill_in_a_write(self, number: int, clients: Sequence[threading.Thread]) -> None:
        """With a file half written, or else when its clients have been answered: it writes no more then."""
        server = self.servers[number]

        def is_writing() -> bool:
            server.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if any(self.kv.glob(f"*/*.{server.pid}.*.part")):
                self.num_half_written += 1
                return True
            server.process.send_signal(signal.SIGCONT)
            time.sleep(0.002)
            return not any(client.is_alive() for client in clients)

        wait_until(is_writing, PATIENCE_SECONDS, lambda: f"it neither writes nor answers: {server.screen}")
        self.kill(number)

    def close(self) -> None:
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT)
            server.close()


@contextlib.contextmanager
def pair(folder: Path, family: str, fault: str = "") -> Iterator[Pair]:
    folder.mkdir()
    both = Pair(folder, family, start_script(folder, fault))
    try:
        both.wait_until_ready()
        yield both
    finally:
        both.close()


class Kills:
    """What is done to two servers, and what they said meanwhile."""

    def __init__(self, both: Pair, reference: Reference) -> None:
        self._both = both
        self._reference = reference
        self._chance = random.Random(1)
        self.on_disk = SaidOnDisk(both.kv)
        self.num_kills = self.num_answers = self.num_found_tokens = 0

    def round(self, number: int) -> None:
        """New conversations, of which either server has one alone; one is killed under them, and what was said to be
        written is there when it comes back."""
        older = list(self._reference.texts)
        common, *own = [conversation(number, each) for each in range(3)]
        self._reference.learn([*common, *own[0], *own[1]])
        victim = self._chance.randrange(2)
        clients = [
            Client(server, self._chance.sample(prompts, len(prompts)))
            for server, prompts in zip(self._both.servers, ([*common, *alone] for alone in own), strict=True)
            for _ in range(2)
        ]
        for client in clients:
            client.start()
        self._kill(victim, number, clients)
        for client in clients:
            client.join(PATIENCE_SECONDS)
            assert not client.is_alive()
            for messages, answered in client.answered:
                assert answered.text == self._reference.texts[messages]
        self.on_disk.look()
        self.restart([victim])
        some = self._chance.sample(older, min(NUM_OLDER, len(older)))
        self.assert_found(victim, [*common, *own[0], *own[1], *some])
        self.assert_sound()

    def _kill(self, victim: int, number: int, clients: Sequence[threading.Thread]) -> None:
        """In a write, or at any moment, and now and then once more while it starts."""
        if number % 2:
            time.sleep(self._chance.random() * MAX_PAUSE_SECONDS)
            self._both.kill(victim)
        else:
            self._both.kill_in_a_write(victim, clients)
        self.num_kills += 1
        if number % 4 == 3:
            self._both.restart(victim)
            time.sleep(self._chance.random() * MAX_PAUSE_SECONDS)
            self._both.kill(victim)
            self.num_kills += 1

    def restart(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._both.restart(number)
        self._both.wait_until_ready()

    def assert_found(self, server: int, prompts: Sequence[Messages]) -> None:
        """What was said to be written of these is not computed."""
        self.num_found_tokens += assert_found(self._both.servers[server], prompts, self._reference, self.on_disk)
        self.num_answers += len(prompts)

    def assert_sound(self) -> None:
        """Neither found anything wrong, but that the other one had the index for a while."""
        for server in self._both.servers:
            report, screen = cache_report(server)["disk"], server.screen
            assert set(report["errors"]) <= {"index"}, screen
            assert report["num_evicted"] == 0
            assert not [line for line in COMPLAINTS if line in screen], screen  # of those who are dead by now too

    def kill_both(self) -> None:
        """And look at what is left, with nobody there."""
        for number in range(2):
            self._both.kill(number)
            self.num_kills += 1
        self.on_disk.look()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", TWO_KINDS)
def test_what_two_servers_said_outlives_any_kill(family: str, tmp_path: Path) -> None:
    """Ten kills, the last of both at once; after it either has what the other one wrote."""
    with (
        serving_app(tmp_path / "reference", family, disk_cache="off") as app,
        pair(tmp_path / "both", family) as both,
    ):
        reference = Reference(app)
        kills = Kills(both, reference)
        for number in count():
            if kills.num_kills >= NUM_KILLS - 2:
                break
            kills.round(number)
        kills.kill_both()
        kills.restart([0, 1])
        for server in range(2):
            kills.assert_found(server, list(reference.texts)[server::NUM_TURNS])
        kills.assert_sound()
        kills.on_disk.look()
    num_blobs, num_answers, num_tokens = len(kills.on_disk.names), kills.num_answers, kills.num_found_tokens
    print(f"{family}: {kills.num_kills} kills, {both.num_half_written} of them in a write, {num_blobs} blobs")
    print(f"{num_tokens} tokens found in {num_answers} answers")
    assert num_tokens > 100 * num_answers
    assert both.num_half_written


SAID_TOO_EARLY = """
import threading
real = FolderStore.write
def later(self, name, parts):
    threading.Timer(0.3, real, (self, name, parts)).start()
    return sum(memoryview(part).nbytes for part in parts)
FolderStore.write, FolderStore.has = later, lambda self, model, name: True
"""
DELETES_WHAT_IT_DOES_NOT_KNOW = """
disk_tier.RECONCILE_SECONDS = 0.05
def delete(self, files):
    for file in files:
        self._delete(file.model, file.name)
DiskAccount._adopt = delete
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", [SAID_TOO_EARLY, DELETES_WHAT_IT_DOES_NOT_KNOW], ids=["early", "deletes"])
def test_servers_that_lose_what_they_said_are_found_out(fault: str, tmp_path: Path) -> None:
    """The same with a fault in both: one says that a blob is written before its file is there; one deletes what another
    server has written since it looked last."""
    with (
        serving_app(tmp_path / "reference", TWO_KINDS[0], disk_cache="off") as app,
        pair(tmp_path / "both", TWO_KINDS[0], fault) as both,
        pytest.raises(AssertionError, match=r"has gone|is not there|is gone|tokens were written"),
    ):
        kills = Kills(both, Reference(app))
        for number in range(NUM_KILLS):
            kills.round(2 * number)


def test_what_was_said_is_looked_up(tmp_path: Path) -> None:
    """Rows up to the last token, which is always computed, or up to the last state before it; of others only what is
    the same."""
    ids = [*range(100, 140)]
    with Disk(tmp_path) as disk:
        on_disk = SaidOnDisk(tmp_path)
        disk.say(ids[:20], states=(10, 20))
        disk.say(ids, states=(40,))
        on_disk.look()
    for prompt, num_rows, num_states in (
        (ids, 39, 20),
        ([*ids, 7], 40, 40),
        ([*ids[:30], 7], 30, 20),
        ([*ids[:15], 7], 15, 10),
        ([7, *ids], 0, 0),
    ):
        assert on_disk.num_tokens(prompt, needs_states=False) == num_rows
        assert on_disk.num_tokens(prompt, needs_states=True) == num_states


def test_what_was_said_and_is_not_there_shows(tmp_path: Path) -> None:
    """A file that is gone, one that is cut off, a row that is gone."""
    with Disk(tmp_path) as disk:
        on_disk = SaidOnDisk(tmp_path)
        disk.say([*range(100, 140)], states=(40,))
        on_disk.look()
    file = disk.files()[0]
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(AssertionError, match="a file that was said"):
        on_disk.look()
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedBlob):
        on_disk.look()
    file.write_bytes(whole)
    on_disk.look()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as catalog:
        catalog.execute("DELETE FROM blobs WHERE name = ?", (file.stem,))
    with pytest.raises(AssertionError, match="a row that was put down"):
        on_disk.look()
