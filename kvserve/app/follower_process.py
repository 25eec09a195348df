"""The process of a rank that follows rank 0: an engine and a screen, no clients, no proxy, no records of conversations.
It loads the model that its own settings name, and ends with rank 0.
"""

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvserve.app.blas import active_blas, what_computes
from kvserve.app.ranks_end import RanksEnd
from kvserve.app.wiring import engine_settings
from kvserve.config import Launch
from kvserve.core.rank_place import RankPlace
from kvserve.engine.caches_seen import note_code
from kvserve.engine.hub import fetched_folder
from kvserve.engine.model import check_folder
from kvserve.engine.model_files import check_weights
from kvserve.engine.worker import Engine
from kvserve.errors import NotReady
from kvserve.observe.terminal import Terminal
from kvserve.settings.start_checks import local_folder

END_SECONDS = 25.0
"""So long a follower that is told to stop waits for rank 0 to end, which may be in a pass with it."""

LOST_SECONDS = 1.5
"""A rank that is lost, or does not follow yet, may sit in MLX for ever."""


class FollowerProcess:
    """One follower. `start` and `stop` belong to the main thread."""

    def __init__(self, launch: Launch, place: RankPlace, terminal: Terminal) -> None:
        self._launch = launch
        self._place = place
        self._terminal = terminal
        self._engine: Engine | None = None
        self.ranks_end = RanksEnd()
        self._follows = False
        self.is_fetching = False

    def start(self, stopping: threading.Event) -> None:
        """Load this rank's part and follow rank 0 from then on. Raises ModelLoadError."""
        self.ranks_end.stopping = stopping
        note_code()
        folder = self._model_folder()
        check_folder(folder)
        check_weights(folder)
        settings = engine_settings(self._launch.settings, self._launch.disk_cache)
        engine = self._engine = Engine(
            folder,
            replace(settings, blas=what_computes(active_blas(), self._launch.environment)),
            grammar_tokenizer=lambda _: None,
            report=self._terminal.error,
            note=self._terminal.note,
            place=self._place,
            on_lost=self.ranks_end.come,
        )
        for warning in self._launch.warnings:
            self._terminal.note(warning)
        engine.start()
        while not stopping.is_set():
            with suppress(NotReady):
                engine.wait_until_ready(0.1)
                self._follows = True
                self._terminal.note(f"{str(self._place).capitalize()} follows rank 0.")
                return

    def stop(self, *, is_told: bool = False) -> None:
        """Wait for rank 0 to end, and write what is kept."""
        if self._engine is not None:
            with self._terminal.flushing() as tell:
                self._engine.stop(END_SECONDS if self._follows and not self.ranks_end.reason else LOST_SECONDS, tell)

    @property
    def is_computing(self) -> bool:
        """Whether the engine's thread has outlasted `stop`."""
        return self._engine is not None and self._engine.is_running

    def abandoned(self) -> str:
        """What is said where the process ends at once."""
        return f"Stopped at once: {self._place} goes, and the others end with it."

    def _model_folder(self) -> Path:
        name = self._launch.settings.model_path
        if (folder := local_folder(name)) is not None:
            return folder
        self.is_fetching = True
        try:
            return fetched_folder(name, self._terminal.note)
        finally:
            self.is_fetching = False
