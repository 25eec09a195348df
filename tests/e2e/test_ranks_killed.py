"""Two ranks of one model, one of which is killed at any moment, again and again: every open request ends, both
processes are gone, and what both said to be written is found after the restart, with the text of one rank."""

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.disk_cache import MIN_GAIN_TOKENS
from tests.disk_said import SaidOnDisk
from tests.disk_servers import MAX_TOKENS, Messages, Reference, ask, said
from tests.laws import TWO_KINDS
from tests.ranked_servers import END_SECONDS, FOLLOWER, LEADER, RankedServer, ranked
from tests.serving import serving_app

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

NUM_KILLS = int(os.environ.get("NUM_RANK_KILLS", "5"))
"""Of each family."""

MAX_PAUSE_SECONDS = 3.0
ANSWER_SECONDS = 20.0
"""So long a client waits at most for the end of its request once a rank is gone."""

LONG_ANSWER = 400
"""Tokens, so that some clients at least have not all of their answer when a rank is killed."""

SEVERAL_RANKS = "several ranks"
"""In what a client is told."""


class Asked(threading.Thread):
    """One request on a connection of its own, and all that came of it."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._port, self.path, self._body = port, path, body
        self.status, self.text, self.is_broken = 0, "", False

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", self.path, json.dumps(self._body), {"content-type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            while piece := response.read1():
                self.text += piece.decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            self.is_broken = True
        finally:
            connection.close()

    @property
    def is_whole(self) -> bool:
        """Whether all of an answer came."""
        if not self._body.get("stream"):
            return self.status == 200 and not self.is_broken
        ends = {"/v1/chat/completions": '"finish_reason":"', "/v1/messages": "message_stop"}
        end = ends.get(self.path, '"type":"response.incomplete"')  # its tokens are at an end, not what it says
        return end in self.text.replace('": "', '":"') or "response.completed" in self.text

    @property
    def is_told(self) -> bool:
        """Whether it ended with an error in its protocol's form."""
        if self.status != 200:
            return self.status == 503 and "rank_lost" in self.text
        forms = {"/v1/chat/completions": '"error"', "/v1/messages": "event: error"}
        return SEVERAL_RANKS in self.text and forms.get(self.path, "error") in self.text


def asked(port: int, number: int) -> list[Asked]:
    """Four requests of three protocols, long enough to be met anywhere."""
    text = said(6, number)
    turns = [{"role": "user", "content": text}]
    plain = {"model": "m", "max_tokens": LONG_ANSWER, "temperature": 0}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**plain, "messages": turns, "stream": True}),
        ("/v1/chat/completions", {**plain, "messages": turns}),
        ("/v1/messages", {**plain, "messages": turns, "stream": True}),
        ("/v1/responses", {"model": "m", "max_output_tokens": LONG_ANSWER, "input": text, "stream": True}),
    ]
    return [Asked(port, path, body) for path, body in bodies]


def written_tokens(kv: Path, ids: tuple[int, ...], *, needs_states: bool) -> int:
    """How many tokens of a prompt both ranks have said to be written: each has a folder of its own."""
    on_disk = SaidOnDisk(kv)
    on_disk.look()
    files = list(kv.rglob("*.safetensors"))
    depths = []
    for folder in {file.parent for file in files}:
        mine = SaidOnDisk(kv)
        mine.look()
        mine.names &= {name for name in mine.names if (folder / f"{name}.safetensors").exists()}
        depths.append(mine.num_tokens(ids, needs_states=needs_states))
    return min(depths) if len(depths) == 2 else 0


def kill(server: RankedServer, victim: int) -> None:
    """As it stands; the other one ends by itself, with 1."""
    server.ranks[victim].process.send_signal(signal.SIGKILL)
    codes = server.exit_codes(END_SECONDS)
    assert codes[1 - victim] == 1, f"{codes}\n{server.screens}"


def kill_in_load(server: RankedServer, victim: int) -> None:
    """MLX waits for a rank that never comes; whoever has started them tells the others to stop, as mlx.launch does."""
    server.ranks[victim].process.send_signal(signal.SIGKILL)
    server.ranks[victim].process.wait()
    server.ranks[1 - victim].process.send_signal(signal.SIGTERM)
    server.exit_codes(END_SECONDS)


