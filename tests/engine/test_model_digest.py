"""Which model lies in a folder is found out by reading all of it once: every byte counts, whenever it was changed, and
what was loaded while something changed has no name."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.engine import model_digest
from kvserve.engine.file_digest import DigestMemory, FilePiece, hash_piece
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.model_files import MEMORY_FILE
from tests.laws import IS_FULL, num_examples
from tests.models import tiny_model
from tests.web.fakes import eventually
from tests.weights import change_byte, fingerprint_of

PATIENCE_SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3_5_vl"), copy)
    return copy


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written count as old."""
    monkeypatch.setattr(model_digest, "SETTLED_SECONDS", 0.0)


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is so little that it is read on the spot."""
    monkeypatch.setattr(model_digest, "AT_ONCE_BYTES", 0)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each file that is read."""
    read: list[int] = []

    def noted(piece: FilePiece, told: Callable[[int], None], **how: bool) -> bytes:
        read.append(piece.end - piece.start)
        return hash_piece(piece, told, **how)

    monkeypatch.setattr(model_digest, "hash_piece", noted)
    return read


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file is read before this is set."""
    event = threading.Event()

    def held(piece: FilePiece, told: Callable[[int], None], **how: bool) -> bytes:
        while not event.wait(0.01):
            told(0)
        return hash_piece(piece, told, **how)

    monkeypatch.setattr(model_digest, "hash_piece", held)
    yield event
    event.set()


def digest_of(folder: Path, report: Callable[[str], None] = pytest.fail) -> ModelDigest:
    return ModelDigest(folder, DigestMemory(folder.parent / "kv", report, report), report, report)


def loaded(folder: Path, meanwhile: Callable[[], object] = lambda: None) -> ModelDigest:
    """As an engine does it; `meanwhile` is what happens to the folder while its files are read."""
    digest = digest_of(folder, lambda _: None)
    digest.begin()
    meanwhile()
    digest.confirm()
    return digest


def named(digest: ModelDigest) -> list[str | None]:
    """What those hear who wait for the name: it, or that there will be none."""
    heard: list[str | None] = []
    digest.when_known(heard.append, lambda: heard.append(None))
    return heard


@settings(
    max_examples=num_examples(25) if IS_FULL else 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(data=st.data())
def test_every_byte_of_every_file_counts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Changed with its time set back, and remembered as it was: another model. Changed back: the same one."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(tiny_model("qwen3_5_vl"), folder)
    before = digest_of(folder).look()
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    place, flip = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(1, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_digest, "SETTLED_SECONDS", -60.0)  # the worst: all is remembered at once
        assert digest_of(folder).look() == before
        change_byte(path, place, flip)
        changed = digest_of(folder).look()
        change_byte(path, place, flip)
        assert changed not in (before, None) and digest_of(folder).look() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "vision.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        lambda folder: (folder / "chat_template.jinja").rename(folder / "other.jinja"),
        lambda folder: (folder / "generation_config.json").unlink(),
    ],
    ids=["weights added", "adapter added", "renamed", "removed"],
)
def test_a_file_that_comes_or_goes_is_another_model(folder: Path, change: Callable[[Path], object]) -> None:
    """As does one that has another name."""
    before = digest_of(folder).look()
    change(folder)
    assert digest_of(folder).look() not in (before, None)


def test_place_and_time_do_not_count(folder: Path, tmp_path: Path) -> None:
    """A copy elsewhere is the same model; it is what reading all of it says."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(folder, tmp_path / "elsewhere" / "other name")
    assert digest_of(folder).look() == digest_of(tmp_path / "elsewhere" / "other name").look() == fingerprint_of(folder)


