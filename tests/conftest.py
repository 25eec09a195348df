"""Settings that must stand before any test module is imported; it knows nothing of the package."""

import os

from hypothesis import settings

# On a CPU, mx.compile calls the C++ compiler at first use, which costs seconds.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# A test that would reach for a model hub is a mistake; let it fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"

# The time of one example says little on a shared machine; pytest-timeout guards the whole test.
settings.register_profile("kvserve", deadline=None)
settings.load_profile("kvserve")
