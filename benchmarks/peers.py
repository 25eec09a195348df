"""kvserve beside other servers of MLX models: the same models, the same requests, one run, whatever loses is shown.

    python -m benchmarks.peers [--save] [--only SCENARIO] [--peer NAME] [--model NAME] [--rounds N]
                               [--blas off|auto|FILE] [--compare] [--environments FOLDER]

A server that is not in this environment gets one of its own, in a cache folder, where it can be installed within twenty
minutes. On each model every server is started with an empty home, answers one short question, and stands still
(SIGSTOP) while another one is asked; no text is said in two scenarios or rounds, and in each round the servers take
turns in the other order. `--save` keeps the rows, the tables and the plots; each run is compared with the rows that are
kept, and with `--compare` the exit code is 1 where the order of two servers is another one, though they are more than
10 % apart.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType

from benchmarks.client import BenchmarkError
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.machine import machine
from benchmarks.peer_nouns import MODELS, Figures, PeerModel, Scenario
from benchmarks.peer_report import KEPT, write_page
from benchmarks.peer_rows import SERVERS, Row, by_scenario, losses, medians, scenario_table, servers_table, turned
from benchmarks.peer_scenarios import SCENARIOS
from benchmarks.peer_servers import PEERS, Installed, Peer, ServerProcess, installed, last_error
from benchmarks.peer_wire import Asking, streamed
from benchmarks.recordings import CHAT, Request
from benchmarks.talking import fast_library, talking_model
from kvserve.app.blas import preloading
from kvserve.demo.build import build_model

ANSWER_TOKENS = 24
"""About how long a random model makes its answers."""

SETTLING = {"messages": [{"role": "user", "content": "Hello, are you there?"}]}
"""Asked once of each started server: a process compiles kernels in its first passes, and none of them is measured."""


def environments_folder() -> Path:
    """Where environments of servers are made and kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvserve-peers"


