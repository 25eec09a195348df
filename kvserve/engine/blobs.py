"""What is kept of a row <-> bytes: slices of KV and states as named tensors and a JSON text that puts them together;
and of a state with sliding windows only what came since another one.

A state is a tree: cache objects of the libraries' own classes, lists, tuples, dicts, None, numbers, strings and arrays
of any type and shape. Objects are rebuilt from their attributes; nothing that a file says is ever executed (no pickle).
Arrays belong to the engine thread; the bytes handed out are views of evaluated arrays and may be read anywhere.
"""

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import RotatingKVCache

from kvserve.cache.disk_blob import Tensor
from kvserve.engine.leaf_forms import TOKEN_AXIS
from kvserve.engine.snapshot import KvSlice, StateSnapshot, window_of

DTYPES: Mapping[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CACHE_MODULES = ("mlx_lm.models.", "mlx_vlm.models.", "kvserve.engine.pools")
"""Where classes are defined whose objects may be written and read: the libraries' own caches, with and without a model
of their own, and what stands for some of them."""

COMMON_MODULE = "mlx_lm.models.cache"
"""Not named in a file."""

type Encoded = tuple[str, list[Tensor]]
"""The payload's text and its tensors."""


class NotStorable(Exception):
    """A state holds something that no file of ours can hold."""


class NotReadable(Exception):
    """A text and tensors that do not go together."""


def encode_kv(kv: KvSlice) -> Encoded:
    """A slice of KV as bytes."""
    writer = _Writer()
    tree = {"kv": _kv_tree(kv, writer)}
    return json.dumps(tree, separators=(",", ":")), writer.tensors()


def decode_kv(text: str, tensors: Sequence[Tensor]) -> KvSlice:
    """A slice of KV with arrays of its own, evaluated. Raises NotReadable."""

    def read(tree: Any, reader: _Reader) -> KvSlice:
        return _kv_of(tree["kv"], reader)

    return _decoded(text, tensors, read)


def encode_state(state: StateSnapshot) -> Encoded:
    """A state as bytes. Raises NotStorable."""
    writer = _Writer()
    tree = {"state": [writer.tree(leaf) for leaf in state.leaves], "num_bytes": state.num_bytes}
    return json.dumps(tree, separators=(",", ":")), writer.tensors()


def decode_state(text: str, tensors: Sequence[Tensor]) -> StateSnapshot:
    """A state with arrays of its own, evaluated. Raises NotReadable."""

    def read(tree: Any, reader: _Reader) -> StateSnapshot:
        return StateSnapshot(tuple(reader.value(leaf) for leaf in tree["state"]), int(tree["num_bytes"]))

    return _decoded(text, tensors, read)


def _decoded[T](text: str, tensors: Sequence[Tensor], read: "Callable[[Any, _Reader], T]") -> T:
    try:
        reader = _Reader(tensors)
        found = read(json.loads(text), reader)
        mx.eval(reader.arrays)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, ImportError) as error:
        raise NotReadable(f"{type(error).__name__}: {error}") from error
    return found


def _kv_tree(kv: KvSlice, writer: "_Writer") -> dict[str, Any]:
    groups = {"start": kv.start, "row_tokens": list(kv.row_tokens)} if kv.row_tokens else {}
    return {
        **groups,
        "leaves": [[writer.number(array) for array in leaf] for leaf in kv.leaves],
        "num_tokens": kv.num_tokens,
        "num_bytes": kv.num_bytes,
        "is_packed": kv.is_packed,
        "rest": None if kv.rest is None else _kv_tree(kv.rest, writer),
    }


def _kv_of(tree: Mapping[str, Any], reader: "_Reader") -> KvSlice:
    return KvSlice(
        leaves=tuple(tuple(reader.arrays[number] for number in leaf) for leaf in tree["leaves"]),
        num_tokens=int(tree["num_tokens"]),
        num_bytes=int(tree["num_bytes"]),
        is_packed=bool(tree["is_packed"]),
        rest=None if tree["rest"] is None else _kv_of(tree["rest"], reader),
        start=int(tree.get("start", 0)),
        row_tokens=tuple(int(count) for count in tree.get("row_tokens", ())),
    )


class _Writer:
    """Collects the arrays of a tree, each once."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def number(self, array: mx.array) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def tree(self, value: Any) -> Any:
        """A value as JSON: plain where JSON has it, else an object with one key that says what it is."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, mx.array):
            return {"array": self.number(value)}
        if isinstance(value, list):
            return [self.tree(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self.tree(each) for each in value]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self.tree(each) for key, each in value.items()}}
        if _cache_class(type(value).__module__, type(value).__name__) is type(value):
            module = {} if type(value).__module__ == COMMON_MODULE else {"module": type(value).__module__}
            attributes = {key: self.tree(each) for key, each in vars(value).items()}
            return {"object": type(value).__name__, **module, "attributes": attributes}
        raise NotStorable(f"a {type(value).__module__}.{type(value).__qualname__}")

    def tensors(self) -> list[Tensor]:
        """The arrays' bytes, not copied where an array is contiguous."""
        views = [array.reshape(-1).view(mx.uint8) if array.size else None for array in self._arrays]
        mx.eval([view for view in views if view is not None])
        return [
            Tensor(_NAMES[array.dtype], tuple(array.shape), b"" if view is None else memoryview(view))
            for array, view in zip(self._arrays, views, strict=True)
        ]


