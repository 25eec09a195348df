"""Which rank a process is stands in the variables that MLX reads, or it computes alone."""

import json
import socket
from pathlib import Path

import pytest

from kvserve.core.rank_place import RankPlace
from kvserve.errors import PortTaken, SettingError, StartupError
from kvserve.settings.rank_env import rank_place, refuse_demo_of_ranks
from kvserve.settings.rank_variables import half_told, own_address
from kvserve.settings.start_checks import refuse_unusable


def hostfile(folder: Path, value: object) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps(value), "utf-8")
    return str(path)


def test_a_ring_of_two_is_read(tmp_path: Path) -> None:
    """The first host leads."""
    hosts = hostfile(tmp_path, [["10.0.0.1:5000", "10.0.1.1:5000"], ["10.0.0.2:5000"]])
    assert rank_place({"MLX_HOSTFILE": hosts, "MLX_RANK": "1"}) == RankPlace(1, 2, "10.0.0.1")


def test_the_coordinator_of_jaccl_leads(tmp_path: Path) -> None:
    devices = hostfile(tmp_path, [[None, "rdma_en5"], ["rdma_en5", None]])
    environment = {"MLX_IBV_DEVICES": devices, "MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "[fe80::1]:7000"}
    assert rank_place(environment) == RankPlace(0, 2, "fe80::1")


@pytest.mark.parametrize("hosts", [[], [["127.0.0.1:5000"]]])
def test_one_host_computes_alone(tmp_path: Path, hosts: list[object]) -> None:
    """mlx.launch writes such files, too."""
    assert rank_place({"MLX_HOSTFILE": hostfile(tmp_path, hosts), "MLX_RANK": "0"}) is None
    (tmp_path / "empty.json").write_text("", "utf-8")
    assert rank_place({"MLX_HOSTFILE": str(tmp_path / "empty.json"), "MLX_RANK": "0"}) is None
    assert rank_place({"MLX_RANK": "0"}) is None
    assert rank_place({}) is None


@pytest.mark.parametrize(
    ("key", "rank", "hosts"),
    [
        ("MLX_RANK", "2", [["a:1"], ["b:1"]]),
        ("MLX_RANK", "first", [["a:1"], ["b:1"]]),
        ("MLX_HOSTFILE", "0", {"a": 1}),
        ("MLX_HOSTFILE", "0", [["a"], ["b"]]),
    ],
)
def test_half_a_description_is_refused(tmp_path: Path, key: str, rank: str, hosts: object) -> None:
    with pytest.raises(SettingError, match=key):
        rank_place({"MLX_HOSTFILE": hostfile(tmp_path, hosts), "MLX_RANK": rank})
    with pytest.raises(SettingError, match="MLX_HOSTFILE"):
        rank_place({"MLX_HOSTFILE": str(tmp_path / "missing"), "MLX_RANK": "0"})


def test_a_rank_of_a_ring_listens_at_its_own_address(tmp_path: Path) -> None:
    """The first one of its row; an address without a port is none. Over jaccl, and alone, there is none to look at."""
    hosts = hostfile(tmp_path, [["10.0.0.1:5000"], ["[fe80::1]:5001", "10.0.0.2:1"]])
    environment = {"MLX_HOSTFILE": hosts, "MLX_RANK": "1"}
    assert own_address(environment) == ("fe80::1", 5001) and half_told(environment) == []
    assert own_address({"MLX_RANK": "1"}) is None and half_told({"MLX_RANK": "1"}) == ["MLX_RANK"]
    assert half_told({"MLX_HOSTFILE": hosts}) == ["MLX_HOSTFILE"] and half_told({}) == []
    with pytest.raises(SettingError, match="with a port"):
        own_address({"MLX_HOSTFILE": hostfile(tmp_path, [["a:1"], ["b:"]]), "MLX_RANK": "1"})
    devices = {"MLX_IBV_DEVICES": hostfile(tmp_path, [[None], [None]]), "MLX_JACCL_COORDINATOR": "a:1"}
    assert own_address({**devices, "MLX_RANK": "0"}) is None


def test_the_demo_runs_on_one_rank() -> None:
    refuse_demo_of_ranks(None, RankPlace(0, 2, "a"))
    with pytest.raises(StartupError, match="rank 1 of 2"):
        refuse_demo_of_ranks("tiny", RankPlace(1, 2, "a"))


def test_a_follower_needs_no_port(tmp_path: Path) -> None:
    """Rank 0 on the same machine has them, and a model to draft with is for nobody over ranks. Rank 0 needs its own."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        environment = {
            "MODEL_PATH": "a/b",
            "MLX_PORT": port,
            "STATE_DIR": str(tmp_path / "state"),
            "DRAFT_MODEL": str(tmp_path / "missing"),
            "MLX_HOSTFILE": hostfile(tmp_path, [["127.0.0.1:5000"], ["127.0.0.1:5001"]]),
        }
        refuse_unusable(["--no-disk-cache"], {**environment, "MLX_RANK": "1", "PROXY_PORT": "1"}, tmp_path / ".env")
        with pytest.raises(PortTaken, match=port):
            refuse_unusable(["--no-disk-cache", "--no-proxy"], {**environment, "MLX_RANK": "0"}, tmp_path / ".env")
