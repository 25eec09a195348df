"""What of a start can be refused before anything slow begins: values, what contradicts itself, folders, ports.

It refuses what is certain to fail as things stand, and nothing else; a setting that is not known yet skips its checks.
Standard library only, and every line must run under Python 3.9, here and in what it imports: install_and_run.py asks
before it installs, `app/process.py` before it imports what takes seconds, and both say the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvserve.errors import ModelLoadError, SettingError, StartupError
from kvserve.settings.blas_files import refuse_absent_library
from kvserve.settings.env_file import UNKNOWN, Value, by_field, read_text, values_in
from kvserve.settings.flags import SETTING_OF_FLAG, DemoKind, FlagError, misspelt, misspelt_words, parse_flags
from kvserve.settings.kinds import DEFAULTS, KINDS, NOT_SHOWN, expanded, shown
from kvserve.settings.model_config import read_config
from kvserve.settings.ports import error_of_binding, proxy_port_taken, refuse_unusable_address, somebody_listens
from kvserve.settings.rank_variables import OFF_OVER_RANKS, rank_found
from kvserve.settings.rule_policies import policies_in

DEMO_NAMES: Mapping[DemoKind, str] = {"smollm2": "kvserve-demo-smollm2", "tiny": "kvserve-demo-qwen3"}
"""Under which a demo model is served; its folder's name begins so."""

_HUB_PART = r"(?!.*(?:--|\.\.))\w(?:[\w.-]{0,94}\w)?"
_HUB_NAME = re.compile(rf"{_HUB_PART}/{_HUB_PART}(?<!\.git)", re.ASCII)
_MODELS = (
    "Give a local folder in Hugging Face format (config.json, tokenizer.json, *.safetensors) or a hub name such as "
    "mlx-community/Qwen3-4B-4bit."
)


def refuse_unusable(argv: Sequence[str], environ: Mapping[str, str], env_file: Path) -> None:
    """Raises StartupError where a start with these flags, this environment and this `.env` would be refused at once."""
    try:
        flags = parse_flags(argv)
    except FlagError as error:
        raise StartupError(str(error)) from None
    from_flags = {name: value for name in SETTING_OF_FLAG if (value := getattr(flags, name)) is not None}
    env_text = read_text(env_file)
    # Of a text that only python-dotenv can read the names are not known: the start looks again.
    refuse_misspelt(values_in(env_text or "") or {}, env_file)
    if flags.demo_remove:
        return  # nothing is served
    refuse_model_of_demo(flags.demo, from_flags)
    settings = known_settings(from_flags, environ, env_text)
    refuse_shared_without_disk(settings.get("remote_cache_url"), flags.no_disk_cache or flags.ephemeral_cache)
    if not flags.no_proxy and {"mlx_port", "proxy_port"} <= settings.keys():
        refuse_equal_ports(settings["mlx_port"], settings["proxy_port"])
    if not flags.no_proxy:
        refuse_backends(settings.get("backends", ()))
    with_proxy = not flags.no_proxy
    if (rank := rank_found(environ)) is not None:
        settings.update(OFF_OVER_RANKS)
        if rank[0] > 0:  # it follows rank 0, which has all ports for clients
            with_proxy, _ = False, settings.pop("mlx_port", None)
    refuse_unusable_start(settings, demo=flags.demo, with_proxy=with_proxy, writes_kv=not flags.no_disk_cache)


def refuse_misspelt(values: Mapping[str, Value], env_file: Path) -> None:
    """Raises StartupError where `.env` sets what is nearly a setting; other programs' variables may stand there too."""
    if found := misspelt([name for name, value in values.items() if value is not None], map(str.upper, KINDS)):
        raise StartupError(misspelt_words(found, str(env_file)))


def known_settings(flags: Mapping[str, Any], environ: Mapping[str, str], env_text: str | None) -> dict[str, Any]:
    """The value of every setting that is given or has a default here, less those that are not known yet; without a text
    nothing is known of `.env`. Raises SettingError for the first that cannot be used."""
    in_file = None if env_text is None else values_in(env_text)
    given = {**by_field(environ, in_file or {}), **flags}
    otherwise = {} if in_file is None else DEFAULTS
    settings: dict[str, Any] = {}
    for name, kind in KINDS.items():
        found = given.get(name, otherwise.get(name, UNKNOWN))
        if found is UNKNOWN:
            continue
        try:
            settings[name] = kind.read(found)
        except ValueError:
            key = SETTING_OF_FLAG[name] if name in flags else name.upper()
            raise SettingError(key, shown(name, found), kind.expected) from None
    return settings


