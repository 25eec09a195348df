"""What is kept of responses: bounded, across a restart, and whatever happens to the file."""

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import NOBODY, Principal
from kvserve.core.keeping import Scope
from kvserve.errors import BadRequest, NotFound
from kvserve.protocols.responses_items import list_items
from kvserve.protocols.responses_store import OwnResponses, ResponseStore, StoredResponse


def response(
    name: str,
    previous: str | None = None,
    said: str = "x",
    principal: Principal = NOBODY,
    session: str | None = None,
) -> StoredResponse:
    """A response to one message."""
    output = [{"id": f"{name}-out", "type": "message", "role": "assistant", "content": said.upper()}]
    return StoredResponse(
        {"id": name, "output": output}, ({"id": f"{name}-in", "content": said},), previous, principal, session
    )


def ids(store: ResponseStore, name: str) -> list[object]:
    """The ids of a conversation's items."""
    return [item["id"] for item in store.of(NOBODY).items_until(name)]


def test_responses_outlive_the_process(tmp_path: Path) -> None:
    """A second store on the same file has what the first one kept; nobody else may read the file."""
    path = tmp_path / "new" / "responses.sqlite3"
    first = ResponseStore(path, pytest.fail)
    first.put(response("a"))
    first.put(response("b", "a"))
    # not closed: a killed process closes nothing
    second = ResponseStore(path, pytest.fail)
    assert second.of(NOBODY).get("b") == response("b", "a")
    assert ids(second, "b") == ["a-in", "a-out", "b-in", "b-out"]
    assert path.stat().st_mode & 0o077 == 0
    first.close()
    second.close()


def test_a_deleted_response_is_gone_and_with_it_what_went_on_from_it() -> None:
    """The others stay."""
    store = ResponseStore(None, pytest.fail)
    for each in (response("a"), response("b", "a"), response("c")):
        store.put(each)
    store.of(NOBODY).delete("a")
    for name in ("a", "b"):
        with pytest.raises(NotFound):
            store.of(NOBODY).items_until(name)
    assert store.of(NOBODY).get("b").previous == "a" and ids(store, "c") == ["c-in", "c-out"]
    with pytest.raises(NotFound):
        store.of(NOBODY).delete("a")


def test_the_longest_unused_go_first() -> None:
    """A conversation that goes on keeps its beginning."""
    store = ResponseStore(None, pytest.fail, max_responses=3)
    for name in ("a", "b", "c"):
        store.put(response(name))
    assert ids(store, "a")
    store.put(response("d", "a"))
    assert ids(store, "d") == ["a-in", "a-out", "d-in", "d-out"]
    with pytest.raises(NotFound):
        store.of(NOBODY).get("b")


def test_bytes_are_bounded_too() -> None:
    """Large responses push others out, the newest stays."""
    store = ResponseStore(None, pytest.fail, max_bytes=5_000)
    for name in "abcdef":
        store.put(response(name, said="x" * 1_000))
    kept = [name for name in "abcdef" if _has(store, name)]
    assert kept == ["e", "f"]


def _has(store: ResponseStore, name: str) -> bool:
    try:
        store.of(NOBODY).get(name)
    except NotFound:
        return False
    return True


def test_a_circle_of_responses_ends() -> None:
    """Nobody writes one; a broken file must not hang a request."""
    store = ResponseStore(None, pytest.fail)
    store.put(response("a", "b"))
    store.put(response("b", "a"))
    assert ids(store, "a") == ["b-in", "b-out", "a-in", "a-out"]


@pytest.mark.parametrize("is_database", [False, True], ids=["no database", "broken names of tables"])
def test_a_broken_file_costs_what_was_kept_and_nothing_else(tmp_path: Path, is_database: bool) -> None:
    """It is reported, and a new file takes its place. SQLite's complaint of a broken name is no text any more."""
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(b"this is no database" * 1000)
    if is_database:
        path.unlink()
        whole = ResponseStore(path, pytest.fail)
        whole.put(response("a"))
        whole.close()
        path.write_bytes(path.read_bytes().replace(b"responses", b"respons\xefs", 1))
    reports: list[str] = []
    store = ResponseStore(path, reports.append)
    with pytest.raises(NotFound):
        store.of(NOBODY).get("a")
    assert len(reports) == 1
    store.put(response("a"))
    store.close()
    again = ResponseStore(path, pytest.fail)
    assert _has(again, "a")
    again.close()


def test_a_broken_file_that_cannot_be_removed_keeps_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that only its owner may write: requests go on, and both faults are reported."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "responses.sqlite3"
    path.write_bytes(b"this is no database" * 1000)
    reports: list[str] = []
    store = ResponseStore(path, reports.append)
    monkeypatch.setattr(Path, "unlink", refuse)
    store.put(response("first"))
    store.put(response("a"))
    assert _has(store, "first") and _has(store, "a") and len(reports) == 2
    store.close()


