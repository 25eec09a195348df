"""How far two ways to compute the same logits are apart. It knows arrays only."""

import mlx.core as mx


def logits_error(found: mx.array, expected: mx.array) -> float:
    """Root mean square difference as a share of the spread, of logits or log-probabilities. Where both say the same
    infinity, a token that the model forbids, there is no error."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    is_finite = mx.isfinite(expected)
    mean = mx.where(is_finite, expected, 0).sum() / is_finite.sum()
    spread = mx.where(is_finite, mx.square(expected - mean), 0).sum()
    difference = mx.where(found == expected, 0, mx.square(found - expected)).sum()
    return float(mx.sqrt(difference / spread).item())  # type: ignore[arg-type]
