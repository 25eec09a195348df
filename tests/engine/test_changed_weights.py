"""KV on disk is that of these very weights: a changed model starts cold, and one that is not known serves from RAM."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from kvserve.cache.disk_tier import DiskTier
from kvserve.engine import engine_start
from kvserve.engine.decode import DecodePool
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.model_files import MEMORY_FILE
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    Result,
    assert_exact,
    cached,
    cold,
    collect,
    engine_settings,
    generate,
    prompt_of,
    turn,
)
from tests.engine.test_vision import Sighted
from tests.engine.visions import picture
from tests.integrity import check_integrity
from tests.laws import sampled
from tests.models import tiny_model
from tests.starts import remembered_starts
from tests.web.fakes import eventually
from tests.weights import change_byte, digest_held_back, turn_middle

BASE = prompt_of(200)
NUM_MOST = 160
"""Most of it."""

FAMILIES = ("qwen3", "qwen3_5")
NUM_TOKENS = 12


def copy_of(family: str, tmp_path: Path) -> Path:
    """A model of the test's own."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(family), folder)
    return folder


@contextmanager
def engine_on(folder: Path, kv: Path, report: Callable[[str], None] = lambda _: None) -> Iterator[Engine]:
    """A running engine on this folder that keeps KV in that one."""
    disk = DiskSettings(kv, None, 0, 24.0)
    engine = Engine(folder, engine_settings(disk=disk), grammar_tokenizer=lambda _: None, report=report)
    with pytest.MonkeyPatch.context() as patch, remembered_starts():
        patch.setattr(DiskTier, "read_rate", None)
        engine.start()
        try:
            engine.wait_until_ready(60)
            yield engine
        finally:
            engine.stop(60)


def ask(folder: Path, kv: Path, tokens: list[int] = BASE) -> Result:
    """The answer of an engine that has just started."""
    with engine_on(folder, kv) as engine:
        return generate(engine, turn(tokens, NUM_TOKENS))[0]


def is_on_disk(engine: Engine) -> bool:
    return engine.cache_report().disk is not None


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_values_that_changed_within_a_tensor_are_other_weights(family: str, tmp_path: Path) -> None:
    """The edges of each tensor, its file's size and time are those of before: nothing is reused, the text is the cold
    one. The control: with the same files everything is reused, and the two models do not write the same."""
    folder, kv = copy_of(family, tmp_path), tmp_path / "kv"
    first = ask(folder, kv)
    assert_exact(again := ask(folder, kv), first.tokens)
    assert cached(first) == 0 and cached(again) > NUM_MOST
    turn_middle(folder / "model.safetensors", "mlp.down_proj.weight")
    other = ask(folder, kv)
    assert cached(other) == 0
    assert_exact(other, ask(folder, tmp_path / "nothing").tokens)
    assert other.tokens != first.tokens
    turn_middle(folder / "model.safetensors", "mlp.down_proj.weight")
    assert_exact(back := ask(folder, kv), first.tokens)
    assert cached(back) > NUM_MOST


def test_a_tower_in_a_file_of_any_name_is_part_of_the_model(tmp_path: Path) -> None:
    """Its values change and the decoder's do not: the image is looked at and computed anew; untouched it is reused."""
    folder, kv = copy_of("qwen3_vl", tmp_path), tmp_path / "kv"
    tensors = dict(mx.load(str(folder / "model.safetensors")).items())
    tower = {name: value for name, value in tensors.items() if name.startswith("vision_tower")}
    mx.save_safetensors(str(folder / "vision.safetensors"), tower)
    rest = {name: value for name, value in tensors.items() if name not in tower}
    mx.save_safetensors(str(folder / "model.safetensors"), rest)

    def look() -> tuple[Result, int]:
        with engine_on(folder, kv) as engine:
            sighted = Sighted("qwen3_vl", engine)
            prompted = sighted.writer.prompt("What is this? ", picture(1), " Say it.")
            [answer] = generate(engine, prompted.request(8))
            return answer, prompted.tokens.images[0].end

    first, _ = look()
    again, end = look()
    assert cached(first) == 0 and cached(again) >= end
    turn_middle(folder / "vision.safetensors", "merger.linear_fc2.weight")
    other, _ = look()
    assert cached(other) == 0
    shutil.rmtree(kv)
    assert_exact(other, look()[0].tokens)
    assert other.tokens != first.tokens


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_no_answer_waits_for_the_digest(family: str, tmp_path: Path) -> None:
    """It is held back: the answer comes, nothing of before is found, what this engine has computed is. Once it is known
    the disk has all of that, what was there before is found again, and so is everything after the next start."""
    folder, kv, other = copy_of(family, tmp_path), tmp_path / "kv", prompt_of(200, seed=1)
    before = ask(folder, kv)
    (kv / MEMORY_FILE).unlink(missing_ok=True)
    with digest_held_back() as let_go, engine_on(folder, kv) as engine:
        [first] = generate(engine, turn(other, NUM_TOKENS))
        [second] = generate(engine, turn(BASE, NUM_TOKENS))
        assert (cached(first), cached(second)) == (0, 0)
        assert_exact(second, before.tokens)
        status = engine.status.digest
        assert status.state == "reading" and status.reason and not is_on_disk(engine)
        assert cached(generate(engine, turn(other, 1))[0]) > NUM_MOST  # its own RAM is of no other weights
        engine._ask(lambda scheduler: scheduler.cache.clear())
        assert cached(generate(engine, turn(other, 1))[0]) == 0
        let_go.set()
        assert eventually(lambda: is_on_disk(engine))
        assert engine.status.digest.state == "known"
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
        assert cached(generate(engine, turn(other, 1))[0]) > NUM_MOST
        [found] = generate(engine, turn(BASE, NUM_TOKENS))
        assert_exact(found, before.tokens)
        assert cached(found) > NUM_MOST
        assert engine.cache_report().disk.num_restores == 1  # type: ignore[union-attr]
    warm = ask(folder, kv, other)
    assert_exact(warm, first.tokens)
    assert cached(warm) > NUM_MOST


