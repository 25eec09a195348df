"""Fifty large pictures in a row leave nothing behind in the server's process, and what is left behind is seen."""

import os
from pathlib import Path

import pytest

from benchmarks import image_memory
from benchmarks.rig import START_SCRIPT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

LEAK = """
from kvserve.prompt import images

kept, real = [], images.read_image


def read_image(source, limits):
    kept.append(source)
    return real(source, limits)


images.read_image = read_image
"""
"""What the server's process runs before anything else: every picture, as it was sent, stays for ever."""

FEW, FEW_WARM_UP = 15, 5
"""Pictures of a control: what is left behind by each of ten more is far more than may be."""


def missed(settings: dict[str, object], num_images: int) -> list[str]:
    figures = image_memory.figures([image_memory.measured(settings, num_images)])
    return [f"{figure.name}: {figure.value:.2f}, {figure.absolute}" for figure in figures if figure.is_missed]


def test_fifty_large_pictures_leave_memory_flat() -> None:
    """Features and KV within their budgets, the process and MLX's memory flat. What is missed once is measured again: a
    step of the allocator comes once, a leak each time."""
    if found := missed(dict(image_memory.SETTINGS), image_memory.NUM_IMAGES):
        assert missed(dict(image_memory.SETTINGS), image_memory.NUM_IMAGES) == [], found


def test_pictures_that_stay_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a server that keeps what was sent misses the bound of the process, and no other."""
    monkeypatch.setattr(image_memory, "NUM_WARM_UP", FEW_WARM_UP)
    (tmp_path / "sitecustomize.py").write_text(LEAK, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(START_SCRIPT.parent)])
    found = missed({**image_memory.SETTINGS, "pythonpath": paths}, FEW)
    assert [line.startswith("growth of process memory") for line in found] == [True], found