def test_a_folder_that_cannot_be_written_keeps_in_memory(tmp_path: Path) -> None:
    """Requests go on; it is reported once."""
    (tmp_path / "file").write_text("no folder")
    reports: list[str] = []
    store = ResponseStore(tmp_path / "file" / "responses.sqlite3", reports.append)
    store.put(response("lost"))
    store.put(response("a"))
    assert _has(store, "a") and len(reports) == 1


def test_many_threads_keep_and_read() -> None:
    """No response is lost, none is another's."""
    store = ResponseStore(None, pytest.fail)

    def work(worker: int) -> None:
        for number in range(20):
            name = f"{worker}-{number}"
            store.put(response(name, f"{worker}-{number - 1}" if number else None))
            assert len(store.of(NOBODY).items_until(name)) == 2 * (number + 1)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(ids(store, f"{worker}-19")) == 40 for worker in range(4))


# --- whose they are --------------------------------------------------------------------------------------------------

KEY, OTHER_KEY = Principal("key1"), Principal("key2")
ANN, BEN = Principal("key1", "ann"), Principal("key1", "ben")
ASKED: list[tuple[Principal, Principal, bool]] = [
    # (whose the response is, who asks for it, whether it is found)
    (NOBODY, NOBODY, True),
    (NOBODY, KEY, False),
    (KEY, NOBODY, False),
    (KEY, KEY, True),
    (KEY, OTHER_KEY, False),
    (ANN, ANN, True),
    (ANN, BEN, False),
    (ANN, KEY, False),
    (KEY, ANN, False),
    (ANN, Principal("key2", "ann"), False),
    (Principal("", "ann"), NOBODY, False),
    (NOBODY, Principal("", "ann"), False),
    (Principal("", "ann"), Principal("", "ben"), False),
]


@pytest.mark.parametrize(("owner", "asker", "is_found"), ASKED)
def test_a_response_is_there_for_its_principal(owner: Principal, asker: Principal, is_found: bool) -> None:
    """By name, as the one before, as the one before that, by an item, and to be deleted; to others it never was."""
    store = ResponseStore(None, pytest.fail)
    name = "resp_req" + "1" * 24
    item = {"id": f"msg_{name.removeprefix('resp_')}_0", "content": "x"}
    store.put(StoredResponse({"id": name, "output": [item]}, (), None, owner))
    store.put(response("b", name, principal=asker))
    own = store.of(asker)
    asks: list[Callable[[OwnResponses, str], object]] = [
        lambda own, name: own.get(name),
        lambda own, name: own.items_until(name),
        lambda own, name: own.item(f"msg_{name.removeprefix('resp_')}_0"),
        lambda own, name: own.delete(name),
    ]
    if is_found:
        assert len(own.items_until("b")) == 3
        for ask in asks:
            ask(own, name)
        with pytest.raises(NotFound):
            own.get(name)
        return
    with pytest.raises(NotFound):
        own.items_until("b")
    unheard = name.replace("1", "2")
    for ask in asks:
        told: list[str] = []
        for each in (name, unheard):
            with pytest.raises(NotFound) as caught:
                ask(own, each)
            told.append(f"{caught.value} {caught.value.param}".replace(each, "ID"))
        assert told[0].replace("1" * 24, "") == told[1].replace("2" * 24, "")
    assert store.of(owner).get(name)


@pytest.mark.parametrize("owner", [ANN, BEN, KEY, OTHER_KEY, NOBODY, Principal("", "ann")])
def test_a_path_names_no_user(owner: Principal) -> None:
    """By it alone a response is there for its key, whichever user asked for it."""
    store = ResponseStore(None, pytest.fail)
    for each in (response("a", principal=owner), response("b", "a", principal=owner)):
        store.put(each)
    for key in ("key1", "key2", ""):
        own = store.of_key(key)
        if key == owner.key:
            assert own.get("a") and len(own.items_until("b")) == 4
        else:
            with pytest.raises(NotFound):
                own.get("a")
    store.of_key(owner.key).delete("a")
    with pytest.raises(NotFound):
        store.of(owner).get("a")


def test_a_conversation_of_two_users_is_nobodys_to_go_on_from() -> None:
    """Earlier versions let one user go on from another one's response: what came before is not read into a prompt."""
    store = ResponseStore(None, pytest.fail)
    for each in (response("a", principal=ANN), response("b", "a", principal=KEY)):
        store.put(each)
    for asker in (ANN, KEY, BEN):
        with pytest.raises(NotFound):
            store.of(asker).items_until("b")


# --- how long, and forgetting ----------------------------------------------------------------------------------------


