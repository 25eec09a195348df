"""What a model's caches allow of drafts, found by trying: a row goes through a pass with wrong tokens, comes back and
goes on, and must be the row that never met them. It knows what must be true of caches of any class, no model's name.

That takes at most twenty passes of a few tokens, of more where a class that is unknown names a length, and twice as
many where KV is quantised.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import RotatingKVCache

from kvserve.engine.borders import described, finding
from kvserve.engine.kv_buffers import flat_caches, held_arrays, with_arrays
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, LeafForm, is_known, lengths_named
from kvserve.engine.logits_error import logits_error
from kvserve.engine.model import LoadedModel
from kvserve.engine.pass_costs import (
    MAX_PASS_TOKENS,
    MEASURED_WIDTHS,
    NUM_FIRST_WIDTHS,
    NUM_MEASURED_TOKENS,
    PassCosts,
)
from kvserve.engine.retreat import Retreat, Way, known_way
from kvserve.engine.self_check import MAX_ERROR, CachesDiffer
from kvserve.engine.width_noise import NUM_TOKENS, agreeing_width, find_width_noise, told

PROMPT_TOKENS = 11
NUM_RIGHT = 2
NUM_WRONG = 3


@dataclass(frozen=True, slots=True)
class DraftSupport:
    """`ways`: how each leaf comes back from a pass, None where rows decode plainly (`why_not`). `row_bytes`: what a row
    holds besides its KV while a draft is tried. `costs` are this model's on this machine, `notes` tell a person."""

    ways: tuple[Way, ...] | None
    why_not: str
    row_bytes: int
    costs: PassCosts
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the operator decides about drafts. `is_on`: what they need is tried while the model is loaded, else when the
    first row comes that has a drafter. At most `max_num_tokens` are drafted at a time; `is_exact`: no pass is so wide
    that its logits are others than those of single steps.
    """

    is_on: bool = False
    max_num_tokens: int = MAX_PASS_TOKENS - 1
    is_exact: bool = False


DEFAULT_DRAFTS = DraftSettings()


def find_draft_support(model: LoadedModel, settings: DraftSettings = DEFAULT_DRAFTS) -> DraftSupport:
    """Try a model's caches, how long passes take and, where settings say so, how wide they may be."""
    costs = PassCosts(min(MAX_PASS_TOKENS, settings.max_num_tokens + 1))
    with mx.stream(generation_stream):
        found = finding(lambda: _tried(model, settings, costs))
    if isinstance(found, Exception):
        why_not = described(found)
        return DraftSupport(None, why_not, 0, costs, (f"Nothing is drafted, every token takes a pass: {why_not}.",))
    return found


def _tried(model: LoadedModel, settings: DraftSettings, costs: PassCosts) -> DraftSupport:
    """Raises CachesDiffer where a leaf does not come back, and what the model raises. Costs are tried first: where no
    draft pays, the passes of the rest would only make the start slower."""
    costs.measure(model.module, model.new_caches)
    if not costs.can_pay:
        return _unpaid(costs)
    ways = _proven_ways(model)
    notes = tuple(_noted(model, settings, costs)) if settings.is_on else ()
    return DraftSupport(ways, "", _row_bytes(model, ways), costs, notes)


def _unpaid(costs: PassCosts) -> DraftSupport:
    """Of a model that computes token after token, as one in 4 bits does on a CPU."""
    width = MEASURED_WIDTHS[NUM_FIRST_WIDTHS - 1]
    plain, wide = (costs.seconds(each, NUM_MEASURED_TOKENS) or 0.0 for each in (1, width))
    why_not = f"a pass of {width} tokens takes {wide / plain:.1f} times as long as a pass of one"
    return DraftSupport(None, why_not, 0, costs, (f"Nothing is drafted: {why_not}.",))


def _noted(model: LoadedModel, settings: DraftSettings, costs: PassCosts) -> Iterator[str]:
    """What a person should know; in `exact` mode passes get narrower. A look at one pass says whether there is
    anything; only who wants it exact waits for more."""
    noises = find_width_noise(model.module, model.new_caches, NUM_TOKENS if settings.is_exact else MAX_PASS_TOKENS)
    if settings.is_exact:
        costs.max_width = min(costs.max_width, agreeing_width(noises))
    if any(noise.max_difference for noise in noises):
        yield told(noises, is_exact=settings.is_exact)


