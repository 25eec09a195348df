"""Loading a model and knowing it: the sizes of its KV, bytes of weights a step reads, context limit.

It runs on the engine thread, which owns what it returns. Tokenizer and template belong to `prompt/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from kvserve.core import GenerationRequest, ImageSpan
from kvserve.engine.borders import described, finding
from kvserve.engine.draft_nouns import DraftSupport
from kvserve.engine.kv_buffers import arrays_in, flat_caches
from kvserve.engine.kv_size import KvSize, kv_size
from kvserve.engine.kv_support import quantiser_of, try_quantising
from kvserve.engine.leaf_forms import LeafForm, find_forms, forms_by_class, lengths_named
from kvserve.engine.quantised import FULL_PRECISION, KvSettings, Quantiser
from kvserve.engine.snapshot import CacheLayout
from kvserve.engine.text_load import is_for_mlx_lm, is_for_mlx_vlm, load_text, refuse_own_code
from kvserve.engine.vision import VlmDecoder
from kvserve.engine.vision_load import ImageRule, VisionModel, VisionSupport, is_vision, load_vision, weight_bytes
from kvserve.engine.vision_pass import RowImages, place
from kvserve.errors import EngineFailure, ModelLoadError
from kvserve.settings.model_config import expert_counts, own_context_limit, read_config, text_config


@dataclass(frozen=True, slots=True)
class Probed:
    """What short forward passes have shown of a model: how wide its logits are, the sizes and forms of a row's caches,
    and what of its KV is not quantised although it should be. See `LoadedModel`."""

    vocab_size: int
    sizes: KvSize
    leaf_forms: tuple[LeafForm, ...]
    leaf_trouble: str = ""
    kv_notes: tuple[str, ...] = ()


type Looking = Callable[[str, Callable[[], Probed]], Probed]
"""Is told how a model that was just loaded is built, and what finds the rest out by passes, which it need not call."""


type Reading = Callable[[Path, dict[str, Any]], VisionModel]
"""Reads the weights in a folder, or a part of them."""

_PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CacheSupport:
    """What can be done with a model's caches: decode rows in one batch, keep their KV for other requests, prefill short
    rows in one padded pass.

    `cut_tokens`: where that is more than 1, what a token gets depends on where a prefill is cut, and every prefill is
    cut at its multiples, nowhere else: then a row from a checkpoint there is the row that is computed anew.

    `notes` tell a person what cannot be done and what it costs. `image_rule` is None where the model sees no images.
    """

    can_batch: bool = True
    can_keep: bool = True
    can_pad: bool = False
    cut_tokens: int = 1
    notes: tuple[str, ...] = ()
    image_rule: ImageRule | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `sizes` are those of a row's KV, `quantiser` says how that is quantised, if it is.

    `active_weight_bytes` is what one decode step reads of the weights: a mixture of experts reads few of them.
    `kv_notes` tell a person what of the KV is not quantised although it should be. `vision` is what a vision model sees
    with, `vision_note` what a person should know of it. `leaf_forms` say how each leaf of a row's caches is kept, as
    classes say where they could not be looked at (`leaf_trouble`): then nothing is kept. `drafts` say what its caches
    allow of drafts, None where none are made; `draft` is the model that drafts for it, if one does.
    `has_states_elsewhere`: layers of other ranks keep states, and what is done with rows is the same on all ranks.
    """

    module: Module
    config: Mapping[str, Any]
    vocab_size: int
    context_limit: int
    weight_bytes: int
    active_weight_bytes: int
    sizes: KvSize
    quantiser: Quantiser | None = None
    kv_notes: tuple[str, ...] = ()
    cache_support: CacheSupport = CacheSupport()
    vision: VisionSupport | None = None
    vision_note: str = ""
    leaf_forms: tuple[LeafForm, ...] | None = None
    leaf_trouble: str = ""
    drafts: DraftSupport | None = None
    draft: "LoadedModel | None" = None
    has_states_elsewhere: bool = False

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of the weights, with those of the model that drafts."""
        return self.weight_bytes + (self.draft.weight_bytes if self.draft is not None else 0)

    @property
    def can_draft(self) -> bool:
        """Whether next tokens may be drafted: that is wanted, pays, and rows come back from a pass."""
        return self.drafts is not None and self.drafts.ways is not None

    def new_caches(self) -> list[Any]:
        """Empty caches of one row, one per layer, in full precision."""
        return make_prompt_cache(self.module)

    @property
    def layout(self) -> CacheLayout:
        """How a row's caches are read and put together again."""
        forms, has_states_elsewhere = self.leaf_forms, self.has_states_elsewhere
        return CacheLayout(self.new_caches, self.quantiser, forms, has_states_elsewhere=has_states_elsewhere)

    @property
    def own_leaves(self) -> tuple[str, ...]:
        """Leaves that are not kept as other releases kept them: their classes, and for how many tokens they have a row
        in a pool, 0 where nothing of them is kept any more."""
        leaves = zip(flat_caches(self.new_caches()), self.leaf_forms or (), strict=False)
        named = {
            f"{type(leaf).__name__} {form.row_tokens if form.has_state else 0}"
            for leaf, form in leaves
            if form.kind in ("pool", "memo") or type(leaf).__module__ == "kvserve.engine.pools"
        }
        return tuple(sorted(named))

    def is_packed(self, num_tokens: int) -> bool:
        """Whether the caches of a row that hold so many tokens are quantised."""
        return self.quantiser is not None and self.quantiser.is_due(num_tokens)

    def packed_from(self, images: Sequence[ImageSpan]) -> int | None:
        """Where the KV of a row with these images is converted, if it is: where quantised KV starts or, inside an image
        that is computed in one piece, behind that."""
        start = self.sizes.packed_from
        if start is None or self.vision is None or self.vision.rule != "whole":
            return start
        return next((span.end for span in images if span.start < start < span.end), start)

    def ready(self, caches: list[Any], num_tokens: int) -> list[Any]:
        """A row's caches, which hold so many tokens, as its next token needs them. They are consumed."""
        return caches if self.quantiser is None else self.quantiser.ready(caches, num_tokens)

    def place(self, caches: list[Any], request: GenerationRequest, num_tokens: int) -> None:
        """Tell a row's caches, which hold so many tokens, where its images lead the positions of the next one."""
        if self.vision is not None and (images := self.images(request)) is not None:
            decoder: Any = self.module
            place(decoder, images, num_tokens, caches)

    def images(self, request: GenerationRequest) -> RowImages | None:
        """Where a request's images stand. Raises EngineFailure for a model that takes none, or one not given."""
        if self.vision is None:
            if request.prompt.images:
                raise EngineFailure("The model takes no images.")
            return None
        decoder: Any = self.module
        return RowImages.of(request, has_positions=decoder.has_positions)


