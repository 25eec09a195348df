"""A file of rows: all of it comes back, or it is begun anew; no damage makes it say something else."""

import os
import random
import shutil
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.sessions import archive_file
from kvserve.sessions.archive_file import FORMAT, FileHeld, begin_anew, is_damage, open_file
from kvserve.sessions.journal import Kind, Rows
from tests.laws import num_examples

NAME = archive_file.FILE_NAME
Plain = dict[tuple[Kind, bytes], bytes]


def plain(rows: Rows) -> Plain:
    return {(kind, key): body for kind, pairs in rows.items() for key, body in pairs}


def content(path: Path) -> Plain:
    """What a new process finds."""
    opened = open_file(path)
    opened.file.close()
    return plain(opened.rows)


def fault(path: Path) -> str | None:
    """What was wrong with the file that stood there."""
    opened = open_file(path)
    opened.file.close()
    return opened.fault


def changes_of(seed: int, count: int = 60, num_bytes: int = 300) -> dict[tuple[Kind, bytes], bytes | None]:
    """Rows of two kinds, some gone again."""
    choose = random.Random(seed)
    changes: dict[tuple[Kind, bytes], bytes | None] = {}
    for _ in range(count):
        kind: Kind = choose.choice(("node", "place"))
        body = choose.randbytes(choose.randrange(num_bytes)) if choose.random() < 0.85 else None
        changes[kind, choose.randrange(40).to_bytes(2)] = body
    return changes


def applied(known: Plain, changes: Mapping[tuple[Kind, bytes], bytes | None]) -> Plain:
    now = dict(known)
    for place, body in changes.items():
        if body is None:
            now.pop(place, None)
        else:
            now[place] = body
    return now


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    """Put, replaced and dropped rows, over several transactions and openings."""
    path, known = tmp_path / "a" / "b" / NAME, {}
    for seed in range(6):
        opened = open_file(path)
        assert plain(opened.rows) == known and opened.fault is None
        opened.file.write(changes_of(seed).items())
        known = applied(known, changes_of(seed))
        assert opened.file.num_rows == len(known)
        assert opened.file.num_bytes == sum(len(body) + 2 + archive_file.ROW_BYTES for body in known.values())
        opened.file.close()


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    """0700 and 0600, also where the folder stood open before."""
    path = tmp_path / "open" / NAME
    path.parent.mkdir(mode=0o755)
    opened = open_file(path)
    opened.file.write(changes_of(1).items())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    opened.file.close()


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written there."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        open_file(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_second_server_does_not_get_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the first until that one has ended; nothing of it is harmed."""
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.05)
    first = open_file(tmp_path / NAME)
    first.file.write({("node", b"1"): b"one"}.items())
    with pytest.raises(FileHeld):
        open_file(tmp_path / NAME)
    first.file.write({("node", b"2"): b"two"}.items())
    first.file.close()
    assert len(content(tmp_path / NAME)) == 2


def test_of_two_servers_that_start_together_the_first_gets_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has made an empty file, and removes nothing."""
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.05)
    connect, held = archive_file._connect, list[bool]()

    def with_another(path: Path) -> sqlite3.Connection:
        if not held:
            held.append(False)
            with pytest.raises(FileHeld):
                open_file(path)
            held[0] = True
        return connect(path)

    monkeypatch.setattr(archive_file, "_connect", with_another)
    first = open_file(tmp_path / NAME)
    assert held == [True]
    first.file.write({("node", b"1"): b"one"}.items())
    assert first.file.is_in_place
    first.file.close()
    assert len(content(tmp_path / NAME)) == 1


def test_a_server_whose_file_was_removed_leaves_the_file_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person clears the folder, another server starts, and then the first one finds its own file gone."""
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.05)
    first = open_file(tmp_path / NAME)
    archive_file.remove_file(tmp_path / NAME)
    second = open_file(tmp_path / NAME)
    first.file.close()
    with pytest.raises(FileHeld):
        begin_anew(tmp_path / NAME)
    assert second.file.is_in_place
    second.file.close()
    again = begin_anew(tmp_path / NAME)
    assert again.file.is_in_place and not again.rows
    again.file.close()


@pytest.mark.parametrize("broken", [b"not a database", b"CREATE T\xffBLE rows"])
def test_a_damaged_file_is_replaced_whatever_is_broken_in_it(tmp_path: Path, broken: bytes) -> None:
    """Also where SQLite's message has a broken name in it, which is no text."""
    path = tmp_path / NAME
    opened = open_file(path)
    opened.file.write({("node", b"1"): b"one"}.items())
    opened.file.close()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"CREATE TABLE rows", broken) if b"rows" in broken else broken)
    again = begin_anew(path)
    assert again.file.is_in_place and not again.rows
    again.file.close()


def test_a_transaction_is_whole_or_not_there(tmp_path: Path) -> None:
    """A disk that is full in the middle of it leaves the one before; with room it goes on."""
    opened = open_file(tmp_path / NAME)
    opened.file.write({("node", b"1"): b"one"}.items())
    connection = opened.file._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    big: dict[tuple[Kind, bytes], bytes | None] = {("node", bytes([number])): b"x" * 5_000 for number in range(20)}
    with pytest.raises(sqlite3.OperationalError, match="full") as full:
        opened.file.write({("node", b"1"): None, **big}.items())
    assert not archive_file.is_damage(full.value) and opened.file.num_rows == 1
    connection.execute("PRAGMA max_page_count = 100000")
    opened.file.write({("node", b"2"): b"two"}.items())
    opened.file.close()
    assert content(tmp_path / NAME) == {("node", b"1"): b"one", ("node", b"2"): b"two"}


