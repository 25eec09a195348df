"""Between kvserve's blobs and the prompt caches of stock mlx-lm: keys and values by rows, other states as they are.

It knows mlx-lm's cache classes and the notes in the blobs; nothing of folders and names.
"""

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from probing.blobs import BlobFile, RawTensor
from probing.wire import Json, ProbeError

TOKEN_AXIS = -2
MODULES = ("mlx_lm.models.cache", "mlx_lm.models.deepseek_v41")
DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "C64": mx.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stock_caches(
    model: Path,
    segments: Sequence[tuple[BlobFile, list[RawTensor], int]],
    chain: Sequence[tuple[BlobFile, list[RawTensor]]],
) -> list[Any]:
    """Caches of a model as stock mlx-lm makes them, from segments (blob, tensors, end) and the checkpoint at their end,
    if there is one, behind those that it goes on from."""
    caches = make_prompt_cache(load_model(model, lazy=True)[0])
    rows = [_rows(*segment) for segment in segments]
    leaf: Any
    found: list[Any] = []
    for state in chain:
        now = _states(*state)
        found = [_completed(before, leaf) for before, leaf in zip(found, now, strict=True)] if found else now
    states = iter(found)
    position = 0
    for index, cache in enumerate(caches):
        leaves = []
        for leaf in cache.caches if isinstance(cache, CacheList) else [cache]:
            if _is_cut(leaf):
                leaf.keys, leaf.values = (
                    mx.concatenate(list(parts), TOKEN_AXIS)
                    for parts in zip(*(row[position] for row in rows), strict=True)
                )
                leaf.offset = leaf.keys.shape[TOKEN_AXIS]
                position += 1
            else:
                leaf = next(states)
            leaves.append(leaf)
        is_list = isinstance(cache, CacheList)
        caches[index] = CacheList(*leaves) if is_list else leaves[0]  # type: ignore[no-untyped-call]
    return list(caches)


def _rows(blob: BlobFile, tensors: list[RawTensor], end: int) -> list[list[mx.array]]:
    """Per layer that is cut: keys and values of the first rows of a segment."""
    kv: Json = json.loads(blob.note)["kv"]
    if kv["is_packed"] or kv["rest"] is not None:
        raise ProbeError("this KV is quantised: stock files of it are not made")
    arrays = [_array(tensor) for tensor in tensors]
    return [[arrays[number][..., : end - blob.start, :] for number in leaf] for leaf in kv["leaves"]]


