"""TurboQuant as a scheme of quantised KV: each vector is its length and a rotated direction in few bits per width.

The codecs are mlx-vlm's (the method: Zandieh et al., "TurboQuant", 2025). mlx-lm's models have no attention that reads
this form, so rows are kept packed and unpacked for one layer at a time, while it attends. Attention then is the plain
one: attention sinks and latent attention work too.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvserve.engine.quantised import Packed


@dataclass(frozen=True, slots=True)
class Turbo:
    """TurboQuant with a whole number of bits per width, for keys and values alike."""

    bits: int
    _codecs: dict[tuple[int, int], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_read_packed(self) -> bool:
        return False

    def pack(self, keys: mx.array, values: mx.array) -> Packed:
        """Lengths (..., 1) in float16 and packed directions in uint32, of keys, then of values."""
        codecs = self._codecs_for(keys, values)
        states = (codecs.key_codec.quantize(keys), codecs.value_codec.quantize(values))
        return tuple(array for norms, indices in states for array in (norms[..., None], indices))

    def fetch(self, rows: Packed, like_keys: mx.array, like_values: mx.array) -> tuple[mx.array, mx.array]:
        from mlx_vlm.turboquant import TurboQuantMSEState  # here: it takes seconds, and few need it

        states = [TurboQuantMSEState(rows[first][..., 0], rows[first + 1]) for first in (0, 2)]
        keys, values = self._codecs_for(like_keys, like_values).dequantize(*states)
        return keys.astype(like_keys.dtype), values.astype(like_values.dtype)

    def _codecs_for(self, keys: mx.array, values: mx.array) -> Any:
        widths = keys.shape[-1], values.shape[-1]
        if widths not in self._codecs:
            self._codecs[widths] = _codecs_of(self.bits, *widths)
        return self._codecs[widths]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turbo":
        return self  # a batch that is split copies its caches; the codecs are constant


def _codecs_of(bits: int, key_width: int, value_width: int) -> Any:
    """An mlx-vlm cache of which only the codecs are used: it builds them for the widths of its first token."""
    from mlx_vlm.turboquant import TurboQuantKVCache

    codecs = TurboQuantKVCache(bits=bits)
    codecs.update_and_fetch(mx.ones((1, 1, 1, key_width)), mx.ones((1, 1, 1, value_width)))
    for codec in (codecs.key_codec, codecs.value_codec):
        mx.eval([value for value in vars(codec).values() if isinstance(value, mx.array)])
    return codecs