def test_a_response_is_kept_for_a_time_after_its_last_use(tmp_path: Path) -> None:
    """Going on from it is a use; when its time is over it is not found, and soon no word of it is in the file."""
    now = [1e9]
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(path, pytest.fail, keep_seconds=1_000.0, wall_clock=lambda: now[0])
    for each in (response("a", said="MARZIPAN"), response("b", said="quince")):
        store.put(each)
    store.tidy()
    now[0] += 999
    assert ids(store, "b")
    now[0] += 1
    assert not _has(store, "a") and _has(store, "b")
    assert b"MARZIPAN" in _bytes_of(path)
    store.tidy()
    assert b"MARZIPAN" not in _bytes_of(path) and b"quince" in _bytes_of(path)
    store.close()


def test_a_file_is_tidied_where_nobody_asks_for_responses(tmp_path: Path) -> None:
    """At a start, and as other requests come; a file that is not there is not made."""
    now = [1e9]
    path = tmp_path / "responses.sqlite3"
    ResponseStore(path, pytest.fail).tidy()
    assert not path.exists()
    first = ResponseStore(path, pytest.fail, wall_clock=lambda: now[0])
    first.put(response("a", said="MARZIPAN"))
    first.close()
    now[0] += 31 * 86_400
    second = ResponseStore(path, pytest.fail, wall_clock=lambda: now[0])
    second.tidy()
    assert b"MARZIPAN" not in _bytes_of(path)
    second.close()


FORGOTTEN: list[tuple[str | None, Principal | None, set[str]]] = [
    ("s1", None, {"ann1", "ben1"}),
    (None, ANN, {"ann1", "ann2", "ann"}),
    ("s1", ANN, {"ann1"}),
    (None, NOBODY, {"nobody2"}),
    ("s3", None, set()),
    (None, OTHER_KEY, set()),
]
KEPT = (
    *((f"ann{number}", ANN, f"s{number}") for number in (1, 2)),
    ("ann", ANN, None),
    ("ben1", BEN, "s1"),
    ("nobody2", NOBODY, "s2"),
)


@pytest.mark.parametrize(("session", "principal", "gone"), FORGOTTEN)
def test_a_session_and_a_principal_can_be_forgotten(
    tmp_path: Path, session: str | None, principal: Principal | None, gone: set[str]
) -> None:
    """Those and no others; their words are in no file any more."""
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(path, pytest.fail)
    for name, owner, named in KEPT:
        store.put(response(name, None, f"<{name}>", owner, named))
    num = store.forget(Scope(session, None if principal is None else str(principal)))
    assert num == len(gone)
    held = _bytes_of(path)
    for name, owner, named in KEPT:
        assert (f"<{name}>".encode() in held) == (name not in gone)
        if name not in gone:
            assert store.of(owner).get(name) == response(name, None, f"<{name}>", owner, named)
    store.close()


def test_a_file_of_before_is_begun_anew(tmp_path: Path) -> None:
    """Nobody knows whose its responses are: they are answered to nobody, and overwritten."""
    path = tmp_path / "responses.sqlite3"
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE responses (id TEXT PRIMARY KEY, previous TEXT, body TEXT NOT NULL, items TEXT NOT NULL, "
            "num_bytes INTEGER NOT NULL, used REAL NOT NULL); PRAGMA user_version = 1;"
            "INSERT INTO responses VALUES ('a', NULL, '{\"id\": \"a\"}', '[\"MARZIPAN\"]', 9, 9e9);"
        )
    database.close()
    store = ResponseStore(path, pytest.fail)
    assert not _has(store, "a")
    assert b"MARZIPAN" not in _bytes_of(path)
    store.put(response("b"))
    store.close()
    again = ResponseStore(path, pytest.fail)
    assert _has(again, "b")
    again.close()


def _bytes_of(path: Path) -> bytes:
    """The file and what SQLite keeps beside it."""
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))


# --- pages -----------------------------------------------------------------------------------------------------------

ITEMS = [{"id": f"i{number}"} for number in range(7)]


@given(st.integers(1, 9), st.sampled_from(["asc", "desc"]))
def test_pages_put_together_are_the_list(limit: int, order: str) -> None:
    """Asked for page by page, every item comes once and in order."""
    got: list[object] = []
    query = {"limit": str(limit), "order": order}
    while True:
        page = list_items(ITEMS, query)
        data = page["data"]
        assert isinstance(data, list) and len(data) <= limit
        got += data
        if not page["has_more"]:
            break
        query = {**query, "after": str(page["last_id"])}
    assert got == (ITEMS if order == "asc" else ITEMS[::-1])


@pytest.mark.parametrize(
    "query",
    [{"order": "up"}, {"limit": "0"}, {"limit": "x"}, {"limit": "1000"}, {"limit": "00000000500"}, {"after": "who"}],
)
def test_a_wrong_query_is_named(query: dict[str, str]) -> None:
    """The error names the word of the query."""
    with pytest.raises(BadRequest) as caught:
        list_items(ITEMS, query)
    assert caught.value.param in query


def test_an_empty_list() -> None:
    """No ids, no more."""
    page = list_items([], {})
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
