"""Which tests run together and in which order: a pytest plugin that knows files and how long each of them took.

A test file is the unit of work, so that what its fixtures start (an engine, a server) is started once; files that share
an expensive fixture are one unit (`TOGETHER`), and a file that takes minutes is cut into pieces. Units go out slowest
first, by the durations that `tests/durations.json` keeps for the default and for the full run; `--keep-durations`
measures them anew. `--part K/N` runs the K-th of N parts of about the same length.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.laws import IS_FULL

DURATIONS_FILE = Path(__file__).with_name("durations.json")
ROOT = DURATIONS_FILE.parent.parent
RUN = "full" if IS_FULL else "default"

TOGETHER = ("tests/proxy/", "tests/protocols/")
"""Folders whose files share what is expensive: a LiteLLM process, the import of the clients' libraries."""

MOVING = "tests/engine/test_moving_ends.py"
ALONG = {
    "tests/test_stopped_answers.py": "tests/protocols/",
    "tests/engine/test_kv_moves.py": MOVING,
    "tests/engine/test_moving_faults.py": MOVING,
    "tests/engine/test_put_back.py": MOVING,
}
"""Files that need what such a folder or another file shares."""

MAX_STALE_FILES = 20
"""More test files than this without their rewritten bytecode are compiled once, before the workers start."""

LEFT_OUT = ("e2e", "with_drafts")
"""Folders whose files no worker of the default run imports."""

UNKNOWN_SECONDS = 5.0
"""For a file that was never measured: early enough that it is not the last one to end."""

PIECE_SECONDS = 60.0
"""A file that takes longer than two of these is cut into pieces of about this length."""

type Durations = Mapping[str, float]


def file_of(node_id: str) -> str:
    """What durations are kept for: the test's file, or the folder that shares a fixture."""
    path = node_id.partition("::")[0]
    return ALONG.get(path) or next((folder for folder in TOGETHER if path.startswith(folder)), path)


