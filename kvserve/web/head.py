"""Parses the head of a request, strictly and without a socket. It refuses what two HTTP parsers could read differently
(the root of request smuggling).

The rules are those of RFC 9112 (HTTP/1.1) without its leniencies: no bare LF, no folded line, no space before a colon.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from kvserve.errors import BadRequest, HeadersTooLarge

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/(\d)\.(\d)")
_FORBIDDEN_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ABSOLUTE_TARGET = re.compile(r"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_CHUNK_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?")
_MAX_LENGTH_DIGITS = 18


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request line and its header lines. `path` is decoded, `query` is not; header names are in lower case.

    `authority` is the host that an absolute request target names; it overrides the Host header.
    """

    method: str
    path: str
    query: str
    version: tuple[int, int]
    headers: tuple[tuple[str, str], ...]
    authority: str | None = None

    def values(self, name: str) -> tuple[str, ...]:
        """Every value sent under this lower-case name, in order."""
        return tuple(value for key, value in self.headers if key == name)

    def get(self, name: str) -> str | None:
        """The values under this lower-case name joined as one list, or None."""
        values = self.values(name)
        return ", ".join(values) if values else None

    def tokens(self, name: str) -> frozenset[str]:
        """The comma-separated members under this name, in lower case."""
        joined = self.get(name) or ""
        return frozenset(member.strip().lower() for member in joined.split(",") if member.strip())

    def as_mapping(self) -> dict[str, str]:
        """Lower-case name -> value, for readers that need no duplicates."""
        return {name: self.get(name) or "" for name, _ in self.headers}


@dataclass(frozen=True, slots=True)
class BodyFraming:
    """How the body ends; `num_bytes` is its length for `length`, else 0."""

    kind: Literal["none", "length", "chunked"]
    num_bytes: int = 0


def parse_head(raw: bytes, max_header_count: int) -> RequestHead:
    """Parse the bytes before the empty line, without it. Raises BadRequest, HeadersTooLarge for too many lines."""
    request_line, *lines = raw.decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise BadRequest("The request line is not `METHOD target HTTP/1.1`.")
    method, target, major, minor = match.groups()
    version = (int(major), int(minor))
    if version[0] != 1:
        raise BadRequest(f"HTTP/{major}.{minor} is not spoken here: use HTTP/1.1.")
    if len(lines) > max_header_count:
        raise HeadersTooLarge(f"The request has {len(lines)} header lines; {max_header_count} are allowed.")
    authority, path, query = _split_target(target, method)
    head = RequestHead(method, path, query, version, tuple(_parse_line(line) for line in lines), authority)
    num_hosts = len(head.values("host"))
    if num_hosts > 1 or (num_hosts == 0 and version >= (1, 1)):
        raise BadRequest("A request needs exactly one Host header.")
    return head


def _split_target(target: str, method: str) -> tuple[str | None, str, str]:
    authority = None
    if absolute := _ABSOLUTE_TARGET.fullmatch(target):
        authority, target = absolute.group(1), absolute.group(2)
        target = target if target.startswith("/") else "/" + target
    if not target.startswith("/") and not (target == "*" and method == "OPTIONS"):
        raise BadRequest("The request target must be a path that starts with `/`.")
    path, _, query = target.partition("?")
    return authority, unquote(path, errors="replace"), query


def _parse_line(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    value = value.strip(" \t")
    if not colon or not _TOKEN.fullmatch(name) or _FORBIDDEN_IN_VALUE.search(value):
        raise BadRequest("A header line is malformed: expected `Name: value` on one line that ends with CR LF.")
    return name.lower(), value


def body_framing(head: RequestHead) -> BodyFraming:
    """How the body of this request ends. Raises BadRequest for anything ambiguous."""
    codings, lengths = head.values("transfer-encoding"), head.values("content-length")
    if codings:
        if lengths:
            raise BadRequest("Content-Length and Transfer-Encoding exclude each other.")
        if head.version < (1, 1) or [coding.lower() for coding in codings] != ["chunked"]:
            raise BadRequest("The only transfer coding understood here is `chunked`, sent once, with HTTP/1.1.")
        return BodyFraming("chunked")
    if not lengths:
        return BodyFraming("none")
    length = lengths[0]
    if len(lengths) > 1 or not (length.isascii() and length.isdigit()):
        raise BadRequest("Content-Length must be sent once, as a decimal number of bytes.")
    if len(length.lstrip("0")) > _MAX_LENGTH_DIGITS:
        return BodyFraming("length", 10**_MAX_LENGTH_DIGITS)
    return BodyFraming("length", int(length))


def parse_chunk_size(line: bytes) -> int:
    """The number of bytes that a chunk's size line announces (extensions are ignored). Raises BadRequest."""
    match = _CHUNK_SIZE_LINE.fullmatch(line)
    if match is None:
        raise BadRequest("The chunked body is malformed: a chunk starts with its size in hexadecimal digits.")
    return int(match.group(1), 16)
