"""What a model's caches allow of drafts, found by trying: a row goes through a pass with wrong tokens, comes back and
goes on, and must be the row that never met them. It knows what must be true of caches of any class, no model's name.

First passes are measured: where no draft pays nothing else is done. The trial takes at most twenty passes of a few
tokens, of more where a class that is unknown names a length, and twice as many where KV is quantised; as many show that
rows beside one another come back one by one; then wide passes are compared with single steps. An earlier start's
findings stand for all of these passes (`DraftsSeen`, 0079).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import RotatingKVCache

from kvserve.engine.batch_costs import MAX_BATCH_TOKENS, BatchCosts
from kvserve.engine.borders import described, finding
from kvserve.engine.draft_nouns import DEFAULT_DRAFTS, DraftSettings, DraftsSeen, DraftSupport
from kvserve.engine.kv_buffers import RowKv, entering, flat_caches, held_arrays, with_arrays
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, LeafForm, is_known, lengths_named
from kvserve.engine.logits_error import logits_error
from kvserve.engine.model import LoadedModel
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts, pays
from kvserve.engine.quantised import PackedCache
from kvserve.engine.retreat import Retreat, Way, known_way
from kvserve.engine.self_check import MAX_ERROR, CachesDiffer
from kvserve.engine.width_noise import (
    NUM_TOKENS,
    WidthNoise,
    agreeing_width,
    find_width_noise,
    is_noisy,
    told,
    widths_between,
)

PROMPT_TOKENS = 11
NUM_RIGHT = 2
NUM_WRONG = 3
NO_WIDTH = "no pass of several tokens has the logits of single steps to the bit, which SPECULATION_EXACT asks for"


def find_draft_support(
    model: LoadedModel,
    settings: DraftSettings = DEFAULT_DRAFTS,
    seen: DraftsSeen | None = None,
    noise_seconds: float = math.inf,
) -> DraftSupport:
    """Find out what a model's caches allow, how long passes take and, where drafts are on, how far they are from single
    steps. `seen`: what was found out of it before, on this machine. To look at noise takes no longer than
    `noise_seconds`, but for a first pass of each width, and where passes have to be exact."""
    costs = PassCosts(min(MAX_PASS_TOKENS, settings.max_num_tokens + 1))
    with mx.stream(generation_stream):
        found = finding(lambda: _found(model, settings, costs, seen, noise_seconds))
    if isinstance(found, Exception):
        why_not = described(found)
        return DraftSupport(None, why_not, 0, costs, (f"Nothing is drafted, every token takes a pass: {why_not}.",))
    return found


def _found(
    model: LoadedModel, settings: DraftSettings, costs: PassCosts, seen: DraftsSeen | None, noise_seconds: float
) -> DraftSupport:
    """Raises CachesDiffer where a leaf does not come back, and what the model raises. Passes are measured first: where
    no draft pays, to try the rest would only make the start slower."""
    ways, num_extra = _ways(model)
    if seen is not None and seen.ways != ways:
        seen = None
    ratios = seen.ratios if seen is not None else costs.measure(model.module, model.new_caches)
    if not pays(ratios):
        return _unpaid(ways, ratios, costs, is_on=settings.is_on, is_known=seen is not None)
    if seen is None:
        _prove_all(model, ways, num_extra)
    why_not = _why_not_together(model, settings, is_known=MAX_BATCH_TOKENS in ratios)
    if not why_not and MAX_BATCH_TOKENS not in ratios:
        wider = finding(partial(costs.measure_wider, model.module, model.new_caches, MAX_BATCH_TOKENS, ratios))
        why_not, ratios = (described(wider), ratios) if isinstance(wider, Exception) else ("", wider)
    if seen is not None:
        costs.guess(ratios)
    found = DraftSupport(ways, "", _row_bytes(model, ways), costs)
    found = replace(found, together=None if why_not else BatchCosts(costs), why_not_together=why_not)
    if not settings.is_on:
        return found
    noises = seen.noises if seen is not None else None
    if noises is None or (settings.is_exact and not _is_still_so(model, noises)):
        max_seconds = math.inf if settings.is_exact else noise_seconds
        noises = find_width_noise(model.module, model.new_caches, NUM_TOKENS, max_seconds)
    seen = DraftsSeen(ways, noises, ratios)
    if settings.is_exact:
        noises += _noises_between(model, noises, costs.max_width)
        costs.max_width = min(costs.max_width, agreeing_width(noises))
    notes = [told(noises, is_exact=settings.is_exact)] if is_noisy(noises) else []
    if costs.max_width == 1:
        return DraftSupport(None, NO_WIDTH, 0, costs, (*notes, f"Nothing is drafted: {NO_WIDTH}."), seen)
    if why_not and model.cache_support.can_batch:
        notes.append(f"Nothing is drafted for rows that share passes: {why_not}.")
    return replace(found, notes=tuple(notes), seen=seen)


def _unpaid(
    ways: tuple[Way, ...], ratios: Mapping[int, float], costs: PassCosts, *, is_on: bool, is_known: bool
) -> DraftSupport:
    """Of a model that computes token after token. `is_known`: from an earlier start."""
    width = max(ratios)
    why_not = f"a pass of {width} tokens takes {ratios[width]:.1f} times as long as one of a single token"
    note = f"Nothing is drafted: {why_not}{' (found at an earlier start)' if is_known else ''}."
    return DraftSupport(None, why_not, 0, costs, (note,), DraftsSeen(ways, (), ratios) if is_on else None)


def _is_still_so(model: LoadedModel, noises: Sequence[WidthNoise]) -> bool:
    """Whether passes may be as wide as these say, for one that wants them exact: all tokens were looked at, and a pass
    of each width agrees today as far as it did. What is remembered can so make passes narrower, and never wider than
    what is seen."""
    if agreeing_width(noises) == 1:
        return True
    if is_noisy(noises) and any(noise.num_tokens < NUM_TOKENS for noise in noises):
        return False
    now = find_width_noise(model.module, model.new_caches, MAX_PASS_TOKENS)
    return agreeing_width(now) >= agreeing_width(noises)


def _noises_between(model: LoadedModel, noises: Sequence[WidthNoise], max_width: int) -> tuple[WidthNoise, ...]:
    """Of the widths up to the agreeing one that were not looked at, over as many tokens: each may have a kernel of its
    own. They are looked at anew at each start."""
    if not (widths := widths_between(noises, max_width)):
        return ()
    num_tokens = max(noise.num_tokens for noise in noises)
    return find_width_noise(model.module, model.new_caches, num_tokens, widths=widths, min_tokens=num_tokens)


def _row_bytes(model: LoadedModel, ways: Sequence[Way]) -> int:
    """States are there twice, and windows have the rows of a pass besides."""
    windows = [leaf.max_size for leaf in flat_caches(model.new_caches()) if isinstance(leaf, RotatingKVCache)]
    held = model.sizes.fixed if "hold" in ways else 0
    return held + (model.sizes.fixed * MAX_PASS_TOKENS // min(windows) if "window" in ways else 0)


def _ways(model: LoadedModel) -> tuple[tuple[Way, ...], int]:
    """How each leaf comes back, by its class and form, and how many tokens more a row needs that is to show it. Raises
    CachesDiffer where one cannot."""
    leaves = flat_caches(model.new_caches())
    forms = model.leaf_forms or ()
    if model.leaf_trouble or len(forms) != len(leaves):
        raise CachesDiffer(model.leaf_trouble or "it is not known what its caches hold")
    unknown = [leaf for leaf in leaves if not is_known(leaf)]
    named = {length for leaf in unknown for length in lengths_named(leaf)}
    if (longest := max(named, default=0)) > MAX_PROBED_TOKENS:
        raise CachesDiffer(f"it names {longest:,}, and at start rows of at most {MAX_PROBED_TOKENS:,} tokens are tried")
    return tuple(_way(leaf, form) for leaf, form in zip(leaves, forms, strict=True)), longest


def _prove_all(model: LoadedModel, ways: Sequence[Way], num_extra: int) -> None:
    """Try these ways, with quantised KV too. Raises CachesDiffer where a row does not come back, and what the model
    raises."""
    _prove(model.module, model.new_caches, ways, num_extra)
    if (quantiser := model.quantiser) is not None:
        _prove(model.module, lambda: quantiser.convert(model.new_caches()), ways, num_extra)


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
    tokens, start = _tokens(PROMPT_TOKENS + num_extra), PROMPT_TOKENS + num_extra
    wrong = [90 - token for token in tokens[:NUM_WRONG]]
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


def _why_not_together(model: LoadedModel, settings: DraftSettings, *, is_known: bool) -> str:
    """Why rows that share passes decode plainly; empty where they need not. `is_known`: an earlier start has tried
    them."""
    if not model.cache_support.can_batch:
        return "rows share no passes"
    if settings.is_exact:
        return "how far the logits of their wider passes are from those of single steps is not measured"
    quantiser = model.quantiser
    forms = [model.new_caches] if quantiser is None else [lambda: quantiser.convert(model.new_caches())]
    if quantiser is not None and quantiser.start:
        forms.append(model.new_caches)
    leaves = [leaf for new_caches in forms for leaf in flat_caches(entering(new_caches()))]
    whole = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, RowKv | PackedCache)}
    if whole:
        return f"{' and '.join(sorted(whole))} cannot be cut row by row"
    for new_caches in () if is_known else forms:
        found = finding(partial(_prove_together, model.module, new_caches))
        if isinstance(found, Exception):
            return str(found) if isinstance(found, CachesDiffer) else described(found)
    return ""


def _prove_together(module: Callable[..., Any], new_caches: Callable[[], list[Any]]) -> None:
    """Two rows of a batch that take wrong tokens in two passes, another number of them each time, and then a plain
    step, beside the same rows alone that were never shown any. Raises CachesDiffer."""
    rows = [_tokens(PROMPT_TOKENS), _tokens(PROMPT_TOKENS + NUM_WRONG)[NUM_RIGHT:]]
    starts = [len(tokens) - 3 * NUM_RIGHT for tokens in rows]
    expected, entered = list[list[mx.array]](), list[list[Any]]()
    for tokens, start in zip(rows, starts, strict=True):
        alone, caches = new_caches(), new_caches()
        _passed(module, alone, tokens[:start])
        _passed(module, caches, tokens[:start])
        expected.append([_passed(module, alone, [token])[-1] for token in tokens[start:]])
        entered.append(entering(caches))
    batch = [layer[0].merge(list(layer)) for layer in zip(*entered, strict=True)]
    places, found = list(starts), [list[mx.array](), list[mx.array]()]
    for kept in ((1, 2 * NUM_RIGHT), (NUM_RIGHT, 1), (1, 1)):
        width = max(kept)
        passed = [
            [*tokens[place : place + count], *(90 - token for token in tokens[: width - count])]
            for tokens, place, count in zip(rows, places, kept, strict=True)
        ]
        logits = module(mx.array(passed), cache=batch)
        mx.eval(logits, held_arrays(batch))
        for row, count in enumerate(kept):
            own = logits[row, :count]
            found[row] += list(own - mx.logsumexp(own, axis=-1, keepdims=True))
        for leaf in flat_caches(batch):
            leaf.cut([width - count for count in kept])
        places = [place + count for place, count in zip(places, kept, strict=True)]
    pairs = [pair for each in zip(found, expected, strict=True) for pair in zip(*each, strict=False)]
    error = max(logits_error(*pair) for pair in pairs)
    if not error <= MAX_ERROR:  # also for one that is not a number
        raise CachesDiffer(
            f"a row that comes back from wrong tokens beside others has logits that are off by {error:.0%}"
        )


def _tokens(num_tokens: int) -> list[int]:
    """So many, and those that follow them."""
    return [1 + (37 * place + place * place) % 89 for place in range(num_tokens + 3 * NUM_RIGHT)]


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
