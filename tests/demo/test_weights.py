"""How weights are drawn: by name and seed alone, with two residual dimensions that no layer touches."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvserve.demo.build import FAMILIES
from kvserve.demo.weights import NUM_RESERVED, TokenRoles, WeightStyle, draw_parameter
from tests.models import TWO_LAYERS, tiny_model

ROLES = TokenRoles(improbable_ids=(), likely_ids=(0, 1), end_id=2, closing_ids=(), closing_share=0.0)


def test_a_parameter_depends_on_its_name_and_the_seed_only() -> None:
    """The same name and seed give the same values; another name or seed gives others."""
    draw = [
        draw_parameter(name, (8, 8), WeightStyle(), ROLES, seed)
        for name, seed in (
            ("a.q_proj.weight", 0),
            ("a.q_proj.weight", 0),
            ("b.q_proj.weight", 0),
            ("a.q_proj.weight", 1),
        )
    ]
    assert np.array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])
    assert not np.array_equal(draw[0], draw[3])


def test_a_parameter_that_no_rule_covers_is_refused() -> None:
    """A name of an unknown kind is an error instead of a guess."""
    with pytest.raises(KeyError, match="mystery"):
        draw_parameter("layers.0.mystery", (4,), WeightStyle(), ROLES, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layer_writes_the_reserved_dimensions(family: str) -> None:
    """Whatever adds to the residual stream has zero rows there, everything is finite float32, and ties do not exist."""
    weights = load_file(tiny_model(family) / "model.safetensors")
    writers = [name for name in weights if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))]
    assert len(writers) >= 2 * TWO_LAYERS.num_layers
    for name in writers:
        assert not weights[name][..., :NUM_RESERVED, :].any()
        assert weights[name][..., NUM_RESERVED:, :].any()
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in weights.values())
    assert any(name.endswith("lm_head.weight") for name in weights)
