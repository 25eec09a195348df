"""What a model will take in memory, foreseen without its weights: a twin of it is built from its config, of arrays that
have shapes and are never computed, and a few tokens go through the twin, so that its own caches show what they hold.

It knows the libraries' classes and no family's name; nothing of it is used by a loaded model.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from kvserve.engine.admission import Budget
from kvserve.engine.borders import described, finding
from kvserve.engine.kv_buffers import flat_caches, held_arrays
from kvserve.engine.kv_size import KvSize, kv_size, largest, leaf_bytes
from kvserve.engine.leaf_forms import LeafForm, is_known, leaf_kind
from kvserve.engine.memory import MemoryPlan, WantedMemory, plan_memory
from kvserve.engine.model_files import most_used_dtype, weight_file_bytes
from kvserve.engine.ranks.dividing import compute_alone, keep_part
from kvserve.engine.text_load import is_for_mlx_lm, is_for_mlx_vlm, refuse_own_code
from kvserve.engine.vision_load import is_vision
from kvserve.errors import ModelLoadError
from kvserve.settings.model_config import own_context_limit, read_config, text_config

PROBE_TOKENS = 16

TOLD_TOKENS = 10_000
"""Of a conversation whose KV is told."""

LONG_PROBES = (2048, 4096)
"""Tokens that a cache of an unknown class is shown: multiples of any step by which buffers grow."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
HEADER_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
USUAL_DTYPE = "bfloat16"

AUTO = WantedMemory()

type Part = tuple[list[Any], tuple[LeafForm, ...]]
"""Caches of a part of a model, or of all of it, that hold a few tokens, and the forms of their leaves."""

