"""Asking a running server over HTTP: where it is by the settings of this folder, what it answers, what it streams. It
knows the wire, not what an answer means."""

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import click

from kvserve.cli.output import Json, printable_in

ANSWER_SECONDS = 30.0
KEY_VARIABLE = "KVSERVE_API_KEY"
"""Stands for --api-key: a command line can be read by whoever lists the machine's processes."""

LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that means all of a machine's own, and one of them to ask."""


class NoAnswer(click.ClickException):
    """Nobody answers there, or what comes is no answer."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is asked: a URL without a path, and a key; "" where none is sent."""

    url: str
    api_key: str

    def get(self, path: str) -> Json:
        """The JSON object of an answer. Raises NoAnswer for any status but 200."""
        return self._ask("GET", path)

    def post(self, path: str, body: Json) -> Json:
        """The same, of a JSON object that is sent."""
        return self._ask("POST", path, json.dumps(body).encode("utf-8"))

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Json:
        connection = self._connect()
        try:
            connection.request(method, path, body, self._headers())
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(path, error, method) from error
        finally:
            connection.close()
        if status != 200:
            raise NoAnswer(f"{method} {self.url}{path}: {status} {_message(raw)}")
        return _parsed(raw)

    def events(self, path: str) -> Iterator[Json]:
        """Server-sent events. Raises NoAnswer, also where the server ends them."""
        connection = self._connect()
        try:
            connection.request("GET", path, headers=self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise NoAnswer(f"GET {self.url}{path}: {response.status} {_message(response.read())}")
            for line in response:
                if line.startswith(b"data:"):
                    yield _parsed(line.removeprefix(b"data:").strip())
            raise NoAnswer(f"GET {self.url}{path}: the stream ended")
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(path, error) from error
        finally:
            connection.close()

    def _silence(self, path: str, error: Exception, method: str = "GET") -> NoAnswer:
        what = printable_in(str(error)) or type(error).__name__  # a status line that is none stands in it
        return NoAnswer(f"{method} {self.url}{path}: {what}. Is a server running there?")

    def _connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return kind(str(address.hostname), address.port, timeout=ANSWER_SECONDS)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Options that say where the server is."""
    for option in (
        click.option(
            "--api-key",
            metavar="KEY",
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="Its API_KEY, by the settings unless --server-url is given.",
        ),
        click.option("--server-url", metavar="URL", help="kvserve's own port, by the settings without it."),
    ):
        function = option(function)
    return function


def address_of(server_url: str | None, api_key: str | None) -> Address:
    """Where to ask. The key of the settings goes to the server of the settings and to no other. Raises StartupError for
    settings that cannot be used, click's error for what is no URL."""
    if server_url is not None:
        url = server_url.rstrip("/").removesuffix("/v1")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            what = f"{server_url!r} is no address such as http://127.0.0.1:8080."
            raise click.BadParameter(what, param_hint="--server-url")
        return Address(url, api_key or "")
    from kvserve.config import load_launch  # what the settings are made of takes a fifth of a second

    settings = load_launch(("--no-proxy",)).settings  # nothing is started: ports and BACKENDS need not fit a start
    return Address(url_of(settings.mlx_host, settings.mlx_port), api_key or settings.api_key or "")


def url_of(host: str, port: int) -> str:
    """Where a server that listens on this address is asked from this machine."""
    host = LOCAL_HOSTS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _parsed(raw: bytes) -> Json:
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise NoAnswer(f"expected a JSON object, got {raw[:300]!r}")
    return value


def _message(raw: bytes) -> str:
    """What an error says, in the protocols' form or any other."""
    try:
        return str(printable_in(json.loads(raw)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return repr(raw[:300])