class Units:
    """Node ids sorted into units; each unit has a length in seconds, by what its file took.

    `num_parts`: the node ids are one of so many parts, so of a file that is cut only about that share is there.
    """

    def __init__(self, node_ids: Sequence[str], durations: Durations, num_parts: int = 1) -> None:
        by_file: dict[str, list[str]] = {}
        for node_id in node_ids:
            by_file.setdefault(file_of(node_id), []).append(node_id)
        self.of: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        for file, ids in by_file.items():
            seconds = durations.get(file, UNKNOWN_SECONDS)
            if seconds > 2 * PIECE_SECONDS:
                seconds /= num_parts
            num_pieces = min(len(ids), int(seconds // PIECE_SECONDS)) if seconds > 2 * PIECE_SECONDS else 1
            for place, node_id in enumerate(ids):
                piece = place * num_pieces // len(ids)
                self.of[node_id] = f"{file}#{piece}" if num_pieces > 1 else file
            self.seconds.update({self.of[node_id]: seconds / num_pieces for node_id in ids})

    def slowest_first(self) -> list[str]:
        """Longest first, by name where that is equal."""
        return sorted(self.seconds, key=lambda unit: (-self.seconds[unit], unit))

    def parts(self, num_parts: int) -> list[set[str]]:
        """Units dealt to parts of about the same length: longest first, each to the part that is shortest so far."""
        parts: list[set[str]] = [set() for _ in range(num_parts)]
        lengths = [0.0] * num_parts
        for unit in self.slowest_first():
            shortest = lengths.index(min(lengths))
            parts[shortest].add(unit)
            lengths[shortest] += self.seconds[unit]
        return parts


def read_durations(run: str = RUN) -> dict[str, float]:
    """Seconds of each file in that run; empty where none were kept."""
    return {file: float(seconds) for file, seconds in _read_file().get(run, {}).items()}


def keep_durations(measured: Durations) -> None:
    """Add what was measured to the kept durations; files that no longer exist leave them."""
    whole = _read_file()
    known = whole.get(RUN, {}) | {file: round(seconds, 1) for file, seconds in measured.items()}
    whole[RUN] = {file: known[file] for file in sorted(known) if (ROOT / file).exists()}
    DURATIONS_FILE.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _read_file() -> dict[str, Any]:
    if not DURATIONS_FILE.exists():
        return {}
    whole: dict[str, Any] = json.loads(DURATIONS_FILE.read_text(encoding="utf-8"))
    return whole


def stale_files(folder: Path) -> list[Path]:
    """Test modules whose bytecode, in which pytest has rewritten the asserts, is missing or older than they are."""
    stale = []
    left_out = {path for name in LEFT_OUT for path in folder.glob(f"{name}/*")}
    for source in set(folder.rglob("test_*.py")) - left_out:
        compiled = list((source.parent / "__pycache__").glob(f"{source.stem}.{sys.implementation.cache_tag}-pytest-*"))
        if all(file.stat().st_mtime <= source.stat().st_mtime for file in compiled):
            stale.append(source)
    return stale


class SlowestFirst(LoadScopeScheduling):
    """Hands whole units to the workers, in the order in which these have sorted their tests."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would sort units by their number of tests
        self._unit_of: dict[str, str] = {}

    def schedule(self) -> None:
        if not self._unit_of:
            part = self.config.getoption("--part")
            node_ids = next(iter(self.registered_collections.values()))
            self._unit_of = Units(node_ids, read_durations(), num_parts=_parse_part(part)[1] if part else 1).of
        super().schedule()

    def remove_node(self, node: Any) -> str | None:
        """A worker has ended. Of one that crashed, xdist would hand out all its units again, the finished ones and the
        test that crashed too, and wait for ever (pytest-xdist issues 784 and 1323)."""
        workload = self.assigned_work.pop(node)
        unfinished = [node_id for unit in workload.values() for node_id, is_done in unit.items() if not is_done]
        if not unfinished:
            return None
        crashed = unfinished[0]
        for unit, tests in workload.items():
            left = {node_id: False for node_id, is_done in tests.items() if not is_done and node_id != crashed}
            if left:
                self.workqueue[unit] = left
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        return self._unit_of[nodeid]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvserve")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts of about the same length")
    group.addoption("--keep-durations", action="store_true", help="write tests/durations.json from what this run took")


def pytest_configure(config: pytest.Config) -> None:
    if part := config.getoption("--part"):
        _parse_part(part)
    config.pluginmanager.register(Schedule(), "kvserve-schedule")


class Schedule:
    """What one process of a run does and measures: the controller, a worker, or the only one."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._num_run: Counter[str] = Counter()
        self._num_collected: Counter[str] = Counter()
        self._collection_seconds: list[float] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config) -> None:
        """In a fresh clone every worker would rewrite the asserts of every test: that takes twice their collection."""
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if not is_whole or len(stale_files(DURATIONS_FILE.parent)) <= MAX_STALE_FILES:
            return
        print("Compiling the tests once, for all workers.", flush=True)
        # Whatever cannot be collected is for the run itself to tell.
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", "-m", config.option.markexpr]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> SlowestFirst:
        return SlowestFirst(config, log)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        started = time.process_time()
        result = yield
        self._collection_seconds.append(time.process_time() - started)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Only this run's part and, where several workers share it, the slowest unit first."""
        self._num_collected.update(file_of(item.nodeid) for item in items)
        units, num_parts = Units([item.nodeid for item in items], read_durations()), 1
        if part := config.getoption("--part"):
            number, num_parts = _parse_part(part)
            wanted = units.parts(num_parts)[number - 1]
            config.hook.pytest_deselected(items=[item for item in items if units.of[item.nodeid] not in wanted])
            items[:] = [item for item in items if units.of[item.nodeid] in wanted]
        if hasattr(config, "workerinput"):
            units = Units([item.nodeid for item in items], read_durations(), num_parts)
            rank = {unit: place for place, unit in enumerate(units.slowest_first())}
            items.sort(key=lambda item: rank[units.of[item.nodeid]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration
        self._num_run[file_of(report.nodeid)] += report.when == "call"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["collection_seconds"] = sum(self._collection_seconds)
            output["num_collected"] = dict(self._num_collected)
        elif session.config.getoption("--keep-durations"):
            # Of a file that is cut, a part runs some pieces only.
            share = {file: self._num_run[file] / self._num_collected[file] for file in self._seconds}
            keep_durations({file: seconds / max(share[file], 1e-3) for file, seconds in self._seconds.items()})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", None)  # a worker that crashed has none
        if output is not None:
            self._collection_seconds.append(output["collection_seconds"])
            self._num_collected.update(output["num_collected"] if not self._num_collected else {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent = " and ".join(f"{seconds:.1f}" for seconds in self._collection_seconds if seconds > 0.5)
        if spent:
            terminalreporter.write_line(f"Collection took {spent} CPU seconds.")


def _parse_part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part takes K/N with 1 <= K <= N, for instance 2/3, and not {text!r}")
    return int(number), int(count)