def test_a_file_is_read_in_pieces_that_belong_to_its_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads read one file: what they find is put together in order, and every piece counts."""
    monkeypatch.setattr("kvserve.engine.file_digest.PIECE_BYTES", 1000)
    monkeypatch.setattr(model_digest, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(model_digest, "SETTLED_SECONDS", 0.0)
    digest = loaded(folder)
    heard = named(digest)
    assert eventually(lambda: heard == [fingerprint_of(folder)])
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(reversed(file.read(2000))))
    assert fingerprint_of(folder) != heard[0]


@pytest.mark.usefixtures("settled")
def test_what_is_remembered_is_not_read(folder: Path, num_read: list[int]) -> None:
    """The second start reads nothing; of a folder with one changed file that one only."""
    first = digest_of(folder).look()
    assert sum(num_read) == sum(path.stat().st_size for path in folder.iterdir())
    num_read.clear()
    assert digest_of(folder).look() == first and not num_read
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert digest_of(folder).look() not in (first, None)
    assert num_read == [(folder / "config.json").stat().st_size]


def test_what_was_just_written_is_not_remembered(folder: Path, num_read: list[int]) -> None:
    """Within one tick of its clock a file system shows no second change: it is read again."""
    for _ in range(2):
        num_read.clear()
        digest_of(folder).look()
        assert sum(num_read) == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.usefixtures("settled", "in_background")
def test_nobody_waits_while_it_is_read(folder: Path, let_go: threading.Event) -> None:
    """The load goes on and ends; the name comes later, to all who wait for it; the next start has it at once."""
    digest = loaded(folder)
    heard = named(digest)
    assert heard == [] and digest.status.state == "reading" and digest.status.reason
    let_go.set()
    assert eventually(lambda: heard == [fingerprint_of(folder)])
    assert named(digest) == heard and digest.status.state == "known" and not digest.status.reason
    assert digest.status.num_read_bytes == digest.status.num_bytes > 0
    assert digest_of(folder).look() == heard[0]


@pytest.mark.usefixtures("settled", "in_background")
def test_a_name_waits_for_the_end_of_the_load(folder: Path) -> None:
    """What is known before the load is over may still turn out to be of other files."""
    digest = digest_of(folder)
    heard = named(digest)
    digest.begin()
    assert eventually(lambda: digest.status.num_read_bytes == digest.status.num_bytes > 0)
    assert heard == []
    digest.confirm()
    assert eventually(lambda: heard == [fingerprint_of(folder)])


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_byte(folder / "model.safetensors", 400_000),
        lambda folder: (folder / "added.json").write_text("{}"),
        lambda folder: (folder / "tokenizer.json").unlink(),
    ],
    ids=["edited", "added", "removed"],
)
def test_what_changed_while_it_was_loaded_has_no_name(
    folder: Path, at_once: bool, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of before nor that of after: nobody knows what was loaded. It is said once."""
    if not at_once:
        monkeypatch.setattr(model_digest, "AT_ONCE_BYTES", 0)
    lines: list[str] = []
    digest = digest_of(folder, lines.append)
    early = named(digest)
    digest.begin()
    change(folder)
    digest.confirm()
    assert eventually(lambda: early == [None]) and named(digest) == [None]
    assert digest.status.state == "unknown" and "while" in digest.status.reason
    digest.stop(PATIENCE_SECONDS)
    assert len(lines) == 1 and digest.status.reason in lines[0]
    after = loaded(folder)
    assert eventually(lambda: after.status.state == "known")


@pytest.mark.usefixtures("settled", "in_background")
def test_what_changed_after_the_load_and_before_it_was_read_has_no_name(folder: Path, let_go: threading.Event) -> None:
    """What was loaded is gone; the digest of what is there now is not its name, also for the next start."""
    before = fingerprint_of(folder)
    digest = loaded(folder)
    heard = named(digest)
    change_byte(folder / "model.safetensors", 400_000)
    let_go.set()
    assert eventually(lambda: heard == [None])
    again = loaded(folder)
    assert eventually(lambda: named(again) == [fingerprint_of(folder)]) and fingerprint_of(folder) != before


