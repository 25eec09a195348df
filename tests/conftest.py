"""Settings that must stand before any test module is imported; it knows nothing of the package."""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.schedule"]

# Without bytecode every worker, and every process that a test starts, compiles all it imports and rewrites all asserts.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Next to nothing that collection makes is garbage (a fifth of its time went into looking), and most of what tests leave
# behind is freed without the collector: it looks less often than by default.
gc.disable()
GC_THRESHOLD = 20_000

# On a CPU, mx.compile calls the C++ compiler at first use, which costs seconds.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# On a CPU, MLX hands every operation to a thread of its own, and Linux lets the woken thread interrupt the one that
# woke it: 200,000 context switches a second, a quarter of the time. Under this policy the woken one waits for its turn.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# That thread woken on another core costs more still: a third of all the time of the engine's tests. Each worker, with
# the processes that it starts, keeps to one core.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(_cores)]})
# Tests run with the BLAS of MLX's wheel, whatever the machine has; `tests/engine/test_with_fast_blas.py` looks for one.
os.environ["BLAS_LIBRARY"] = "off"
# A test that would reach for a model hub is a mistake; let it fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"

# The time of one example says little on a shared machine; pytest-timeout guards the whole test. A law that names no
# number of examples has hypothesis' own hundred in `make full`.
settings.register_profile("kvserve", deadline=None, max_examples=100 if os.environ.get("FULL_RUN") == "1" else 30)
settings.load_profile("kvserve")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a run leaves out whole is not even imported: its clients' libraries alone take seconds."""
    if collection_path.name == "e2e" and "not e2e" in config.option.markexpr:
        return True
    return None


def pytest_collection_finish() -> None:
    """Nine thousand collected tests are no garbage: a full collection need not walk over them, here or ever again."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before anything is deselected: what `tests.laws.sampled_cells` leaves out of every run is `long`."""
    for item in items:
        for mark in item.iter_markers("sampled_cells"):
            if isinstance(item, pytest.Function) and not mark.kwargs["where"](**item.callspec.params):
                item.add_marker(pytest.mark.long)