def test_what_is_gone_leaves_the_disk(tmp_path: Path) -> None:
    """After dropping and compacting neither file holds a word of it, and the room is given back."""
    path = tmp_path / NAME
    opened = open_file(path)
    opened.file.write({("node", bytes([number])): b"SECRET" * 2_000 for number in range(50)}.items())
    opened.file.write({("node", bytes([number])): None for number in range(50)}.items())
    opened.file.compact()
    left = [file.read_bytes() for file in tmp_path.iterdir()]
    assert not any(b"SECRET" in held for held in left) and sum(map(len, left)) < 100_000
    opened.file.close()


def test_another_format_is_begun_anew(tmp_path: Path) -> None:
    """A file of a newer program is not guessed at."""
    opened = open_file(tmp_path / NAME)
    opened.file.write({("node", b"1"): b"one"}.items())
    opened.file._connection.execute("UPDATE contents SET format = ?", (FORMAT + 1,))
    opened.file.close()
    assert fault(tmp_path / NAME) is not None and content(tmp_path / NAME) == {}


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM rows WHERE rowid = (SELECT max(rowid) FROM rows)",
        "INSERT INTO rows SELECT 'node', x'ffff', digest, body FROM rows LIMIT 1",
        "UPDATE rows SET body = x'00' WHERE rowid = (SELECT max(rowid) FROM rows)",
        "UPDATE rows SET kind = 'read' WHERE rowid = (SELECT max(rowid) FROM rows)",
        "UPDATE rows SET body = 'text' WHERE rowid = (SELECT max(rowid) FROM rows)",
        "UPDATE contents SET num_rows = num_rows - 1",
        "DELETE FROM contents",
        "INSERT INTO contents SELECT * FROM contents",
        "DROP TABLE rows",
        "DROP TABLE contents",
    ],
)
def test_a_file_that_does_not_add_up_is_begun_anew(tmp_path: Path, harm: str) -> None:
    """A lost, foreign, changed or retyped row, a wrong sum, a missing table: nothing of it is believed."""
    path = tmp_path / NAME
    opened = open_file(path)
    opened.file.write(changes_of(1).items())
    opened.file._connection.execute(harm)
    opened.file.close()
    assert fault(path) is not None
    assert content(path) == {} and fault(path) is None


@dataclass(frozen=True)
class Written:
    """Folders with a file as a killed process leaves it, most of it in the log, and as one that ended does; and every
    content that the file ever had."""

    killed: Path
    ended: Path
    contents: list[Plain]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "live" / NAME
    contents: list[Plain] = [{}]
    opened = open_file(path)
    for seed in range(8):
        opened.file.write(changes_of(seed, num_bytes=3_000).items())
        contents.append(applied(contents[-1], changes_of(seed, num_bytes=3_000)))
        if seed == 3:
            opened.file._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    shutil.copytree(path.parent, folder / "killed")
    opened.file.close()
    return Written(folder / "killed", path.parent, contents)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume is not waited for: what is tried is what files say, not when they are safe."""
    pragmas = [pragma.replace("synchronous = NORMAL", "synchronous = OFF") for pragma in archive_file._PRAGMAS]
    monkeypatch.setattr(archive_file, "_PRAGMAS", pragmas)


@pytest.mark.usefixtures("unsynced")
@settings(max_examples=num_examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_makes_it_say_something_else(written: Written, tmp_path: Path, data: st.DataObject) -> None:
    """Any byte of any of its files flipped, any of them cut anywhere: a content that was once whole, or nothing."""
    whole = data.draw(st.sampled_from([written.killed, written.ended]))
    folder = tmp_path / "harmed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    file = folder / data.draw(st.sampled_from(sorted(path.name for path in whole.iterdir())))
    held = bytearray(file.read_bytes())
    place = data.draw(st.one_of(st.integers(0, len(held) - 1), st.integers(0, min(4_200, len(held) - 1))))
    if data.draw(st.booleans()):
        held[place] ^= data.draw(st.integers(1, 255))
    else:
        del held[place:]
    file.write_bytes(held)
    found = content(folder / NAME)
    assert found in written.contents
    again = open_file(folder / NAME)  # and it is of use, or says that it is damaged
    try:
        again.file.write({("node", b"new"): b"n"}.items())
    except sqlite3.Error as error:  # in what only a write reads: `Archive` begins a file anew then
        assert is_damage(error)
        return
    finally:
        again.file.close()
    assert content(folder / NAME) == {**found, ("node", b"new"): b"n"}


def test_the_whole_file_is_found_whole(written: Written, tmp_path: Path) -> None:
    """The control: without damage it is the last content; with some in the right place nothing is left of it."""
    for number, whole in enumerate((written.killed, written.ended)):
        shutil.copytree(whole, tmp_path / str(number))
        assert content(tmp_path / str(number) / NAME) == written.contents[-1] != {}
    file = tmp_path / "1" / NAME
    held = bytearray(file.read_bytes())
    body = max(written.contents[-1].values(), key=len)
    held[held.index(body[:100])] ^= 1
    file.write_bytes(held)
    assert content(file) == {}