def _row_bytes(model: LoadedModel, ways: Sequence[Way]) -> int:
    """States are there twice, and windows have the rows of a pass besides."""
    windows = [leaf.max_size for leaf in flat_caches(model.new_caches()) if isinstance(leaf, RotatingKVCache)]
    held = model.sizes.fixed if "hold" in ways else 0
    return held + (model.sizes.fixed * MAX_PASS_TOKENS // min(windows) if "window" in ways else 0)


def _proven_ways(model: LoadedModel) -> tuple[Way, ...]:
    """How each leaf comes back. Raises CachesDiffer where one does not, and what the model raises."""
    leaves = flat_caches(model.new_caches())
    forms = model.leaf_forms or ()
    if model.leaf_trouble or len(forms) != len(leaves):
        raise CachesDiffer(model.leaf_trouble or "it is not known what its caches hold")
    unknown = [leaf for leaf in leaves if not is_known(leaf)]
    named = {length for leaf in unknown for length in lengths_named(leaf)}
    if (longest := max(named, default=0)) > MAX_PROBED_TOKENS:
        raise CachesDiffer(f"it names {longest:,}, and at start rows of at most {MAX_PROBED_TOKENS:,} tokens are tried")
    ways = tuple(_way(leaf, form) for leaf, form in zip(leaves, forms, strict=True))
    _prove(model.module, model.new_caches, ways, longest)
    if (quantiser := model.quantiser) is not None:
        _prove(model.module, lambda: quantiser.convert(model.new_caches()), ways, longest)
    return ways


def _way(leaf: Any, form: LeafForm) -> Way:
    if form.depends_on_cuts:
        raise CachesDiffer(f"what {type(leaf).__name__} holds depends on where a pass ends")
    known = known_way(leaf)
    if known == "trim" and form.kind not in ("cut", "none"):
        raise CachesDiffer(f"not every pass writes its {type(leaf).__name__}")
    if known is not None:
        return known
    return "trim" if form.kind == "cut" and hasattr(leaf, "trim") and leaf.is_trimmable() else "hold"


def _prove(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], ways: Sequence[Way], num_extra: int
) -> None:
    """A row that took wrong tokens in two passes, the second of which had to bring the first one's right tokens along
    where states went back, beside one that was never shown any. Raises CachesDiffer."""
    tokens = [1 + (37 * place + place * place) % 89 for place in range(PROMPT_TOKENS + num_extra + 3 * NUM_RIGHT)]
    start, wrong = PROMPT_TOKENS + num_extra, [90 - token for token in tokens[:NUM_WRONG]]
    plain, caches = new_caches(), new_caches()
    _passed(module, plain, tokens[:start])
    _passed(module, caches, tokens[:start])
    expected = [_passed(module, plain, [token])[-1] for token in tokens[start:]]
    found: list[mx.array] = []
    behind: list[int] = []
    for first in (start, start + NUM_RIGHT):
        right = tokens[first : first + NUM_RIGHT]
        passed = [*behind, *right, *wrong]
        leaves = flat_caches(caches)
        retreat = Retreat.before(leaves, ways)
        before = [with_arrays(held, mx.contiguous) for held in retreat.held]
        mx.eval(held_arrays(before))
        logits = _passed(module, caches, passed)
        found += list(logits[len(behind) : len(behind) + NUM_RIGHT])
        _check_held(retreat, before)
        num_kept = len(behind) + NUM_RIGHT
        behind = [*behind, *right][retreat.back(len(passed), num_kept) :]
    found += list(_passed(module, caches, [*behind, *tokens[start + 2 * NUM_RIGHT :]])[-NUM_RIGHT:])
    error = max(logits_error(*pair) for pair in zip(found, expected, strict=True))
    if not error <= MAX_ERROR:  # also for one that is not a number
        raise CachesDiffer(f"a row that comes back from wrong tokens has logits that are off by {error:.0%}")


def _check_held(retreat: Retreat, before: Sequence[Any]) -> None:
    """What is held is what it was: a class that writes into its arrays changes those that are held, too."""
    for leaf, held, was in zip(retreat.leaves, retreat.held, before, strict=True):
        pairs = zip(held_arrays(held), held_arrays(was), strict=True)
        if not all(mx.array_equal(*pair) for pair in pairs):
            raise CachesDiffer(f"{type(leaf).__name__} writes into its arrays")


def _passed(module: Callable[..., Any], caches: list[Any], tokens: Sequence[int]) -> mx.array:
    """Log-probabilities (tokens, vocabulary) behind each token of one pass."""
    logits: mx.array = module(mx.array([list(tokens)]), cache=caches)[0]
    mx.eval(logits, held_arrays(caches))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