type CacheKind = Literal["every token", "window", "state", "other"]
"""every token  keys and values, or what they are made of, of each token
window       those of the last so many tokens
state        the same size whatever the length
other        a class that is not known here, by how it grows
"""


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """So many caches of one kind: what they take together per token, and whatever the length. `window` is in tokens."""

    kind: CacheKind
    class_name: str
    num_caches: int
    bytes_per_token: float
    fixed_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """What is known of a model's weights: their bytes, from where, and the type of their numbers, if that is known."""

    num_bytes: int
    source: Literal["files", "hub"]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A model that is not loaded. `weights_from`: where its bytes of weights are known from (`shapes`: those of the
    decoder alone where it sees; `written out`: shapes too, since its files are smaller than what is loaded of them);
    `dtype` what its numbers are, and whether that is only what is usual. `context_limit` is for how long it was made,
    None: it does not say. Of several ranks (`num_ranks`) none holds more; `caches` are those of the one that holds most
    of a long conversation."""

    weight_bytes: int
    weights_from: Literal["files", "hub", "shapes", "written out"]
    dtype: str
    is_dtype_known: bool
    sizes: KvSize
    caches: tuple[LayerCaches, ...]
    context_limit: int | None
    num_ranks: int = 1

    @property
    def bytes_per_10k_tokens(self) -> float:
        """KV of a conversation's ten thousand tokens, without what it has whatever its length."""
        return TOLD_TOKENS * self.sizes.per_token


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a machine: the plan of its memory, the longest conversation that may run alone, and how many tokens
    of all conversations stay in RAM (None: as many as there are). `is_cut_by` says what ends the context."""

    foreseen: Foreseen
    memory_bytes: int
    plan: MemoryPlan
    context_tokens: int
    ram_tokens: int | None
    is_cut_by: Literal["memory", "MAX_KV_SIZE", "model"]

    @property
    def leaves_room(self) -> bool:
        """Whether weights and budgets together are within what MLX may use."""
        return self.foreseen.weight_bytes + self.plan.total_bytes <= self.memory_bytes


def fit(foreseen: Foreseen, memory_bytes: int, max_kv_size: int, wanted: WantedMemory = AUTO) -> Fit:
    """What of a context fits where MLX may use so much: the budgets are those of a start."""
    plan = plan_memory(memory_bytes, foreseen.weight_bytes, wanted)
    sizes, own = foreseen.sizes, foreseen.context_limit
    limit = min(max_kv_size, own or max_kv_size)
    most = max(0, Budget(max_rows=1, max_bytes=plan.batch_bytes, sizes=sizes).most_tokens(limit))
    ram = int((plan.kv_bytes - sizes.fixed) / sizes.per_token) if sizes.per_token else None
    cut_by: Literal["memory", "MAX_KV_SIZE", "model"] = "model" if limit == own else "MAX_KV_SIZE"
    return Fit(
        foreseen=foreseen,
        memory_bytes=memory_bytes,
        plan=plan,
        context_tokens=most,
        ram_tokens=max(0, ram) if ram is not None else None,
        is_cut_by=cut_by if most == limit else "memory",
    )


def foreseen_in(folder: Path, num_ranks: int = 1) -> Foreseen:
    """What a folder's model will take, on each of so many ranks; without weights there, their bytes are counted by
    their shapes. Raises ModelLoadError."""
    config = read_config(folder)
    refuse_own_code(folder, config)
    dtype = HEADER_DTYPES.get(most_used_dtype(folder) or "")
    num_bytes = weight_file_bytes(folder)
    return foreseen(config, Weights(num_bytes, "files", dtype) if num_bytes else None, num_ranks)


def foreseen_of_hub(config: Mapping[str, Any], num_weight_bytes: int, num_ranks: int = 1) -> Foreseen:
    """The same of what the hub tells of a model. Raises ModelLoadError."""
    return foreseen(config, Weights(num_weight_bytes, "hub") if num_weight_bytes else None, num_ranks)


def foreseen(config: Mapping[str, Any], weights: Weights | None = None, num_ranks: int = 1) -> Foreseen:
    """The same of a config, with what is known of the weights. Raises ModelLoadError for an architecture that cannot be
    loaded or divided, or whose code wants numbers before it says what it holds."""
    named = weights.dtype if weights is not None and weights.dtype is not None else _dtype_named(config)
    used = named or USUAL_DTYPE
    is_written_out = _is_written_out(config)
    known = None if is_written_out else weights
    seen = finding(lambda: _seen(config, DTYPES[used], num_ranks, counts_weights=known is None))
    if isinstance(seen, Exception):
        raise _unforeseen(config, seen)
    parts, share, counted = seen
    sizes = [kv_size(caches, forms, None, 0) for caches, forms in parts]
    caches, forms = parts[max(range(len(parts)), key=lambda place: sizes[place].held(TOLD_TOKENS))]
    return Foreseen(
        weight_bytes=int(share * (known.num_bytes if known is not None else counted)),
        weights_from=known.source if known is not None else "written out" if is_written_out else "shapes",
        dtype=used,
        is_dtype_known=named is not None,
        sizes=largest(sizes),
        caches=tuple(_grouped(flat_caches(caches), forms)),
        context_limit=own_context_limit(config),
        num_ranks=num_ranks,
    )


def _seen(
    config: Mapping[str, Any], dtype: Any, num_ranks: int, *, counts_weights: bool
) -> tuple[list[Part], float, int]:
    """What the caches of parts of the model hold, the largest part's share of the weights, and the bytes of all of
    them, 0 where these are known. Raises what the libraries raise."""
    whole, share = _twin(config, dtype), 1.0
    twins = [whole]
    if num_ranks > 1:
        twins = _parts(config, dtype, num_ranks)
        share = max(map(_num_bytes, twins)) / _num_bytes(whole)
    return [_caches_seen(twin) for twin in twins], share, _weight_bytes(whole, config) if counts_weights else 0


def _unforeseen(config: Mapping[str, Any], error: Exception) -> ModelLoadError:
    if isinstance(error, ModelLoadError):
        return error
    return ModelLoadError(
        f"What a model of the architecture {config.get('model_type')!r} takes cannot be told from its config "
        f"({described(error)}): start it, and GET /health tells."
    )


def _dtype_named(config: Mapping[str, Any]) -> str | None:
    for part in (config, text_config(config)):
        for key in ("torch_dtype", "dtype"):
            if part.get(key) in DTYPES:
                return str(part[key])
    return None


# --- the twin ---------------------------------------------------------------------------------------------------------


def _twin(config: Mapping[str, Any], dtype: Any) -> Any:
    """The model's decoder, of arrays that are not computed. Raises what the libraries raise."""
    own = json.loads(json.dumps(config))  # the argument classes of some architectures edit what they are given
    if is_for_mlx_lm(config):
        model_class, arguments = _get_classes(own)
        twin: Any = model_class(arguments.from_dict(own))
    elif is_for_mlx_vlm(config):
        twin = _vlm_twin(own)
    else:
        raise ModelLoadError(
            f"The architecture {config.get('model_type')!r} is known neither to mlx-lm nor to mlx-vlm."
        )
    twin.set_dtype(dtype)
    return twin