def refuse_unusable_start(
    settings: Mapping[str, Any], *, demo: DemoKind | None, with_proxy: bool, writes_kv: bool
) -> None:
    """Raises StartupError for the first setting whose value leads nowhere: what it names is looked up, what is to be
    written or listened on is tried. A setting that is not there is not known yet."""
    checks = (
        (True, policies_in, ("cache_rule_policies",)),
        (True, template_text, ("chat_template",)),
        (True, model_folders, ("model_folders",)),
        (sys.platform == "linux", refuse_absent_library, ("blas_library",)),
        (True, refuse_unusable_address, ("mlx_host", "mlx_port")),
        (demo is None, refuse_unusable_model, ("model_path",)),
        (True, refuse_unusable_draft_model, ("draft_model",)),
        (True, _refuse_unusable_keys, ("api_keys_file", "api_key")),
        (True, partial(_refuse_demo_nowhere, demo), ("state_dir",)),
        (writes_kv, refuse_unusable_folder, ("disk_cache_dir",)),
        (with_proxy, _refuse_proxy_nowhere, ("proxy_port", "state_dir")),
        (with_proxy, _refuse_unusable_proxy_port, ("proxy_host", "proxy_port", "state_dir")),
    )
    for is_wanted, check, names in checks:
        if is_wanted and all(name in settings for name in names):
            check(*(settings[name] for name in names))


# --- what contradicts itself ------------------------------------------------------------------------------------------


def refuse_model_of_demo(demo: DemoKind | None, from_flags: Mapping[str, object]) -> None:
    """Raises SettingError where both are asked for."""
    if demo is not None and "model_path" in from_flags:
        raise SettingError("--model", from_flags["model_path"], "no model together with --demo, which has its own")


def refuse_shared_without_disk(url: object, has_no_disk: bool) -> None:
    """Raises StartupError: who wants no words on a disk wants none on a network, and what is sent are the disk's
    files."""
    if url is not None and has_no_disk:
        raise StartupError(
            "REMOTE_CACHE_URL needs the disk cache: what is shared are its files. Start without --no-disk-cache and "
            "--ephemeral-cache, or without REMOTE_CACHE_URL."
        )


def refuse_equal_ports(mlx_port: int, proxy_port: int) -> None:
    """Raises SettingError where LiteLLM would listen where kvserve does."""
    if mlx_port == proxy_port:
        raise SettingError("PROXY_PORT", proxy_port, "another port than MLX_PORT")


def refuse_backends(backends: Sequence[str]) -> None:
    """Raises SettingError where a server with a proxy of its own is told of others: its proxy would not ask them."""
    if backends:
        expected = "none beside a proxy of its own: start it with --no-proxy, and `kvserve proxy` in front of all"
        raise SettingError("BACKENDS", NOT_SHOWN, expected)


# --- folders ----------------------------------------------------------------------------------------------------------


def refuse_unusable_folder(folder: Path) -> None:
    """Raises SettingError where KV could not be kept: a server that keeps none is not what was asked for."""
    _refuse_unwritable(folder, "DISK_CACHE_DIR (--disk-cache)", folder, "; --no-disk-cache keeps everything in RAM")


def _refuse_demo_nowhere(demo: DemoKind | None, state_dir: Path) -> None:
    """Raises SettingError where a demo model is to be served that is not there and cannot be made."""
    if demo is None:
        return
    there: list[str] = []
    with contextlib.suppress(OSError):
        there = os.listdir(state_dir)
    if not any(name.startswith(DEMO_NAMES[demo]) for name in there):
        _refuse_unwritable(state_dir, "STATE_DIR", state_dir, ", for the demo model")


def _refuse_proxy_nowhere(port: int, state_dir: Path) -> None:
    """Raises SettingError where LiteLLM's configuration cannot be written."""
    what = ", for LiteLLM; --no-proxy starts without it"
    _refuse_unwritable(_proxy_folder(port, state_dir), "STATE_DIR", state_dir, what)


