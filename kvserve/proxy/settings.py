"""What the operator may set about the proxy, and where its files lie; it knows no environment and no processes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Where LiteLLM listens, what it fronts and who may call it.

    `listed_model_id` is what the proxy lists; the backend sees it without the `openai/` that LiteLLM users put before
    the name. `backend_model_id` is what the backend itself lists that model as.
    With `api_key` every request needs that key and the backend gets it too; without, any key or none will do.
    By `secret` the backend knows that it is the proxy who says whose key a request came with.
    A stream that is silent for `keep_alive_seconds` (at least 1) gets a comment.
    `allowed_origins` and `allowed_hosts` extend loopback exactly as they do on the backend's own port.
    """

    port: int
    backend_url: str
    listed_model_id: str
    backend_model_id: str
    state_dir: Path
    host: str = "127.0.0.1"
    api_key: str | None = None
    secret: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_log_bytes: int = 2**20
    keep_alive_seconds: float = 10.0
    startup_timeout_seconds: float = 120.0

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
