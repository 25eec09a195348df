"""What of a start can be refused before anything slow begins: values, what contradicts itself, folders, ports.

Standard library only, and every line must run under Python 3.9, here and in what it imports: install_and_run.py asks
before it installs, `process.py` before it imports what takes seconds, and both say the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvserve.errors import ModelLoadError, PortTaken, SettingError, StartupError
from kvserve.flags import SETTING_OF_FLAG, FlagError, parse_flags
from kvserve.values import KINDS, values_in
from kvserve.web.port_holder import describe_holder, refuse_taken_port, somebody_listens

LOOPBACK = "127.0.0.1"


def refuse_unusable(
    argv: Sequence[str], environ: Mapping[str, str], env_text: str, defaults: Mapping[str, str]
) -> None:
    """Raises StartupError where a start with these flags, this environment, this text of `.env` would be refused at
    once. `defaults`: each setting's, by its key, as a text."""
    try:
        flags = parse_flags(argv)
    except FlagError as error:
        raise StartupError(str(error)) from None
    from_flags = {name: value for name in SETTING_OF_FLAG if (value := getattr(flags, name)) is not None}
    refuse_model_of_demo(flags.demo, from_flags)
    settings = _read(from_flags, _by_field(environ), _by_field(values_in(env_text)), _by_field(defaults))
    if not flags.no_proxy:
        refuse_equal_ports(settings["mlx_port"], settings["proxy_port"])
    refuse_taken_port(settings["mlx_host"], settings["mlx_port"])
    if not (flags.no_disk_cache or flags.ephemeral_cache):
        refuse_unusable_folder(settings["disk_cache_dir"])
    if not flags.no_proxy:
        _refuse_taken_proxy_port(settings["proxy_port"], settings["state_dir"])
    if not flags.demo:
        local_folder(settings["model_path"])


def _by_field(texts: Mapping[str, str]) -> dict[str, str]:
    """What is set, by the names of the settings' fields; an empty text sets nothing."""
    return {name.lower(): text for name, text in texts.items() if text}


def _read(flags: Mapping[str, object], *texts: Mapping[str, str]) -> dict[str, Any]:
    """Every setting's value, from the first that sets it. Raises SettingError for the first that cannot be used."""
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        found = next((each[name] for each in (flags, *texts) if name in each), None)
        try:
            values[name] = None if found is None else kind.read(found)
        except ValueError:
            key = SETTING_OF_FLAG[name] if name in flags else name.upper()
            raise SettingError(key, found, kind.expected) from None
    return values


def refuse_model_of_demo(is_demo: bool, from_flags: Mapping[str, object]) -> None:
    """Raises SettingError where both are asked for."""
    if is_demo and "model_path" in from_flags:
        raise SettingError("--model", from_flags["model_path"], "no model together with --demo, which builds its own")


def refuse_equal_ports(mlx_port: int, proxy_port: int) -> None:
    """Raises SettingError where LiteLLM would listen where kvserve does."""
    if mlx_port == proxy_port:
        raise SettingError("PROXY_PORT", proxy_port, "another port than MLX_PORT")


def refuse_unusable_folder(folder: Path) -> None:
    """Raises SettingError where KV could not be kept: a server that keeps none is not what was asked for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        expected = f"a folder that can be written to ({error.strerror}); --no-disk-cache keeps everything in RAM"
        raise SettingError("DISK_CACHE_DIR (--disk-cache)", str(folder), expected) from None


def _refuse_taken_proxy_port(port: int, state_dir: Path) -> None:
    """Raises PortTaken where somebody listens, unless it may be a proxy of a former run, which the start would end:
    `proxy/ownership.py` writes down which one that is, and judges it."""
    may_be_ours = (state_dir / f"litellm-{port}" / "process.json").exists()
    if not may_be_ours and somebody_listens(LOOPBACK, port):
        raise PortTaken(
            f"Port {port} for the LiteLLM proxy is taken by {describe_holder(port)}. It was left alone. Stop it, "
            "choose another PROXY_PORT, or start with --no-proxy."
        )


def local_folder(model_path: str) -> Path | None:
    """The folder that MODEL_PATH names, None where it is a name on the hub. Raises ModelLoadError for anything else."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model_path.startswith((".", "~")) or model_path.count("/") != 1:
        raise ModelLoadError(
            f"MODEL_PATH={model_path!r} is not a folder. Give a local folder in Hugging Face format (config.json, "
            "tokenizer.json, *.safetensors) or a hub name such as mlx-community/Qwen3-4B-4bit."
        )
    return None
