"""`python -m tests.beside_load`: the default tests, many times, beside a busy loop on each core.

A test that depends on how fast it is fails on somebody's machine sooner or later; here it fails at once. Runs may go
side by side (`--lanes`), which is harder still. Each lane has a copy of the tree: runs in one folder would share what
pytest keeps there. Whatever was started is ended, also where somebody stops this.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.workspace import ROOT, Workspace

RUN_SECONDS = 3600.0
MAX_LINES = 60
"""So much is shown of a run in which something failed."""

LOOP = "while True: pass"


@contextmanager
def busy_loops() -> Iterator[None]:
    """One on each core, until the end; of the same priority as the tests."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(arguments: Sequence[str]) -> int:
    """1 where a test failed in any run."""
    parser = argparse.ArgumentParser(prog="python -m tests.beside_load", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1, help="how many runs go on at once")
    parser.add_argument("arguments", nargs="*", help="for pytest, such as a file; by default all default tests")
    chosen = parser.parse_args(arguments)
    running: set[subprocess.Popen[str]] = set()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="kvserve-load-") as folder, busy_loops():
        lanes: SimpleQueue[Workspace] = SimpleQueue()
        for lane in range(chosen.lanes):
            lanes.put(Workspace(Path(folder) / str(lane)))

        def one(number: int) -> bool:
            space = lanes.get()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", *chosen.arguments],
                    cwd=space.root,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )
                running.add(process)
                stdout, _ = process.communicate(timeout=RUN_SECONDS)
            finally:
                lanes.put(space)
            lines = stdout.splitlines() or [f"pytest ended with {process.returncode}"]
            shown = lines[-1:] if process.returncode == 0 else lines[-MAX_LINES:]
            print(f"run {number}: " + "\n".join(shown), flush=True)
            return process.returncode == 0

        with ThreadPoolExecutor(chosen.lanes) as pool:
            try:
                green = list(pool.map(one, range(1, chosen.runs + 1)))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in running:
                    process.terminate()  # nothing where it has ended
    print(f"{sum(green)} of {len(green)} runs without a failure")
    return 0 if all(green) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