class _Group:
    """Stands for a group of ranks where nothing is computed: a model asks it only which part is its own."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks

    def rank(self) -> int:
        return self._rank


def _parts(config: Mapping[str, Any], dtype: Any, num_ranks: int) -> list[Any]:
    """Twins of the parts that are unlike, which then compute alone: what the caches of one hold depends on no other.
    Raises ModelLoadError."""
    if not is_for_mlx_lm(config):
        raise ModelLoadError(f"Only mlx-lm divides models, and it does not know the family {config.get('model_type')}.")
    twins = []
    for rank in range(num_ranks):
        twins.append(twin := _twin(config, dtype))
        if keep_part(twin, config, num_ranks, _Group(rank, num_ranks)) is None:  # of every layer each has as much
            _shard_alone(twin)
            return twins
        compute_alone(twin)
    return twins


def _shard_alone(twin: Any) -> None:
    alone = mx.distributed.init(backend="ring")  # of this process, where no variable names others
    for module in twin.modules():
        for name in ("group", "sharding_group"):
            if isinstance(getattr(module, name, None), _Group):
                setattr(module, name, alone)


def _num_bytes(twin: Any) -> int:
    arrays: list[tuple[str, mx.array]] = tree_flatten(twin.parameters())  # type: ignore[assignment]
    return sum(array.nbytes for _, array in arrays)


def _vlm_twin(config: dict[str, Any]) -> Any:
    """mlx-vlm's language model, the part of a checkpoint that has the caches."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs  # it takes seconds

    module, _ = get_model_and_args(config)
    kinds = [kind for kind in ("text", "vision", "audio") if isinstance(config.get(f"{kind}_config"), dict)]
    arguments = update_module_configs(  # type: ignore[no-untyped-call]
        module.ModelConfig.from_dict(config), module, config, kinds
    )
    return module.Model(arguments).language_model


def _quantise(twin: Any, quantization: Mapping[str, Any]) -> None:
    """As mlx-lm converts: every layer that can be, but for those that the config says more of."""
    group_size = int(quantization["group_size"])

    def wanted(path: str, layer: Any) -> Any:
        if path in quantization:
            return quantization[path]
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group_size == 0

    mode = quantization.get("mode", "affine")
    quantize(twin, group_size, int(quantization["bits"]), mode=mode, class_predicate=wanted)


def _form_of_weights(config: Mapping[str, Any]) -> Any:
    """How another program quantised them, None where none did."""
    return config.get("quantization_config") or text_config(config).get("quantization_config")