def check_folder(folder: Path) -> None:
    """Raise ModelLoadError for a folder without a usable config, with code of its own, or of an architecture that
    neither mlx-lm nor mlx-vlm knows."""
    config = read_config(folder)
    refuse_own_code(folder, config)
    if not is_for_mlx_lm(config) and not is_for_mlx_vlm(config):
        raise _explained(folder, config, ValueError("not supported"))


@dataclass(frozen=True, slots=True)
class ExpectedSizes:
    """What a model's config promises before it is loaded; `vocab_size` 0 where it says nothing."""

    vocab_size: int
    context_limit: int


def expected_sizes(folder: Path, max_kv_size: int) -> ExpectedSizes:
    """Sizes of a model that is not loaded. Raises ModelLoadError for a config that cannot be read."""
    config = read_config(folder)
    vocab_size = text_config(config).get("vocab_size")
    return ExpectedSizes(
        vocab_size=vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else 0,
        context_limit=min(max_kv_size, own_context_limit(config) or max_kv_size),
    )


def load(
    folder: Path,
    max_kv_size: int,
    kv: KvSettings = FULL_PRECISION,
    looking: Looking = lambda _build, probe: probe(),
    read: Reading | None = None,
) -> LoadedModel:
    """Load weights and measure the model's sizes with short forward passes, also with quantised KV. `read`: where
    not all of the weights are read.

    Raises ModelLoadError for a folder without config or weights, broken files, code of its own, an unknown
    architecture, or one whose KV cannot be quantised as the settings say.
    """
    config = read_config(folder)
    refuse_own_code(folder, config)
    try:
        loaded = (read or _read_whole)(folder, config)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{folder} holds no weights (model*.safetensors): {error}.") from error
    except ModelLoadError:
        raise
    except Exception as error:  # a broken file can raise anything from inside the libraries
        raise _explained(folder, config, error) from error
    module, config = loaded.decoder, loaded.config
    probed = looking(_build_of(loaded), lambda: _probed(folder, config, module, kv))
    context_limit = min(max_kv_size, own_context_limit(config) or max_kv_size)
    return LoadedModel(
        module=module,
        config=config,
        vocab_size=probed.vocab_size,
        context_limit=context_limit,
        weight_bytes=weight_bytes(module) + (loaded.vision.num_bytes if loaded.vision is not None else 0),
        active_weight_bytes=_active_weight_bytes(module, config),
        sizes=probed.sizes,
        quantiser=quantiser_of(kv),
        kv_notes=(*probed.kv_notes, *_start_notes(kv, context_limit)),
        vision=loaded.vision,
        vision_note=loaded.note,
        leaf_forms=probed.leaf_forms,
        leaf_trouble=probed.leaf_trouble,
    )


