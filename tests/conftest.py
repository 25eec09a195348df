"""Settings that must stand before any test module is imported; it knows nothing of the package."""

import os

import pytest
from hypothesis import settings

# On a CPU, mx.compile calls the C++ compiler at first use, which costs seconds.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# A test that would reach for a model hub is a mistake; let it fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"

# The time of one example says little on a shared machine; pytest-timeout guards the whole test.
settings.register_profile("kvserve", deadline=None)
settings.load_profile("kvserve")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before anything is deselected: what `tests.laws.sampled_cells` leaves out of every run is `long`."""
    for item in items:
        for mark in item.iter_markers("sampled_cells"):
            if isinstance(item, pytest.Function) and not mark.kwargs["where"](**item.callspec.params):
                item.add_marker(pytest.mark.long)
