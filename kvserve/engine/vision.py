"""A decoder that sees: text goes through it as through any other, and embeddings of images where a row has some.

What one pass must know beside tokens and caches (`VisionContext`) is shown to the model's layers during that pass only;
what a row must keep between passes travels with its caches (`RopeShift`). Nothing of a request stays on a module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import flat_caches, held_arrays, with_leaves
from kvserve.engine.logits_error import logits_error

MAX_TWIN_ERROR = 1e-3
"""How far logits may be apart with mlx-lm's cache in the place of mlx-vlm's: both do the same."""

TRIED_PASSES = (20, 1, 9)


@dataclass(frozen=True, slots=True)
class VisionContext:
    """What a pass over tokens (batch, length) must know beside them.

    `position_ids` (3, batch, length) int32, where a token's position is not its offset; `shift` (batch,) is added to
    the offsets of text. `deepstack`: per decoder layer from the first on what is added to its output, (batch, length,
    width). `image_index` (length,) int32 numbers the image that each token belongs to, -1 for text.
    """

    position_ids: mx.array | None = None
    shift: mx.array | None = None
    deepstack: tuple[mx.array, ...] = ()
    image_index: mx.array | None = None


@dataclass(slots=True, eq=False)
class CurrentPass:
    """Where a pass shows its context to the hooks inside the model."""

    context: VisionContext = field(default_factory=VisionContext)

    @contextmanager
    def showing(self, context: VisionContext) -> Iterator[None]:
        """For the length of one pass, while its graph is built."""
        self.context = context
        try:
            yield
        finally:
            self.context = VisionContext()


class RopeShift:
    """Per row, how far the position of its next text token is from its offset: an image takes fewer positions than
    tokens. An entry behind a row's caches, which batches merge and take apart like those. Never stored: it follows
    from the prompt."""

    def __init__(self, rows: Sequence[int] = (0,)) -> None:
        self.rows = list(rows)

    @property
    def array(self) -> mx.array | None:
        """(rows,) int32; None where no row is shifted, so that text takes the very path of a text model."""
        return mx.array(self.rows, dtype=mx.int32) if any(self.rows) else None

    @classmethod
    def merge(cls, entries: Sequence[Self]) -> Self:
        return cls([row for entry in entries for row in entry.rows])

    def extend(self, other: Self) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[int(index)] for index in batch_indices]

    def extract(self, index: int) -> Self:
        return type(self)(self.rows[index : index + 1])

    def prepare(self, **_: object) -> None:
        """A batch of prompts begins; nothing depends on it."""

    def finalize(self) -> None:
        """A batch of prompts ends; nothing depends on it."""

    def empty(self) -> bool:
        return False

    def size(self) -> int:
        return 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int) -> int:
        return num_tokens

    @property
    def state(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        return 0


class VisionDecoder(Module):
    """A language model that also takes embeddings, and positions where its family counts images by rows and columns.

    Call it like any mlx-lm model, or `look` with embeddings.
    """

    def __init__(self, decoder: Any, current: CurrentPass, *, has_positions: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decoder = decoder
        self.current = current
        self.has_positions = has_positions

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits (batch, length, vocabulary) of token ids (batch, length)."""
        return self.look(inputs, cache, VisionContext())

    def look(
        self, inputs: mx.array, cache: list[Any] | None, context: VisionContext, embeddings: mx.array | None = None
    ) -> mx.array:
        """The same, with `embeddings` (batch, length, width) in place of those of the ids."""
        if not self.has_positions or cache is None:
            with self.current.showing(context):
                return self._run(inputs, cache, embeddings)
        kv, shift = cache[:-1], cache[-1].array
        if context.position_ids is None and shift is not None:
            context = VisionContext(None, shift, context.deepstack, context.image_index)
        with self.current.showing(context):
            logits = self._run(inputs, kv, embeddings)
        cache[:-1] = kv  # a model may put others in their places: mlx-vlm's Qwen 3.5 does where a batch has one row
        return logits

    @property
    def layers(self) -> Any:
        return self.decoder.layers

    def make_cache(self) -> list[Any]:
        """Empty caches of one row; where positions follow images, its shift behind them."""
        caches = self._own_caches()
        return [*caches, RopeShift()] if self.has_positions else caches

    def embed(self, inputs: mx.array) -> mx.array:
        """The embeddings (batch, length, width) that `look` takes."""
        embedded: mx.array = embedding_table(self.decoder)(inputs)
        return embedded

    def _own_caches(self) -> list[Any]:
        return list(make_prompt_cache(self.decoder))

    def _run(self, inputs: mx.array, kv: list[Any] | None, embeddings: mx.array | None) -> mx.array:
        """One pass of an mlx-lm model."""
        more = {} if embeddings is None else {"input_embeddings": embeddings}
        logits: mx.array = self.decoder(inputs, cache=kv, **more)
        return logits


