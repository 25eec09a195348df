"""kill -9 of a real server at any moment: the next one starts, is warm, and never writes a wrong token."""

import contextlib
import http.client
import os
import random
import shutil
import signal
import threading
import time
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvserve.cache.disk_blob import BlobHead, BlobName, unpack_blob
from kvserve.demo.build import TINY
from tests.disk_said import SaidOnDisk
from tests.disk_servers import (
    PATIENCE_SECONDS,
    Reference,
    Server,
    ask,
    assert_found,
    cache_report,
    clear,
    post,
    said,
    wait_until_ready,
)
from tests.e2e.servers import ServerProcess, serving, wait_until
from tests.models import tiny_model
from tests.serving import serving_app

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite")
KEPT_SECONDS = 3.0
"""What is older outlives any kill."""

DEEPER = replace(TINY, num_layers=8)
"""8k tokens in small steps take it many times three seconds, and in large ones less than a client waits."""

NUM_KILLS = int(os.environ.get("NUM_KILLS", "4"))
SYSTEM = said(15, 0)
PROMPTS = [
    *((SYSTEM, said(3 * seed, seed)) for seed in range(1, 5)),
    (said(60, 7), "Go on."),
    (said(60, 7), said(10, 8)),
]


def num_prompt_tokens(server: Server) -> int:
    """Of all requests so far."""
    return int(cache_report(server)["num_prompt_tokens"])


def answer(server: Server, prompt: tuple[str, str], max_tokens: int = 16, **fields: object) -> tuple[str, float]:
    """A greedy answer, and the share of the prompt (system and user text) that was found."""
    system, user = prompt
    answered = ask(server, (("system", system), ("user", user)), max_tokens, **fields)
    return answered.text, answered.share


def wait_until_written(server: Server) -> None:
    """Until the disk has bytes, none is queued, and that has been so for a second."""
    looks: list[int] = []

    def is_settled() -> bool:
        report = cache_report(server)
        num_bytes = report["disk_bytes"] if not report["disk"]["num_queued_bytes"] else 0
        looks.append(num_bytes)
        time.sleep(0.1)
        return num_bytes > 0 and looks[-10:] == [num_bytes] * 10

    wait_until(is_settled, 60, lambda: f"not settled: {looks}")


def test_the_files_of_a_server_that_runs_are_warm_for_another(tmp_path: Path) -> None:
    """What a kill would leave: once the disk has taken what there was, the prompt is known, the text is the same."""
    with serving_app(tmp_path / "running", "qwen3_5") as app:
        expected, share = answer(app, PROMPTS[0])
        assert share == 0
        wait_until_written(app)
        shutil.copytree(tmp_path / "running", tmp_path / "left")
    with serving_app(tmp_path / "left", "qwen3_5") as app:
        text, share = answer(app, PROMPTS[0])
    assert text == expected and share >= 0.95


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_killed_server_is_warm_again(tmp_path: Path) -> None:
    """Once the disk has taken what there was: the prompt is known, the text is the same."""
    model = str(tiny_model("qwen3_5"))
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        expected, _ = answer(server.wait_until_healthy(), PROMPTS[0])
        wait_until_written(server)
        server.end(signal.SIGKILL)
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        text, share = answer(server.wait_until_healthy(), PROMPTS[0])
    assert text == expected and share >= 0.95


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_seconds_after_an_answer_a_kill_loses_nothing(family: str, tmp_path: Path) -> None:
    """By the clock, whatever the disk says: the last prompt is known after the kill, and the text is the same."""
    model = str(tiny_model(family))
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        answer(server.wait_until_healthy(), PROMPTS[1])
        expected, _ = answer(server, PROMPTS[0])
        time.sleep(KEPT_SECONDS)
        server.end(signal.SIGKILL)
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        text, share = answer(server.wait_until_healthy(), PROMPTS[0])
    print(f"{family}: {share:.3f} of the last prompt is warm")
    assert text == expected and share >= 0.95


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", FAMILIES)
def test_sigterm_loses_nothing(family: str, tmp_path: Path) -> None:
    """All that was warm before is as warm after the restart, to the token, and says the same."""
    model = str(tiny_model(family))
    with serving(tmp_path, "--model", model, with_proxy=False, WARM_NEXT_TURN="false") as server:
        server.wait_until_healthy()
        for prompt in PROMPTS:
            answer(server, prompt)
        expected = [answer(server, prompt) for prompt in PROMPTS]
        server.end(signal.SIGTERM)
    with serving(tmp_path, "--model", model, with_proxy=False, WARM_NEXT_TURN="false") as server:
        server.wait_until_healthy()
        found = [answer(server, prompt) for prompt in PROMPTS]
    print(f"{family}: {[f'{share:.3f}' for _, share in found]} of the prompts are warm")
    assert found == expected and min(share for _, share in expected) > 0.9


