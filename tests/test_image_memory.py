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
    kept.append(source[: 2**21])
    return real(source, limits)


images.read_image = read_image
"""
"""What the server's process runs before anything else: two megabytes of each picture, as it was sent, stay for ever."""


def missed(settings: dict[str, object], num_images: int) -> list[str]:
    figures = image_memory.figures([image_memory.measured(settings, num_images)])
    return [f"{figure.name}: {figure.value:.2f}, {figure.absolute}" for figure in figures if figure.is_missed]


def test_fifty_large_pictures_leave_memory_flat() -> None:
    """Features and KV within their budgets, the process and MLX's memory flat."""
    assert missed(dict(image_memory.SETTINGS), image_memory.NUM_IMAGES) == []


def test_two_megabytes_of_each_picture_are_seen(tmp_path: Path) -> None:
    """The control: a server that keeps a fifth of each body misses the bound of the process, and no other."""
    (tmp_path / "sitecustomize.py").write_text(LEAK, encoding="utf-8")
    found = missed(
        {**image_memory.SETTINGS, "pythonpath": os.pathsep.join([str(tmp_path), str(START_SCRIPT.parent)])}, 30
    )
    assert [line.partition(":")[0] for line in found] == ["growth of process memory from picture 20 to 50"], found


def test_budgets_that_never_fill_are_seen() -> None:
    """The other control: with room for all of them, features and KV pass what they are measured against."""
    found = missed({**image_memory.SETTINGS, "image_feature_max_bytes": 2**30, "prompt_cache_max_bytes": 2**30}, 30)
    for kept in ("of features", "of KV", "of MLX memory"):
        assert any(kept in line for line in found), found