def _is_written_out(config: Mapping[str, Any]) -> bool:
    """Whether files in FP8 become numbers of 16 bits as they are loaded: mlx-lm 0.32 writes them out where a model is
    made of them (`sanitize`), but for blocks with scales that MLX computes with. mlx-vlm 0.7, which loads what sees,
    quantises blocks of 128 anew, in about as many bytes."""
    form = _form_of_weights(config)
    if config.get("quantization") is not None or not isinstance(form, Mapping) or form.get("quant_method") != "fp8":
        return False
    block = form.get("weight_block_size")
    if is_vision(config):
        return block != [128, 128]
    return is_for_mlx_lm(config) and not (block == [32, 32] and form.get("scale_fmt") == "ue8m0")


def _weight_bytes(twin: Any, config: Mapping[str, Any]) -> int:
    """Bytes of its weights, which are quantised as the config says. Raises ModelLoadError for a form of quantisation
    whose bytes a config does not tell. Where embeddings are tied, as transformers has it unless a config says no, some
    classes drop the head only once they see that no file has one."""
    if (quantization := config.get("quantization")) is not None:
        _quantise(twin, quantization)
    elif _form_of_weights(config) is not None and not _is_written_out(config):
        raise ModelLoadError("Its weights are quantised in a form whose bytes only its files tell.")
    is_tied = text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    arrays: list[tuple[str, mx.array]] = tree_flatten(twin.parameters())  # type: ignore[assignment]
    return sum(array.nbytes for path, array in arrays if not (is_tied and "lm_head" in path.split(".")))


# --- its caches -------------------------------------------------------------------------------------------------------


def _caches_seen(twin: Any) -> Part:
    """Caches that hold a few tokens, and the forms of their leaves. Raises what the twin raises."""
    caches = _filled(twin, PROBE_TOKENS)
    leaves = flat_caches(caches)
    if all(map(is_known, leaves)):
        return caches, tuple(LeafForm(leaf_kind(leaf)) for leaf in leaves)
    short, long = (flat_caches(_filled(twin, num_tokens)) for num_tokens in LONG_PROBES)
    return caches, tuple(
        LeafForm(leaf_kind(leaf), None, *_growth(*pair)) for leaf, *pair in zip(leaves, short, long, strict=True)
    )


def _filled(twin: Any, num_tokens: int) -> list[Any]:
    """New caches once so many tokens have gone through. While a function is traced nothing can be computed, so code
    that would compute with weights that are none raises instead."""
    caches = make_prompt_cache(twin)

    def run(tokens: mx.array) -> mx.array:
        twin(tokens, cache=caches)
        return tokens

    mx.compile(run)(mx.zeros((1, num_tokens), dtype=mx.int32))
    return caches


def _growth(short: Any, long: Any) -> tuple[float, int]:
    """Bytes per token of a leaf of an unknown class, and those that do not grow."""
    few, many = (sum(array.nbytes for array in held_arrays(leaf)) for leaf in (short, long))
    per_token = max(0, many - few) / (LONG_PROBES[1] - LONG_PROBES[0])
    return per_token, max(0, int(few - per_token * LONG_PROBES[0]))


def _grouped(leaves: Sequence[Any], forms: Sequence[LeafForm]) -> Iterator[LayerCaches]:
    """Caches of one kind and size together; what holds nothing is left out."""
    counted = Counter(
        LayerCaches(_kind(leaf), type(leaf).__name__, 1, *leaf_bytes(leaf, form), getattr(leaf, "max_size", None))
        for leaf, form in zip(leaves, forms, strict=True)
    )
    for one, number in counted.items():
        if one.bytes_per_token or one.fixed_bytes:
            per_token, fixed = one.bytes_per_token * number, one.fixed_bytes * number
            yield replace(one, num_caches=number, bytes_per_token=per_token, fixed_bytes=fixed)


def _kind(leaf: Any) -> CacheKind:
    if isinstance(leaf, ArraysCache):
        return "state"
    if isinstance(leaf, RotatingKVCache):
        return "window"
    return "every token" if leaf_kind(leaf) == "cut" else "other"
