"""What compares logits and greedy text holds with a fast BLAS too, whose last bits depend on how much is computed.

KVSERVE_TEST_BLAS names the library; otherwise one is looked for as the server looks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.app.blas import fault_of, preloading
from kvserve.settings.blas_files import library_files

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "test_prefix_cache.py",
    "test_prefix_cache_controls.py",
    "test_prefill_together.py",
    "test_before_stop.py",
    "test_snapshot.py",
    "test_batch_kv.py",
    "test_logprobs.py",
    "test_put_back.py",
    "test_worker.py",
)
"""Warm against cold rows, rows together against rows alone, and the controls that such a comparison must notice."""

RUN = """
import sys
from kvserve.app.blas import active_blas
assert active_blas() is not None, "the library was not preloaded"
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def fast_blas() -> Path:
    """The first library that works."""
    named = os.environ.get("KVSERVE_TEST_BLAS", "auto")
    files = library_files(named if named in ("auto", "off") else Path(named), Path(sys.prefix))
    found = next((file for file in files if fault_of(file, os.environ) is None), None)
    if found is None:
        pytest.skip("there is no fast BLAS here; KVSERVE_TEST_BLAS=FILE names one")
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_logits_and_text_are_within_their_tolerance_with_a_fast_blas() -> None:
    """The same tests as in the default run, in a process that has it preloaded, on all cores."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FULL_RUN"))}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        environ |= preloading(fast_blas(), environ)
        command = [sys.executable, "-c", RUN, "-q", "-n", "0", *(f"tests/engine/{name}" for name in FILES)]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, cores)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
