"""What of a model's KV can be quantised as the settings ask, found out at load by trying it.

Layers that keep keys and values of every token are quantised, others stay as they are; no model's name is known here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.quantised import KvSettings, Quantiser, Scheme, Turbo, Uniform
from kvserve.errors import ModelLoadError

GROUP_SIZES = (32, 64, 128)
_PROBED_LENGTHS = (7, 3)


@dataclass(frozen=True, slots=True)
class KvSupport:
    """How a model's KV is quantised: `caches` hold a few tokens that way, `notes` name the layers that stay."""

    caches: list[Any]
    notes: tuple[str, ...]


def try_quantising(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], plain: Sequence[Any], settings: KvSettings
) -> KvSupport | None:
    """Quantise as the settings say; None if they say no. `plain` are caches of a row in full precision.

    Raises ModelLoadError where no layer can be quantised, a group does not fit, or the model's attention cannot read
    what is quantised.
    """
    if settings.bits is None:
        return None
    what = f"KV_BITS={settings.bits} with KV_QUANT_SCHEME={settings.scheme} cannot be used with this model"
    whole: list[Any] = [leaf for leaf in flat_caches(plain) if type(leaf) is KVCache]
    if not whole:
        raise ModelLoadError(
            f"{what}: no layer of it keeps keys and values of every token, only sliding windows or recurrent states, "
            "which stay small by themselves. Set KV_BITS=OFF."
        )
    if settings.scheme == "uniform":
        _check_groups(settings.group_size, {array.shape[-1] for leaf in whole for array in (leaf.keys, leaf.values)})
    try:
        caches = _run(module, new_caches, Quantiser(_scheme(settings), settings.start))
    except Exception as error:  # attention that cannot read quantised KV may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        otherwise = "KV_QUANT_SCHEME=turboquant or KV_BITS=OFF" if settings.scheme == "uniform" else "KV_BITS=OFF"
        raise ModelLoadError(
            f"{what}: its attention cannot read quantised KV ({type(error).__name__}: {reason}). Set {otherwise}."
        ) from error
    return KvSupport(caches, tuple(_notes(plain, settings)))


def quantiser_of(settings: KvSettings) -> Quantiser | None:
    """What quantises a model's KV as the settings say, where it was found that it can be; None if they say no."""
    return Quantiser(_scheme(settings), settings.start) if settings.bits is not None else None


def _scheme(settings: KvSettings) -> Scheme:
    bits = settings.bits or 0
    return Turbo(bits) if settings.scheme == "turboquant" else Uniform(bits, settings.group_size)


def _check_groups(group_size: int, widths: set[int]) -> None:
    if all(width % group_size == 0 for width in widths):
        return
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    instead = f"KV_GROUP_SIZE={fitting[-1]}" if fitting else "KV_QUANT_SCHEME=turboquant or KV_BITS=OFF"
    said = " and ".join(str(width) for width in sorted(widths))
    raise ModelLoadError(
        f"KV_GROUP_SIZE={group_size} cannot be used with this model: its keys and values are {said} wide, and a group "
        f"has to divide that. Set {instead}."
    )


def _run(module: Callable[..., Any], new_caches: Callable[[], list[Any]], quantiser: Quantiser) -> list[Any]:
    """Two rows alone, then a step of both in one batch where caches can be merged; caches of the first alone.

    Caches that cannot be merged after all are decoded alone: that is for the check of all caches to find.
    """
    rows = [quantiser.convert(new_caches()) for _ in _PROBED_LENGTHS]
    found = []
    for caches, length in zip(rows, _PROBED_LENGTHS, strict=True):
        found += [module(mx.zeros((1, size), dtype=mx.int32), cache=caches)[0, -1] for size in (length, 1)]
    mx.eval(found, [cache.state for caches in rows for cache in caches])
    if all(hasattr(cache, "merge") for cache in rows[0]):
        batched = finding(partial(_step_of_batch, module, rows))
        found += [] if isinstance(batched, Exception) else [batched]
    if any(mx.isnan(logits).any().item() for logits in found):
        raise ValueError("logits are not numbers")
    return rows[0]


def _step_of_batch(module: Callable[..., Any], rows: Sequence[list[Any]]) -> Any:
    """Logits of all rows in one batch. Raises what the caches raise."""
    batch = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
    return module(mx.zeros((len(rows), 1), dtype=mx.int32), cache=batch)


def _notes(plain: Sequence[Any], settings: KvSettings) -> Iterator[str]:
    """One line for the layers that stay in full precision, if there are any."""
    staying: dict[str, list[int]] = {}
    for index, cache in enumerate(plain):
        others = [leaf for leaf in flat_caches([cache]) if type(leaf) is not KVCache]
        if others:
            kind = "sliding windows" if isinstance(others[0], RotatingKVCache) else "recurrent or unknown states"
            staying.setdefault(kind, []).append(index)
    if staying:
        parts = [f"{_ranges(layers)} ({kind})" for kind, layers in sorted(staying.items())]
        num_quantised = len(plain) - sum(map(len, staying.values()))
        yield (
            f"KV_BITS={settings.bits} quantises {num_quantised} of {len(plain)} layers. In full precision stay the "
            f"layers {' and '.join(parts)}."
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours drawn together: 0-2, 4-6, 9."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