class VlmDecoder(VisionDecoder):
    """A language model of mlx-vlm, for families that mlx-lm lacks: it takes every position.

    Some of its caches are twins of mlx-lm's, which join batches and are cut; `twins`: for which of them mlx-lm's stand.
    `stand_in`: what stands for one of the others, itself or one that does what its own forgets (`pools`).
    """

    def __init__(self, decoder: Any, current: CurrentPass, *, has_positions: bool) -> None:
        super().__init__(decoder, current, has_positions=has_positions)
        self.twins: frozenset[type] = frozenset()
        self.stand_in: Callable[[Any], Any] = lambda leaf: leaf

    def adopt_caches(self) -> None:
        """Find out for which of its caches mlx-lm's can stand: none may show in the logits. Raises what the model
        raises with its own."""
        own = {type(leaf) for leaf in flat_caches(make_prompt_cache(self.decoder)) if mlx_lm_twin(leaf) is not None}
        expected, found = self._tried(frozenset()), frozenset[type]()
        for twins in (own, *({each} for each in sorted(own, key=lambda each: each.__name__))):
            if not found >= twins and self._is_right(found | twins, expected):
                found |= twins
        self.twins = found

    def _is_right(self, twins: frozenset[type], expected: Sequence[mx.array]) -> bool:
        def compare() -> None:
            pairs = zip(self._tried(twins), expected, strict=True)
            if not max(logits_error(*pair) for pair in pairs) <= MAX_TWIN_ERROR:
                raise ValueError("other logits")

        return finding(compare) is None

    def _tried(self, twins: frozenset[type]) -> list[mx.array]:
        """Logits after each of a few passes, with mlx-lm's caches for these."""
        self.twins = twins
        caches, logits = self.make_cache(), []
        for length in TRIED_PASSES:
            logits.append(self(mx.array([[1 + 37 * place % 89 for place in range(length)]]), caches)[0, -1])
            mx.eval(logits, held_arrays(caches))
        return logits

    def _own_caches(self) -> list[Any]:
        def chosen(leaf: Any) -> Any:
            return mlx_lm_twin(leaf) if type(leaf) in self.twins else self.stand_in(leaf)

        return with_leaves(make_prompt_cache(self.decoder), chosen)

    def _run(self, inputs: mx.array, kv: list[Any] | None, embeddings: mx.array | None) -> mx.array:
        more: dict[str, Any] = {}
        if self.has_positions:
            more["position_ids"] = self._positions(inputs, kv)
        logits: mx.array = self.decoder(inputs, inputs_embeds=embeddings, cache=kv, **more).logits
        return logits

    def _positions(self, inputs: mx.array, kv: list[Any] | None) -> mx.array:
        context = self.current.context
        if context.position_ids is not None:
            return context.position_ids
        num_rows, length = inputs.shape
        offset = next((leaf.offset for leaf in flat_caches(kv or ()) if hasattr(leaf, "offset")), 0)
        starts = mx.array(offset, dtype=mx.int32).reshape(-1) + (0 if context.shift is None else context.shift)
        positions = starts[:, None] + mx.arange(length, dtype=mx.int32)[None]
        return mx.broadcast_to(positions[None], (3, num_rows, length))


