"""The dashboard on the wire: files, headers, the stream, its limits, and that it never keeps a server from ending."""

import json
import re
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import JsonObject, Turn
from kvserve.errors import NotFound, NotReady
from kvserve.protocols.client_configs import CLIENTS
from kvserve.web import dashboard_pages
from kvserve.web.dashboard_pages import FILES
from tests.web.fakes import FakeService, RawClient, encode_request, eventually, serving

VENDORED = "uPlot"
FOLDER = Path(dashboard_pages.__file__).parent / "dashboard"


@dataclass
class WatchedService(FakeService):
    """A service that counts how often it was looked at."""

    watchers: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(2))
    num_looks: int = 0
    num_steps: int = 0
    is_loading: bool = False
    never_loads: bool = False

    def conversation(self, name: str) -> JsonObject:
        if name == "unknown":
            raise NotFound("No conversation of this name.")
        return {"id": name, "turns": []}

    def begin(self, turn: Turn) -> FakeService:
        if not self.is_ready:
            raise NotReady("The model is still loading.", retry_after_seconds=5)
        return super().begin(turn)

    def load(self, turn: Turn, served: object) -> Generator[None]:
        if turn.model != self.name:
            raise NotFound("No such model.", param="model")
        self.is_loading = True
        try:
            while self.never_loads or self.num_steps < 2:
                self.num_steps += 1
                yield
        finally:
            self.is_loading = False

    def dashboard(self) -> JsonObject:
        self.num_looks += 1
        return {"number": self.num_looks}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events every 50 ms."""
    monkeypatch.setattr(dashboard_pages, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(dashboard_pages, "LOOK_SECONDS", 0.01)


def follow(client: RawClient) -> dict[str, str]:
    """Ask for the stream and read its head."""
    client.send(encode_request("GET", "/dashboard/events"))
    status, headers = client.read_head()
    assert status == 200
    return headers


def event(client: RawClient) -> JsonObject:
    return dict(json.loads(client.read_chunk().decode().removeprefix("data: ")))


def test_the_page_and_its_files_need_no_key_and_load_nothing_else() -> None:
    """Each has its type and a policy that allows this server only; another path is a 404."""
    with serving(WatchedService(), api_key="secret") as served, served.connect() as client:
        page = client.request("GET", "/dashboard")
        for name, kind in FILES.items():
            answer = client.request("GET", f"/dashboard/{name}")
            assert (answer.status, answer.headers["content-type"]) == (200, kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
        assert page.body == (FOLDER / "index.html").read_bytes()
        for path in ("/dashboard/other.js", "/dashboard/../server.py", "/dashboard/%2e%2e/server.py"):
            assert client.request("GET", path, None, {"Authorization": "Bearer secret"}).status == 404


def test_the_stream_has_the_protection_of_every_other_endpoint() -> None:
    """The key, the Host and the Origin."""
    with serving(WatchedService(), api_key="secret") as served, served.connect() as client:
        assert client.request("GET", "/dashboard/events").status == 401
        foreign = {"Authorization": "Bearer secret", "Origin": "http://evil.example"}
        assert client.request("GET", "/dashboard/events", None, foreign).status == 403
        client.send(encode_request("GET", "/dashboard/events", host="evil.example"))
        assert client.read_response().status == 403


def test_events_come_until_the_reader_leaves() -> None:
    """One after the other; when the reader is gone, nobody looks any more and the place is free."""
    service = WatchedService()
    with serving(service) as served:
        with served.connect() as client:
            assert follow(client)["connection"] == "close"
            assert [event(client)["number"] for _ in range(3)] == [1, 2, 3]
        assert eventually(lambda: len(served.server._connections) == 0)
        num_looks = service.num_looks
        time.sleep(0.2)
        assert service.num_looks == num_looks
        assert service.watchers.acquire(blocking=False) and service.watchers.acquire(blocking=False)


def test_only_so_many_may_watch() -> None:
    """One too many is a 503 that says when to come back, and takes no place."""
    with serving(WatchedService()) as served, served.connect() as one, served.connect() as two:
        follow(one)
        follow(two)
        with served.connect() as three:
            refused = three.request("GET", "/dashboard/events")
            assert (refused.status, refused.headers["retry-after"]) == (503, "10")
        one.close()

        def has_room() -> bool:
            with served.connect() as client:
                client.send(encode_request("GET", "/dashboard/events"))
                return client.read_head()[0] == 200

        assert eventually(has_room)


def test_a_server_that_drains_does_not_wait_for_a_watcher() -> None:
    """The stream ends well-formed as soon as no further request is wanted."""
    with serving(WatchedService()) as served, served.connect() as client:
        follow(client)
        event(client)
        served.server.stop_accepting()
        while b"[DONE]" not in client.read_chunk():
            pass
        assert client.read_chunk() == b"" and client.is_closed()


class Links(HTMLParser):
    """What a page loads, and what it would run or style inline."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets += [value for name in ("src", "href") if (value := given.get(name)) is not None]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if (tag == "script" and "src" not in given) or tag == "style":
            self.inline.append(tag)


