"""Fetches pictures from https addresses of hosts that the operator named, within limits of time and size.

A name is resolved once, all its addresses must be public, the connection goes to one of them, and the certificate must
be the host's. A redirect must pass the same checks.
"""

import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from kvserve.errors import BadRequest
from kvserve.prompt.memo import Memo

MEMO_BYTES: Final = 64 * 2**20
MAX_FRESH_SECONDS: Final = 3600.0
MAX_REDIRECTS: Final = 3
HTTPS_PORT: Final = 443
_CHUNK_BYTES = 65536
_REDIRECTS = (301, 302, 303, 307, 308)
_IN_PATHS = "%/:=&?~+!$,;'@()*"
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d{1,9})", re.IGNORECASE)
_NOT_KEPT = re.compile(r"(?:^|[\s,])(?:no-store|no-cache)", re.IGNORECASE)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_TUNNELS = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """The limits of all remote pictures of one request together: seconds, resolved names, and bytes."""

    seconds: float = 20.0
    max_bytes: int = 64 * 2**20


type Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host name, for a port. Raises OSError."""


def resolve_host(host: str, port: int) -> Sequence[str]:
    """The host's addresses from the system's resolver, with its timeout."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def is_public(address: str) -> bool:
    """Whether it is an address of the public internet: not this machine, its networks, a tunnel or a group."""
    given = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(given, ipaddress.IPv6Address):
        inner = given.ipv4_mapped
        if inner is None and given in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(given) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if given not in _GLOBAL_UNICAST or any(given in tunnel for tunnel in _TUNNELS):
            return False
    return given.is_global and not given.is_multicast


@dataclass(frozen=True, slots=True)
class _Kept:
    """A picture that its host allows to keep until this time of the monotonic clock."""

    content: bytes
    until: float


