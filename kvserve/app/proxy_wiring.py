"""The proxy's settings, from the settings of the process. It knows neither a model nor the engine, so that a process
without one can import it."""

from collections.abc import Mapping
from functools import partial

from kvserve.config import Settings
from kvserve.observe.terminal import Terminal
from kvserve.proxy.access import is_loopback
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import ProxySettings
from kvserve.proxy.litellm import LitellmProxy
from kvserve.settings.backend_list import backends_in
from kvserve.settings.ports import local_host


def own_backend(settings: Settings, port: int) -> tuple[BackendAddress]:
    """This process itself, as its proxy asks it."""
    host = "127.0.0.1" if settings.mlx_host in ("0.0.0.0", "::") else url_host(settings.mlx_host)
    return (BackendAddress("kvserve", f"http://{host}:{port}", settings.api_key),)


def named_backends(settings: Settings) -> tuple[BackendAddress, ...]:
    """Those that BACKENDS names."""
    return tuple(BackendAddress(*parts) for parts in backends_in(settings.backends))


def proxy_settings(settings: Settings, backends: tuple[BackendAddress, ...]) -> ProxySettings:
    return ProxySettings(
        host=settings.proxy_host,
        port=settings.proxy_port,
        backends=backends,
        listed_model_id=settings.listed_model_id,
        backend_model_id=settings.model_path,
        state_dir=settings.state_dir,
        api_key=settings.api_key,
        allowed_origins=settings.allowed_origins,
        allowed_hosts=settings.allowed_hosts,
        max_body_bytes=settings.max_request_body_bytes,
        max_waiting=settings.backend_max_waiting,
        api_keys_file=str(settings.api_keys_file.absolute()) if settings.api_keys_file is not None else None,
    )


def started_proxy(settings: ProxySettings, environment: Mapping[str, str], terminal: Terminal) -> LitellmProxy:
    """LiteLLM as a process that is on its way. Raises StartupError."""
    tell_ready = partial(terminal.ready, "LiteLLM", f"http://{url_host(local_host(settings.host))}:{settings.port}")
    proxy = LitellmProxy(settings, environment, terminal.note, on_ready=tell_ready)
    proxy.start()
    return proxy


def proxy_url(settings: Settings) -> str:
    """Where the proxy is asked from this machine."""
    return f"http://{url_host(local_host(settings.proxy_host))}:{settings.proxy_port}"


def access_warnings(settings: Settings, *, has_model: bool = True, has_proxy: bool = True) -> list[str]:
    """What the start says of who may speak to the ports of this process."""
    hosts = {"MLX_HOST": settings.mlx_host} if has_model else {}
    if has_proxy and settings.api_keys_file is None:
        hosts["PROXY_HOST"] = settings.proxy_host
    return [
        f"{name}={host} without API_KEY: whoever reaches this machine over the network may use the "
        "model, read what is told of requests and empty the cache."
        for name, host in hosts.items()
        if settings.api_key is None and not is_loopback(host.lower())
    ]


def url_host(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
