"""What each setting may be: how its text is read, and within which bounds. `config.py` has meanings and the other
defaults, and reads every value through this table.

Standard library only, and every line must run under Python 3.9: install_and_run.py reads values by it, too, so that one
that cannot be used is refused before anything is installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from kvserve.settings.backend_list import backends_in
from kvserve.settings.redis_address import parse_address

MAX_PORT = 65535
MAX_NUMBER = sys.float_info.max

ModelFamily = Literal["auto", "qwen3", "glm4", "generic"]
QuantScheme = Literal["uniform", "turboquant"]
GroupSize = Literal[32, 64, 128]
KvBits = Literal[4, 8]
BlasSearch = Literal["auto", "off"]
DraftLimit = Literal["auto", "off"]
MAX_DRAFT_TOKENS = 15

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SWITCHES = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}
_WHOLE = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?\s*")
_HOMELESS = "a path that begins with ~ needs a home folder that is known"
_LABEL = "[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*(?!\d+(?::|$)){_LABEL}(?::[1-9]\d{{0,4}})?")

_SECRET = re.compile("[!-~]{16,}")
SECRETS = frozenset({"api_key", "backends", "proxy_secret", "remote_cache_url"})
"""Settings whose values hold keys: no message quotes them."""
NOT_SHOWN = "(not shown)"


class Kind(NamedTuple):
    """One kind of value. `read` takes what was written, or a value that has its type already, and raises ValueError
    where it cannot be used; `expected` says what can be."""

    read: Callable[[object], object]
    expected: str


# --- readers ----------------------------------------------------------------------------------------------------------


def _int(value: object) -> int:
    """As pydantic reads one: `10`, ` 1_000 `, `10.0`."""
    if isinstance(value, str) and (match := _WHOLE.fullmatch(value)):
        return int(match[1])
    if isinstance(value, int):
        return int(value)
    raise ValueError(value)


def _float(value: object) -> float:
    if isinstance(value, (int, float)) or (isinstance(value, str) and value.isascii()):
        return float(value)
    raise ValueError(value)


def _bool(value: object) -> bool:
    if isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _size(value: object) -> int:
    """A number of bytes, or one with a unit."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)):
        number, unit = match.groups()
        if unit.lower() in _SIZE_UNITS:
            size = float(number) * _SIZE_UNITS[unit.lower()]
            if size > MAX_NUMBER:
                raise ValueError(value)
            return int(size)
    return _int(value)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if isinstance(value, (tuple, list)):
        return tuple(map(str, value))
    raise ValueError(value)


def _hosts(value: object) -> tuple[str, ...]:
    """Lower-case host names, each with `:port` where it is not 443; no addresses in numbers, no patterns."""
    hosts = tuple(re.sub(r":443\Z", "", host.lower()) for host in _names(value))
    if not all(map(_HOST.fullmatch, hosts)):
        raise ValueError(value)
    return hosts


