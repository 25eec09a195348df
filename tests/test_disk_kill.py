"""kill -9 of a real server at any moment: the next one starts, is warm, and never writes a wrong token."""

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.servers import ServerProcess, serving, wait_until
from tests.models import tiny_model

OTHERS = ("qwen3", "gemma3", "gpt_oss", "glm4_moe_lite")
"""Besides qwen3_5, which is killed in every run of the tests."""

NUM_KILLS = int(os.environ.get("NUM_KILLS", "8"))
WORDS = "The quick brown fox reads file {0} again and counts line {1} of {2} before it runs. "


def said(num_sentences: int, seed: int) -> str:
    """A text of so many sentences (about 20 tokens each), another one for another seed."""
    return "".join(WORDS.format(seed, number, seed * number) for number in range(num_sentences))


SYSTEM = said(15, 0)
PROMPTS = [
    *((SYSTEM, said(3 * seed, seed)) for seed in range(1, 5)),
    (said(60, 7), "Go on."),
    (said(60, 7), said(10, 8)),
]


def answer(server: ServerProcess, prompt: tuple[str, str], max_tokens: int = 16) -> tuple[str, float]:
    """A greedy answer, and the share of the prompt (system and user text) that was found."""
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), prompt, strict=True)]
    body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "repetition_penalty": 1}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        body = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, body
    message, usage = body["choices"][0]["message"], body["usage"]  # type: ignore[index]
    text = f"{message.get('reasoning_content')}|{message['content']}"
    return text, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def wait_until_written(server: ServerProcess) -> None:
    """Until the disk has bytes, none is queued, and that has been so for a second."""
    looks: list[int] = []

    def is_settled() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("GET", "/v1/cache")
            report = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        num_bytes = report["disk_bytes"] if not report["disk"]["num_queued_bytes"] else 0
        looks.append(num_bytes)
        time.sleep(0.1)
        return num_bytes > 0 and looks[-10:] == [num_bytes] * 10

    wait_until(is_settled, 60, lambda: f"not settled: {looks}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["qwen3_5", *(pytest.param(family, marks=pytest.mark.e2e) for family in OTHERS)])
def test_a_killed_server_is_warm_again(family: str, tmp_path: Path) -> None:
    """Once the disk has taken what there was: the prompt is known, the text is the same."""
    model = str(tiny_model(family))
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
def test_what_a_long_prefill_had_is_warm(tmp_path: Path) -> None:
    """Killed in the middle of 8k tokens: what was complete before is not computed again."""
    model, prompt = str(tiny_model("qwen3_5")), ("Be brief.", said(400, 3))
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        server.wait_until_healthy()
        threading.Thread(target=ask_quietly, args=(server, prompt), daemon=True).start()
        server.wait_for(num_prefilling=1)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("*.safetensors"))) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        server.end(signal.SIGKILL)
    with serving(tmp_path, "--model", model, with_proxy=False) as server:
        _, share = answer(server.wait_until_healthy(), prompt)
    assert share > 0.05


def ask_quietly(server: ServerProcess, prompt: tuple[str, str]) -> None:
    """A request whose server may die."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        answer(server, prompt)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(60 + 40 * NUM_KILLS)
def test_no_moment_of_a_kill_leads_to_a_wrong_token(tmp_path: Path) -> None:
    """Random kill points under traffic: every start succeeds, every answer is that of a server without cache."""
    rng, model = random.Random(4), str(tiny_model("qwen3_5"))
    with serving(tmp_path / "cold", "--model", model, "--no-disk-cache", with_proxy=False) as server:
        server.wait_until_healthy()
        expected = [answer(server, prompt)[0] for prompt in PROMPTS]
    num_warm = 0
    for _ in range(NUM_KILLS):
        with serving(tmp_path / "warm", "--model", model, with_proxy=False) as server:
            server.wait_until_healthy()
            for prompt, text in zip(PROMPTS, expected, strict=True):
                found, share = answer(server, prompt)
                assert found == text
                num_warm += share > 0.95
            others = [(SYSTEM, said(rng.randrange(2, 120), rng.randrange(9, 1000))) for _ in range(4)]
            threads = [threading.Thread(target=ask_quietly, args=(server, prompt), daemon=True) for prompt in others]
            for thread in threads:
                thread.start()
            time.sleep(rng.random() * 2)
            server.end(signal.SIGKILL)
            for thread in threads:
                thread.join(60)
    assert num_warm >= (NUM_KILLS - 1) * len(PROMPTS)
