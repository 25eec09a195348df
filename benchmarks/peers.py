"""kvserve beside other servers of MLX models: the same models, the same requests, one run, whatever loses is shown.

    python -m benchmarks.peers [--save] [--only SCENARIO] [--peer NAME] [--model NAME] [--rounds N]
                               [--blas off|auto|FILE] [--compare] [--environments FOLDER]

A server that is not in this environment gets one of its own, in a cache folder, where it can be installed within twenty
minutes. In each scenario every server is started anew with an empty home, answers one short question, and stands still
(SIGSTOP) while another one is asked; in each round they take turns in the other order. `--save` keeps the rows, the
tables and the plots; each run is compared with the rows that are kept, and with `--compare` the exit code is 1 where
the order of two servers is another one, though they are more than 10 % apart.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.client import BenchmarkError
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.machine import machine
from benchmarks.peer_report import KEPT, write_page
from benchmarks.peer_rows import SERVERS, Row, by_scenario, losses, medians, scenario_table, servers_table, turned
from benchmarks.peer_scenarios import MODELS, SCENARIOS, Figures, PeerModel, Scenario
from benchmarks.peer_servers import PEERS, Installed, Peer, ServerProcess, installed, last_error
from benchmarks.peer_wire import Asking, streamed
from benchmarks.recordings import CHAT, Request
from benchmarks.talking import fast_library, talking_model
from kvserve.app.blas import preloading
from kvserve.demo.build import build_model

SETTLING = {"messages": [{"role": "user", "content": "Hello, are you there?"}]}
"""Asked once of each started server: the first passes of a process compile kernels, and none of them is measured."""


def environments_folder() -> Path:
    """Where environments of servers are made and kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvserve-peers"


def tell(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


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


@dataclass(slots=True)
class Entrant:
    """A server in a scenario on a model: what its rounds gave, or why it has none."""

    peer: Peer
    process: ServerProcess | None = None
    stage: RunningPeer | None = None
    rounds: list[Figures] = field(default_factory=list)
    fault: str = ""

    def row(self, scenario: Scenario, model: PeerModel) -> Row:
        figures = medians(self.rounds)
        if self.process is not None and self.rounds:
            figures = replace(
                figures, peak_bytes=self.process.peak_bytes or None, start_seconds=self.process.start_seconds
            )
        return Row(scenario.name, model.name, self.peer.name, figures, len(self.rounds), self.fault, "")


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part on a model: where each is installed, the model's folder, and what was preloaded into all of them.
    `absent` collects who does not start on the model, and why: nobody is waited for twice."""

    model: PeerModel
    folder: Path
    oracle: FrozenOracle
    found: Mapping[str, Installed]
    preloaded: Mapping[str, str]
    absent: dict[str, str] = field(default_factory=dict)


def played(scenario: Scenario, ground: Field, peers: Sequence[Peer], num_rounds: int) -> list[Row]:
    """Each server's rows in a scenario; who cannot take part has one that says why."""
    entrants = [Entrant(peer) for peer in peers]
    with ExitStack() as running:
        scratch = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="kvserve-peers-")))
        for entrant in entrants:
            _enter(entrant, scenario, ground, scratch, running)
        for number in range(num_rounds):
            for entrant in entrants[:: -1 if number % 2 else 1]:
                if entrant.stage is not None and not entrant.fault:
                    _play(entrant, scenario, number)
    return [entrant.row(scenario, ground.model) for entrant in entrants]


def _enter(entrant: Entrant, scenario: Scenario, ground: Field, scratch: Path, running: ExitStack) -> None:
    peer, found = entrant.peer, ground.found[entrant.peer.name]
    if found.fault:
        entrant.fault = found.fault
    elif scenario.path not in peer.endpoints:
        entrant.fault = f"has no {scenario.path}"
    elif peer.name in ground.absent:
        entrant.fault = ground.absent[peer.name]
    else:
        process = ServerProcess(peer, found, ground.folder, scratch / peer.name, ground.preloaded)
        try:
            running.enter_context(process)
            entrant.stage = RunningPeer(process, ground.model, ground.oracle)
            entrant.stage.settle_in()
            process.stand_still()
            entrant.process = process
        except BenchmarkError as error:
            entrant.stage, entrant.fault = None, _words(error)
            ground.absent[peer.name] = entrant.fault
            process.end(signal.SIGTERM)


def _play(entrant: Entrant, scenario: Scenario, number: int) -> None:
    assert entrant.stage is not None and entrant.process is not None
    entrant.stage.seed = number
    entrant.process.go_on()
    try:
        entrant.rounds.append(scenario.play(entrant.stage))
    except BenchmarkError as error:
        entrant.fault = _words(error)
        entrant.rounds.clear()
    finally:
        entrant.process.stand_still()


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
    number = 0
    with tempfile.TemporaryDirectory(prefix="kvserve-peer-models-") as scratch:
        for model in wanted.models:
            folder = model_folder(model, Path(scratch), is_fast=wanted.blas is not None)
            oracle = FrozenOracle(model.family, folder, model.convention)
            ground = Field(model, folder, oracle, found, preloaded)
            for scenario in wanted.scenarios:
                if not scenario.suits(model):
                    continue
                turn = number % len(wanted.peers)
                number += 1
                tell(f"{model.name}: {scenario.name}")
                order = [*wanted.peers[turn:], *wanted.peers[:turn]]
                rows += played(scenario, ground, order, wanted.rounds_of(scenario, model))
                put([*rows, *server_rows(wanted.peers, found, rows)])
    return [*rows, *server_rows(wanted.peers, found, rows)]


def model_folder(model: PeerModel, scratch: Path, *, is_fast: bool) -> Path:
    """The model's files: in 4 bits, but in float32 with a BLAS that is fast for it."""
    if not model.is_talking:
        return build_model(model.family, scratch / model.name, answer_tokens=None)
    folder = talking_model("float32" if is_fast else "4-bit")
    if folder is None:
        raise BenchmarkError("the model that talks is not here and cannot be fetched")
    return folder


def server_rows(peers: Iterable[Peer], found: Mapping[str, Installed], rows: Sequence[Row]) -> list[Row]:
    """What is known of each server: its versions, how long its starts took, or why there is none."""
    told = []
    for peer in peers:
        known = found[peer.name]
        starts = [
            seconds for row in rows if row.server == peer.name and (seconds := row.figures.start_seconds) is not None
        ]
        words = known.fault or ", ".join(f"{name} {number}" for name, number in known.versions.items())
        faults = [row.note for row in rows if row.server == peer.name and row.note]
        if not starts and faults and not known.fault:
            words = f"{words}; {faults[0]}"
        figures = Figures(start_seconds=median(starts) if starts else None)
        told.append(Row(SERVERS, "", peer.name, figures, len(starts), words, ""))
    return told


def _stamped(rows: Sequence[Row], load: tuple[float, float, float], blas: Path | None) -> list[Row]:
    what = f"{machine(load)} {f'{blas.name} preloaded into all' if blas else 'The BLAS of the wheel of MLX for all'}."
    return [replace(row, measured_on=what) for row in rows]


def main(argv: Sequence[str]) -> int:
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


def _told(rows: Sequence[Row]) -> Iterable[str]:
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