def _read_whole(folder: Path, config: dict[str, Any]) -> VisionModel:
    return load_vision(folder, config) if is_vision(config) else VisionModel(*load_text(folder, config), None)


def _build_of(loaded: VisionModel) -> str:
    """The classes of a model and of its caches, with every length that these name: loading has tried some of them, and
    may have come to another choice than before."""
    decoder = loaded.decoder
    leaves = [(_name_of(leaf), sorted(lengths_named(leaf))) for leaf in flat_caches(make_prompt_cache(decoder))]
    has_positions = getattr(decoder, "has_positions", None)
    return repr((_name_of(decoder), has_positions, loaded.vision is not None, leaves))


def _name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _probed(folder: Path, config: Mapping[str, Any], module: Module, kv: KvSettings) -> Probed:
    vocab_size, caches = _probe(folder, config, module)
    forms = finding(lambda: _forms(module))
    leaf_trouble = described(forms) if isinstance(forms, Exception) else ""
    if isinstance(forms, Exception):  # its sizes are needed all the same
        forms = forms_by_class(lambda: make_prompt_cache(module))
    support = try_quantising(module, lambda: make_prompt_cache(module), caches, kv)
    sizes = kv_size(caches, forms, support.caches if support else None, kv.start)
    return Probed(vocab_size, sizes, forms, leaf_trouble, support.notes if support else ())


def _start_notes(kv: KvSettings, context_limit: int) -> tuple[str, ...]:
    if kv.bits is None or kv.start < context_limit:
        return ()
    return (
        f"KV_BITS={kv.bits} does nothing: QUANTIZED_KV_START={kv.start} is beyond the context limit of {context_limit} "
        "tokens.",
    )


def _explained(folder: Path, config: Mapping[str, Any], error: Exception) -> ModelLoadError:
    if isinstance(error, ValueError) and "not supported" in str(error):
        return ModelLoadError(
            f"The architecture {config['model_type']!r} of {folder} is known neither to mlx-lm nor to mlx-vlm. Choose "
            "a model of a family that one of them supports, or update them if the family is new."
        )
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelLoadError(
        f"The model in {folder} could not be loaded: {first_line[:300]}. Its files may be incomplete or damaged; "
        "download or convert it again."
    )


def _probe(folder: Path, config: Mapping[str, Any], module: Module) -> tuple[int, list[Any]]:
    """Logits width, and caches of a few tokens from a forward pass that also compiles kernels."""
    caches = make_prompt_cache(module)
    try:
        logits = module(mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32), cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
    except Exception as error:
        raise _explained(folder, config, error) from error
    return logits.shape[-1], caches


def _forms(module: Module) -> tuple[LeafForm, ...]:
    """The forms of a row's leaves, once those that forget at cuts have others in their place where there are some.
    Raises what the model raises."""
    forms = find_forms(module, lambda: make_prompt_cache(module))
    if isinstance(module, VlmDecoder) and any(form.depends_on_cuts for form in forms):
        from kvserve.engine.pools import with_memory  # here: mlx-vlm takes seconds

        return with_memory(module, forms)
    return forms


def _active_weight_bytes(module: Module, config: Mapping[str, Any]) -> int:
    """Weights that one token passes through; expert weights (num_experts, ...) count by the share that is chosen."""
    num_experts, per_token = expert_counts(config)
    share = per_token / num_experts if num_experts and per_token else 1.0
    num_bytes = 0.0
    for array in arrays_in(module.parameters()):  # type: ignore[no-untyped-call]
        is_expert_stack = array.ndim == 3 and array.shape[0] == num_experts
        num_bytes += array.nbytes * (share if is_expert_stack else 1.0)
    return int(num_bytes)
