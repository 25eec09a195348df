"""The proxy's settings and files, and the child process's configuration made of them: LiteLLM's and the guard's files,
the environment and the command line. It knows no environment of its own and starts no process."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.envelope import api_base, pass_through_endpoint
from kvserve.proxy.guard import GuardRules
from kvserve.proxy.keep_alive import LITELLM_VARIABLES


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Where LiteLLM listens, what it fronts and who may call it.

    `listed_model_id` is what the proxy lists; the backend sees it without the `openai/` that LiteLLM users put before
    the name. `backend_model_id` is what the backend itself lists that model as.
    With `api_key` every request needs that key; without, any key or none will do. A backend gets its own.
    By `secret` the backend knows that it is the proxy who says whose key a request came with.
    With `api_keys_file` the holders that this file names may call too; LiteLLM gets `api_key` whoever calls.
    A stream that is silent for `keep_alive_seconds` (at least 1) gets a comment.
    With `watches_backends` each backend is asked how it is; where more than `max_waiting` requests wait it is busy.
    `allowed_origins` and `allowed_hosts` extend loopback exactly as they do on the backend's own port.
    """

    port: int
    backends: tuple[BackendAddress, ...]
    listed_model_id: str
    backend_model_id: str
    state_dir: Path
    host: str = "127.0.0.1"
    api_key: str | None = None
    secret: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_waiting: int = 8
    watches_backends: bool = False
    max_log_bytes: int = 2**20
    keep_alive_seconds: float = 10.0
    startup_timeout_seconds: float = 120.0
    api_keys_file: str | None = None

    @property
    def files(self) -> "ProxyFiles":
        """The files of the proxy on this port; two servers with different ports may share a state folder."""
        return proxy_files(self.state_dir, self.port)


@dataclass(frozen=True, slots=True)
class ProxyFiles:
    """The files of one proxy, all in one private folder."""

    folder: Path

    @property
    def config(self) -> Path:
        """LiteLLM's configuration. Its path on a command line is part of the proof that a process is ours."""
        return self.folder / "litellm.yaml"

    @property
    def guard(self) -> Path:
        """What the guard around LiteLLM needs to know, as JSON."""
        return self.folder / "guard.json"

    @property
    def pid(self) -> Path:
        """Which process we started, and for whom."""
        return self.folder / "process.json"

    @property
    def log(self) -> Path:
        """What LiteLLM wrote to its standard output and error."""
        return self.folder / "litellm.log"


def proxy_files(state_dir: Path, port: int) -> ProxyFiles:
    """The files of the proxy on this port."""
    return ProxyFiles(state_dir.absolute() / f"litellm-{port}")


type Json = dict[str, object]

# LiteLLM's dialect for a local OpenAI-compatible server without special cases. Under `openai/` it looks every name up
# in its catalogue: it sends `gpt-5-codex` and `o1-pro` to /v1/responses or refuses their temperature, and /v1/models
# lists OpenAI's models. `hosted_vllm/` loses text: it drops streamed pieces with `[DONE]` or a Unicode line separator.
_DIALECT = "llamafile"
_BACKEND_KEY_IF_NONE = "none"

# What a Python process needs to run. All other variables stay out: LiteLLM reads some hundred (databases, other
# providers' keys, HTTP proxies), and each could send a prompt elsewhere.
_PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)

_FIXED_VARIABLES = {
    # Each of these replaces a download at start by the copy inside the package.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_LOG": "ERROR",
    # Otherwise LiteLLM loads the nearest .env file, ours, which may hold other providers' keys.
    "LITELLM_MODE": "PRODUCTION",
    "DISABLE_ADMIN_UI": "True",
    "NO_DOCS": "True",
    # The drain must end well before the server's own shutdown does.
    "GRACEFUL_SHUTDOWN_TIMEOUT": "1",
    # Shorter than any backend keeps an idle connection, so that no request meets a closing one.
    "AIOHTTP_KEEPALIVE_TIMEOUT": "30",
    **LITELLM_VARIABLES,
    # LiteLLM ends a stream with an error when so many pieces in a row are equal: a table, a run of blank lines.
    "REPEATED_STREAMING_CHUNK_LIMIT": "1000000000",
    "NO_PROXY": "*",
    "no_proxy": "*",
    "PYTHONUNBUFFERED": "1",
}


def deployment(public_name: str, backend_name: str, backend: BackendAddress) -> Json:
    """One entry of LiteLLM's model list: requests for `public_name` go to this backend as `backend_name`. Of those of
    one name the hook leaves the backend that the guard chose."""
    return {
        "model_name": public_name,
        "litellm_params": {
            "model": f"{_DIALECT}/{backend_name}",
            "api_base": api_base(backend),
            "api_key": backend.api_key or _BACKEND_KEY_IF_NONE,
            "max_retries": 0,
        },
    }


def litellm_config(settings: ProxySettings) -> Json:
    """LiteLLM's configuration: the listed model first, then every other name; no retries, no cool-downs.

    A retry would prefill a second time, and a cool-down after an error would refuse the next client's request.
    """
    listed = settings.listed_model_id
    general: Json = {
        "dangerously_permit_weak_or_unset_master_key": True,
        "forward_client_headers_to_llm_api": True,
        "cancel_on_disconnect": True,
        "disable_model_info_refresh": True,
        "pass_through_endpoints": [pass_through_endpoint(backend) for backend in settings.backends],
    }
    if settings.api_key is not None:
        general["master_key"] = settings.api_key
    return {
        "model_list": [
            deployment(public, name, backend)
            for public, name in ((listed, listed.removeprefix("openai/")), ("*", "*"))
            for backend in settings.backends
        ],
        "general_settings": general,
        "litellm_settings": {
            "callbacks": ["kvserve.proxy.hook.raw_body_hook"],
            "num_retries": 0,
            # LiteLLM drops the backend's comments and empty pieces, so it has to send its own.
            "sse_keepalive_ping_interval_seconds": settings.keep_alive_seconds,
            "disable_token_counter": True,  # the backend counts; LiteLLM's own count costs 100 ms on long prompts
        },
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }


def guard_rules(settings: ProxySettings) -> GuardRules:
    """What the guard in the child process enforces: its rules have the names of the settings."""
    return GuardRules(**{field.name: getattr(settings, field.name) for field in fields(GuardRules)})


def child_environment(base: Mapping[str, str], files: ProxyFiles) -> dict[str, str]:
    """The child's complete environment: the variables of `base` that Python needs, and ours."""
    environment = {name: base[name] for name in _PASSED_VARIABLES if name in base}
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_root}{os.pathsep}{inherited}" if inherited else package_root
    return environment | _FIXED_VARIABLES | {"CONFIG_FILE_PATH": str(files.config)}


def child_command(settings: ProxySettings) -> list[str]:
    """The command line. `-P` keeps the working folder off the import path."""
    files = settings.files
    return [
        *(sys.executable, "-P", "-m", "kvserve.proxy.entry"),
        *("--config", str(files.config), "--guard", str(files.guard)),
        *("--host", settings.host, "--port", str(settings.port)),
    ]


def write_files(settings: ProxySettings) -> ProxyFiles:
    """Writes both configurations, readable by this user only, since they may hold the API key. Returns their paths."""
    files = settings.files
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.folder.chmod(0o700)
    # LiteLLM reads YAML, which includes JSON.
    write_private(files.config, json.dumps(litellm_config(settings), indent=1))
    write_private(files.guard, json.dumps(asdict(guard_rules(settings)), indent=1))
    return files


def write_private(path: Path, text: str) -> None:
    """Replaces the file in one step; only this user can read it, also while it is written."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
