"""One model at a time in memory, and how another one takes its place, step by step.

    unload   the old engine flushes what it keeps and ends, and its memory is given back
    load     the other engine starts; if it fails, the old model is loaded again

It joins the engine with what is served of a model. Who asks for which model is for `model_pool.py`, which calls
everything here under its lock; no step blocks.
"""

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvserve.app.catalogue import ModelSource
from kvserve.app.model_factory import ModelFactory
from kvserve.engine.engine_settings import EngineStatus
from kvserve.engine.model_files import weights_stamp
from kvserve.engine.worker import Engine
from kvserve.errors import ModelLoadError, NotReady
from kvserve.requests.served_model import ServedModel

MIN_STAY_SECONDS = 1.0
STAY_PER_LOAD = 2.0
"""A model that others wait for goes on taking requests for this many times what loading it took: however the requests
mix, at most about a third of the time is spent on loading. A model that has nothing to do leaves at once."""

RETRY_SECONDS = 60.0
"""A model that failed to load is tried again after this time, or as soon as its files change."""


@dataclass(frozen=True, slots=True)
class Swap:
    """An exchange that is over. `seconds` from the first request that waited, `load_seconds` of it for loading;
    `num_freed_bytes` is the memory that came back with the old model; `error` says why the new one is not there."""

    left: str
    entered: str
    seconds: float
    load_seconds: float
    num_freed_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A load that failed, when, and what the model's files were then."""

    error: ModelLoadError
    at: float
    stamp: object


@dataclass(slots=True, eq=False)
class KnownModel:
    """A model that was described once: where it lies, what is served of it, how its last load failed if it did, and
    whether it was ever loaded."""

    source: ModelSource
    served: ServedModel
    failure: Failure | None = None
    was_loaded: bool = False


@dataclass(slots=True, eq=False)
class Exchange:
    """One in progress. `old_engine` until it has ended; `back_to` is the model to return to if loading fails."""

    target: str
    began_at: float
    old_engine: Engine | None = None
    left: str | None = None
    back_to: str | None = None
    num_bytes_before: int = 0
    num_freed_bytes: int = 0
    loading_since: float | None = None
    error: str | None = None


