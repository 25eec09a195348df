"""The file of keys: whose a key is, what is refused, and that it is read again when it changes."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import HELD, KEY_HEADER, holder_digest, key_digest
from kvserve.errors import NotReady, SettingError, Unauthorized
from kvserve.proxy.keys_file import (
    API_KEYS_OWN,
    LOOK_SECONDS,
    KeyHolder,
    KeysFile,
    headers_of_holder,
    key_sha256,
    read_keys,
    refuse_unusable_keys,
)
from tests.proxy.held import ANNA, ANNAS_SECOND, API_KEY, BOSS, OTTO, TABLES, keys_text, write_keys

KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)


def bearer(key: str) -> dict[str, list[str]]:
    return {"authorization": [f"Bearer {key}"]}


class Written:
    """A file whose clock a test turns."""

    def __init__(self, path: Path, api_key: str | None = API_KEY) -> None:
        self.path, self.told = path, []
        self.now = 100.0
        self.file = KeysFile(path, api_key, self.told.append, clock=lambda: self.now)

    path: Path
    told: list[str]

    def knows(self, key: str) -> bool:
        try:
            return bool(self.file.holder(bearer(key)).name)
        except Unauthorized:
            return False

    def later(self, seconds: float = LOOK_SECONDS) -> None:
        self.now += seconds


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(write_keys(tmp_path / "keys.toml"))


@given(st.dictionaries(NAMES, st.lists(KEYS, min_size=1, max_size=3), max_size=5), KEYS)
def test_a_key_finds_its_holder_and_no_other(keys: dict[str, list[str]], stranger: str) -> None:
    """Whatever names and keys there are; a key that no table has finds nobody."""
    whose = {key: name for name, each in keys.items() for key in each}
    own = {name: [key for key, holder in whose.items() if holder == name] for name in keys}
    tables = {name: {"key_sha256": [key_sha256(key) for key in each]} for name, each in own.items() if each}
    table = read_keys(keys_text(tables))
    assert [holder.name for holder in table.holders] == list(tables)
    for key in {*whose, stranger}:
        found = table.holder_of([key.encode()])
        assert (found.name if found is not None else None) == whose.get(key)
        twice = table.holder_of([b"unknown", key.encode()])
        assert twice == found, "the first known one counts"


def test_a_holders_fields(tmp_path: Path) -> None:
    """Each as it is written; what is left out has its default: the principal is the name, and there is no limit."""
    table = read_keys(
        f"""
        [anna]
        key_sha256 = ["{key_sha256("a")}", "{key_sha256("b")}"]
        principal = "house"
        requests_per_minute = 60
        rows_at_once = 4
        operator = true
        [otto]
        key_sha256 = ["{key_sha256("c")}"]
        """
    )
    anna, otto = table.holders
    assert anna == KeyHolder("anna", "house", 60, 4, is_operator=True) and table.num_keys(anna) == 2
    assert otto == KeyHolder("otto", "otto") and otto.requests_per_minute is otto.rows_at_once is None


HASH = key_sha256("a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[anna", "no TOML"),
        (f'key_sha256 = ["{HASH}"]', "begins with [NAME]"),
        ("[anna]", "key_sha256"),
        ("[anna]\nkey_sha256 = []", "key_sha256"),
        (f'[anna]\nkey_sha256 = "{HASH}"', "key_sha256"),
        ('[anna]\nkey_sha256 = ["sk-my-own-secret"]', "key_sha256"),
        (f'[anna]\nkey_sha256 = ["{HASH.upper()}"]', "key_sha256"),
        (f'[anna]\nkey_sha256 = ["{HASH}", "{HASH}"]', "[anna] has a key that [anna] has too"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\n[otto]\nkey_sha256 = ["{HASH}"]', "[otto] has a key that [anna] has too"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nrow_at_once = 3', "row_at_once"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nrows_at_once = 0', "rows_at_once is no whole number from 1"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nrows_at_once = true', "rows_at_once is no whole number from 1"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nrequests_per_minute = 1.5', "requests_per_minute is no whole number"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\noperator = "yes"', "operator is neither"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nprincipal = " "', "principal is no text"),
        (f'[anna]\nkey_sha256 = ["{HASH}"]\nprincipal = "\\u001b[2J"', "principal is no text"),
        (f'["\\u001b[2J"]\nkey_sha256 = ["{HASH}"]', "no name that can be read"),
    ],
)
def test_what_is_no_table_of_keys_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """With its reason, by name and field; a key that was written in the place of its hash is not repeated."""
    with pytest.raises(ValueError, match=r"\w") as raised:
        read_keys(text)
    assert reason in str(raised.value) and "secret" not in str(raised.value) and "\x1b" not in str(raised.value)
    file = tmp_path / "keys.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(SettingError, match="API_KEYS_FILE") as refused:
        refuse_unusable_keys(file)
    assert reason in str(refused.value)


def test_a_start_takes_a_good_file_and_none(tmp_path: Path) -> None:
    """An empty file names nobody, which is a table too."""
    refuse_unusable_keys(None)
    refuse_unusable_keys(write_keys(tmp_path / "keys.toml"))
    refuse_unusable_keys(write_keys(tmp_path / "empty.toml", {}))
    for path, reason in ((tmp_path / "none.toml", "No such file"), (tmp_path, "cannot be read")):
        with pytest.raises(SettingError, match=reason):
            refuse_unusable_keys(path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe4")
    with pytest.raises(SettingError, match="UTF-8"):
        refuse_unusable_keys(tmp_path / "latin.toml")


def test_two_keys_of_one_principal_are_one_owner(written: Written) -> None:
    """And two tables of one principal; another principal is another owner, and API_KEY's own is as it was."""
    owners = {key: written.file.holder(bearer(key)).digest for key in (ANNA, ANNAS_SECOND, OTTO, BOSS)}
    assert owners[ANNA] == owners[ANNAS_SECOND] and len(set(owners.values())) == 3
    assert written.file.holder(bearer(API_KEY)) is API_KEYS_OWN and API_KEYS_OWN.is_operator
    one, other = KeyHolder("laptop", "anna"), KeyHolder("phone", "anna")
    assert one.digest == other.digest == owners[ANNA]


