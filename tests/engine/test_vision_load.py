"""Vision checkpoints that cannot be used whole, and families that fail the trial: served as far as it is right."""

import gc
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from safetensors.numpy import load_file, save_file

from kvserve.engine import vision_check
from kvserve.engine.worker import Engine
from tests.engine.engines import cached, engine_settings, generate, prompt_of, request, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.visions import VISION, picture, vlm_answer
from tests.laws import sampled
from tests.models import tiny_model


@pytest.mark.parametrize("family", sampled(VISION, ("qwen3_5_vl",)))
def test_weights_are_in_memory_once(family: str) -> None:
    """Decoder and tower take what their files have: there is no second copy of either half."""
    num_bytes = sum(file.stat().st_size for file in tiny_model(family).glob("*.safetensors"))
    gc.collect()
    before = mx.get_active_memory()
    with running_engine(family) as engine:
        model = engine.wait_until_ready(0)
        assert model.vision is not None and model.vision.num_bytes > 0
        gc.collect()
        taken = mx.get_active_memory() - before
        print(f"{family}: {taken:,} bytes in memory, {num_bytes:,} in files")
        assert 0.9 * num_bytes <= taken <= 1.1 * num_bytes


def test_a_checkpoint_without_its_tower_answers_text(tmp_path: Path) -> None:
    """Its config describes a tower that its weights lack: it sees no images, text is as with it."""
    folder = tmp_path / "half"
    shutil.copytree(tiny_model("qwen3_5_vl"), folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("vision_tower.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "mlx"})
    wanted = request(prompt_of(40), 8)
    with running_engine("qwen3_5_vl") as engine:
        [expected] = generate(engine, wanted)
    engine = Engine(folder, engine_settings(), grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    try:
        model = engine.wait_until_ready(60)
        assert model.vision is None and model.cache_support.image_rule is None
        assert any("sees no images" in note for note in model.cache_support.notes)
        assert generate(engine, wanted)[0].tokens == expected.tokens
    finally:
        engine.stop(60)


def test_a_family_that_fails_the_trial_is_served_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that lead elsewhere: prompts with images are computed in one pass, by themselves, anew; and are right."""
    monkeypatch.setattr(vision_check, "MAX_ERROR", -1.0)
    with running_engine("qwen3_vl", prefill_step_size=32) as engine:
        sighted = Sighted("qwen3_vl", engine)
        support = sighted.model.cache_support
        assert (support.image_rule, support.can_batch, support.can_keep) == ("alone", False, False)
        assert any("computed alone and anew" in note for note in support.notes)
        prompts = [sighted.writer.prompt("What is this? ", picture(seed), " Say it.") for seed in (1, 2)]
        answers = generate(engine, *(prompted.request() for prompted in [*prompts, prompts[0]]))
        for prompted, answer in zip([*prompts, prompts[0]], answers, strict=True):
            assert answer.tokens == vlm_answer("qwen3_vl", prompted)
            assert cached(answer) == 0


def test_a_family_whose_positions_are_counted_otherwise_refuses_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not understood is not served."""
    monkeypatch.setattr(vision_check._ImageTrial, "wrong_positions", lambda self: "it counts otherwise")
    with running_engine("qwen3_vl") as engine:
        model = engine.wait_until_ready(0)
        assert model.vision is None
        assert any("it counts otherwise" in note for note in model.cache_support.notes)
