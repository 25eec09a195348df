"""One model over two ranks, each a process of its own on this machine, as their tests start, ask and end them. MLX's
ring joins them. It speaks HTTP to rank 0, and knows no engine."""

import contextlib
import http.client
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.servers import ROOT, START_SCRIPT, ServerProcess, wait_until
from tests.models import tiny_model
from tests.ports import free_port

NUM_RANKS = 2
END_SECONDS = 60.0
LEADER, FOLLOWER = range(NUM_RANKS)

ALIKE = {"SPECULATION": "off", "WARM_NEXT_TURN": "false", "PREWARM_PREFIXES": 0, "MLX_DISABLE_COMPILE": 1}
"""What is off over ranks is off on the one rank that they are compared with. Both read from disk whatever it took."""

READING_PAYS = """
from kvserve.cache.disk_tier import DiskTier
DiskTier.read_rate = property(lambda _: None, lambda *_: None)
"""


def start_script(folder: Path, fault: str = "") -> Path:
    """The start of a server to which reading pays, however slow a busy machine's disk is, with a fault of its code."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "start_llm.py"
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(path + READING_PAYS + fault + START_SCRIPT.read_text("utf-8"), "utf-8")
    return script


NEAR_TIE = 1e-4
"""Two tokens that are so close in their log-probabilities may change places: the parts of a sum are added in another
order, which makes errors of 1.5e-5 (`tests/e2e/test_ranks_noise.py`)."""


class RankedServer:
    """Two ranks on one folder of KV, `folder/kv`."""

    def __init__(self, folder: Path, family: str, faults: Sequence[str] = ("", ""), **settings: object) -> None:
        """`faults` is code of each rank that runs before it starts."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.kv = folder / "kv"
        self._family, self._settings = family, settings
        self._scripts = [start_script(folder / f"start{rank}", fault) for rank, fault in enumerate(faults)]
        self.ranks: list[ServerProcess] = []
        self.start()

    def start(self) -> None:
        """Start both, at ports that are free now."""
        hosts = self.folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(NUM_RANKS)]), "utf-8")
        model = str(tiny_model(self._family))
        common = {"MLX_HOSTFILE": hosts, "DISK_CACHE_DIR": self.kv, **ALIKE, **self._settings}
        options = {"with_proxy": False, "port": free_port(), **common}  # the same command on all ranks
        self.ranks = [
            ServerProcess(self.folder / str(rank), "--model", model, script=script, MLX_RANK=rank, **options)
            for rank, script in enumerate(self._scripts)
        ]

    @property
    def lead(self) -> ServerProcess:
        """The rank that is asked."""
        return self.ranks[LEADER]

    @property
    def screens(self) -> str:
        return "\n".join(f"--- rank {rank}\n{each.screen}" for rank, each in enumerate(self.ranks))

    def wait_until_ready(self) -> "RankedServer":
        self.lead.wait_until_healthy()
        return self

    def exit_codes(self, seconds: float = END_SECONDS) -> list[int]:
        """Of both, once they are gone."""
        wait_until(lambda: all(each.process.poll() is not None for each in self.ranks), seconds, lambda: self.screens)
        return [int(each.process.returncode) for each in self.ranks]

    def stop(self) -> list[int]:
        """Tell both to stop, as mlx.launch does; the exit codes."""
        for each in self.ranks:
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGTERM)
        return self.exit_codes()

    def close(self) -> None:
        for each in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(signal.SIGCONT)
            each.process.kill()
            each.process.wait()


@contextlib.contextmanager
def ranked(folder: Path, family: str, faults: Sequence[str] = ("", ""), **settings: object) -> Iterator[RankedServer]:
    """Two ranks that answer; at the end both are gone."""
    server = RankedServer(folder, family, faults, **settings)
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class Written:
    """An answer, token by token: its text, and how much likelier it was than the next best, in log-probabilities."""

    tokens: tuple[str, ...]
    gaps: tuple[float, ...]
    num_cached_tokens: int


def write(port: int, text: str, num_tokens: int = 48, never: Iterable[int] = ()) -> Written:
    """A greedy answer to a user's message, without the tokens of `never`. It thinks nothing: log-probabilities are
    those of what is said."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "repetition_penalty": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {str(token): -100 for token in never},
        "enable_thinking": False,
    }
    answer = posted(port, "/v1/chat/completions", body)
    tokens = answer["choices"][0]["logprobs"]["content"]
    likely = [sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True) for token in tokens]
    return Written(
        tuple(token["token"] for token in tokens),
        tuple(best - second for best, second in likely),
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def posted(port: int, path: str, body: Any) -> Any:
    """The body of an answer that succeeded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, found
    return found
