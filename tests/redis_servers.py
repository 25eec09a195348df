"""A real Redis server for the tests that need one: on a free port of this machine, in a folder of its own, nothing of
it kept."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

NAMES = ("redis-server", "valkey-server")
START_SECONDS = 20.0


@dataclass(eq=False)
class RedisServer:
    """A running server; `client` is the test's own connection."""

    process: "subprocess.Popen[bytes]"
    port: int
    password: str | None
    ca_file: Path | None = None

    @property
    def url(self) -> str:
        who = f":{self.password}@" if self.password else ""
        if self.ca_file is not None:
            return f"rediss://{who}127.0.0.1:{self.port}/0?ssl_ca_certs={self.ca_file}"
        return f"redis://{who}127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        tls = {"ssl": True, "ssl_ca_certs": str(self.ca_file)} if self.ca_file is not None else {}
        return redis.Redis(port=self.port, host="127.0.0.1", password=self.password, **tls)

    def keys(self, kind: str) -> list[str]:
        """The names of its blobs' parts (b), paths (m), users (u) or blocks (i)."""
        return sorted(key.decode() for key in self.client.scan_iter(f"kvs1:*:{kind}:*", count=1000))

    def holds(self, words: bytes) -> bool:
        """Whether these bytes stand in any value."""
        client = self.client
        return any(words in client.get(key) for key in self.keys("b"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def redis_server(
    folder: Path, *options: str, password: str | None = None, is_tls: bool = False, port: int | None = None
) -> Iterator[RedisServer]:
    """A server with these options beside those that keep it here. Fails where none is installed: a test that is left
    out shows nothing."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, "no redis-server: apt-get install redis-server (macOS: brew install redis)"
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [program, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no", *options]
    command += ["--requirepass", password] if password else []
    ca_file = None
    if is_tls:
        ca_file, certificate, key = certificates(folder)
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca_file)]
    else:
        command += ["--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = RedisServer(process, port, password, ca_file)
    try:
        _await_ready(server)
        yield server
    finally:
        server.kill()


def _await_ready(server: RedisServer) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            assert server.client.ping()
            return
        except redis.ConnectionError:
            assert server.process.poll() is None and time.monotonic() < until, "redis-server does not start"
            time.sleep(0.05)


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A throw-away authority, and a certificate of it for this machine: files of both, and the key."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", ca_key, "-out", ca, "-subj", "/CN=a test")
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", "/CN=127.0.0.1")
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", names)
    _openssl("x509", "-req", "-in", request, "-out", certificate, *signed)
    return ca, certificate, key


def _openssl(*arguments: Any) -> None:
    command: Sequence[str] = ["openssl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)
