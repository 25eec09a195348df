"""What is kept of responses: bounded, across a restart, and whatever happens to the file."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import BadRequest, NotFound
from kvserve.protocols.responses_listing import list_items
from kvserve.protocols.responses_store import ResponseStore, StoredResponse


def response(name: str, previous: str | None = None, said: str = "x") -> StoredResponse:
    """A response to one message."""
    output = [{"id": f"{name}-out", "type": "message", "role": "assistant", "content": said.upper()}]
    return StoredResponse({"id": name, "output": output}, ({"id": f"{name}-in", "content": said},), previous)


def ids(store: ResponseStore, name: str) -> list[object]:
    """The ids of a conversation's items."""
    return [item["id"] for item in store.items_until(name)]


def test_responses_outlive_the_process(tmp_path: Path) -> None:
    """A second store on the same file has what the first one kept; nobody else may read the file."""
    path = tmp_path / "new" / "responses.sqlite3"
    first = ResponseStore(path, pytest.fail)
    first.put(response("a"))
    first.put(response("b", "a"))
    # not closed: a killed process closes nothing
    second = ResponseStore(path, pytest.fail)
    assert second.get("b") == response("b", "a")
    assert ids(second, "b") == ["a-in", "a-out", "b-in", "b-out"]
    assert path.stat().st_mode & 0o077 == 0
    first.close()
    second.close()


def test_a_deleted_response_is_gone_and_with_it_what_went_on_from_it() -> None:
    """The others stay."""
    store = ResponseStore(None, pytest.fail)
    for each in (response("a"), response("b", "a"), response("c")):
        store.put(each)
    store.delete("a")
    for name in ("a", "b"):
        with pytest.raises(NotFound):
            store.items_until(name)
    assert store.get("b").previous == "a" and ids(store, "c") == ["c-in", "c-out"]
    with pytest.raises(NotFound):
        store.delete("a")


def test_the_longest_unused_go_first() -> None:
    """A conversation that goes on keeps its beginning."""
    store = ResponseStore(None, pytest.fail, max_responses=3)
    for name in ("a", "b", "c"):
        store.put(response(name))
    assert ids(store, "a")
    store.put(response("d", "a"))
    assert ids(store, "d") == ["a-in", "a-out", "d-in", "d-out"]
    with pytest.raises(NotFound):
        store.get("b")


def test_bytes_are_bounded_too() -> None:
    """Large responses push others out, the newest stays."""
    store = ResponseStore(None, pytest.fail, max_bytes=5_000)
    for name in "abcdef":
        store.put(response(name, said="x" * 1_000))
    kept = [name for name in "abcdef" if _has(store, name)]
    assert kept == ["e", "f"]


def _has(store: ResponseStore, name: str) -> bool:
    try:
        store.get(name)
    except NotFound:
        return False
    return True


def test_a_circle_of_responses_ends() -> None:
    """Nobody writes one; a broken file must not hang a request."""
    store = ResponseStore(None, pytest.fail)
    store.put(response("a", "b"))
    store.put(response("b", "a"))
    assert ids(store, "a") == ["b-in", "b-out", "a-in", "a-out"]


def test_a_broken_file_costs_what_was_kept_and_nothing_else(tmp_path: Path) -> None:
    """It is reported, and a new file takes its place."""
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(b"this is no database" * 1000)
    reports: list[str] = []
    store = ResponseStore(path, reports.append)
    with pytest.raises(NotFound):
        store.get("a")
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
            assert len(store.items_until(name)) == 2 * (number + 1)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(ids(store, f"{worker}-19")) == 40 for worker in range(4))


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