def tell(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a model is served with: its folder and that of its twin that never ends an answer, its oracle, where each
    server is installed, and what was preloaded into all of them."""

    model: PeerModel
    folder: Path
    endless: Path
    oracle: FrozenOracle
    found: Mapping[str, Installed]
    preloaded: Mapping[str, str]


# --- one server in a scenario -----------------------------------------------------------------------------------------


class RunningPeer:
    """A started server on the stage of a scenario."""

    def __init__(self, process: ServerProcess, model: PeerModel, oracle: FrozenOracle) -> None:
        self.model, self.seed = model, 0
        self._process, self._oracle = process, oracle

    def ask(self, path: str, body: Mapping[str, object], headers: Mapping[str, str], num_tokens: int) -> Asking:
        process = self._process
        sent = streamed(path, body, process.peer.model_id(process.model), num_tokens)
        return Asking(process.port, path, sent, headers)

    def settle_in(self) -> None:
        """Raises BenchmarkError where it does not answer."""
        self.ask(CHAT, SETTLING, {}, 4).answer()

    def restart(self, how: signal.Signals) -> None:
        self._process.end(how)
        self._process.start()
        self.settle_in()

    def possible(self, requests: Sequence[Request]) -> list[Possible]:
        self._oracle.forget()
        return [self._oracle.judge(request) for request in requests]


class Entrant:
    """A server on a model, started when it is first asked and again where it failed; what the rounds of the scenario
    that is played gave, or why there is nothing."""

    def __init__(self, peer: Peer, ground: Ground, home: Path) -> None:
        self.peer = peer
        self._ground, self._home, self._num_homes = ground, home, 0
        self._process: ServerProcess | None = None
        self._folder = ground.folder
        self._stage: RunningPeer | None = None
        self._absent = ground.found[peer.name].fault
        self._start_seconds: list[float] = []
        self.rounds: list[Figures] = []
        self.fault = ""

    def begin(self, scenario: Scenario) -> None:
        """Be ready for a scenario, standing still."""
        self.rounds, self.fault = [], self._absent
        folder = self._ground.endless if scenario.is_endless else self._ground.folder
        if folder != self._folder:
            self.end()
            self._folder = folder
        if not self.fault and scenario.path not in self.peer.endpoints:
            self.fault = f"has no {scenario.path}"
        elif not self.fault and self._process is None:
            self._start()
        if self._process is not None:
            self._process.peak_bytes = 0

    def play(self, scenario: Scenario, seed: int) -> None:
        """One round of it."""
        if self.fault or self._stage is None or self._process is None:
            return
        self._stage.seed = seed
        self._process.go_on()
        try:
            self.rounds.append(scenario.play(self._stage))
            self._process.stand_still()
        except BenchmarkError as error:
            self.fault = _words(error)
            self.rounds.clear()
            self.end()  # whatever it still does is not to fall on the next scenario

    def end(self) -> None:
        """End the server, if there is one."""
        if self._process is not None:
            self._process.end(signal.SIGTERM)
        self._process = self._stage = None

    def row(self, scenario: Scenario) -> Row:
        """Of the scenario that was played."""
        started = median(self._start_seconds) if self._start_seconds else None
        figures = replace(medians(self.rounds), start_seconds=started)
        if self._process is not None and self.rounds:
            figures = replace(figures, peak_bytes=self._process.peak_bytes or None)
        return Row(scenario.name, self._ground.model.name, self.peer.name, figures, len(self.rounds), self.fault, "")

    def _start(self) -> None:
        """In a home of its own, which is empty. Who does not start is not asked again on this model."""
        ground, self._num_homes = self._ground, self._num_homes + 1
        home = self._home / str(self._num_homes)
        process = ServerProcess(self.peer, ground.found[self.peer.name], self._folder, home, ground.preloaded)
        try:
            process.start()
            self._start_seconds.append(process.start_seconds)
            stage = RunningPeer(process, ground.model, ground.oracle)
            stage.settle_in()
            process.stand_still()
            self._process, self._stage = process, stage
        except BenchmarkError as error:
            self._absent = self.fault = _words(error)
            process.end(signal.SIGTERM)


def _words(error: BenchmarkError) -> str:
    return last_error(str(error).partition("\n")[0])


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is run: everything, or what was asked for by name."""

    scenarios: Sequence[Scenario] = SCENARIOS
    peers: Sequence[Peer] = PEERS
    models: Sequence[PeerModel] = MODELS
    num_rounds: int | None = None
    blas: Path | None = None

    def rounds_of(self, scenario: Scenario, model: PeerModel) -> int:
        return (self.num_rounds or model.num_rounds) if scenario.has_rounds else 1


def run(wanted: Wanted, environments: Path, put: Callable[[Sequence[Row]], None]) -> list[Row]:
    """Every scenario on every model; `put` is given all rows so far after each. Raises BenchmarkError where the model
    that talks is wanted and cannot be had."""
    preloaded = preloading(wanted.blas, os.environ) if wanted.blas is not None else {}
    found = {peer.name: installed(peer, environments, tell) for peer in wanted.peers}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvserve-peers-") as scratch:
        for model in wanted.models:
            folder, endless = model_folders(model, Path(scratch) / "models", is_fast=wanted.blas is not None)
            oracle = FrozenOracle(model.family, folder, model.convention)
            ground = Ground(model, folder, endless, oracle, found, preloaded)
            for more in on_model(wanted, ground, Path(scratch) / "homes" / model.name):
                rows += more
                put([*rows, *server_rows(wanted.peers, found, rows)])
    return [*rows, *server_rows(wanted.peers, found, rows)]


def on_model(wanted: Wanted, ground: Ground, homes: Path) -> Iterator[list[Row]]:
    """The rows of each scenario in turn. No text of one is said in another, nor in another round."""
    entrants = [Entrant(peer, ground, homes / peer.name) for peer in wanted.peers]
    try:
        for place, scenario in enumerate(SCENARIOS):
            if scenario not in wanted.scenarios or not scenario.suits(ground.model):
                continue
            tell(f"{time.strftime('%H:%M:%S')} {ground.model.name}: {scenario.name}")
            turn = place % len(entrants)
            order = [*entrants[turn:], *entrants[:turn]]
            for entrant in order:
                entrant.begin(scenario)
            for number in range(wanted.rounds_of(scenario, ground.model)):
                for entrant in order[:: -1 if number % 2 else 1]:
                    entrant.play(scenario, seed=100 * place + number)
            yield [entrant.row(scenario) for entrant in entrants]
    finally:
        for entrant in entrants:
            entrant.end()


def model_folders(model: PeerModel, scratch: Path, *, is_fast: bool) -> tuple[Path, Path]:
    """The model's files, and those of its twin that never ends an answer: of the model that talks the same, in 4 bits,
    but in float32 with a BLAS that is fast for it."""
    if not model.is_talking:
        ending = build_model(model.family, scratch / model.name, answer_tokens=ANSWER_TOKENS)
        return ending, build_model(model.family, scratch / f"{model.name}-endless", answer_tokens=None)
    folder = talking_model("float32" if is_fast else "4-bit")
    if folder is None:
        raise BenchmarkError("the model that talks is not here and cannot be fetched")
    return folder, folder


def server_rows(peers: Iterable[Peer], found: Mapping[str, Installed], rows: Sequence[Row]) -> list[Row]:
    """What is known of each server: its versions, or why there is none."""
    told = []
    for peer in peers:
        known = found[peer.name]
        has_started = any(row.figures.start_seconds is not None for row in rows if row.server == peer.name)
        words = known.fault or ", ".join(f"{name} {number}" for name, number in known.versions.items())
        faults = [row.note for row in rows if row.server == peer.name and row.note]
        if faults and not has_started and not known.fault:
            words = f"{words}; {faults[0]}"
        told.append(Row(SERVERS, "", peer.name, Figures(), 0, words, ""))
    return told


def _stamped(rows: Sequence[Row], load: tuple[float, float, float], blas: Path | None) -> list[Row]:
    what = f"{machine(load)} {f'{blas.name} preloaded into all' if blas else 'The BLAS of the wheel of MLX for all'}."
    return [replace(row, measured_on=what) for row in rows]


def _leave(number: int, _frame: FrameType | None) -> None:
    """No server is left behind, standing still."""
    sys.exit(128 + number)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _leave)
    given = _parser().parse_args(argv)
    load, blas = os.getloadavg(), fast_library(given.blas) if given.blas != "off" else None
    wanted = Wanted(
        [each for each in SCENARIOS if not given.only or each.name in given.only],
        [each for each in PEERS if not given.peer or each.name in given.peer],
        [each for each in MODELS if not given.model or each.name in given.model],
        given.rounds,
        blas,
    )
    kept = KEPT.read()

    def put(rows: Sequence[Row]) -> None:
        if given.save:
            KEPT.put(_stamped(rows, load, blas))

    rows = _stamped(run(wanted, given.environments, put), load, blas)
    for line in _told(rows):
        print(line)
    differing = turned(kept, rows)
    for each in differing:
        print(f"Another order than in the kept run: {each}")
    if given.save:
        write_page(KEPT.read())
    return int(bool(given.compare and differing))


def _told(rows: Sequence[Row]) -> Iterator[str]:
    yield rows[0].measured_on
    yield from servers_table(rows)
    for name, found in by_scenario(rows).items():
        yield f"\n{name}"
        yield from scenario_table(found)
    yield "\nWhere another server is better by more than 10 %:"
    yield from losses(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description="kvserve beside other servers.")
    parser.add_argument("--only", action="append", choices=[each.name for each in SCENARIOS], help="this scenario")
    parser.add_argument("--peer", action="append", choices=[each.name for each in PEERS], help="only this server")
    parser.add_argument("--model", action="append", choices=[each.name for each in MODELS], help="only this model")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each scenario that has several; medians count")
    parser.add_argument("--blas", default="off", metavar="off|auto|FILE", help="preloaded into all servers alike")
    parser.add_argument("--environments", type=Path, default=environments_folder(), help="where servers are installed")
    parser.add_argument("--save", action="store_true", help="keep the rows, and write tables and plots of all that are")
    parser.add_argument("--compare", action="store_true", help="fail where the order is not that of the kept rows")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