def expanded(path: str) -> Path:
    """With the home folder in place of ~. Raises ValueError where there is none."""
    if "\0" in path:
        raise ValueError(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(path) from None


def _path(value: object) -> object:
    return expanded(value) if isinstance(value, str) else value


def aliases_in(pairs: Sequence[str]) -> dict[str, str]:
    """The model of each further name. Raises ValueError for a name without a model."""
    found = {}
    for pair in pairs:
        name, _, target = (part.strip() for part in pair.partition("="))
        if not (name.rstrip("*") and target):
            raise ValueError(pair)
        if target.startswith("~"):
            expanded(target)
        found[name] = target
    return found


def _aliases(value: object) -> tuple[str, ...]:
    pairs = _names(value)
    aliases_in(pairs)
    return pairs


def _backends(value: object) -> tuple[str, ...]:
    texts = _names(value)
    backends_in(texts)
    return texts


def _secret(value: object) -> object:
    """None, or a text that can stand in a header's value before a blank."""
    if value is not None and not (isinstance(value, str) and _SECRET.fullmatch(value)):
        raise ValueError(value)
    return value


def _folders(value: object) -> tuple[str, ...]:
    return tuple(str(expanded(name)) for name in _names(value))


# --- kinds ------------------------------------------------------------------------------------------------------------


def _held(read: Callable[[object], float], is_within: Callable[[float], bool], expected: str) -> Kind:
    def held(value: object) -> object:
        if not is_within(found := read(value)):
            raise ValueError(value)
        return found

    return Kind(held, expected)


def _whole(lowest: int, highest: int | None = None) -> Kind:
    if highest is None:
        return _held(_int, lambda found: found >= lowest, f"a whole number greater than or equal to {lowest}")
    return _held(_int, lambda found: lowest <= found <= highest, f"a whole number from {lowest} to {highest}")


def _port(lowest: int) -> Kind:
    free = "" if lowest else " (0 takes a free one)"
    expected = f"a port, a whole number from {lowest} to {MAX_PORT}{free}"
    return _held(_int, lambda found: lowest <= found <= MAX_PORT, expected)


def _number(lowest: float, highest: float = MAX_NUMBER, *, is_above: bool = False) -> Kind:
    """From `lowest` on, or above it."""
    words = f"greater than {lowest:g}" if is_above else f"greater than or equal to {lowest:g}"
    if highest == MAX_NUMBER:
        words = f"a finite number {words}"
    else:
        words = f"a number {words}" + (f" and less than or equal to {highest:g}" if highest < MAX_NUMBER else "")

    def is_within(found: float) -> bool:
        return (found > lowest if is_above else found >= lowest) and found <= highest

    return _held(_float, is_within, words)


def _sized(example: str) -> Kind:
    return _held(_size, lambda found: found >= 1, f"a positive size such as {example}")


def _auto(kind: Kind) -> Kind:
    def read(value: object) -> object:
        is_auto = value is None or (isinstance(value, str) and value.strip().lower() == "auto")
        return None if is_auto else kind.read(value)

    return Kind(read, f"AUTO or {kind.expected}")


def _choice(choices: tuple[object, ...], expected: str, read: Callable[[object], object] = lambda value: value) -> Kind:
    def chosen(value: object) -> object:
        if (found := read(value)) not in choices:
            raise ValueError(value)
        return found

    return Kind(chosen, expected)


def _bits(value: object) -> object:
    return {"off": None, "4": 4, "8": 8}.get(str(value).strip().lower(), value)


def _wired(value: object) -> object:
    """Bytes, 0 for OFF, None for AUTO."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word is None or word == "auto":
        return None
    if (found := 0 if word == "off" else _size(value)) < 0:
        raise ValueError(value)
    return found


def _library(value: object) -> object:
    """`auto`, `off` or a file."""
    word = value.strip().lower() if isinstance(value, str) else value
    return word if word in ("auto", "off") else _path(_text(value))


def _draft(value: object) -> object:
    """`auto`, `off` or a number of tokens."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in get_args(DraftLimit):
        return word
    if not 1 <= (found := _int(value)) <= MAX_DRAFT_TOKENS:
        raise ValueError(value)
    return found


def _redis_url(value: object) -> object:
    """The URL of a Redis server, as it was written."""
    if value is not None:
        parse_address(str(value))
    return value


def shown(name: str, value: object) -> object:
    """A value as it may be printed: one that may hold a password is not."""
    return NOT_SHOWN if name in SECRETS else value


def _words(choices: tuple[str, ...]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}"


def _text(value: object) -> object:
    if not value or "\0" in str(value):
        raise ValueError(value)
    return value


_TEXT = Kind(_text, "a text that is not empty")
_ANY = Kind(lambda value: value, "a text")
_SWITCH = Kind(_bool, "a boolean, true or false")
_NAMES = Kind(_names, "names by comma")
_FOLDER = Kind(_path, f"a folder; {_HOMELESS}")
_FILE = Kind(_path, f"a file; {_HOMELESS}")
_POSITIVE = _whole(1)
_COUNT = _whole(0)
_SECONDS = _number(0)
_POSITIVE_SECONDS = _number(0, is_above=True)

DEFAULTS: Mapping[str, Any] = {
    "model_path": "lmstudio-community/GLM-4.7-Flash-MLX-4bit",
    "model_folders": (),
    "mlx_host": "127.0.0.1",
    "mlx_port": 8080,
    "proxy_port": 4000,
    "proxy_host": "127.0.0.1",
    "backends": (),
    "cache_rule_policies": (),
    "blas_library": "auto",
    "api_key": None,
    "api_keys_file": None,
    "disk_cache_dir": "~/.cache/kvserve",
    "state_dir": "~/.cache/kvserve/run",
}
"""Of the settings that `start_checks.py` looks behind: folders, ports, names that have to be there."""

KINDS: Mapping[str, Kind] = {
    "model_path": _TEXT,
    "chat_template": _FILE,
    "draft_model": _FOLDER,
    "model_family": _choice(get_args(ModelFamily), _words(get_args(ModelFamily))),
    "model_strict": _SWITCH,
    "model_aliases": Kind(_aliases, f"name=model pairs, by comma; {_HOMELESS}"),
    "model_folders": Kind(_folders, f"folders that are there, by comma; {_HOMELESS}"),
    "proxy_model_id": _TEXT,
    "mlx_host": _TEXT,
    "mlx_port": _port(0),
    "proxy_port": _port(1),
    "proxy_host": _TEXT,
    "proxy_startup_wait_seconds": _SECONDS,
    "max_kv_size": _POSITIVE,
    "kv_group_size": _choice(get_args(GroupSize), "32, 64 or 128", _int),
    "kv_bits": _choice((None, *get_args(KvBits)), "OFF, 4 or 8", _bits),
    "kv_quant_scheme": _choice(get_args(QuantScheme), _words(get_args(QuantScheme))),
    "quantized_kv_start": _COUNT,
    "prompt_cache_max_entries_global": _POSITIVE,
    "prompt_cache_max_entries_per_session": _POSITIVE,
    "prompt_cache_ttl_seconds": _SECONDS,
    "prompt_cache_session_max_idle_seconds": _SECONDS,
    "eviction_interval_seconds": _number(60),
    "keepalive_interval_seconds": _number(30),
    "prompt_cache_block_size": _POSITIVE,
    "prompt_cache_max_bytes": _auto(_sized("8GB")),
    "session_records_max_bytes": _auto(_sized("512MiB")),
    "cache_use_block_index": _SWITCH,
    "cache_canonicalize_tool_context": _SWITCH,
    "cache_rule_policies": _NAMES,
    "cache_vlm_image_identity": _SWITCH,
    "cache_session_partitioning": _SWITCH,
    "tenant_isolation": _SWITCH,
    "cache_norm_safety_check": _SWITCH,
    "normalize_write_tool_content_for_prompt": _SWITCH,
    "disk_cache_dir": _FOLDER,
    "disk_cache_max_bytes": _auto(_sized("200GB")),
    "disk_cache_min_free_bytes": _sized("2GB"),
    "disk_cache_ttl_hours": _number(0, float("inf"), is_above=True),
    "remote_cache_url": Kind(_redis_url, "a URL such as redis://10.0.0.5:6379/0 or rediss://user:password@cache.lan"),
    "warm_next_turn": _SWITCH,
    "prewarm_prefixes": _whole(0, 64),
    "warm_max_tokens": _POSITIVE,
    "warm_max_time_share": _number(0, 1),
    "default_temperature": _number(0, 2),
    "default_top_p": _number(0, 1, is_above=True),
    "default_top_k": _COUNT,
    "default_min_p": _number(0, 1),
    "default_repetition_penalty": _number(0, 10, is_above=True),
    "default_repetition_context_size": _COUNT,
    "default_max_tokens": _POSITIVE,
    "default_thinking": _SWITCH,
    "preserve_thinking": _SWITCH,
    "generation_watchdog_seconds": _SECONDS,
    "stream_share": _number(0, 0.9, is_above=True),
    "max_concurrent_requests": _POSITIVE,
    "max_queued_requests": _COUNT,
    "max_batch_bytes": _auto(_sized("4GB")),
    "wired_limit": Kind(_wired, "OFF, AUTO or a size such as 20GB"),
    "prefill_step_size": _whole(16, 8192),
    "speculation": Kind(_draft, f"auto, off or a whole number from 1 to {MAX_DRAFT_TOKENS}"),
    "speculation_exact": _SWITCH,
    "blas_library": Kind(_library, f"auto, off or a library file; {_HOMELESS}"),
    "backends": Kind(_backends, "[NAME=]http[s]://[KEY@]HOST[:PORT] by comma, no name and no URL twice"),
    "backend_max_waiting": _COUNT,
    "proxy_secret": Kind(_secret, "at least 16 characters of ASCII without blanks"),
    "api_key": _ANY,
    "api_keys_file": _FILE,
    "allowed_origins": _NAMES,
    "allowed_hosts": _NAMES,
    "max_request_body_bytes": _sized("64MiB"),
    "max_connections": _POSITIVE,
    "max_header_bytes": _held(_size, lambda found: found >= 1024, "a size of at least 1024 bytes"),
    "header_timeout_seconds": _POSITIVE_SECONDS,
    "body_timeout_seconds": _POSITIVE_SECONDS,
    "idle_connection_seconds": _POSITIVE_SECONDS,
    "state_dir": _FOLDER,
    "responses_keep_days": _POSITIVE_SECONDS,
    "enable_request_logging": _SWITCH,
    "log_root": _FOLDER,
    "log_keep_days": _COUNT,
    "explanations_kept": _POSITIVE,
    "dashboard_show_text": _SWITCH,
    "image_hosts": Kind(_hosts, "host names by comma, such as images.example.com or cdn.example.com:8443"),
    "image_fetch_seconds": _POSITIVE_SECONDS,
    "image_fetch_max_bytes": _sized("64MiB"),
    "image_feature_max_bytes": _auto(_sized("512MiB")),
    "vlm_cache_debug": _SWITCH,
}
"""The settings in the order of `config.py`: where several are wrong, both name the same one first."""
