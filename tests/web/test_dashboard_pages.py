"""The dashboard on the wire: files, headers, the stream, its limits, and that it never keeps a server from ending."""

import json
import re
import threading
import time
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvserve.core import JsonObject
from kvserve.web import dashboard_pages
from kvserve.web.dashboard_pages import FILES
from tests.web.fakes import FakeService, RawClient, encode_request, eventually, serving

FOLDER = Path(dashboard_pages.__file__).parent / "dashboard"


@dataclass
class WatchedService(FakeService):
    """A service that counts how often it was looked at."""

    watchers: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(2))
    num_looks: int = 0

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
        f"/dashboard/{name}" for name in FILES
    }
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name in FILES:
        addresses = re.findall(r"(?:https?:)?//[\w.]+", (FOLDER / name).read_text("utf-8"))
        assert [each for each in addresses if "www.w3.org" not in each and "://" in each] == []
