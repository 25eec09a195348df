"""What a start finds out about a tiny model is found out once per process, by whichever test starts it first.

The passes that show a model's sizes, the trials of its caches, with drafts too, and of an image, the first two tokens,
the probing of its chat template and the proofs of how that writes calls and turns, and of where text can be cut, take
most of a start, and always find the same:
they depend on the model's folder, on how its KV is quantised, on the classes of its caches and on the template alone.
Tests of these themselves call `check_caches`, `ChatTemplate` and `row_of_calls` directly, where nothing is remembered.
"""

import gc
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from kvserve.app import learned_template, model_swap
from kvserve.app.model_factory import ModelFactory
from kvserve.core import SamplingParams
from kvserve.engine import decode, draft_support, engine_start, leaf_forms, pass_costs, shapeless, vision_check
from kvserve.engine import model as engine_model
from kvserve.engine.batch_costs import BatchCosts
from kvserve.engine.draft_nouns import DraftSettings, DraftsSeen, DraftSupport
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.model import CacheSupport, LoadedModel, Looking, Probed
from kvserve.engine.model_files import file_stamps
from kvserve.engine.quantised import FULL_PRECISION, KvSettings
from kvserve.engine.scheduler import Scheduler
from kvserve.prompt import cuts, stitch, template
from tests.laws import IS_FULL
from tests.weights import fingerprint_of

_loading = threading.local()
"""Which model the thread of an engine is just loading, and with which quantisation of KV."""

_fingerprints: dict[Any, str] = {}
_sizes: dict[Any, Probed] = {}
_verdicts: dict[Any, CacheSupport] = {}
_seen: dict[Any, Any] = {}
_draft_supports: dict[Any, DraftSupport] = {}
_drawn: set[Any] = set()
_profiles: dict[Any, Any] = {}
_rows: dict[Any, Any] = {}
_learned: dict[Any, Any] = {}

_THAWED_GC = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
"""A swap of models collects what was frozen too: of a server its modules, of a process of tests every collected test as
well, which takes a third of a second. Here nothing is frozen, so what a model leaves is collected without that."""

_probed_model = engine_model._probed
_load, _check_caches, _draw_two_tokens = engine_start.load, engine_start.check_caches, engine_start._draw_two_tokens
_find_draft_support = decode.find_draft_support
_probed, _row_of_calls = template._probed, learned_template.row_of_calls
_check_vision = vision_check.check_vision
_describe, _cuts_proved = ModelFactory.describe, cuts._proved
_learn_layout, _lost_behind_results = stitch.learn_layout, learned_template.lost_behind_results
_surroundings = engine_start.surroundings
_surroundings_once = cache(_surroundings)
"""The files of the libraries are looked through once: there are four thousand."""
_keeps_the_first_length = shapeless.keeps_the_first_length
_keeps_the_first_length_once = cache(_keeps_the_first_length)
"""It is of MLX, not of a model."""


def _load_and_note(folder: Path, max_kv_size: int, kv: KvSettings = FULL_PRECISION, *look: Looking) -> LoadedModel:
    stamps = (folder, *sorted(file_stamps(folder).items()))  # sizes, times and places of all files
    if stamps not in _fingerprints:
        _fingerprints[stamps] = fingerprint_of(folder)
    _loading.model = (_fingerprints[stamps], kv)
    return _load(folder, max_kv_size, kv, *look)


def _probed_model_once(folder: Path, config: Mapping[str, Any], module: Module, kv: KvSettings) -> Probed:
    """What a test has replaced in the passes is part of the key, and its own classes of caches. Where the passes gave
    the model other caches they are taken again."""
    loaded = _loading.__dict__.get("model")
    ways = engine_model.find_forms, engine_model.try_quantising, leaf_forms._kind, type(module).__call__
    classes = _cache_classes(module)
    key = (loaded, ways, classes)
    if loaded is not None and key in _sizes:
        return _sizes[key]
    found = _probed_model(folder, config, module, kv)
    if loaded is not None and _cache_classes(module) == classes:
        _sizes[key] = found
    return found


def _cache_classes(module: Module) -> tuple[type, ...]:
    return tuple(type(leaf) for leaf in flat_caches(make_prompt_cache(module)))


def _check_caches_once(model: LoadedModel) -> CacheSupport:
    """A test's own classes of caches are part of the key. What raised is tried again, a model of unknown origin too."""
    loaded = _loading.__dict__.pop("model", None)
    if loaded is None:
        return _check_caches(model)
    key = (*loaded, tuple(type(leaf) for leaf in flat_caches(model.new_caches())))
    if key not in _verdicts:
        _verdicts[key] = _check_caches(model)
    _loading.key = key
    return _verdicts[key]


def _check_vision_once(module: Any, vision: Any, vocab_size: int) -> Any:
    """What a test has replaced in the trial is part of the key. What raised is tried again."""
    loaded = _loading.__dict__.get("key")
    if loaded is None:
        return _check_vision(module, vision, vocab_size)
    key = (loaded, vision_check.MAX_ERROR, *vars(vision_check._ImageTrial).values())
    if key not in _seen:
        _seen[key] = _check_vision(module, vision, vocab_size)
    return _seen[key]