def _refuse_unwritable(folder: Path, key: str, value: Path, what: str) -> None:
    if (reason := _why_unwritable(folder)) is not None:
        raise SettingError(key, str(value), f"a folder that can be written to ({reason}){what}")


def _proxy_folder(port: int, state_dir: Path) -> Path:
    return state_dir / f"litellm-{port}"


def _why_unwritable(folder: Path) -> str | None:
    """None where files can be written there, or folders made where it is not there yet. The folder itself is never
    made and removed for it: another server may be starting on it at the same time."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(folder)  # a name that is too long stands nowhere
        with tempfile.TemporaryFile(dir=next(each for each in (folder, *folder.parents) if os.path.lexists(each))):
            return None
    except OSError as error:
        return error.strerror or str(error)


def template_text(file: Path | None) -> str | None:
    """What stands in the file that CHAT_TEMPLATE names, None where it names none. Raises SettingError for one that is
    not there or is no text. A pipe is none: its text comes once, and it is read here and by the server."""
    if file is None:
        return None
    if not os.path.isfile(file):
        raise SettingError("CHAT_TEMPLATE", str(file), "a file that is there")
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingError("CHAT_TEMPLATE", str(file), f"a file that can be read ({reason})") from None


def _refuse_unusable_keys(file: Path | None, api_key: str | None) -> None:
    """Raises SettingError for a file that is not there, and for one without a key for port 8080. What stands in it is
    read by `app/process.py`."""
    if file is None:
        return
    if not api_key:
        expected = (
            "API_KEY to be set beside it: the operator's key on both ports and the only one on MLX_PORT, where users' "
            "keys do not count"
        )
        raise SettingError("API_KEYS_FILE", str(file), expected)
    if not os.path.isfile(file):
        expected = "a file that is there; `kvserve keys new NAME` prints what goes into it"
        raise SettingError("API_KEYS_FILE", str(file), expected)


def model_folders(names: Sequence[str]) -> tuple[Path, ...]:
    """The folders that MODEL_FOLDERS names. Raises SettingError for one that is not there."""
    for name in names:
        if not os.path.isdir(name):
            raise SettingError("MODEL_FOLDERS", name, "folders that are there, by comma")
    return tuple(map(Path, names))


# --- ports ------------------------------------------------------------------------------------------------------------


def _refuse_unusable_proxy_port(host: str, port: int, state_dir: Path) -> None:
    """Raises PortTaken where somebody listens, SettingError where nobody may, unless it may be a proxy of a former run,
    which the start would end: `proxy/ownership.py` writes down which one that is, and judges it."""
    if (_proxy_folder(port, state_dir) / "process.json").exists():
        return
    error = error_of_binding(host, port)
    if somebody_listens(host, port) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
        raise proxy_port_taken(port)
    if isinstance(error, OSError):
        expected = f"a port that can be listened on ({error.strerror}); --no-proxy starts without LiteLLM"
        raise SettingError("PROXY_PORT", port, expected)


# --- the model --------------------------------------------------------------------------------------------------------


def refuse_unusable_model(model_path: str) -> None:
    """Raises ModelLoadError for what is neither a hub name nor a folder with a model's config."""
    if (folder := local_folder(model_path)) is not None:
        try:
            read_config(folder)
        except ModelLoadError as error:
            raise ModelLoadError(f"MODEL_PATH={model_path!r} cannot be served: {error} {_MODELS}") from None


def refuse_unusable_draft_model(folder: Path | None) -> None:
    """Raises SettingError for what is not a folder with a model's config; None names none."""
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise SettingError("DRAFT_MODEL", str(folder), "a folder that is there")
    try:
        read_config(folder)
    except ModelLoadError as error:
        raise SettingError("DRAFT_MODEL", str(folder), f"a folder with a model ({error})") from None


def local_folder(model_path: str) -> Path | None:
    """The folder that MODEL_PATH names, None where it is a name on the hub. Raises ModelLoadError for anything else."""
    with contextlib.suppress(ValueError):
        folder = expanded(model_path)
        if os.path.isdir(folder):
            return folder
    if _HUB_NAME.fullmatch(model_path):
        return None
    name = model_path.rstrip("/")
    meant = f"A hub name has no / at its end: MODEL_PATH={name}." if _HUB_NAME.fullmatch(name) else _MODELS
    raise ModelLoadError(f"MODEL_PATH={model_path!r} is not a folder. {meant}")
