"""What a start has found out of a model's caches, as it stands on disk."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.engine import caches_seen, checked_file
from kvserve.engine.caches_seen import REFRESH_SECONDS, UNUSED_SECONDS, CachesSeen, Seen
from kvserve.engine.draft_nouns import DraftsSeen
from kvserve.engine.leaf_forms import LeafForm
from kvserve.engine.model import KvSize, Probed
from kvserve.engine.model_files import CACHES_FILE
from kvserve.engine.pass_costs import MEASURED_WIDTHS
from kvserve.engine.width_noise import WIDTHS, WidthNoise
from tests.laws import num_examples

FORMS = (LeafForm("cut"), LeafForm("window", None, 0.5, 96))
DRAFTS = DraftsSeen(
    ("trim", "window"),
    tuple(WidthNoise(width, 1e-3 * width, 2, 96) for width in WIDTHS),
    {width: 1 + 0.1 * width for width in MEASURED_WIDTHS},
)
SEEN = Seen(
    Probed(1000, KvSize(96, 1024.5, 300.0, 64, 256, 0.75), FORMS, kv_notes=("One layer stays.",)),
    can_pad=True,
    drafts=DRAFTS,
)
KEY = {"its files": "0a1b", "the BLAS": "OpenBLAS 0.3", "the machine": "one"}
MODEL = Path("/models/one")


def memory(folder: Path, now: float = 1e9, note: Callable[[str], None] = pytest.fail) -> CachesSeen:
    return CachesSeen(folder, pytest.fail, note, lambda: now)


def test_a_look_is_found_again_under_its_whole_key_alone(tmp_path: Path) -> None:
    """Also by another process. With any part of the key changed, added or left out nothing is found, and a line says
    what changed; libraries are named alone, as they make other files of a model's too. A model that was never here has
    no line."""
    lines: list[str] = []
    memory(tmp_path).remember(KEY, MODEL, SEEN)
    assert memory(tmp_path).find(KEY, MODEL) == memory(tmp_path).find(KEY, Path("/moved")) == SEEN
    for part in KEY:
        assert memory(tmp_path, note=lines.append).find({**KEY, part: "x"}, MODEL) is None
        assert lines.pop().endswith(f"changed are {part}.") and not lines
    assert memory(tmp_path, note=lines.append).find(KEY | {"its files": "x", "the BLAS": ""}, MODEL) is None
    assert lines.pop().endswith("changed are the BLAS.")
    assert memory(tmp_path, note=lines.append).find({**KEY, "more": "x"}, MODEL) is None
    assert memory(tmp_path).find({**KEY, "its files": "x"}, Path("/models/new")) is None
    assert memory(tmp_path / "none").find(KEY, MODEL) is None


def test_a_look_without_drafts_leaves_what_another_one_found_of_them(tmp_path: Path) -> None:
    """Of a server beside it, or of the same model that drafts for itself; and a look with drafts brings its own."""
    memory(tmp_path).remember(KEY, MODEL, replace(SEEN, drafts=None))
    assert memory(tmp_path).find(KEY, MODEL) == replace(SEEN, drafts=None)
    for drafts in (DRAFTS, replace(DRAFTS, ways=("hold", "hold"))):
        memory(tmp_path).remember(KEY, MODEL, replace(SEEN, drafts=drafts))
        memory(tmp_path).remember(KEY, MODEL, replace(SEEN, drafts=None))
        assert memory(tmp_path).find(KEY, MODEL) == replace(SEEN, drafts=drafts)


def test_it_holds_numbers_and_digests_only(tmp_path: Path) -> None:
    """For its owner's eyes; no name of a model, a folder or a machine."""
    memory(tmp_path).remember(KEY, MODEL, SEEN)
    text = (tmp_path / CACHES_FILE).read_text()
    assert set(json.loads(text)) == {"format", "check", "looks"}
    assert (tmp_path / CACHES_FILE).stat().st_mode & 0o077 == 0
    assert not [word for word in ("0a1b", "OpenBLAS", "/models", '"one"') if word in text]
    assert [each.name for each in tmp_path.iterdir()] == [CACHES_FILE]


