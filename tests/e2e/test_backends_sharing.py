"""Two servers behind two proxies that share a Redis: a session that moves, as its server was killed, goes on warm."""

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recordings import shared_folder
from tests.e2e.cluster import Cluster, ask, cluster
from tests.e2e.servers import ROOT, wait_until
from tests.e2e.session_loops import Loop, Turn, play, recorded_loops
from tests.e2e.test_backends import doors, homes, killed_while_played
from tests.redis_servers import redis_server

NUM_SESSIONS = 20
NUM_PLAYING, MAX_AGAIN_MIDWAY = 40, 0.05
"""How many go on while a server is killed, and the share of their tokens that may be computed again."""

SETTLE_SECONDS = 1.0
MAX_AGAIN = 0.01
"""Of a prompt: 0.001 were measured, and 0.029 without records, with answers of 24 tokens behind a long beginning."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shared_folder() is None, reason="needs the recordings in shared/ in or beside the repository"),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    script = ROOT / "tests" / "e2e" / "reading_pays.py"
    with (
        redis_server(tmp_path / "redis") as redis,
        cluster(tmp_path / "cluster", script, REMOTE_CACHE_URL=redis.url) as started,
    ):
        yield started


def remote(servers: Cluster, name: str) -> dict[str, Any]:
    body = ask(servers.ports[name], "GET", "/v1/cache", key=f"key-of-{name}").json()
    return {**body["remote"], "num_queued_bytes": body["disk"]["num_queued_bytes"]}


def has_sent_all(servers: Cluster, name: str) -> bool:
    told = remote(servers, name)
    return told["num_queued_bytes"] == told["num_queued"] == told["records"]["num_queued"] == 0


def trim(loops: list[Loop]) -> None:
    """Take the white space off the ends of all answers, as many a client does: their text has other tokens then."""
    for loop in loops:
        for entry in loop._history:
            if entry.get("role") == "assistant":
                parts = [entry] if isinstance(entry["content"], str) else entry["content"]
                for part, name in ((part, name) for part in parts for name in ("content", "text") if name in part):
                    part[name] = part[name].strip()


def num_again(before: Turn, turn: Turn) -> int:
    """Tokens that the model had read or written by the turn before, and that were computed again."""
    return max(0, before.num_prompt_tokens + before.num_answer_tokens - turn.num_cached_tokens)


def share_again(loop: Loop) -> float:
    """Of the last turn's prompt."""
    return num_again(*loop.turns[-2:]) / loop.turns[-1].num_prompt_tokens


def test_a_server_that_is_killed_in_the_middle_costs_its_sessions_little(servers: Cluster) -> None:
    """Forty sessions go on while it is killed, and those that moved compute 5 % at most of their tokens again: what it
    had not sent yet. Where a busy machine looks for longer than it may a session is cold, which is counted: so many are
    left out, a few at most. No turn is in error."""
    loops = recorded_loops(NUM_PLAYING, "midway")
    play(loops, doors(servers), 3)
    before = killed_while_played(servers, loops, 3)
    assert set(homes(loops)) == {"a"}
    moved = [loop for loop, home in zip(loops, before, strict=True) if home == "b"]
    told = remote(servers, "a")
    num_given_up = told["num_given_up"] + told["records"]["num_given_up"]
    first = sorted((first_elsewhere(loop) for loop in moved), key=lambda pair: num_again(*pair))
    again = [num_again(*pair) for pair in first]
    num_counted = len(moved) - num_given_up
    share = sum(again[:num_counted]) / sum(turn.num_prompt_tokens for _, turn in first[:num_counted])
    print(
        f"{len(moved)} of {len(loops)} sessions moved, {sum(loop.num_sent_again for loop in loops)} answers broke off; "
        f"of their tokens {share:.3f} were computed again, at most {max(again)} of a session's; a: {told}"
    )
    assert num_given_up <= len(moved) // 4
    assert share <= MAX_AGAIN_MIDWAY, again


def first_elsewhere(loop: Loop) -> tuple[Turn, Turn]:
    """The first turn that the other server answered, and the one before it."""
    at = next(at for at, turn in enumerate(loop.turns) if turn.backend != loop.turns[0].backend)
    return loop.turns[at - 1], loop.turns[at]


def test_a_killed_server_costs_its_sessions_next_to_nothing(servers: Cluster) -> None:
    """Each goes on, on the other server, and computes next to nothing again, in its next turn and in the one after.

    What a server has not sent when it is killed is lost: here all was sent. A look that takes more than half a second,
    as on a machine that does something else, is given up and counted: so many may be cold, a few at most.
    """
    loops = recorded_loops(NUM_SESSIONS, "sharing")
    for number, loop in enumerate(loops):
        loop.headers = {"x-session-id": f"sharing-{number}"}
    for _ in range(3):
        play(loops, doors(servers), 1)
        trim(loops)
    before = homes(loops)
    assert {"a", "b"} <= set(before)
    time.sleep(SETTLE_SECONDS)  # what was written last is offered once its user is noted
    for name in "ab":
        wait_until(partial(has_sent_all, servers, name), 60, lambda: f"{remote(servers, 'a')} {remote(servers, 'b')}")
    sent = remote(servers, "b")
    servers.servers["b"].end(signal.SIGKILL)
    shares = list[list[float]]()
    for _ in range(2):
        for number, loop in enumerate(loops):
            wait_until(lambda: remote(servers, "a")["state"] == "up", 60, lambda: f"{remote(servers, 'a')}")
            loop.turn(doors(servers)[number % 2])
        trim(loops)
        shares.append([share_again(loop) for loop in loops])
    assert set(homes(loops)) == {"a"}
    moved = [number for number, home in enumerate(before) if home == "b"]
    told = remote(servers, "a")
    num_given_up = told["num_given_up"] + told["records"]["num_given_up"]
    print(
        f"{len(moved)} of {len(loops)} sessions moved; of a prompt again, the most: "
        f"{max(shares[0][number] for number in moved):.3f}, in all {max(shares[0]):.3f}; "
        f"{sent['records']['num_sent']} rows of {sent['records']['num_sent_bytes']} bytes were sent by b; a: {told}"
    )
    assert told["records"]["num_refused"] == 0 and num_given_up <= len(moved) // 4
    assert len(moved) - told["records"]["num_conversations"] <= num_given_up
    for turn in shares:
        assert sum(share > MAX_AGAIN for share in turn) <= num_given_up, (moved, shares)
