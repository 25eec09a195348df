"""Quantised KV: how rows of keys and values are packed, and the caches that hold them, of one row and of a batch.

Quantisation runs along the head's width, so that every token is packed for itself: rows can be cut, padded, joined and
merged like those of a plain cache. mlx-lm's batch generator finds here what it finds in its own caches (merge, extend,
filter, extract); its attention reads packed arrays where a cache has `bits`, and plain ones else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, create_attention_mask

from kvserve.engine.kv_buffers import KvArrays, RightAligned, flat_caches, num_slots, settle, with_leaves, with_room

TOKEN_AXIS = -2

MAX_SCORES = 2**24
"""Attention that reads packed arrays writes its scores out: so many, per head, may be there at a time. With 32 heads in
half precision that is 1 GiB."""

MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What the operator decides about quantised KV; `bits` None: everything stays in full precision.

    `start` tokens of each row are computed and kept in full precision. The uniform scheme has a `group_size`.
    """

    bits: Literal[4, 8] | None = None
    scheme: Literal["uniform", "turboquant"] = "uniform"
    group_size: int = 64
    start: int = 0


FULL_PRECISION = KvSettings()


class Scheme(Protocol):
    """A way to pack keys and values."""

    @property
    def is_read_packed(self) -> bool:
        """Whether attention multiplies the packed arrays themselves."""

    def pack(self, keys: mx.array, values: mx.array) -> KvArrays:
        """Pack (rows, heads, tokens, width); each token for itself."""

    def fetch(self, rows: KvArrays, like_keys: mx.array, like_values: mx.array) -> tuple[Any, Any]:
        """What attention gets for packed rows; the last keys and values tell widths and type."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """MLX's own quantisation: per group of widths a scale and a bias. mlx-lm's attention multiplies it as it is."""

    bits: int
    group_size: int

    @property
    def is_read_packed(self) -> bool:
        return True

    def pack(self, keys: mx.array, values: mx.array) -> KvArrays:
        quantised = (mx.quantize(each, group_size=self.group_size, bits=self.bits) for each in (keys, values))
        return tuple(array for arrays in quantised for array in arrays)

    def fetch(self, rows: KvArrays, like_keys: mx.array, like_values: mx.array) -> tuple[KvArrays, KvArrays]:
        return rows[:3], rows[3:]


@dataclass(frozen=True, slots=True)
class Turbo:
    """TurboQuant with a whole number of bits per width, for keys and values alike: each vector is its length and a
    rotated direction in few bits per width.

    The codecs are mlx-vlm's (the method: Zandieh et al., "TurboQuant", 2025). mlx-lm's models have no attention that
    reads this form, so rows are kept packed and unpacked for one layer at a time, while it attends. Attention then is
    the plain one: attention sinks and latent attention work too.
    """

    bits: int
    _codecs: dict[tuple[int, int], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_read_packed(self) -> bool:
        return False

    def pack(self, keys: mx.array, values: mx.array) -> KvArrays:
        """Lengths (..., 1) in float16 and packed directions in uint32, of keys, then of values."""
        codecs = self._codecs_for(keys, values)
        states = (codecs.key_codec.quantize(keys), codecs.value_codec.quantize(values))
        return tuple(array for norms, indices in states for array in (norms[..., None], indices))

    def fetch(self, rows: KvArrays, like_keys: mx.array, like_values: mx.array) -> tuple[mx.array, mx.array]:
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


@dataclass(frozen=True, slots=True)
class Quantiser:
    """When and how a row's caches are packed: as soon as they hold `start` tokens, and from then on."""

    scheme: Scheme
    start: int

    def is_due(self, num_tokens: int) -> bool:
        """Whether caches that hold so many tokens are packed."""
        return num_tokens >= self.start

    def longest_chunk(self, num_tokens: int) -> int:
        """How many tokens may follow so many in one prefill chunk."""
        is_bounded = self.is_due(num_tokens) and self.scheme.is_read_packed
        return max(MIN_CHUNK_TOKENS, MAX_SCORES // (num_tokens + 1)) if is_bounded else MAX_SCORES

    def ready(self, caches: list[Any], num_tokens: int) -> list[Any]:
        """The caches as the next token needs them, where they hold `num_tokens`. Plain ones are consumed."""
        return self.convert(caches) if self.is_due(num_tokens) else caches

    def convert(self, caches: list[Any]) -> list[Any]:
        """Pack every layer that keeps all its tokens; what is packed already, windows and states stay."""
        converted = with_leaves(caches, self._converted)
        mx.eval([vars(leaf) for leaf in flat_caches(converted) if isinstance(leaf, PackedCache)])
        return converted

    def _converted(self, cache: Any) -> Any:
        if type(cache) is not KVCache:
            return cache
        rows = () if cache.keys is None else self.scheme.pack(*cache.keys_and_values())  # type: ignore[no-untyped-call]
        return PackedCache(self.scheme, rows, cache.offset)


class PackedCache:
    """Packed keys and values of one row. `rows` may have slots behind the `offset` tokens that it holds."""

    def __init__(self, scheme: Scheme, rows: KvArrays = (), offset: int = 0) -> None:
        self.scheme = scheme
        self.rows = rows
        self.offset = offset
        _mark(self, scheme)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add tokens (1, heads, tokens, width); what attention reads of all tokens."""
        self.rows = _written(self.rows, self.scheme.pack(keys, values), self.offset)
        self.offset += keys.shape[TOKEN_AXIS]
        return self.scheme.fetch(_cut(self.rows, self.offset), keys, values)

    def reserve(self, num_tokens: int) -> None:
        """Make room for so many tokens, where there are some already."""
        if self.rows and self.rows[0].shape[TOKEN_AXIS] < num_tokens:
            self.rows = _mapped(self.rows, lambda array: with_room(array, self.offset, num_tokens))

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)  # type: ignore[misc]

    @property
    def state(self) -> tuple[KvArrays, int]:
        return self.rows, self.offset

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return not self.rows

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int) -> int:
        """Drop the newest tokens; says how many."""
        num_tokens = min(self.offset, num_tokens)
        self.offset -= num_tokens
        return num_tokens

    @classmethod
    def merge(cls, caches: "Sequence[PackedCache]") -> "BatchPackedCache":
        """One batch of rows, the shorter ones padded on the left. A single one is handed over, and is empty then."""
        return BatchPackedCache(caches[0].scheme).take_in(caches)


class BatchPackedCache(RightAligned):
    """Packed keys and values of a batch of rows; after mlx-lm's `BatchKVCache`."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        _mark(self, scheme)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add tokens (rows, heads, tokens, width); what attention reads of all slots, padding included."""
        self.add(self.scheme.pack(keys, values))
        return self.scheme.fetch(_cut(self.rows, self._idx), keys, values)

    def make_mask(self, num_tokens: int, return_array: bool = False, **kwargs: Any) -> Any:
        if self.gaps:
            return self.uneven_mask(num_tokens, kwargs.get("window_size"))
        return create_causal_mask(num_tokens, offset=self._idx, left_padding=self.left_padding, **kwargs)

    def extract(self, index: int) -> PackedCache:
        """One row as a cache of its own: see `row`."""
        return PackedCache(self.scheme, *self.row(index))

    def take_out(self) -> PackedCache:
        """The same of the only row: see `only_row`."""
        return PackedCache(self.scheme, *self.only_row())

    @property
    def state(self) -> tuple[KvArrays, mx.array, mx.array, int]:
        return self.rows, self.offset, self.left_padding, self._idx


def _mark(cache: Any, scheme: Scheme) -> None:
    """mlx-lm's attention takes the keys of a cache that has `bits` for packed ones, whatever the value."""
    if isinstance(scheme, Uniform):
        cache.bits, cache.group_size = scheme.bits, scheme.group_size


def _mapped(rows: KvArrays, change: Callable[[mx.array], mx.array]) -> KvArrays:
    return tuple(change(array) for array in rows)


def _cut(rows: KvArrays, end: int) -> KvArrays:
    return _mapped(rows, lambda array: array[..., :end, :])


def _written(held: KvArrays, new: KvArrays, start: int) -> KvArrays:
    """`held` with `new` at slot `start`, larger where that does not fit. The arrays of `held` are changed."""
    num_new = new[0].shape[TOKEN_AXIS]
    if not held or start + num_new > held[0].shape[TOKEN_AXIS]:
        held = held or _mapped(new, lambda array: array[..., :0, :])
        held = _mapped(held, lambda array: with_room(array, start, num_slots(start + num_new)))
        settle(*held)
    for array, rows in zip(held, new, strict=True):
        array[..., start : start + num_new, :] = rows
    return held
