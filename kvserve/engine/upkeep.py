"""What an engine does with what is kept, of its model and of the one that drafts, while no row asks for it: sweeping,
joining, work ahead of requests, forgetting, and the way to disk at the end. Belongs to the engine thread.
"""

from collections.abc import Callable
from dataclasses import replace

from kvserve.core import TokenSequence
from kvserve.engine.borders import ShortMemory
from kvserve.engine.cache_records import CacheReport, ForgottenKv
from kvserve.engine.disk_writing import Flush
from kvserve.engine.draft_model import DraftModel
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.warmer import Warmer
from kvserve.engine.warming import Warming


class EngineUpkeep:
    """Over one model's cache and warmer. `account` has what live rows hold counted anew."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PrefixCache,
        warmer: Warmer,
        memory: ShortMemory,
        draft_model: DraftModel | None,
        account: Callable[[], None],
    ) -> None:
        self._model = model
        self._cache = cache
        self._warmer = warmer
        self._memory = memory
        self._draft_model = draft_model
        self._account = account

    def note_busy(self) -> None:
        """Note that rows compute."""
        self._warmer.note_busy()
        if self._draft_model is not None:
            self._draft_model.note_busy()

    def warm(self, warming: Warming) -> None:
        """Take a job of work ahead."""
        self._warmer.add(warming)
        if self._draft_model is not None:
            self._draft_model.warm(warming.job)

    def sweep(self) -> None:
        """Evict what has outlived its time, also while no request comes."""
        self._account()
        self._cache.make_room()
        self._cache.kv_room.evict_rest(to_its_end=True)
        self._cache.kv_room.memory.look()
        self._cache.warmed.look()
        if self._draft_model is not None:
            self._draft_model.sweep()

    def do_idle_work(self) -> bool:
        """One small piece of work that no request waits for. Returns whether there was any."""
        self._account()
        if self._cache.do_disk_work() or self._memory.with_second_try(self._cache.coalesce) or self._warmer.step():
            return True
        return self._draft_model is not None and self._draft_model.do_idle_work()

    def seconds_to_rest(self, at_most: float) -> float:
        """How long an idle engine may wait before it looks at work ahead of requests."""
        due = self._warmer.seconds_until_due()
        seconds = at_most if due is None else min(due, at_most)
        return seconds if self._draft_model is None else self._draft_model.seconds_to_rest(seconds)

    def give_ram_back(self) -> None:
        """Where RAM is only lent, evict what no row uses as soon as the disk has it."""
        self._cache.give_ram_back()
        if self._draft_model is not None:
            self._draft_model.give_ram_back()

    def report(self) -> CacheReport:
        """What is kept and was done, also ahead of requests."""
        return replace(self._cache.report(), warming=self._warmer.report())

    def discard(self, tokens: TokenSequence, is_owner: Callable[[str], bool]) -> None:
        """Forget what only the entries of these owners and this conversation use, on disk too."""
        self._cache.discard(tokens, is_owner)
        if self._draft_model is not None:
            self._draft_model.cache.discard(tokens, is_owner)

    def clear(self) -> None:
        """Forget everything that is kept; running rows continue."""
        self._warmer.drop_all("cleared")
        self._cache.empty()
        self.forget_images()
        if self._draft_model is not None:
            self._draft_model.clear()

    def forget(self, is_forgotten: Callable[[str], bool]) -> ForgottenKv:
        """Forget what only the requests of these owners used; rows under way have been told before."""
        self._warmer.forget(is_forgotten)
        self.forget_images()
        gone = self._cache.forget(is_forgotten)
        if self._draft_model is None:
            return gone
        drafted = self._draft_model.forget(is_forgotten)
        return replace(
            gone,
            num_ram_bytes=gone.num_ram_bytes + drafted.num_ram_bytes,
            num_disk_bytes=gone.num_disk_bytes + drafted.num_disk_bytes,
            is_done=gone.is_done and drafted.is_done,
        )

    def forget_images(self) -> None:
        """The features that a vision tower keeps have no owners: all are dropped."""
        if self._model.vision is not None:
            self._model.vision.tower.clear()

    def begin_flush(self) -> Flush:
        """How much `close_disk` will have to write, and a look at how far it is."""
        flush = self._cache.begin_flush()
        if self._draft_model is None:
            return flush
        drafts = self._draft_model.cache.begin_flush()
        return Flush(flush.num_bytes + drafts.num_bytes, lambda: flush.num_written_bytes() + drafts.num_written_bytes())

    def close_disk(self, timeout_seconds: float) -> bool:
        """Write what RAM has and the disk has not, and end the disks' threads. Whether all of it is there."""
        is_all_there = self._cache.close_disk(timeout_seconds)
        if self._draft_model is not None:
            is_all_there &= self._draft_model.cache.close_disk(timeout_seconds)
        return is_all_there