def test_a_row_that_runs_when_the_name_comes_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefill began without a name; its prompt and its answer are on disk in the end."""
    folder, kv = copy_of("qwen3", tmp_path), tmp_path / "kv"
    # At full speed it writes thousands of tokens until the name is there, on a busy machine.
    step = DecodePool.step
    monkeypatch.setattr(DecodePool, "step", lambda self: (time.sleep(0.005), step(self))[1])
    with digest_held_back() as let_go, engine_on(folder, kv) as engine:
        running, tokens = engine.submit(turn(BASE, 100_000)), list[int]()
        for batch in running.batches(60):
            tokens += [event.token for event in batch if hasattr(event, "token")]
            if tokens and not let_go.is_set():
                let_go.set()
                assert eventually(lambda: is_on_disk(engine))
                num_before = len(tokens)
            if let_go.is_set() and len(tokens) >= num_before + 40:
                running.cancel()
    with engine_on(folder, kv) as engine:
        conversation = [*BASE, *tokens[: num_before + 32], *prompt_of(5)]
        [warm] = generate(engine, turn(conversation, 8))
        assert cached(warm) >= len(BASE) + num_before
        assert_exact(warm, cold(engine, conversation, 8))


def test_what_changes_while_it_is_loaded_is_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which bytes were loaded: RAM serves, the disk gives and takes nothing, a line and the state say so.
    The next start is one of the files as they are."""
    folder, kv, lines = copy_of("qwen3", tmp_path), tmp_path / "kv", list[str]()
    ask(folder, kv)
    files = sorted(kv.rglob("*.safetensors"))
    load = engine_start.with_images_tried

    def changing(*arguments: object) -> object:
        change_byte(folder / "model.safetensors", 400_000)
        return load(*arguments)

    monkeypatch.setattr(engine_start, "with_images_tried", changing)
    with engine_on(folder, kv, lines.append) as engine:
        assert cached(generate(engine, turn(BASE, 1))[0]) == 0
        assert cached(generate(engine, turn(BASE, 1))[0]) > NUM_MOST
        assert engine.status.digest.state == "unknown" and not is_on_disk(engine)
    assert sorted(kv.rglob("*.safetensors")) == files
    assert sum("model.safetensors changed" in line for line in lines) == 1
    monkeypatch.setattr(engine_start, "with_images_tried", load)
    assert cached(ask(folder, kv)) == 0
    assert cached(ask(folder, kv)) > NUM_MOST


def test_a_cache_that_is_emptied_before_the_name_is_known_stays_empty(tmp_path: Path) -> None:
    """Whose KV is whose on the disk is not known: all of it goes, and none comes back with the name."""
    folder, kv = copy_of("qwen3", tmp_path), tmp_path / "kv"
    ask(folder, kv)
    (kv / MEMORY_FILE).unlink(missing_ok=True)
    with digest_held_back() as let_go, engine_on(folder, kv) as engine:
        engine.clear_cache()
        assert not list(kv.rglob("*.safetensors"))
        let_go.set()
        assert eventually(lambda: is_on_disk(engine))
        assert cached(generate(engine, turn(BASE, 1))[0]) == 0


def test_an_engine_ends_at_once_while_it_is_read(tmp_path: Path) -> None:
    """No thread is left, and nothing is kept under any name."""
    folder, kv = copy_of("qwen3", tmp_path), tmp_path / "kv"
    threads = set(threading.enumerate())
    with digest_held_back(), engine_on(folder, kv) as engine:
        assert collect(engine.submit(turn(BASE, 8))).tokens
        engine.stop(60)
        assert engine.has_ended
        assert eventually(lambda: set(threading.enumerate()) <= threads), set(threading.enumerate()) - threads
    assert not list(kv.rglob("*.safetensors"))
