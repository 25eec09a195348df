"""Recorded sessions in closed loop, of `tests/test_closed_loop_recorded.py`, with drafts at every step: the smallest
one with the families of that table."""

from pathlib import Path

import pytest

from benchmarks.closed_loop import FAMILIES
from tests.test_closed_loop_recorded import SMALL
from tests.test_closed_loop_recorded import test_what_the_server_said_is_known_when_it_comes_back as is_known


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_server_said_is_known_when_it_comes_back(family: str, tmp_path: Path) -> None:
    """What it wrote is led, so what is drafted wrongly shows in what it keeps."""
    is_known(name=SMALL, family=family, num_requests=4, tmp_path=tmp_path)
