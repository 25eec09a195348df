"""The address of a Redis server, as REMOTE_CACHE_URL has it. It knows the form of the URL, and what of it may be shown.

redis://[user[:password]@]host[:port][/db]      rediss:// the same over TLS, ?ssl_ca_certs=FILE and others

Standard library only, and every line must run under Python 3.9: a URL that cannot be used is refused before anything is
installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit

SCHEMES = ("redis", "rediss")
PORT = 6379
MAX_DATABASE = 2**31 - 1
FILE_KEYS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""What a URL may say of TLS: files. That certificates are checked is no question."""


@dataclass(frozen=True)
class RemoteAddress:
    """Where a Redis server is, and who we are there. `shown` is what may be printed: no user, no password, no file."""

    host: str
    port: int
    database: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.is_tls else 'redis'}://{host}:{self.port}/{self.database}"


def parse_address(url: str) -> RemoteAddress:
    """Raises ValueError for what is no such URL; the error holds nothing of it."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise ValueError("no URL of a Redis server") from None
    database = parts.path.removeprefix("/") or "0"
    given = parse_qs(parts.query, keep_blank_values=True)
    files = {key: values[0] for key, values in given.items()}
    is_tls = parts.scheme == "rediss"
    is_sound = (
        parts.scheme in SCHEMES
        and bool(host)
        and port != 0
        and not parts.fragment
        and database.isascii()
        and database.isdigit()
        and int(database) <= MAX_DATABASE
        and all(key in FILE_KEYS and len(values) == 1 and values[0] for key, values in given.items())
        and (is_tls or not files)
    )
    if not is_sound or host is None:
        raise ValueError("no URL of a Redis server")
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return RemoteAddress(host, port or PORT, int(database), user, password, is_tls, MappingProxyType(files))