def _cache_class(module: str, name: str) -> Any:
    """A class of caches, if the libraries have one there. A subclass of the same name elsewhere may mean something
    else, and a module of weights is no cache."""
    if not module.startswith(CACHE_MODULES):
        return None
    found = getattr(importlib.import_module(module), name, None)
    is_cache = isinstance(found, type) and hasattr(found, "state") and not issubclass(found, Module)
    return found if is_cache else None


class _Reader:
    """Arrays by their number, and the values around them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.arrays = list(_arrays_of(tensors))

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        if "array" in tree:
            return self.arrays[tree["array"]]
        if "tuple" in tree:
            return tuple(self.value(each) for each in tree["tuple"])
        if "dict" in tree:
            return {key: self.value(each) for key, each in tree["dict"].items()}
        if "float" in tree:
            return float(tree["float"])
        return self._object(tree.get("module", COMMON_MODULE), tree["object"], tree["attributes"])

    def _object(self, module: str, name: str, attributes: Mapping[str, Any]) -> Any:
        made = _cache_class(module, name)
        if made is None:
            raise ValueError(f"{module}.{name} is no class of caches")
        empty = made.__new__(made)
        for key, value in attributes.items():
            setattr(empty, key, self.value(value))
        return empty


def _arrays_of(tensors: Sequence[Tensor]) -> Iterator[mx.array]:
    for tensor in tensors:
        dtype = DTYPES[tensor.dtype]
        if math.prod(tensor.shape) * dtype.size != memoryview(tensor.data).nbytes:
            raise ValueError(f"a tensor of shape {tensor.shape} has {memoryview(tensor.data).nbytes} bytes")
        if not math.prod(tensor.shape):
            yield mx.zeros(tensor.shape, dtype)
            continue
        # As bytes first: their place in the file need not suit the type.
        yield mx.array(np.frombuffer(tensor.data, np.uint8)).view(dtype).reshape(tensor.shape)


# --- sliding windows as runs of rows ----------------------------------------------------------------------------------


def since(state: StateSnapshot, num_tokens: int) -> StateSnapshot | None:
    """The state with the rows of its last tokens only, in arrays of their own; None where no window has more.

    base   |--------------- window ---------------|
    state         |--------------- window ---------------|
    part                                          |------|       what is written of it
    """
    if not any(_num_rows(leaf) > num_tokens for leaf in state.leaves):
        return None
    leaves = [_cut(leaf, num_tokens) if _num_rows(leaf) > num_tokens else leaf for leaf in state.leaves]
    return StateSnapshot.of(leaves)


def joined(base: StateSnapshot, part: StateSnapshot) -> StateSnapshot:
    """The whole state of which `part` has what came since `base`. Raises NotReadable where it does not begin where its
    base ends."""
    if len(base.leaves) != len(part.leaves):
        raise NotReadable("they are of other models")
    return StateSnapshot.of([_completed(one, other) for one, other in zip(base.leaves, part.leaves, strict=True)])


def _completed(base: Any, part: Any) -> Any:
    num_rows = _num_rows(part)
    if not _is_window(part) or num_rows == (num_wanted := min(part.offset, part.max_size)):
        return part
    num_missing = num_wanted - num_rows
    if not _is_window(base) or base.offset + num_rows != part.offset or not 0 < num_missing <= _num_rows(base):
        raise NotReadable("a window does not go on from the one before")

    def rows(one: mx.array, other: mx.array) -> mx.array:
        return mx.concatenate([one[..., -num_missing:, :], other], axis=TOKEN_AXIS)

    return window_of(part, rows(base.keys, part.keys), rows(base.values, part.values))


def _cut(leaf: Any, num_rows: int) -> Any:
    return window_of(leaf, *(mx.contiguous(each[..., -num_rows:, :]) for each in (leaf.keys, leaf.values)))


def _is_window(leaf: Any) -> bool:
    """As `snapshot` keeps them: exactly this class, its rows in the order of time."""
    return type(leaf) is RotatingKVCache and leaf.keep == 0 and leaf.keys is not None


def _num_rows(leaf: Any) -> int:
    return int(leaf.keys.shape[TOKEN_AXIS]) if _is_window(leaf) else 0
