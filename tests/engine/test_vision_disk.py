"""Images and the disk: after a restart their KV is read back, and what is written is what a cold engine writes."""

from pathlib import Path

import pytest

from kvserve.engine.engine_settings import DiskSettings
from tests.engine.engines import assert_exact, cached, generate, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.visions import VISION, picture
from tests.laws import sampled


@pytest.mark.parametrize("family", sampled(VISION, ("qwen3_5_vl",)))
def test_after_a_restart_the_image_is_there(family: str, tmp_path: Path) -> None:
    """Its KV comes from disk; the tower of the new process is not asked; another image shares nothing past it."""
    disk = DiskSettings(tmp_path / "kv", None, 0, 24.0)
    with running_engine(family, disk=disk) as engine:
        writer = Sighted(family, engine).writer
        first = writer.prompt("What is this? ", picture(1), " Say it.")
        other = writer.prompt("What is this? ", picture(2), " Say it.")
        [answer] = generate(engine, first.request())
        assert cached(answer) == 0
        second = first.followed_by(answer.tokens, writer.tokenizer.encode(" And why is that so?"))
    with running_engine(family, disk=disk) as engine:
        sighted = Sighted(family, engine)
        [warm] = generate(engine, second.request())
        assert cached(warm) >= first.tokens.images[0].end
        assert sighted.num_tower_calls == 0
        [answer] = generate(engine, other.request())
        assert cached(answer) <= first.tokens.images[0].start
        assert_exact(warm, sighted.cold(second))
        assert_exact(answer, sighted.cold(other))