@dataclass
class Stored:
    """How many tokens of KV a server had at which moment."""

    looks: list[tuple[float, int]] = field(default_factory=list)

    def look(self, server: ServerProcess) -> None:
        report = cache_report(server)
        self.looks.append((time.monotonic(), report["num_stored_tokens"]))

    def at(self, moment: float) -> int:
        """What was complete then."""
        return max((num_tokens for seen_at, num_tokens in self.looks if seen_at <= moment), default=0)

    def watch(self, server: ServerProcess, num_more_tokens: int) -> int:
        """Look until so many more tokens have been complete for three seconds, then kill; what was complete then."""
        self.look(server)
        first = self.looks[0][1]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.at(time.monotonic() - KEPT_SECONDS) < first + num_more_tokens:
            assert time.monotonic() < deadline, self.looks[-5:]
            time.sleep(0.1)
            self.look(server)
        assert server.health()[1]["num_running"] == 1, "it was over before the kill"  # type: ignore[index]
        server.end(signal.SIGKILL)
        return self.at(time.monotonic() - KEPT_SECONDS)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_what_a_long_prefill_had_is_warm(family: str, tmp_path: Path) -> None:
    """Killed in the middle of 8k tokens: what was complete three seconds before is not computed again, and what is
    written with it is what a server writes that has to compute all of it."""
    model, prompt = str(tiny_model(family, scale=DEEPER)), ("Be brief.", said(280, 3))
    small_steps = {"PREFILL_STEP_SIZE": 16}  # so that it takes many times three seconds
    with serving(tmp_path, "--model", model, with_proxy=False, **small_steps) as server:
        server.wait_until_healthy()
        threading.Thread(target=ask_quietly, args=(server, prompt), daemon=True).start()
        server.wait_for(num_prefilling=1)
        num_complete = Stored().watch(server, 1000)
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        (text, share), num_tokens = answer(server.wait_until_healthy(), prompt), num_prompt_tokens(server)
        clear(server)
        assert answer(server, prompt) == (text, 0)
    print(f"{family}: {round(share * num_tokens)} of {num_tokens} tokens are warm, {num_complete} had been complete")
    assert num_tokens > 8000 and 1000 <= num_complete < num_tokens
    assert round(share * num_tokens) >= num_complete


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_what_a_long_answer_had_is_warm(family: str, tmp_path: Path) -> None:
    """Killed in the middle of an answer: whoever goes on from what was complete three seconds before computes nothing
    of it, and is answered as by a server that has to."""
    model = str(tiny_model(family))
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        server.wait_until_healthy()
        threading.Thread(target=ask_quietly, args=(server, PROMPTS[0], 100_000), daemon=True).start()
        server.wait_for(num_decoding=1)
        num_complete = Stored().watch(server, 400)
    path = longest_path(tmp_path / "kv")
    assert len(path) >= num_complete
    body = {"prompt": [*path[:num_complete], 300], "max_tokens": 16, "temperature": 0, "repetition_penalty": 1}
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        server.wait_until_healthy()
        warm = post(server, "/v1/completions", body)
        clear(server)
        cold = post(server, "/v1/completions", body)
    num_cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (warm, cold)]
    print(f"{family}: {num_cached[0]} tokens are warm, {num_complete} had been complete")
    assert num_cached == [num_complete, 0]
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def longest_path(folder: Path) -> list[int]:
    """The tokens of the longest prefix that whole files on disk have."""
    names = [BlobName(path.stem) for path in folder.rglob("*.safetensors")]
    heads = [unpack_blob(next(folder.rglob(f"{name}.safetensors")).read_bytes(), name).head for name in names]
    segments = {head.name: head for head in heads if head.kind == "segment"}
    last: BlobHead | None = max(segments.values(), key=lambda head: head.tokens.end)
    end, ids = last.tokens.end, list[int]()  # type: ignore[union-attr]
    while last is not None:
        ids = [*array("I", last.tokens.packed(last.tokens.start, end)), *ids]
        end, last = last.tokens.start, segments.get(BlobName(last.parent))
    return ids


def ask_quietly(server: ServerProcess, prompt: tuple[str, str], max_tokens: int = 16) -> None:
    """A request whose server may die, or be ended by a test that failed."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AssertionError):
        answer(server, prompt, max_tokens)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_moment_of_a_kill_leads_to_a_wrong_token(family: str, tmp_path: Path) -> None:
    """Random kill points under traffic, some while it starts: every start succeeds, nothing is computed that the one
    before said to be written, every answer is that of a server that keeps nothing."""
    rng, model = random.Random(4), str(tiny_model(family))
    prompts = [(("system", system), ("user", user)) for system, user in PROMPTS]
    with serving_app(tmp_path / "cold", family, disk_cache="off") as app:
        reference = Reference(app)
        reference.learn(prompts)
    on_disk, num_found = SaidOnDisk(tmp_path / "warm" / "kv"), 0
    small_steps = {"PREFILL_STEP_SIZE": 16}  # so that to read always pays
    for number in range(NUM_KILLS):
        if number % 4 == 3:
            with serving(tmp_path / "warm", "--model", model, with_proxy=False, **small_steps) as server:
                time.sleep(rng.random() * 2)
                server.end(signal.SIGKILL)
        with serving(tmp_path / "warm", "--model", model, with_proxy=False, **small_steps) as server:
            wait_until_ready(server)
            num_found += assert_found(server, prompts, reference, on_disk)
            others = [(SYSTEM, said(rng.randrange(2, 120), rng.randrange(9, 1000))) for _ in range(4)]
            threads = [threading.Thread(target=ask_quietly, args=(server, prompt), daemon=True) for prompt in others]
            for thread in threads:
                thread.start()
            time.sleep(rng.random() * 2)
            server.end(signal.SIGKILL)
            for thread in threads:
                thread.join(PATIENCE_SECONDS)
        on_disk.look()
    print(f"{family}: {NUM_KILLS} kills under traffic, {NUM_KILLS * len(PROMPTS)} answers the same, {num_found} tokens")
    assert num_found > sum(map(len, reference.ids.values()))