def test_what_changed_since_it_was_described_has_no_name(folder: Path) -> None:
    """Tokenizer and template were read then: a name for the files of now would not be theirs."""
    digest = digest_of(folder, lambda _: None)
    digest.look()
    digest.expected = dict(digest._files)
    (folder / "chat_template.jinja").write_text("other")
    digest.begin()
    digest.confirm()
    assert named(digest) == [None]


@pytest.mark.usefixtures("settled", "in_background")
def test_it_ends_when_nobody_wants_to_know_any_more(folder: Path, let_go: threading.Event) -> None:
    """A shutdown or a swap in the middle: no thread is left, nobody is called, nothing is remembered."""
    before = set(threading.enumerate())
    digest = loaded(folder)
    heard = named(digest)
    assert set(threading.enumerate()) > before
    digest.stop(PATIENCE_SECONDS)
    assert eventually(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before
    let_go.set()
    assert heard == [] and not (folder.parent / "kv" / MEMORY_FILE).exists()


@pytest.mark.usefixtures("settled", "in_background")
def test_a_reading_that_was_broken_off_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long files that were read are remembered at once."""
    monkeypatch.setattr("kvserve.engine.file_digest.PIECE_BYTES", 100_000)
    monkeypatch.setattr(model_digest, "NUM_THREADS", 1)
    (folder / "model-2.safetensors").write_bytes(bytes(250_000))
    reached, read = threading.Event(), set[Path]()

    def stops_late(piece: FilePiece, told: Callable[[int], None], **how: bool) -> bytes:
        if piece.path.name == "tokenizer.json" and not reached.is_set():
            reached.set()
            while True:
                told(0)
        read.add(piece.path)
        return hash_piece(piece, told, **how)

    monkeypatch.setattr(model_digest, "hash_piece", stops_late)
    digest = loaded(folder)
    assert reached.wait(PATIENCE_SECONDS)
    digest.stop(PATIENCE_SECONDS)
    assert folder / "model-2.safetensors" in read
    read.clear()
    again = loaded(folder)
    assert eventually(lambda: again.status.state == "known")
    assert folder / "tokenizer.json" in read and folder / "model-2.safetensors" not in read


@pytest.mark.usefixtures("settled", "in_background")
def test_a_file_that_cannot_be_read_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the disk while it is read: no name, one line, and nobody waits for ever."""

    def broken(*_: object, **__: object) -> bytes:
        raise OSError("input/output error")

    monkeypatch.setattr(model_digest, "hash_piece", broken)
    lines: list[str] = []
    digest = digest_of(folder, lines.append)
    digest.begin()
    digest.confirm()
    assert eventually(lambda: digest.status.state == "unknown")
    assert len(lines) == 1 and "input/output error" in lines[0]


def test_without_a_disk_nothing_is_read(folder: Path, num_read: list[int]) -> None:
    """Where nothing outlives the process no name is needed."""
    digest = ModelDigest(folder, None, pytest.fail, pytest.fail)
    assert digest.look() is None
    digest.begin()
    digest.confirm()
    assert named(digest) == [] and digest.status.state == "not needed" and not num_read


@pytest.mark.usefixtures("settled", "in_background")
def test_a_long_reading_is_told_of_by_quarters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it goes on, and when the name is there; what is wrong is another thing."""
    monkeypatch.setattr(model_digest, "QUIET_SECONDS", -1.0)
    monkeypatch.setattr("kvserve.engine.file_digest.READ_BYTES", 50_000)
    notes: list[str] = []
    digest = ModelDigest(
        folder, DigestMemory(folder.parent / "kv", pytest.fail, pytest.fail), pytest.fail, notes.append
    )
    digest.begin()
    digest.confirm()
    assert eventually(lambda: len(notes) == 4)
    assert all(note.startswith("Reading the weights once") for note in notes[:3]) and "are known" in notes[3]