class RemotePictures:
    """Fetches from the hosts of an operator's list. Safe for several threads.

    `hosts` are lower-case names, each with `:port` where it is not 443. The callables are for tests.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        limits: RemoteLimits,
        *,
        resolve: Resolve = resolve_host,
        may_ask: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hosts = frozenset(hosts)
        self.limits = limits
        self._resolve = resolve
        self._may_ask = may_ask
        self._tls = ssl.create_default_context() if tls is None else tls
        self.now = now
        self._kept: Memo[_Kept] = Memo(MEMO_BYTES)

    def visit(self) -> "Visit":
        """A new request's visit."""
        return Visit(self)

    def kept(self, url: str) -> bytes | None:
        """The kept bytes, while the host allows it."""
        kept = self._kept.get(url)
        return kept.content if kept is not None and self.now() < kept.until else None

    def keep(self, url: str, content: bytes, cache_control: str) -> None:
        """Keep the bytes as long as the host's `Cache-Control` allows, at most an hour."""
        age = _MAX_AGE.search(cache_control)
        if age is not None and not _NOT_KEPT.search(cache_control):
            self._kept.put(url, _Kept(content, self.now() + min(float(age[1]), MAX_FRESH_SECONDS)), len(content))

    @contextlib.contextmanager
    def connection(self, url: SplitResult, deadline: float) -> Iterator[http.client.HTTPSConnection]:
        """An open connection to an allowed address of the URL's host. Raises BadRequest, OSError."""
        host, port = self._named(url)
        addresses = self._resolve(host, port)
        if not all(self._may_ask(address) for address in addresses):
            raise refused(f"{host} leads to an address that is not on the public internet")
        # A certificate of another host ends it (ssl.SSLError is an OSError).
        with (
            self._reached(addresses, port, deadline) as plain,
            self._tls.wrap_socket(plain, server_hostname=host) as secured,
        ):
            connection = http.client.HTTPSConnection(host, port, context=self._tls)
            connection.sock = _Timed(secured, lambda: left(deadline, self.now))
            yield connection

    def _reached(self, addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
        """A connection to the first address that accepts one. Raises the last OSError."""
        failure = OSError("it has no address")
        for address in addresses:
            try:
                plain = socket.create_connection((address, port), timeout=left(deadline, self.now))
            except OSError as error:
                failure = error
                continue
            plain.settimeout(left(deadline, self.now))
            return plain
        raise failure

    def _named(self, url: SplitResult) -> tuple[str, int]:
        """Host and port of an allowed address. Raises BadRequest."""
        try:
            host, port = (url.hostname or "").rstrip("."), url.port or HTTPS_PORT
            host = host.encode("idna").decode("ascii").lower()
        except ValueError as error:  # UnicodeError is one
            raise refused("its address cannot be read") from error
        if url.scheme.lower() != "https" or url.username is not None or url.password is not None:
            raise refused("only https addresses without a user are fetched")
        name = host if port == HTTPS_PORT else f"{host}:{port}"
        if name not in self.hosts:
            raise refused(f"{name[:80]!r} is not one of IMAGE_HOSTS ({', '.join(sorted(self.hosts))[:120]})")
        return host, port


class Visit:
    """What one request fetches: each address once, all within the limits."""

    def __init__(self, pictures: RemotePictures) -> None:
        self._pictures = pictures
        self._read: dict[str, bytes] = {}
        self._deadline: float | None = None
        self._bytes_left = pictures.limits.max_bytes

    def read(self, url: str, max_bytes: int) -> bytes:
        """The bytes behind an https address. Raises BadRequest unless the whole file arrives in time."""
        if url in self._read:
            return self._read[url]
        content = self._pictures.kept(url)
        if content is None:
            content = self._fetched(url, max_bytes)
        self._read[url] = content
        return content

    def _fetched(self, url: str, max_bytes: int) -> bytes:
        if self._deadline is None:  # the clock starts at the first picture that is not here
            self._deadline = self._pictures.now() + self._pictures.limits.seconds
        try:
            return self._follow(url, self._deadline, max_bytes)
        except BadRequest:
            raise
        except TimeoutError as error:
            raise refused(f"its host took longer than {self._pictures.limits.seconds:g} seconds") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise refused(f"it cannot be fetched ({type(error).__name__}: {str(error)[:120]})") from error

    def _follow(self, url: str, deadline: float, max_bytes: int) -> bytes:
        place = url
        for _ in range(MAX_REDIRECTS + 1):
            found = self._asked(url, place, deadline, max_bytes)
            if isinstance(found, bytes):
                return found
            place = urljoin(place, found)
        raise refused(f"its host redirects more than {MAX_REDIRECTS} times")

    def _asked(self, url: str, place: str, deadline: float, max_bytes: int) -> bytes | str:
        """The file, or the address of a redirect. The file is kept under the client's address."""
        split = urlsplit(place)
        with self._pictures.connection(split, deadline) as connection:
            path = quote(split.path or "/", safe=_IN_PATHS) + (
                f"?{quote(split.query, safe=_IN_PATHS)}" if split.query else ""
            )
            connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status in _REDIRECTS and location:
                return location
            if response.status != http.client.OK:
                raise refused(f"its host answered {response.status}")
            content = self._content(response, max_bytes)
            if place == url:  # what a redirect said may change, whatever its end says
                self._pictures.keep(url, content, response.getheader("Cache-Control", ""))
            return content

    def _content(self, response: http.client.HTTPResponse, max_bytes: int) -> bytes:
        if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise refused("its host sent it compressed")
        limit = min(max_bytes, self._bytes_left)
        parts: list[bytes] = []
        num_bytes = 0
        if response.length is None or response.length <= limit:
            while num_bytes <= limit and (part := response.read(_CHUNK_BYTES)):
                parts.append(part)
                num_bytes += len(part)
        else:
            num_bytes = response.length
        if num_bytes > limit:
            what = "it has" if limit == max_bytes else "it and those before it in the request have"
            raise refused(
                f"{what} more than {max_bytes if limit == max_bytes else self._pictures.limits.max_bytes:,} bytes"
            )
        if response.length:  # what was announced and did not come
            raise refused("its host broke off")
        self._bytes_left -= num_bytes
        return b"".join(parts)


def left(deadline: float, now: Callable[[], float]) -> float:
    """The remaining seconds. Raises TimeoutError when there are none."""
    seconds = deadline - now()
    if seconds <= 0:
        raise TimeoutError("no time is left")
    return seconds


def refused(reason: str) -> BadRequest:
    return BadRequest(f"A remote image cannot be read: {reason}.", param="messages")


class _Timed:
    """A socket for http.client, with one deadline for all operations together."""

    def __init__(self, sock: ssl.SSLSocket, seconds_left: Callable[[], float]) -> None:
        self._sock = sock
        self._seconds_left = seconds_left

    def sendall(self, content: Any) -> None:
        self._sock.settimeout(self._seconds_left())
        self._sock.sendall(content)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_TimedReader(self._sock, self._seconds_left))

    def close(self) -> None:
        """Do nothing: http.client calls this before the answer is read; the caller closes the socket."""


class _TimedReader(io.RawIOBase):
    """Reads a socket; each read may take the remaining time, so that a slow drip ends too. It closes nothing."""

    def __init__(self, sock: ssl.SSLSocket, seconds_left: Callable[[], float]) -> None:
        self._sock = sock
        self._seconds_left = seconds_left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._seconds_left())
        return self._sock.recv_into(buffer)