@settings(max_examples=num_examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_no_damage_makes_it_say_something_else(tmp_path: Path, place: float, flip: int, cut: bool) -> None:
    """Any byte changed, or the end cut off: what was remembered, or nothing. A file that does not add up is taken away
    with one line, and written anew."""
    lines: list[str] = []
    memory(tmp_path).remember(KEY, MODEL, SEEN)
    path = tmp_path / CACHES_FILE
    held = bytearray(path.read_bytes())
    at = int(place * len(held))
    held[at] ^= flip
    path.write_bytes(held[:at] if cut else held)
    assert memory(tmp_path, note=lines.append).find(KEY, MODEL) in (None, SEEN)
    assert path.exists() == (not lines) and len(lines) <= 1
    assert memory(tmp_path).find(KEY, MODEL) in (None, SEEN)
    memory(tmp_path).remember(KEY, MODEL, SEEN)
    assert memory(tmp_path).find(KEY, MODEL) == SEEN


def test_rows_that_say_nothing_that_is_known_are_damage(tmp_path: Path) -> None:
    """Their checksum is right all the same."""
    memory(tmp_path).remember(KEY, MODEL, SEEN)
    held = json.loads((tmp_path / CACHES_FILE).read_text())["looks"]
    changes: tuple[dict[str, Any], ...] = (
        {"sizes": {"fixed": 1}},
        {"forms": [["cut"]]},
        {"vocab_size": None},
        {"kv_notes": 7},
    )
    drafts = DRAFTS.row()
    of_drafts = ({"ways": 7}, {"noises": []}, {"noises": [[2, "x", 0, 16]]}, {"ratios": drafts["ratios"][:-1]})
    ratios = [{"ratios": [[width, ratio] for width in MEASURED_WIDTHS]} for ratio in (0.5, float("nan"), float("inf"))]
    changes += tuple({"drafts": {**drafts, **change}} for change in (*of_drafts, *ratios))
    for change in (*changes, {"vocab_size": float("inf")}, {"forms": [["cut", 10**400, 0]]}, {"drafts": 7}):
        [[name, place, parts, used_at, seen]] = held
        lines: list[str] = []
        rows = [[name, place, parts, used_at, {**seen, **change}]]
        checked_file.CheckedFile(tmp_path / CACHES_FILE, caches_seen.FORMAT, "looks").write(rows)
        assert memory(tmp_path, note=lines.append).find(KEY, MODEL) is None and len(lines) == 1


def test_what_is_not_used_for_long_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is used now and then stays; of too many the least recently used go."""
    unused = {**KEY, "its files": "2c"}
    memory(tmp_path, 0).remember(KEY, MODEL, SEEN)
    memory(tmp_path, 0).remember(unused, Path("/two"), SEEN)
    assert memory(tmp_path, 2 * REFRESH_SECONDS).find(KEY, MODEL) == SEEN
    late = UNUSED_SECONDS + REFRESH_SECONDS
    memory(tmp_path, late).remember({**KEY, "its files": "3d"}, Path("/three"), SEEN)
    assert memory(tmp_path, late).find(KEY, MODEL) == SEEN
    assert memory(tmp_path, late).find(unused, Path("/two")) is None
    monkeypatch.setattr(caches_seen, "MAX_ROWS", 1)
    memory(tmp_path, late + 1).remember(unused, Path("/two"), SEEN)
    assert memory(tmp_path, late + 1).find(KEY, MODEL) is None


def test_servers_of_the_same_number_write_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two containers that share a folder: each is process 1. One is written whole, then the other."""

    def meanwhile(_descriptor: int) -> None:
        monkeypatch.setattr(checked_file.os, "fsync", lambda _: None)
        file.write([["other"]])
        assert file.read() == [["other"]]

    monkeypatch.setattr(checked_file.os, "getpid", lambda: 1)
    monkeypatch.setattr(checked_file.os, "fsync", meanwhile)
    file = checked_file.CheckedFile(tmp_path / CACHES_FILE, caches_seen.FORMAT, "looks")
    file.write([["one"]])
    assert file.read() == [["one"]] and [each.name for each in tmp_path.iterdir()] == [CACHES_FILE]


def test_a_place_that_cannot_be_written_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered, and nobody is kept from anything."""

    def full(_descriptor: int) -> None:
        raise OSError("no space left")

    lines: list[str] = []
    monkeypatch.setattr(checked_file.os, "fsync", full)
    CachesSeen(tmp_path, lines.append, pytest.fail).remember(KEY, MODEL, SEEN)
    assert len(lines) == 1 and "no space left" in lines[0] and list(tmp_path.iterdir()) == []