class ModelSwap:
    """The models that are known, the one that is loaded, and the exchange in progress. Its caller holds a lock."""

    def __init__(self, factory: ModelFactory, clock: Callable[[], float] = time.monotonic) -> None:
        self.known: dict[str, KnownModel] = {}
        self.loaded: ServedModel | None = None
        self.exchange: Exchange | None = None
        self.loaded_at = 0.0
        self.stay_until = 0.0
        self.num_swaps = 0
        self.last_swap: Swap | None = None
        self._factory = factory
        self._clock = clock
        self._notes: list[str] = []

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def engine_status(self) -> EngineStatus | None:
        """Of the engine that works now, whether it answers, loads or ends."""
        engine = self.loaded.engine if self.loaded is not None else None
        if engine is None and self.exchange is not None:
            engine = self.exchange.old_engine or self.known[self.exchange.target].served.engine
        return engine.status if engine is not None else None

    def engines(self) -> list[Engine]:
        """Every engine that may be running."""
        old = self.exchange.old_engine if self.exchange is not None else None
        return [*(known.served.engine for known in self.known.values()), *([old] if old is not None else [])]

    def is_loaded(self, name: str) -> bool:
        return self.loaded is not None and self.loaded.name == name

    @property
    def has_rows(self) -> bool:
        """Whether the loaded model computes for anybody, or somebody waits for it to."""
        if self.loaded is None:
            return False
        status = self.loaded.engine.status
        return status.num_waiting + status.num_prefilling + status.num_decoding > 0

    def fresh_failure(self, name: str) -> Failure | None:
        """Why loading this model would be in vain now."""
        known = self.known[name]
        failure = known.failure
        if failure is None or self._clock() - failure.at > RETRY_SECONDS:
            return None
        return failure if failure.stamp == weights_stamp(known.source.folder) else None

    def take_notes(self) -> list[str]:
        """Lines for a person since the last call, to be written once the lock is free."""
        notes, self._notes = self._notes, []
        return notes

    # --- step by step -------------------------------------------------------------------------------------------------

    def begin(self, target: str, since: float) -> None:
        """Have `target`, which somebody has wanted since then, take the place of the loaded model, if there is one."""
        self.exchange = exchange = Exchange(target, since)
        left, self.loaded = self.loaded, None
        if left is None:
            return
        exchange.left = exchange.back_to = left.name
        exchange.num_bytes_before = left.engine.status.active_memory_bytes
        exchange.old_engine = left.engine
        left.engine.stop(0)
        known = self.known[left.name]
        known.served = self._factory.renewed(left, known.source)

    def advance(self) -> None:
        """One step further, if there is an exchange and it can go on."""
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.old_engine is not None:
            if exchange.old_engine.has_ended:
                self._give_back(exchange)
        elif exchange.loading_since is None:
            exchange.loading_since = self._clock()
            known = self.known[exchange.target]
            known.served = self._factory.refreshed(known.served, known.source)
            known.served.engine.start()
        else:
            self._look_at_load(exchange)

    def _give_back(self, exchange: Exchange) -> None:
        """The old engine has ended: what it held is freed before the other one loads."""
        exchange.old_engine = None
        gc.unfreeze()  # what is frozen is never collected: without it each model would leave something behind
        gc.collect()
        _give_back_heap()
        num_bytes_now = self.known[exchange.target].served.engine.status.active_memory_bytes
        exchange.num_freed_bytes = max(0, exchange.num_bytes_before - num_bytes_now)

    def _look_at_load(self, exchange: Exchange) -> None:
        known = self.known[exchange.target]
        try:
            model = known.served.engine.wait_until_ready(0)
        except NotReady:
            return
        except ModelLoadError as error:
            self._turn_back(exchange, known, error)
            return
        gc.freeze()  # what is loaded stays: the collector need not walk over it again on the engine's time
        known.failure, known.was_loaded = None, True
        known.served = self.loaded = self._factory.completed(known.served, model)
        self.exchange = None
        self.loaded_at = now = self._clock()
        load_seconds = now - (exchange.loading_since or now)
        self.stay_until = now + max(MIN_STAY_SECONDS, STAY_PER_LOAD * load_seconds)
        if exchange.left is not None:
            self._tell(exchange, exchange.left, now - exchange.began_at, load_seconds)

    def _turn_back(self, exchange: Exchange, known: KnownModel, error: ModelLoadError) -> None:
        """The model does not load: the one before it comes back, if there was one."""
        # a new error: the one that was raised keeps the frames of the load, and what they hold
        known.failure = Failure(ModelLoadError(str(error)), self._clock(), weights_stamp(known.source.folder))
        failed_engine, known.served = known.served.engine, self._factory.renewed(known.served, known.source)
        self.exchange = None
        if exchange.back_to is None:
            return
        self._notes.append(f"{exchange.target} could not be loaded, {exchange.back_to} comes back. {error}")
        self.exchange = Exchange(
            exchange.back_to, exchange.began_at, old_engine=failed_engine, left=exchange.target, error=str(error)
        )

    def _tell(self, exchange: Exchange, left: str, seconds: float, load_seconds: float) -> None:
        self.num_swaps += exchange.error is None
        num_freed = exchange.num_freed_bytes
        self.last_swap = Swap(
            left, exchange.target, round(seconds, 3), round(load_seconds, 3), num_freed, error=exchange.error
        )
        freed = f", {num_freed / 2**30:.2f} GiB were freed" if num_freed else ""
        self._notes.append(f"{exchange.target} took the place of {left} after {seconds:.1f} s{freed}")


def _give_back_heap() -> None:
    """Each engine's threads had heaps of their own; glibc keeps their free pages, 1 to 3 MB for every swap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other systems' allocators have no such call
    if trim is not None:
        trim(0)
