"""What computes recurrent layers in tests comes to mlx-lm's own numbers."""

from collections.abc import Iterator

import pytest

from tests import recurrent
from tests.recurrent import are_equal, by_token, example


@pytest.fixture
def looked_at_anew() -> Iterator[None]:
    recurrent._is_same.cache_clear()
    yield
    recurrent._is_same.cache_clear()


@pytest.mark.parametrize(("num_rows", "num_tokens", "is_masked"), [(1, 9, False), (3, 33, True), (2, 64, False)])
def test_a_recurrent_layer_has_the_numbers_of_mlx_lms_own_loop(num_rows: int, num_tokens: int, is_masked: bool) -> None:
    """Outputs and states of one row and of several, with padding too, to the bit."""
    assert are_equal(example(num_rows, num_tokens, is_masked=is_masked), by_token)


@pytest.mark.usefixtures("looked_at_anew")
def test_where_the_numbers_would_be_others_mlx_lms_own_loop_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in another order is seen, and is used for nothing."""
    exact = recurrent._by_token

    def rounded(*arguments: object) -> object:
        out, state = exact(*arguments)  # type: ignore[arg-type]
        return out, state * (1 + 2**-23)

    monkeypatch.setattr(recurrent, "_by_token", rounded)
    assert not are_equal(example(2, 9), rounded)  # type: ignore[arg-type]
    assert are_equal(example(2, 9), by_token)
