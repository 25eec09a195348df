"""What the child is started with."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import (
    ProxySettings,
    child_command,
    child_environment,
    guard_rules,
    litellm_config,
    write_files,
)
from kvserve.proxy.guard import GuardRules


def settings(folder: Path, key: str | None = None) -> ProxySettings:
    return ProxySettings(
        port=4000,
        backends=(BackendAddress("kvserve", "http://127.0.0.1:8080/", key),),
        listed_model_id="openai/org/name",
        backend_model_id="org/name",
        state_dir=folder,
        api_key=key,
        allowed_origins=("https://a.example",),
        allowed_hosts=("box.local",),
        max_body_bytes=12_345,
    )


def test_the_listed_model_comes_first_and_nothing_is_tried_twice(tmp_path: Path) -> None:
    """Two entries, one backend, no retries and no cool-downs anywhere."""
    config = json.loads(json.dumps(litellm_config(settings(tmp_path))))
    assert [entry["model_name"] for entry in config["model_list"]] == ["openai/org/name", "*"]
    assert [entry["litellm_params"]["model"].partition("/")[2] for entry in config["model_list"]] == ["org/name", "*"]
    assert {entry["litellm_params"]["api_base"] for entry in config["model_list"]} == {"http://127.0.0.1:8080/v1"}
    assert {entry["litellm_params"]["max_retries"] for entry in config["model_list"]} == {0}
    assert (config["litellm_settings"]["num_retries"], config["router_settings"]["num_retries"]) == (0, 0)
    assert config["router_settings"]["disable_cooldowns"] is True


@pytest.mark.parametrize("key", [None, "k"])
def test_the_key_is_master_key_and_backend_key(tmp_path: Path, key: str | None) -> None:
    """Set, it is both; unset, LiteLLM is told that this is meant."""
    config = json.loads(json.dumps(litellm_config(settings(tmp_path, key))))
    assert config["general_settings"].get("master_key") == key
    assert config["general_settings"]["dangerously_permit_weak_or_unset_master_key"] is True
    assert {entry["litellm_params"]["api_key"] for entry in config["model_list"]} == {key or "none"}


def test_each_backend_has_its_deployments_and_its_endpoint(tmp_path: Path) -> None:
    """Under every name, each with its own key; LiteLLM's own key is the proxy's."""
    backends = (BackendAddress("a", "http://a", "key-a"), BackendAddress("a1", "https://b:1/"))
    config: Any = litellm_config(replace(settings(tmp_path, "front"), backends=backends))
    found = [
        (row["model_name"], row["litellm_params"]["api_base"], row["litellm_params"]["api_key"])
        for row in config["model_list"]
    ]
    assert found == [
        (name, base, key)
        for name in ("openai/org/name", "*")
        for base, key in (("http://a/v1", "key-a"), ("https://b:1/v1", "none"))
    ]
    endpoints = config["general_settings"]["pass_through_endpoints"]
    assert [(row["target"], row["headers"]) for row in endpoints] == [
        ("http://a", {"authorization": "Bearer key-a"}),
        ("https://b:1", {"authorization": "Bearer none"}),
    ]
    one, other = (row["path"] for row in endpoints)
    assert not one.startswith(other) and not other.startswith(one)
    assert config["general_settings"]["master_key"] == "front"


@pytest.mark.parametrize("key", [None, "k"])
def test_the_guards_rules_survive_the_file(tmp_path: Path, key: str | None) -> None:
    """What the child reads equals what the parent wrote: the operator's own settings, the key first of all."""
    rules = guard_rules(settings(tmp_path, key))
    assert (rules.api_key, rules.allowed_origins, rules.allowed_hosts) == (key, ("https://a.example",), ("box.local",))
    assert (rules.max_body_bytes, rules.listed_model_id, rules.backend_model_id) == (
        12_345,
        "openai/org/name",
        "org/name",
    )
    assert rules.backends == (BackendAddress("kvserve", "http://127.0.0.1:8080/", key),)
    assert GuardRules.from_json(json.loads(json.dumps(asdict(rules)))) == rules


def test_the_environment_is_ours(tmp_path: Path) -> None:
    """Other providers' keys, databases, proxies and LiteLLM's own switches stay outside; downloads are off."""
    foreign = dict.fromkeys(
        ("OPENAI_API_KEY", "DATABASE_URL", "HTTPS_PROXY", "http_proxy", "LITELLM_LOG", "REDIS_URL", "WORKER_CONFIG"),
        "x",
    )
    environment = child_environment({"PATH": "/bin", "HOME": "/home/u", **foreign}, settings(tmp_path).files)
    assert environment["PATH"] == "/bin"
    assert {name for name in foreign if environment.get(name) == "x"} == set()
    local = [name for name in environment if name.startswith("LITELLM_LOCAL_")]
    assert len(local) == 5
    assert {environment[name] for name in local} == {"True"}
    assert environment["LITELLM_MODE"] == "PRODUCTION"
    assert environment["CONFIG_FILE_PATH"] == str(settings(tmp_path).files.config)


def test_the_package_is_importable_in_the_child(tmp_path: Path) -> None:
    """Its root stands before what the user had on PYTHONPATH."""
    environment = child_environment({"PYTHONPATH": "/mine"}, settings(tmp_path).files)
    root, rest = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "kvserve" / "proxy" / "entry.py").is_file()
    assert rest == "/mine"


def test_the_command_line_names_our_configuration(tmp_path: Path) -> None:
    """That is part of the proof that the process is ours; the key is not on it."""
    command = child_command(settings(tmp_path, "very-secret"))
    assert str(settings(tmp_path).files.config) in command
    assert "very-secret" not in " ".join(command)


def test_the_files_are_private(tmp_path: Path) -> None:
    """Nobody else reads them, even where a former run left them open."""
    folder = settings(tmp_path).files.folder
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "litellm.yaml").write_text("old")
    (folder / "litellm.yaml").chmod(0o644)
    files = write_files(settings(tmp_path, "k"))
    assert {path.stat().st_mode & 0o077 for path in (files.folder, files.config, files.guard)} == {0}
    assert json.loads(files.config.read_text())["general_settings"]["master_key"] == "k"
