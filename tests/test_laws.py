"""What is left to `make full` is marked so, and nothing else is."""

import pytest

from tests.laws import sampled, sampled_cells


def is_long(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("long") is not None


@pytest.mark.parametrize("one", [1, 2])
@pytest.mark.parametrize("other", ["a", "b"])
@sampled_cells(lambda one, other: one == 1 or other == "a")
def test_cells_that_are_not_chosen_are_long(request: pytest.FixtureRequest, one: int, other: str) -> None:
    """The function is asked with the parameters of a cell by name."""
    assert is_long(request) == (one == 2 and other == "b")


@pytest.mark.parametrize("value", sampled([1, 2], (1,)))
def test_values_that_are_not_named_are_long(request: pytest.FixtureRequest, value: int) -> None:
    """The others run every time."""
    assert is_long(request) == (value == 2)
