"""Ranks begin together where they are of one model and have the same settings; who else connects is sent away."""

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvserve.core.rank_place import RankPlace
from kvserve.engine.engine_settings import DiskSettings, EngineSettings
from kvserve.engine.ranks import group, loading
from kvserve.engine.ranks.loading import glimpsed, joined, refuse_unlike
from kvserve.engine.ranks.place import Ranks
from kvserve.engine.ranks.rank_link import Ears, Progress
from kvserve.errors import ModelLoadError
from tests.engine.engines import engine_settings

NUM_WEIGHT_BYTES = 2**20


class TwoRanks(Ranks):
    """One of two; what the other one says was said before."""

    def __init__(self, others: dict[str, Any]) -> None:
        self._others = others
        self.said: dict[str, Any] = {}

    def gathered(self, name: str, value: Any) -> list[Any]:
        self.said[name] = value
        return [value, self._others.get(name, value)]


def disk(folder: Path, *, is_ephemeral: bool = False) -> DiskSettings:
    """The settings of a disk that is not used."""
    return DiskSettings(folder, None, 0, 1.0, is_ephemeral)


def meet(monkeypatch: pytest.MonkeyPatch, own: EngineSettings, other: EngineSettings) -> None:
    """Start with settings where another rank has others."""
    ranks = TwoRanks({})
    monkeypatch.setattr(loading, "join", lambda *_: ranks)
    place = RankPlace(0, 2, "")
    joined(place, other, Ears())
    ranks = TwoRanks(ranks.said)
    joined(place, own, Ears())


def test_other_settings_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank without a disk would find nothing after a restart, and its weights would be compared with nobody's. Where
    each has its folder is its own."""
    without = engine_settings()
    on_disk, elsewhere = (replace(without, disk=disk(tmp_path / name)) for name in ("one", "other"))
    scratch = replace(without, disk=disk(tmp_path, is_ephemeral=True))
    meet(monkeypatch, on_disk, elsewhere)
    for own, other in ((without, on_disk), (on_disk, scratch), (scratch, without)):
        with pytest.raises(ModelLoadError, match="same settings: disk cache is"):
            meet(monkeypatch, own, other)
    with pytest.raises(ModelLoadError, match="same settings: prefill_step_size is"):
        meet(monkeypatch, without, replace(without, prefill_step_size=64))


def model_folder(folder: Path, weights: bytes, config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config, "utf-8")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_files_of_other_weights_are_told_apart(tmp_path: Path) -> None:
    """By size, by what stands in the config, and where tensors of one size hold other numbers."""
    weights = bytes(NUM_WEIGHT_BYTES)
    own = glimpsed(model_folder(tmp_path / "own", weights))
    assert own == glimpsed(model_folder(tmp_path / "same", weights))
    half = NUM_WEIGHT_BYTES // 2
    others = (weights[:half] + b"1" * half, {}), (weights + b"0", {}), (weights, {"config": '{"a": 1}'})
    for number, (other, config) in enumerate(others):
        assert own != glimpsed(model_folder(tmp_path / str(number), other, **config))


def test_a_file_that_one_rank_lacks_is_refused_on_both() -> None:
    """Neither waits for the other."""
    fewer, more = {"a": "1"}, {"a": "1", "b": "2"}
    for own, other in ((fewer, more), (more, fewer)):
        with pytest.raises(ModelLoadError, match="same model files: b is"):
            refuse_unlike(TwoRanks({"model files": other}), "model files", own)


def test_a_stranger_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that says too little, one that guesses; then a rank whose words come in pieces."""
    monkeypatch.setattr(group, "GREETING_SECONDS", 1.0)
    opened: list[socket.socket] = []

    def connect(port: int, secret: bytes) -> None:
        for words in (b"", secret[:5], b"x" * (len(secret) + group.RANK_BYTES)):
            opened.append(socket.create_connection(("127.0.0.1", port)))
            opened[-1].sendall(words)
        opened[1].shutdown(socket.SHUT_WR)
        opened.append(socket.create_connection(("127.0.0.1", port)))
        opened[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened[-1].sendall(secret[:7])
        later = threading.Timer(1.2, opened[-1].sendall, [secret[7:] + (1).to_bytes(group.RANK_BYTES)])
        later.start()

    def agree(told: mx.array) -> mx.array:
        numbers: Any = told.tolist()
        connect(numbers[0], bytes(numbers[1:]))
        return told

    monkeypatch.setattr(group, "JOIN_SECONDS", 20.0)
    links = group._accepted(RankPlace(0, 2, "127.0.0.1"), agree, Progress(), Ears())
    assert [link.peer for link in links] == [1]
    for each in (*opened, *(link._connection for link in links)):
        each.close()
