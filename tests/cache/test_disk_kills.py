"""Two disk tiers on one folder, one of which is killed at any moment, again and again: what they said is there."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.disk_child import WORDS
from tests.cache.disks import Disk

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = int(os.environ.get("NUM_DISK_KILLS", "200"))
KILLS_PER_FOLDER = 10
MAX_LINES = 30


class Child:
    """A tier that says prompts, and what it has said of them so far."""

    def __init__(self, folder: Path, seed: int) -> None:
        command = [sys.executable, "-m", "tests.cache.disk_child", str(folder), str(seed)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.said: list[list[int]] = []

    def hear(self, num_lines: int) -> None:
        """Wait until it has told of so many prompts more."""
        assert self._process.stdout is not None
        for _ in range(num_lines):
            line = self._process.stdout.readline()
            assert line.endswith("\n"), "it ended by itself"
            self.said.append(json.loads(line))

    def kill(self) -> list[list[int]]:
        """End it as it stands, and hear the rest of what it has said."""
        self._process.kill()
        rest, _ = self._process.communicate()
        whole = rest[: rest.rfind("\n") + 1]
        return [*self.said, *(json.loads(line) for line in whole.splitlines())]


def assert_there(folder: Path, said: list[list[int]]) -> None:
    """A third one on this folder has all of it, rows and states; every byte is looked at."""
    with Disk(folder) as disk:
        for ids in said:
            rows, states = disk.recall(ids)
            assert rows == ids and len(ids) in states
        assert set(disk.faults) <= {"index"}, disk.lines


def killed_again_and_again(folder: Path, num_kills: int, chance: random.Random) -> int:
    """How many prompts were told of."""
    children = [Child(folder, chance.randrange(10**6)) for _ in range(2)]
    said: list[list[int]] = []
    try:
        for _ in range(num_kills):
            number = chance.randrange(2)
            children[number].hear(chance.randint(1, MAX_LINES))
            said += children[number].kill()
            children[number] = Child(folder, chance.randrange(10**6))
            assert_there(folder, said)
    finally:
        for child in children:
            said += child.kill()
    assert_there(folder, said)
    return len(said)


def test_what_two_tiers_said_outlives_some_kills(tmp_path: Path) -> None:
    """A few, in every run of the tests."""
    assert killed_again_and_again(tmp_path, 2, random.Random(1)) >= 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(-(-NUM_KILLS // KILLS_PER_FOLDER)))
def test_what_two_tiers_said_outlives_any_kill(tmp_path: Path, number: int) -> None:
    """Two hundred, ten on each folder."""
    assert killed_again_and_again(tmp_path, KILLS_PER_FOLDER, random.Random(number)) >= KILLS_PER_FOLDER


def test_what_is_said_and_not_there_would_show(tmp_path: Path) -> None:
    """The same look at a folder from which a file has gone."""
    ids = [token for word in WORDS for token in word]
    with Disk(tmp_path) as disk:
        disk.say(ids, states=(len(ids),))
    assert_there(tmp_path, [ids])
    max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(AssertionError):
        assert_there(tmp_path, [ids])
