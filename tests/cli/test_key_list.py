"""`kvserve keys`: a new key opens the door that its table names, and no list shows one."""

import tomllib
from pathlib import Path

import pytest

from kvserve.core import Principal
from kvserve.proxy.keys_file import KeyHolder, key_sha256, read_keys
from tests.cli.running import run, told, words_of
from tests.proxy.held import ANNA, limited, write_keys


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("API_KEYS_FILE", raising=False)
    return tmp_path


def test_a_new_key_is_its_holders() -> None:
    """The table reads back as it was asked for; the next key is another one."""
    asked = ("--requests-per-minute", "60", "--rows-at-once", "4", "--operator")
    made = told("keys", "new", "anna", *asked)
    [holder] = read_keys(made["table"]).holders
    assert holder == KeyHolder("anna", "anna", 60, 4, is_operator=True)
    assert read_keys(made["table"]).holder_of([made["key"].encode()]) == holder
    assert made["key_sha256"] == key_sha256(made["key"]) and made["key"] not in made["table"]
    plain = told("keys", "new", "anna")
    assert read_keys(plain["table"]).holders == (KeyHolder("anna", "anna"),)
    assert plain["key"] != made["key"] and len(plain["key"]) > 40


def test_what_is_printed_can_be_put_into_the_file() -> None:
    """Both keys of a change; the key itself stands there once."""
    shown = run("keys", "new", "anna").stdout
    table = shown.partition("# For API_KEYS_FILE:\n")[2]
    key = next(line for line in shown.splitlines() if line.startswith("sk-kvserve-"))
    assert shown.count(key) == 1
    assert tomllib.loads(table)["anna"]["key_sha256"] == [key_sha256(key)]


def test_the_pages_table_is_one() -> None:
    """What docs/clients.md has to be pasted."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text("utf-8")
    block = page.partition("## Keys for several people")[2].partition("```toml\n")[2].partition("```")[0]
    assert read_keys(block).holders == (KeyHolder("anna", "anna", 60, 4),)


@pytest.mark.parametrize("words", [("a b",), ("a.b",), ("",), ("x" * 65,), ("anna", "--rows-at-once", "0")])
def test_what_is_no_name_is_refused(words: tuple[str, ...]) -> None:
    """Of a dot TOML would make a table in a table."""
    assert run("keys", "new", *words).exit_code == 2


def test_the_list_shows_names_and_digests_and_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is the name by which the principal's things are forgotten."""
    file = write_keys(folder / "keys.toml", limited(rows_at_once=2, requests_per_minute=9, principal="house"))
    monkeypatch.setenv("API_KEYS_FILE", str(file))
    found = {each["name"]: each for each in told("keys", "list")}
    assert found["anna"] == {
        "name": "anna",
        "principal": "house",
        "principal_digest": str(Principal(KeyHolder("anna", "house").digest)),
        "num_keys": 2,
        "requests_per_minute": 9,
        "rows_at_once": 2,
        "is_operator": False,
    }
    assert found["boss"]["is_operator"] and found["otto"]["rows_at_once"] is None
    shown = run("keys", "list").stdout
    assert all(name in shown for name in ("house", found["anna"]["principal_digest"], "operator"))
    assert key_sha256(ANNA) not in shown and ANNA not in shown
    monkeypatch.delenv("API_KEYS_FILE")
    assert told("keys", "list", "--file", str(file)) == list(found.values())


def test_the_list_is_there_in_a_proxys_folder_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose settings are refused where a server with a proxy of its own would start."""
    monkeypatch.setenv("BACKENDS", "a=http://a:1,b=http://b:1")
    monkeypatch.setenv("API_KEYS_FILE", str(write_keys(folder / "keys.toml")))
    assert [row["name"] for row in told("keys", "list")] == ["anna", "otto", "boss"]


def test_what_is_wrong_with_the_file_is_told(folder: Path) -> None:
    """And that there is none."""
    done = run("keys", "list")
    assert done.exit_code == 1 and "API_KEYS_FILE is not set" in done.stderr
    (folder / "keys.toml").write_text("[anna]\nkey_sha256 = ['x']", "utf-8")
    done = run("keys", "list", "--file", "keys.toml")
    assert done.exit_code == 1 and "keys.toml: [anna] key_sha256 is no list of SHA-256" in words_of(done.stderr)