@contextmanager
def always_paying() -> Iterator[None]:
    """Meanwhile drafts are worth their passes: what a tiny model's take on a busy machine decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_support, "pays", lambda _: True)
        patch.setattr(pass_costs, "pays", lambda _: True)
        yield


def _find_draft_support_once(
    model: LoadedModel, settings: DraftSettings, seen: DraftsSeen | None = None, noise_seconds: float = math.inf
) -> DraftSupport:
    """What passes cost is each engine's own: it goes on to measure."""
    key = _loading.__dict__.get("key")
    if key is None or seen is not None:
        return _find_draft_support(model, settings, seen, noise_seconds)
    if (key, settings) not in _draft_supports:
        with always_paying():
            _draft_supports[key, settings] = _find_draft_support(model, settings)
    found = _draft_supports[key, settings]
    costs = deepcopy(found.costs)
    return replace(found, costs=costs, together=BatchCosts(costs) if found.together is not None else None)


def _draw_two_tokens_once(scheduler: Scheduler, sampling: SamplingParams) -> None:
    """A model that could not generate is tried again."""
    key = _loading.__dict__.get("key")
    if key is None or (key, sampling) not in _drawn:
        _draw_two_tokens(scheduler, sampling)
        _drawn.add((key, sampling))


def _probed_once(compiled: Any, row: Any = None, row_behind_words: Any = template.no_row) -> Any:
    """What was found out is shared: it is frozen, and the compiled template in it is safe for threads."""
    key = (compiled.source, tuple(sorted(compiled._variables.items())), row, row_behind_words is template.no_row)
    if key not in _profiles:
        _profiles[key] = _probed(compiled, row, row_behind_words)
    return _profiles[key]


def _row_of_calls_once(tokenizer: Any) -> Any:
    """Frozen as well: texts, and patterns made of them."""
    key = (tokenizer.chat_template, tuple(sorted(tokenizer.template_variables.items())))
    if key not in _rows:
        _rows[key] = _row_of_calls(tokenizer)
    return _rows[key]


def _describe_and_note(factory: ModelFactory, source: Any) -> Any:
    """The files of the model that this thread describes, and the template that it was given, meanwhile."""
    stamps = tuple(sorted(file_stamps(source.folder).items()))  # sizes, times and places of all files
    _loading.described = (source.folder, stamps, source.chat_template, factory.settings.model_family)
    try:
        return _describe(factory, source)
    finally:
        del _loading.described


def _learned_once(learn: Any, *key: Any) -> Any:
    """What was learned is a text, a list of texts or frozen. Of a model of unknown origin it is learned again."""
    described = _loading.__dict__.get("described")
    if described is None:
        return learn()
    if (described, key) not in _learned:
        _learned[described, key] = learn()
    return _learned[described, key]


def _cuts_proved_once(tokenizer: Any, tokens: Sequence[str], hiding: Iterable[str]) -> list[str]:
    hides = frozenset(hiding)
    return list(_learned_once(lambda: _cuts_proved(tokenizer, tokens, hides), "cuts", tuple(tokens), hides))


def _learn_layout_once(*arguments: Any) -> Any:
    return _learned_once(lambda: _learn_layout(*arguments), "layout")


def _lost_behind_results_once(*arguments: Any) -> Any:
    return _learned_once(lambda: _lost_behind_results(*arguments), "results")


@contextmanager
def remembered_starts() -> Iterator[None]:
    """Meanwhile a start takes from the ones before what it would find out again. What a test has replaced stays so."""
    with pytest.MonkeyPatch.context() as patch:
        if engine_start.load is _load and engine_start.check_caches is _check_caches:
            patch.setattr(engine_start, "load", _load_and_note)
            patch.setattr(engine_model, "_probed", _probed_model_once)
            patch.setattr(engine_start, "check_caches", _check_caches_once)
            for module in (decode, engine_start):
                patch.setattr(module, "find_draft_support", _find_draft_support_once)
            patch.setattr(engine_start, "_draw_two_tokens", _draw_two_tokens_once)
        if vision_check.check_vision is _check_vision:
            patch.setattr(vision_check, "check_vision", _check_vision_once)
        if engine_start.surroundings is _surroundings:
            patch.setattr(engine_start, "surroundings", _surroundings_once)
        if shapeless.keeps_the_first_length is _keeps_the_first_length:
            patch.setattr(shapeless, "keeps_the_first_length", _keeps_the_first_length_once)
        if template._probed is _probed:
            patch.setattr(template, "_probed", _probed_once)
        if learned_template.row_of_calls is _row_of_calls:
            patch.setattr(learned_template, "row_of_calls", _row_of_calls_once)
        if ModelFactory.describe is _describe:
            patch.setattr(ModelFactory, "describe", _describe_and_note)
            for module, name, learned, once in (
                (cuts, "_proved", _cuts_proved, _cuts_proved_once),
                (stitch, "learn_layout", _learn_layout, _learn_layout_once),
                (learned_template, "lost_behind_results", _lost_behind_results, _lost_behind_results_once),
            ):
                if getattr(module, name) is learned:
                    patch.setattr(module, name, once)
        if not IS_FULL:
            patch.setattr(model_swap, "gc", _THAWED_GC)
        yield
