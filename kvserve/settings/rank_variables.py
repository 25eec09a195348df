"""The variables that MLX itself reads of one of several ranks, and the settings that mean nothing there.

Standard library only, and every line must run under Python 3.9: `start_checks.py` reads it before an installation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvserve.errors import SettingError

RANK, RING, JACCL, COORDINATOR = "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"

OFF_OVER_RANKS: Mapping[str, object] = {
    "speculation": "off",
    "draft_model": None,
    "warm_next_turn": False,
    "prewarm_prefixes": 0,
    "model_folders": (),
    "remote_cache_url": None,
}
"""Settings that mean nothing where several ranks compute one model, and their values there."""


def rank_found(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Rank, number of ranks, and the host where rank 0 listens; None where a process computes alone. Raises
    SettingError for half of it."""
    name = JACCL if environment.get(JACCL) else RING
    if not environment.get(RANK) or not environment.get(name):
        return None
    hosts = _hosts(name, environment[name])
    if len(hosts) < 2:
        return None
    leader = environment.get(COORDINATOR, "") if name == JACCL else hosts[0][0]
    host = str(leader).rpartition(":")[0].strip("[]")
    if not host:
        key, value = (COORDINATOR, str(leader)) if name == JACCL else (name, environment[name])
        raise SettingError(key, value, "an address of rank 0 with its port, as mlx.launch writes it")
    rank = environment[RANK]
    if not rank.isdecimal() or int(rank) >= len(hosts):
        raise SettingError(RANK, rank, f"the number of one of the {len(hosts)} ranks, from 0 on")
    return int(rank), len(hosts), host


def own_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where this rank of a ring listens for the others, by its hostfile; None where there is no ring. Raises
    SettingError."""
    found = rank_found(environment)
    if found is None or environment.get(JACCL):
        return None
    address = str(_hosts(RING, environment[RING])[found[0]][0])
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingError(RING, environment[RING], f"addresses with a port, which {address!r} is not")
    return host.strip("[]"), int(port)


def half_told(environment: Mapping[str, str]) -> list[str]:
    """The variables of ranks that are set though this process computes alone."""
    is_told = rank_found(environment) is not None
    return [] if is_told else [name for name in (RANK, RING, JACCL, COORDINATOR) if environment.get(name)]


def _hosts(name: str, path: str) -> list[Any]:
    """A row for each rank. Raises SettingError."""
    try:
        hosts = json.loads(Path(path).read_text("utf-8") or "[]")  # mlx.launch writes an empty file for one host
    except (OSError, ValueError) as error:
        raise SettingError(name, path, f"a file of hosts as mlx.launch writes it ({error})") from None
    if not isinstance(hosts, list) or not all(isinstance(host, list) and host for host in hosts):
        raise SettingError(name, path, "a list with a list of addresses for each rank")
    return hosts