def test_what_the_backend_is_told(written: Written) -> None:
    """The server's own key in the place of the holder's, and whose it is in a header that key_digest reads; of API_KEY
    the key alone says it, so what was kept under it is still its own."""
    sent = [(b"Authorization", b"Bearer " + ANNA.encode()), (b"X-API-Key", ANNA.encode()), (b"x-other", b"1")]
    for holder in (written.file.holder(bearer(ANNA)), API_KEYS_OWN):
        told = headers_of_holder(sent, holder, API_KEY)
        names = {name.decode().lower(): value.decode() for name, value in told}
        assert len(names) == len(told) and ANNA not in str(told)
        assert names["authorization"] == f"Bearer {API_KEY}" and names["x-other"] == "1"
        assert key_digest(names) == (holder.digest or key_digest({"x-api-key": API_KEY}))
        assert holder_digest(names) == holder.digest
        assert (KEY_HEADER in names) == bool(holder.digest)
    assert holder_digest({KEY_HEADER: f"{HELD} anything"}) == holder_digest({KEY_HEADER: "0123456789abcdef"}) == ""


def test_without_an_api_key_the_file_alone_counts(tmp_path: Path) -> None:
    """Nobody is the operator by an empty key."""
    written = Written(write_keys(tmp_path / "keys.toml"), api_key=None)
    assert written.knows(ANNA) and not written.knows("") and not written.knows("none")
    with pytest.raises(Unauthorized):
        written.file.holder({})


def test_a_key_that_is_taken_out_is_refused_within_a_second(written: Written) -> None:
    """One that is put in is known then, too; the file is looked at no more often than that."""
    assert written.knows(OTTO) and not written.knows("new")
    tables = {name: table for name, table in TABLES.items() if name != "otto"}
    write_keys(written.path, {**tables, "new": {"key_sha256": [key_sha256("new")]}})
    written.later(LOOK_SECONDS / 2)
    assert written.knows(OTTO), "within the second it may still count"
    written.later(LOOK_SECONDS / 2)
    assert not written.knows(OTTO) and written.knows("new") and written.knows(ANNA) and written.told == []


@pytest.mark.parametrize("broken", ["[anna", "", None])
def test_a_broken_file_keeps_the_last_good_table_and_says_one_line(written: Written, broken: str | None) -> None:
    """However often it is looked at; one that is gone is broken, one without holders is not: it takes all keys."""
    if broken is None:
        written.path.unlink()
    else:
        written.path.write_text(broken, "utf-8")
    for _ in range(5):
        written.later()
        assert written.knows(ANNA) is (broken != "")
    assert len(written.told) == (0 if broken == "" else 1)
    assert not written.told or "The keys that it had before count" in written.told[0]
    write_keys(written.path, {"anna": TABLES["anna"]})
    written.later()
    assert written.knows(ANNA) and not written.knows(OTTO)
    written.path.write_text("[anna", "utf-8")
    written.later()
    assert written.knows(ANNA) and len(written.told) == (1 if broken == "" else 2), "said again of the next fault"


def test_without_a_good_file_nobody_but_the_operator_is_known(tmp_path: Path) -> None:
    """It is no 401, which would have clients throw their keys away; once the file is mended they are let in."""
    path = tmp_path / "keys.toml"
    written = Written(path)
    assert len(written.told) == 1 and written.knows(API_KEY)
    with pytest.raises(NotReady):
        written.file.holder(bearer(ANNA))
    write_keys(path)
    written.later()
    assert written.knows(ANNA) and not written.knows("stranger")


def test_a_change_in_the_same_moment_of_the_same_size_is_seen(tmp_path: Path) -> None:
    """A file system that counts whole seconds gives both the same time."""
    path = write_keys(tmp_path / "keys.toml")
    stat = os.stat(path)
    told: list[str] = []
    now, wall_ns = [100.0], [stat.st_mtime_ns + 1_000_000]
    file = KeysFile(path, None, told.append, clock=lambda: now[0], wall_clock_ns=lambda: wall_ns[0])
    assert file.holder(bearer(OTTO)).name == "otto"
    real = os.stat
    frozen = real(path)
    path.write_text(keys_text().replace(key_sha256(OTTO), key_sha256("other")), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", lambda name, **more: frozen if name == path else real(name, **more))
        now[0] += LOOK_SECONDS
        with pytest.raises(Unauthorized):
            file.holder(bearer(OTTO))


def test_a_file_that_stays_is_not_read_again(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is older than what a clock of files can tell apart."""
    old = 1_600_000_000_000_000_000
    stat = os.stat(written.path)
    file = KeysFile(written.path, None, written.told.append, lambda: written.now, lambda: stat.st_ctime_ns + 10**10)
    os.utime(written.path, ns=(old, old))
    file = KeysFile(written.path, None, written.told.append, lambda: written.now, lambda: stat.st_ctime_ns + 10**10)
    read: list[str] = []
    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: (read.append(text), real(text))[1])
    for _ in range(3):
        written.later()
        assert file.holder(bearer(OTTO)).name == "otto"
    assert read == []
    write_keys(written.path)
    written.later()
    assert file.holder(bearer(OTTO)).name == "otto" and len(read) == 1
