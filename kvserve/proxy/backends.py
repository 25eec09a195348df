"""The servers behind the proxy, and the order in which they are asked for a key. Pure; it knows no request and no
state."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """One server: the name that all proxies give it, a URL without a path, and the key that it asks for, if any."""

    name: str
    url: str
    api_key: str | None = None

    @property
    def base(self) -> str:
        """The URL without a slash at its end."""
        return self.url.rstrip("/")


def rendezvous(key: bytes, backends: Sequence[BackendAddress]) -> tuple[BackendAddress, ...]:
    """All of them, the key's own first (rendezvous hashing: Thaler and Ravishankar, 1998). The order depends on names
    alone, so every proxy finds the same; without one of them the others keep theirs."""
    return tuple(sorted(backends, key=lambda each: hashlib.sha256(key + each.name.encode("utf-8")).digest()))