def _states(blob: BlobFile, tensors: list[RawTensor]) -> list[Any]:
    arrays = [_array(tensor) for tensor in tensors]

    def value(tree: Any) -> Any:
        if isinstance(tree, list):
            return [value(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        if "array" in tree:
            return arrays[tree["array"]]
        if "tuple" in tree:
            return tuple(value(each) for each in tree["tuple"])
        if "dict" in tree:
            return {key: value(each) for key, each in tree["dict"].items()}
        if "float" in tree:
            return float(tree["float"])
        made = _class(tree["object"])
        empty = made.__new__(made)
        for key, each in tree["attributes"].items():
            setattr(empty, key, value(each))
        return empty

    return [value(leaf) for leaf in json.loads(blob.note)["state"]]


def _completed(before: Any, leaf: Any) -> Any:
    """A window with the rows that it has had before, as many as it holds."""
    if not _is_window(leaf) or leaf.keys is None:
        return leaf
    num_missing = min(leaf.offset, leaf.max_size) - leaf.keys.shape[TOKEN_AXIS]
    if num_missing:
        leaf.keys, leaf.values = (
            mx.concatenate([one[..., -num_missing:, :], other], TOKEN_AXIS)
            for one, other in ((before.keys, leaf.keys), (before.values, leaf.values))
        )
        leaf._idx = leaf.keys.shape[TOKEN_AXIS]
    return leaf


def _class(name: str) -> Any:
    for module in MODULES:
        if hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    raise ProbeError(f"mlx-lm has no cache class {name}")


def _array(tensor: RawTensor) -> mx.array:
    dtype, shape, data = tensor
    if not math.prod(shape):
        return mx.zeros(shape, DTYPES[dtype])
    return mx.array(np.frombuffer(data, np.uint8)).view(DTYPES[dtype]).reshape(shape)


# --- the other way ----------------------------------------------------------------------------------------------------


def num_tokens_of(caches: Sequence[Any]) -> int:
    """How many tokens stock caches hold. Raises ProbeError where they do not say so."""
    leaves = [leaf for cache in caches for leaf in (cache.caches if isinstance(cache, CacheList) else [cache])]
    offsets = {int(leaf.offset) for leaf in leaves if isinstance(leaf, KVCache | RotatingKVCache)}
    if len(offsets) != 1:
        raise ProbeError("the file does not say how many tokens it holds")
    return offsets.pop()


def check_caches(model: Path, caches: Sequence[Any]) -> None:
    """Raise ProbeError for caches that are not, layer by layer, of the kind that this model has."""
    wanted = [type(cache).__name__ for cache in make_prompt_cache(load_model(model, lazy=True)[0])]
    found = [type(cache).__name__ for cache in caches]
    if wanted != found:
        raise ProbeError(
            f"the file is of another model: {len(found)} layers {found[:1]}, not {len(wanted)} {wanted[:1]}"
        )


def parts_of(caches: Sequence[Any]) -> tuple[tuple[str, list[RawTensor]], tuple[str, list[RawTensor]] | None]:
    """A segment's note and tensors, and a checkpoint's where a layer cannot be cut."""
    num_tokens, rows, states = num_tokens_of(caches), _Collected(), _Collected()
    leaves, objects = [], []
    leaf: Any
    for cache in caches:
        for leaf in cache.caches if isinstance(cache, CacheList) else [cache]:
            if _is_cut(leaf):
                leaves.append([rows.add(array[..., :num_tokens, :]) for array in (leaf.keys, leaf.values)])
            else:
                objects.append(states.tree(_in_order(leaf)))
    kv = {"leaves": leaves, "num_tokens": num_tokens, "num_bytes": rows.num_bytes, "is_packed": False, "rest": None}
    segment = json.dumps({"kv": kv}), rows.tensors
    if not objects:
        return segment, None
    return segment, (json.dumps({"state": objects, "num_bytes": states.num_bytes}), states.tensors)


def _is_cut(leaf: Any) -> bool:
    return type(leaf) is KVCache


def _is_window(leaf: Any) -> bool:
    return type(leaf) is RotatingKVCache


def _in_order(leaf: Any) -> Any:
    """A window as the server keeps it: its last rows in the order of time."""
    if _is_window(leaf) and leaf.keep == 0 and leaf.keys is not None:
        leaf.keys, leaf.values = (
            leaf._temporal_order(each)[..., -leaf.max_size :, :] for each in (leaf.keys, leaf.values)
        )
        leaf._idx = leaf.keys.shape[TOKEN_AXIS]
    return leaf


class _Collected:
    """Tensors by number, in the order in which they are met."""

    def __init__(self) -> None:
        self.tensors: list[RawTensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, _, data in self.tensors)

    def add(self, array: mx.array) -> int:
        data = bytes(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))) if array.size else b""
        self.tensors.append((NAMES[array.dtype], list(array.shape), data))
        return len(self.tensors) - 1

    def tree(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str | float):
            return value
        if isinstance(value, mx.array):
            return {"array": self.add(value)}
        if isinstance(value, list):
            return [self.tree(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self.tree(each) for each in value]}
        if type(value).__module__ not in MODULES:
            raise ProbeError(f"a {type(value).__name__} cannot be written")
        attributes = {key: self.tree(each) for key, each in vars(value).items()}
        return {"object": type(value).__name__, "attributes": attributes}