def test_the_page_names_its_own_files_only() -> None:
    """Whatever it links is one of its files or a place on it; nothing is inline; no file speaks of another host."""
    links = Links()
    links.feed((FOLDER / "index.html").read_text("utf-8"))
    assert links.inline == []
    assert {target for target in links.targets if not target.startswith("#")} <= {
        f"dashboard/{name}"
        for name in FILES  # from where the page is: also below /backends/NAME/
    }
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name in set(FILES) - {f"{VENDORED}.LICENSE.txt"}:
        text = re.sub(r"\A/\*!.*?\*/", "", (FOLDER / name).read_text("utf-8"))  # where a library says who made it
        assert [each for each in re.findall(r"https?://[\w.]+", text) if "www.w3.org" not in each] == []


def test_what_others_wrote_is_named_with_its_version_and_licence() -> None:
    """The library stands there as it was published; its licence names the version that the script has."""
    licence = (FOLDER / f"{VENDORED}.LICENSE.txt").read_text("utf-8")
    version = re.search(r"\(v([\d.]+)\)", (FOLDER / f"{VENDORED}.iife.min.js").read_text("utf-8"))
    assert version is not None and licence.startswith(f"uPlot {version[1]} ") and "MIT License" in licence


def test_the_root_leads_a_browser_to_the_page() -> None:
    """Anybody else is told that the server runs, without a key, as probes of local servers expect."""
    with serving(WatchedService(), api_key="secret") as served, served.connect() as client:
        led = client.request("GET", "/", None, {"Accept": "text/html,application/xhtml+xml;q=0.9"})
        assert (led.status, led.headers["location"], led.body) == (302, "/dashboard", b"")
        told = client.request("GET", "/", None, {"Accept": "*/*"})
        assert (told.status, told.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert b"kvserve is running" in told.body
        assert led.headers["cache-control"] == told.headers["cache-control"] == "no-store"
        assert client.request("HEAD", "/").status == 200
        assert client.request("POST", "/", {}).status in (401, 405)


def test_turns_and_snippets_want_the_key() -> None:
    """What the page fetches besides its events is protected as these are; an unknown conversation is a 404."""
    key = {"Authorization": "Bearer secret"}
    with serving(WatchedService(), api_key="secret") as served, served.connect() as client:
        for path in ("/dashboard/sessions/abc", "/dashboard/clients"):
            assert client.request("GET", path).status == 401
        assert client.request("GET", "/dashboard/sessions/abc", None, key).json == {"id": "abc", "turns": []}
        assert client.request("GET", "/dashboard/sessions/unknown", None, key).status == 404
        told: Any = client.request("GET", "/dashboard/clients", None, key).json
    assert [each["name"] for each in told["clients"]] == list(CLIENTS)
    assert told["url"] == "http://localhost" and all("http://localhost" in each["text"] for each in told["clients"])
    assert "API_KEY" in str(told) and "secret" not in str(told)


def test_a_model_is_loaded_by_its_name() -> None:
    """The answer comes once it is there, and whoever leaves gives up its place in the queue; other names are a 404,
    what is no name a 400, and nothing happens without the key."""
    service = WatchedService()
    with serving(service, api_key="secret") as served, served.connect() as client:
        key, body = {"Authorization": "Bearer secret"}, {"model": service.name}
        with served.connect() as stranger:
            assert stranger.request("POST", "/v1/models/load", body).status == 401
        for wrong, status in (({"model": "other"}, 404), ({}, 400), ({"model": 7}, 400)):
            assert client.request("POST", "/v1/models/load", wrong, key).status == status
        service.is_ready = False
        early = client.request("POST", "/v1/models/load", body, key)
        assert (early.status, early.headers["retry-after"]) == (503, "5"), "no model is known before the first one"
        service.is_ready = True
        assert service.num_steps == 0
        loaded = client.request("POST", "/v1/models/load", body, key)
        assert (loaded.status, loaded.json) == (200, {"model": service.name, "status": "loaded"})
        assert service.num_steps == 2 and not service.is_loading
        service.never_loads = True
        with served.connect() as leaving:
            leaving.send(encode_request("POST", "/v1/models/load", body, key))
            assert eventually(lambda: service.is_loading)
        assert eventually(lambda: not service.is_loading)
