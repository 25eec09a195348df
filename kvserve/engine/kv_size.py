"""How many bytes the KV of a row takes, while it is live and kept, read off caches of a few tokens. It runs no
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvserve.engine.kv_buffers import arrays_in, flat_caches
from kvserve.engine.leaf_forms import LeafForm, is_known
from kvserve.engine.quantised import PackedCache

COPIED_LAYERS = 1.5
"""A row that joins, leaves or grows has one layer twice, and the part of it that is padded: measured with four layers,
a batch of 184 MiB took 60 more."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """Sizes of one row: `fixed` for windows and states, `per_token` in full precision, `per_packed_token` quantised.
    `slot_tokens` are places that its caches hold ahead, `copy_share` is the part of a batch that is there twice while a
    row joins, leaves or outgrows its places. `memo_per_token` is what of `per_token` is not kept.

    A live row of more than `packed_from` tokens is quantised as a whole; None: never. What is kept of it for others is
    in full precision up to there.
    """

    fixed: int
    per_token: float
    per_packed_token: float = 0.0
    packed_from: int | None = None
    slot_tokens: int = 0
    copy_share: float = 0.0
    memo_per_token: float = 0.0

    def token_bytes(self, num_tokens: int) -> float:
        """Bytes of each token of a live row that holds so many."""
        return self.per_packed_token if self._is_packed(num_tokens) else self.per_token

    def live(self, num_tokens: int) -> float:
        """Bytes of a live row with the places that it holds ahead, without padding."""
        return self.fixed + (num_tokens + self.slot_tokens) * self.token_bytes(num_tokens)

    def held(self, num_tokens: int) -> float:
        """Bytes of a row that has left its batch: no place is held ahead."""
        return self.fixed + num_tokens * self.token_bytes(num_tokens)

    def copied(self, num_bytes: float) -> float:
        """What of a batch of so many bytes is there twice at the most."""
        return self.copy_share * num_bytes

    def peak(self, num_tokens: int) -> float:
        """The most that a live row holds until it has so many tokens: while it is converted it is there twice."""
        if self.packed_from is None or not self._is_packed(num_tokens):
            return self.live(num_tokens)
        converting = (self.packed_from + self.slot_tokens) * self.per_token + self.packed_from * self.per_packed_token
        return self.fixed + max(converting, (num_tokens + self.slot_tokens) * self.per_packed_token)

    def kept(self, start: int, end: int) -> float:
        """Bytes that the tokens `[start, end)` take in the prefix cache, with a state at their end."""
        border = end if self.packed_from is None else min(max(start, self.packed_from), end)
        per_token = self.per_token - self.memo_per_token
        return self.fixed + (border - start) * per_token + (end - border) * self.per_packed_token

    def _is_packed(self, num_tokens: int) -> bool:
        return self.packed_from is not None and num_tokens > self.packed_from


def largest(sizes: Sequence[KvSize]) -> KvSize:
    """What a row takes at the most of several parts, all of which are quantised from the same token on or never."""

    def most(name: str) -> Any:
        return max(getattr(each, name) for each in sizes)

    kept = max(each.per_token - each.memo_per_token for each in sizes)
    return KvSize(
        fixed=most("fixed"),
        per_token=most("per_token"),
        per_packed_token=most("per_packed_token"),
        packed_from=sizes[0].packed_from,
        slot_tokens=most("slot_tokens"),
        copy_share=most("copy_share"),
        memo_per_token=most("per_token") - kept,
    )


def kv_size(caches: Sequence[Any], forms: Sequence[LeafForm], packed: Sequence[Any] | None, packed_from: int) -> KvSize:
    """The sizes of a row with such caches, which are quantised from some token on or never (None)."""
    per_token, fixed = _sizes(caches, forms)
    num_plain = sum(type(cache) is KVCache for cache in flat_caches(caches))
    # Plain layers join and leave a batch one after the other, all others at once.
    copy_share = COPIED_LAYERS / num_plain if num_plain and packed is None else 1.0
    leaves = zip(flat_caches(caches), forms, strict=True)
    memo_per_token = sum(_bytes_per_token(leaf) for leaf, form in leaves if form.kind == "memo")
    sizes = KvSize(
        fixed, per_token, slot_tokens=KVCache.step, copy_share=min(1.0, copy_share), memo_per_token=memo_per_token
    )
    if packed is None:
        return sizes
    return replace(sizes, per_packed_token=_sizes(packed, forms)[0], packed_from=packed_from)


def _sizes(caches: Sequence[Any], forms: Sequence[LeafForm]) -> tuple[float, int]:
    """KV bytes per token, and bytes that a row has whatever its length."""
    leaves = [leaf_bytes(cache, form) for cache, form in zip(flat_caches(caches), forms, strict=True)]
    return sum(per_token for per_token, _ in leaves), sum(fixed for _, fixed in leaves)


def leaf_bytes(cache: Any, form: LeafForm) -> tuple[float, int]:
    """The same of one leaf that holds a few tokens. Only shapes are looked at."""
    if isinstance(cache, ArraysCache):
        return 0.0, cache.nbytes
    if isinstance(cache, RotatingKVCache):
        return 0.0, int(_bytes_per_token(cache) * cache.max_size)
    if not is_known(cache) and not isinstance(cache, PackedCache):
        return form.per_token, form.fixed
    return _bytes_per_token(cache), 0


def _bytes_per_token(cache: Any) -> float:
    """Keys and values are (rows, heads, slots, width); slots are allocated ahead, so they are counted, not tokens.

    What has no slots, such as an offset, does not grow with the tokens.
    """
    return sum(array.nbytes / array.shape[-2] for array in arrays_in(cache.state) if array.ndim > 2 and array.size)