# --- hooks inside an mlx-lm model -------------------------------------------------------------------------------------


class ShiftedRope(Module):
    """Rotary embedding by explicit positions where a pass has some, else the model's own by shifted offsets."""

    def __init__(self, plain: Any, rotary: Any, rotate: Callable[..., Any], current: CurrentPass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain = plain
        self.rotary = rotary
        self.rotate = rotate
        self.current = current

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        context = self.current.context
        if context.position_ids is None:
            rotated: mx.array = self.plain(x, offset=offset if context.shift is None else offset + context.shift)
            return rotated
        cos, sin = self.rotary(x, context.position_ids)
        rotary = self.rotary
        rotated, _ = self.rotate(x, x, cos, sin, mrope_section=rotary.mrope_section, style=rotary.style)
        return rotated

    def disagreement(self) -> float:
        """How far the two ways are apart where they must agree: at three equal positions, as a share of the input."""
        width = self.plain.dims
        x = mx.cos(mx.arange(4 * width, dtype=mx.float32)).reshape(1, 1, 4, width)
        positions = mx.broadcast_to(mx.arange(5, 9, dtype=mx.int32), (3, 1, 4))
        with self.current.showing(VisionContext(position_ids=positions)):
            explicit = self(x)
        return float(mx.abs(explicit - self.plain(x, offset=5)).max().item())  # type: ignore[arg-type]


class DeepLayer(Module):
    """A decoder layer to whose output a pass may add what the vision tower saw at one of its depths."""

    def __init__(self, layer: Any, index: int, current: CurrentPass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.index = index
        self.current = current

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self.layer(*args, **kwargs)
        deepstack = self.current.context.deepstack
        return output + deepstack[self.index] if self.index < len(deepstack) else output


def masks_with_images(model: Any, current: CurrentPass) -> Callable[[mx.array, Sequence[Any]], list[Any]]:
    """For a model that makes its masks by `_make_masks(h, caches)`: tokens of one image see each other, later ones too.

    The pass holds whole images, so the part of the mask that changes is its right end.
    """
    plain = model._make_masks

    def masks(h: mx.array, caches: Sequence[Any]) -> list[Any]:
        index = current.context.image_index
        if index is None or h.shape[1] == 1:
            return list(plain(h, caches))
        same = (index[:, None] == index[None, :]) & (index[:, None] >= 0)
        found: dict[str, mx.array] = {}
        for layer, cache in zip(model.layers, caches, strict=True):
            if layer.layer_type not in found:
                window = model.window_size if layer.layer_type == "sliding_attention" else None
                mask = create_attention_mask(h, cache, window_size=window, return_array=True)
                num_before = mask.shape[-1] - same.shape[-1]
                found[layer.layer_type] = mask | mx.pad(same, [(0, 0), (num_before, 0)])
        return [found[layer.layer_type] for layer in model.layers]

    return masks


def embedding_table(decoder: Any) -> Any:
    """The module that embeds token ids, wherever a family keeps it."""
    inner = getattr(decoder, "language_model", decoder)
    return inner.model.embed_tokens


def mlx_lm_twin(cache: Any) -> Any:
    """An empty cache of mlx-lm's of the same name as one of mlx-vlm's; None where there is none."""
    if type(cache).__module__ != "mlx_vlm.models.cache":
        return None
    match type(cache).__name__:
        case "KVCache":
            return KVCache()  # type: ignore[no-untyped-call]
        case "RotatingKVCache":
            return RotatingKVCache(cache.max_size, cache.keep)  # type: ignore[no-untyped-call]
        case "ArraysCache":
            return ArraysCache(len(cache.cache))
    return None