def one_round(server: RankedServer, number: int, chance: random.Random, reference: Reference) -> tuple[int, int]:
    """Some prompts are answered, then one rank is killed under four others; both come back. Returns how many clients
    were told of it, and how many tokens were found again."""
    victim = (LEADER, FOLLOWER)[number % 2]
    prompts: list[Messages] = [(("user", said(5, 50 + number)),), (("user", said(2, 0)),)]
    reference.learn(prompts)
    for messages in prompts:
        assert ask(server.lead, messages, MAX_TOKENS).text == reference.texts[messages]
    open_requests = asked(server.lead.port, number)
    for each in open_requests:
        each.start()
    time.sleep(chance.random() * MAX_PAUSE_SECONDS)
    killed_at = time.monotonic()
    kill(server, victim)
    for each in open_requests:
        each.join(max(0.0, killed_at + END_SECONDS - time.monotonic()))
        assert not each.is_alive(), "a request goes on"
        if victim == FOLLOWER:
            assert each.is_whole or each.is_told, f"{each.path}: {each.status} {each.text[-500:]}\n{server.screens}"
    server.start()
    if number % 3 == 2:  # once more while it loads
        time.sleep(chance.random() * MAX_PAUSE_SECONDS)
        kill_in_load(server, 1 - victim)
        server.start()
    server.wait_until_ready()
    num_found = 0
    for messages in prompts:
        expected = written_tokens(server.kv, reference.ids[messages], needs_states=reference.needs_states)
        answered = ask(server.lead, messages, MAX_TOKENS)
        assert answered.text == reference.texts[messages]
        assert answered.num_cached_tokens > expected - MIN_GAIN_TOKENS, f"{answered}, but {expected} were written"
        num_found += answered.num_cached_tokens if expected else 0
    return sum(each.is_told for each in open_requests), num_found


@pytest.mark.parametrize("family", TWO_KINDS)
def test_a_rank_may_be_killed_at_any_moment(family: str, tmp_path: Path) -> None:
    """Five kills, of either rank in turn."""
    seed = int(os.environ.get("RANK_KILL_SEED", str(random.randrange(2**16))))
    print(f"seed {seed}")
    with (
        serving_app(tmp_path / "reference", family, disk_cache="off") as app,
        ranked(tmp_path / "ranks", family) as server,
    ):
        reference, chance = Reference(app), random.Random(seed)
        rounds = [one_round(server, number, chance, reference) for number in range(NUM_KILLS)]
    print(f"of four clients were told, and tokens were found again: {rounds}")
    assert any(num_told for num_told, _ in rounds), "no client heard of a lost rank"
    assert any(num_found for _, num_found in rounds), "nothing was kept"


PIPELINED, IN_A_PASS = "qwen3_next", 1
"""The seed of a pause of 0.4 seconds: the four requests decode."""


def test_a_rank_of_a_pipeline_may_be_killed(tmp_path: Path) -> None:
    """Rank 0 waits for what the other one would have sent, which is no sum of both."""
    with (
        serving_app(tmp_path / "reference", PIPELINED, disk_cache="off") as app,
        ranked(tmp_path / "ranks", PIPELINED) as server,
    ):
        num_told, _ = one_round(server, FOLLOWER, random.Random(IN_A_PASS), Reference(app))
    assert num_told == 4


STUCK_EARLY = """
from kvserve.engine.ranks import rank_link
rank_link.LONGEST_PASS_SECONDS = 5.0
rank_link.PASS_FACTOR = 1.0
"""
"""A bound that a test can wait for."""


def test_a_rank_that_stands_still_ends_the_group(tmp_path: Path) -> None:
    """SIGSTOP in a pass: its link is open, and nothing comes of the pass. The client hears of it."""
    with ranked(tmp_path, "qwen3", (STUCK_EARLY, "")) as server:
        [request, *_] = asked(server.lead.port, 1)
        request.start()
        time.sleep(1.0)
        server.ranks[FOLLOWER].process.send_signal(signal.SIGSTOP)
        request.join(END_SECONDS)
        assert not request.is_alive()
        assert request.is_told or request.is_whole, request.text
        server.lead.process.wait(END_SECONDS)
        assert server.lead.process.returncode == 1
        with contextlib.suppress(ProcessLookupError):
            server.ranks[FOLLOWER].process.send_signal(signal.SIGCONT)
        assert server.exit_codes() == [1, 1]
