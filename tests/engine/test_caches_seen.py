"""What a start has found out of a model's caches is taken over by the next one with the same model, and by no other."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kvserve.engine import caches_seen, engine_start, model_digest
from kvserve.engine import model as model_module
from kvserve.engine.caches_seen import (
    CacheLook,
    CachesSeen,
    LookKey,
    note_code,
    surroundings,
)
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.file_digest import DigestMemory
from kvserve.engine.model import CacheSupport, LoadedModel, Probed, load
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.model_files import CACHES_FILE
from kvserve.engine.quantised import FULL_PRECISION, KvSettings
from kvserve.engine.self_check import check_caches
from kvserve.engine.worker import Engine
from tests.engine.engines import FAMILIES, engine_settings, generate, prompt_of, turn
from tests.engine.odd_caches import DropsPadding, use_cache
from tests.laws import sampled
from tests.models import TWO_LAYERS, tiny_model
from tests.weights import change_byte

# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What computes, in the place of the libraries."""
    package = tmp_path / "computes"
    (package / "deep" / "__pycache__").mkdir(parents=True)
    (package / "deep" / "cache.py").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(caches_seen, "PACKAGES", ("computes",))
    caches_seen._code_at_first.cache_clear()
    return package


def test_whatever_computes_is_part_of_the_key(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a library that is changed by hand or under the same version, and of what its wheel lays beside it, the
    device, the system, the BLAS, each setting of quantised KV. What Python makes of the sources is not."""
    (beside := tmp_path / "computes_cpu.libs").mkdir()  # where a wheel has its BLAS
    (beside / "libblas.so").write_text("one")

    def key(kv: KvSettings = FULL_PRECISION, blas: str = "") -> str:
        """In another process."""
        caches_seen._code_at_first.cache_clear()
        return json.dumps(surroundings(kv, blas))

    was = key()
    (package / "deep" / "__pycache__" / "cache.pyc").touch()
    (package / "deep" / "nowhere").symlink_to("gone")
    assert key() == was
    settings_of_kv = (
        KvSettings(bits=4),
        KvSettings(bits=8),
        KvSettings(bits=4, start=9),
        KvSettings(bits=4, group_size=32),
    )
    keys = [*map(key, settings_of_kv), key(blas="OpenBLAS")]
    with monkeypatch.context() as patch:
        patch.setattr(mx, "device_info", lambda: {"architecture": "other"})
        keys += [key()]
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        keys += [key()]
    usable, which = caches_seen._processors()
    for processors in ((usable + 1, which), (usable, "others")):
        with monkeypatch.context() as patch:
            patch.setattr(caches_seen, "_processors", lambda found=processors: found)
            keys += [key()]
    for path in (package / "deep" / "cache.py", beside / "libblas.so"):
        change_byte(path, 0)
        keys += [key()]
    (package / "more.py").touch()
    keys += [key()]
    assert len({was, *keys}) == 1 + len(keys) and "null" not in keys


def test_a_processor_is_known_by_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by how fast it just runs; where nothing is said of it there is none."""
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(caches_seen, "CPU_INFO", told)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert caches_seen._processors()[0] == 2
    found = [caches_seen._processors()[1]]
    for flags, clock in (("avx2", 2100), ("avx2", 900), ("avx2 amx", 900)):
        one = f"processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t\t: {clock}\nflags\t\t: {flags}"
        told.write_text(f"{one}\n\n{one} other\n")
        found.append(caches_seen._processors()[1])
    assert found[1] == found[2] and len(set(found)) == 3


def test_code_that_was_replaced_under_a_process_has_no_key(package: Path, starts: "Starts") -> None:
    """What it has imported is of before, and what it imports from now on is not: nothing is remembered or found, until
    the next start."""
    starts.start()
    was = surroundings(FULL_PRECISION, "")
    change_byte(package / "deep" / "cache.py", 0)
    assert was is not None and surroundings(FULL_PRECISION, "") is None
    for _ in range(2):
        starts.start(around=lambda: None)
    assert starts.num_looks == 3 and starts.lines == []
    caches_seen._code_at_first.cache_clear()
    assert surroundings(FULL_PRECISION, "") not in (None, was)


def test_code_that_is_replaced_before_or_while_the_first_model_is_loaded_has_no_key(
    package: Path, starts: "Starts"
) -> None:
    """A start may fetch for hours before it loads, and a load imports the model's module: which code it is, is asked
    at the beginning, and again when the weights are in memory. Where it could not be told then, it is never known."""
    source = package / "deep" / "cache.py"
    note_code()
    starts.start(meanwhile=lambda: change_byte(source, 0), around=lambda: surroundings(FULL_PRECISION, ""))
    assert surroundings(FULL_PRECISION, "") is None
    caches_seen._code_at_first.cache_clear()
    starts.start(around=lambda: surroundings(FULL_PRECISION, ""))
    assert starts.num_looks == 2 and starts.lines == []
    starts.start(around=lambda: surroundings(FULL_PRECISION, ""))
    assert starts.num_looks == 2
    caches_seen._code_at_first.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", lambda _: (_ for _ in ()).throw(FileNotFoundError))
        note_code()
    assert surroundings(FULL_PRECISION, "") is None


def test_the_libraries_and_this_program_are_looked_at() -> None:
    """Where they are installed: MLX's own binary is among their files."""
    names = {package: [name for name, *_ in caches_seen._stamps(package)] for package in caches_seen.PACKAGES}
    assert "/models/cache.py" in names["mlx_lm"] and "/engine/self_check.py" in names["kvserve"]
    assert "/models/base.py" in names["mlx_vlm"] and any(name.startswith("/core.") for name in names["mlx"])


# --- the look ---------------------------------------------------------------------------------------------------------


RIGHT = CacheSupport()


AROUND = {"the BLAS": "one"}


class Starts:
    """Starts of one model, with what a start does about its caches. `num_looks` counts those that tried anything."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "model"
        self._kv = folder / "kv"
        self.lines: list[str] = []
        self.num_looks = 0
        monkeypatch.setattr(model_digest, "SETTLED_SECONDS", 0.0)

    def start(
        self,
        kv: KvSettings = FULL_PRECISION,
        meanwhile: Callable[[], object] = lambda: None,
        check: Callable[[LoadedModel], CacheSupport] = lambda _: RIGHT,
        around: Callable[[], LookKey | None] = lambda: AROUND,
    ) -> tuple[LoadedModel, CacheSupport]:
        digest = ModelDigest(self.folder, DigestMemory(self._kv, pytest.fail, pytest.fail), lambda _: None, pytest.fail)
        digest.begin()

        def found() -> LookKey | None:
            return {**key, "KV_BITS or what goes with it": repr(kv)} if (key := around()) is not None else None

        look = CacheLook(CachesSeen(self._kv, pytest.fail, self.lines.append), digest, self.folder, found)

        def looking(build: str, probe: Callable[[], Probed]) -> Probed:
            meanwhile()
            return look.probed(build, probe)

        model = load(self.folder, 131072, kv, looking)
        self.num_looks += look.support is None
        support = look.support or check(model)
        digest.confirm()
        look.remember(model, support)
        return model, support


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    return Starts(tmp_path, monkeypatch)


@pytest.mark.parametrize("family", sampled(FAMILIES, ("gemma3",)))
def test_what_is_remembered_is_what_was_found(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of caches, to the last number; no pass goes through the model."""
    shutil.copytree(tiny_model(family), tmp_path / "model")
    starts = Starts(tmp_path, monkeypatch)
    first, found = starts.start(check=check_caches)
    monkeypatch.setattr(type(first.module), "__call__", lambda *_, **__: pytest.fail("it was tried"))
    again, remembered = starts.start()
    assert (remembered, starts.num_looks) == (found, 1)
    assert (again.vocab_size, again.sizes, again.leaf_forms) == (first.vocab_size, first.sizes, first.leaf_forms)
    assert again.leaf_trouble == first.leaf_trouble == "" and again.context_limit == first.context_limit


def test_quantised_kv_is_remembered_with_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantiser is there, and a model's notes are; other settings are another look."""
    shutil.copytree(tiny_model("qwen3", scale=replace(TWO_LAYERS, head_dim=32)), tmp_path / "model")
    starts, eight = Starts(tmp_path, monkeypatch), KvSettings(bits=8, group_size=32, start=10**9)
    first, found = starts.start(eight, check=check_caches)
    again, remembered = starts.start(eight)
    assert remembered == found and again.quantiser == first.quantiser is not None and starts.num_looks == 1
    assert again.kv_notes == first.kv_notes != () and again.sizes == first.sizes
    starts.start(replace(eight, start=64))
    assert starts.num_looks == 2 and starts.lines == [
        "The model's caches are tried again, which takes longer: changed are KV_BITS or what goes with it."
    ]


def test_other_weights_are_looked_at(starts: Starts) -> None:
    """One byte, in a file whose size and time are as before; the same bytes again are known."""
    starts.start()
    change_byte(starts.folder / "model.safetensors", 400_000)
    starts.start()
    change_byte(starts.folder / "model.safetensors", 400_000)
    starts.start()
    assert starts.num_looks == 2 and [line.endswith("changed are its files.") for line in starts.lines] == [True]


def test_what_changes_while_it_is_loaded_is_neither_taken_over_nor_remembered(starts: Starts) -> None:
    """Nobody knows which bytes were loaded."""
    path = starts.folder / "model.safetensors"
    starts.start(meanwhile=lambda: change_byte(path, 400_000))
    assert (starts.num_looks, starts.lines) == (1, [])
    starts.start()
    starts.start(meanwhile=lambda: change_byte(path, 400_000))
    starts.start(meanwhile=lambda: change_byte(path, 400_000))
    assert starts.num_looks == 4
    starts.start()
    assert starts.num_looks == 4, "it was known before the two changes, and is the same again"


def test_what_went_wrong_is_tried_at_each_start(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been the machine that was short of something: only what came out right is taken over."""
    wrong = (
        CacheSupport(can_batch=False, notes=("no batch",)),
        CacheSupport(can_keep=False, notes=("no copies",)),
        CacheSupport(can_keep=False),
        CacheSupport(notes=("no padding",)),
        CacheSupport(cut_tokens=256),
    )
    for support in wrong:
        starts.start(check=lambda _, found=support: found)
    assert starts.num_looks == len(wrong)
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "find_forms", lambda *_: 1 / 0)
        starts.start()
    starts.start()
    starts.start()
    assert starts.num_looks == len(wrong) + 2


def test_a_class_that_is_not_known_is_tried_at_each_start(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model whose caches are of other classes than before is looked at, whatever its files are."""
    starts.start()

    class Harmless(KVCache):
        pass

    with monkeypatch.context() as patch:
        use_cache(patch, Harmless)
        for _ in range(2):
            assert starts.start()[1].can_batch
    assert starts.num_looks == 3
    with monkeypatch.context() as patch:
        use_cache(patch, DropsPadding)
        assert not starts.start(check=check_caches)[1].can_batch
    starts.start()
    assert starts.num_looks == 4 and all(line.endswith("the classes of its caches.") for line in starts.lines)


# --- an engine --------------------------------------------------------------------------------------------------------


def test_an_engine_starts_without_a_look_and_says_the_same(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer and what it says of its caches are those of the first start. One that failed behind the look has
    remembered nothing, and who wants nothing on disk has nothing there."""

    def failing(*_: object) -> None:
        raise ValueError("it writes nothing")

    def start(disk: DiskSettings | None) -> tuple[Any, Any]:
        engine = Engine(
            starts.folder, engine_settings(disk=disk), grammar_tokenizer=lambda _: None, report=lambda _: None
        )
        engine.start()
        try:
            engine.wait_until_ready(60)
            [result] = generate(engine, turn(prompt_of(20), 4))
            return result.tokens, engine.status.cache_support
        finally:
            engine.stop(60)

    disk = DiskSettings(tmp_path / "kv", None, 0, 24.0)
    check = engine_start.check_caches
    looks: list[CacheSupport] = []
    monkeypatch.setattr(engine_start, "check_caches", lambda model: looks.append(check(model)) or looks[-1])
    with monkeypatch.context() as patch:
        patch.setattr(engine_start, "_draw_two_tokens", failing)
        with pytest.raises(Exception, match="it writes nothing"):
            start(disk)
    first = start(disk)
    assert start(disk) == first and len(looks) == 2
    for without_traces in (None, replace(disk, folder=tmp_path / "scratch", is_ephemeral=True)):
        assert start(without_traces) == first
    assert len(looks) == 4 and not list((tmp_path / "scratch").glob(CACHES_FILE))
