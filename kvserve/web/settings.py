"""The web server's settings as one frozen value; it knows no environment and no sockets."""

from dataclasses import dataclass

from kvserve.proxy.access import AccessRules


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Where to listen and every limit.

    `port` 0 takes a free one. `header_timeout_seconds` and `body_timeout_seconds` each hold for the whole section,
    `write_timeout_seconds` for one event of a stream or one whole answer. A waiting request checks its client every
    `poll_seconds`; `keep_alive_seconds` is the longest silence of a stream. The proxy's statement of a client's key
    counts only with `proxy_secret`; "" accepts none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    proxy_secret: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_header_bytes: int = 65536
    max_header_count: int = 100
    max_connections: int = 256
    header_timeout_seconds: float = 10.0
    body_timeout_seconds: float = 60.0
    write_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 120.0
    linger_seconds: float = 1.0
    keep_alive_seconds: float = 10.0
    poll_seconds: float = 0.03

    @property
    def access(self) -> AccessRules:
        """The rules of who may speak."""
        return AccessRules(self.host, self.api_key, self.allowed_origins, self.allowed_hosts)
