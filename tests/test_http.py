"""The whole server over HTTP on a real model: clients that leave, rows that fail, overload, many at once."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import mlx.core as mx
import pytest

from kvserve.engine import decode_group
from kvserve.engine.logits_processors import GrammarProcessor
from kvserve.engine.prefill import Prefill
from tests.laws import sampled_cells
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    Chat,
    chat_body,
    chunks_of,
    encode_request,
    eventually,
    is_error_form,
    joined,
    num_open_files,
    plain_body,
    serves,
    serving_app,
    slow_prefill,
)

WORDS = "the user asks what the server should write before the file is read again "


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A server with small prefill chunks, so that a long prompt takes long, and with room for all who come."""
    with serving_app(tmp_path_factory.mktemp("roomy"), prefill_step_size=64, max_queued_requests=256) as app:
        yield app


# --- clients that leave -----------------------------------------------------------------------------------------------


def _leave_when(app: AppUnderTest, body: dict[str, Any], path: str, has_begun: Any) -> int:
    """Send, wait until the server is that far, close, wait until the row is gone; returns the forward passes."""
    before = app.num_forward_calls
    with app.connect() as client:
        client.send(encode_request("POST", path, body))
        assert eventually(has_begun), app.health()
    assert eventually(app.is_idle)
    return app.num_forward_calls - before


@sampled_cells(lambda stream, path: stream is (path == CHAT_PATH))
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_prefill_frees_its_row(roomy: AppUnderTest, path: str, stream: bool) -> None:
    """A 20,000-token prompt is given up soon after the client's leave, streamed or not."""
    long: Any = [300 + number % 600 for number in range(20_000)]
    if path == CHAT_PATH:
        long = [{"role": "user", "content": roomy.served.tokenizer.decode(long)}]
    field = "messages" if path == CHAT_PATH else "prompt"
    body = plain_body(path, stream=stream, **{field: long})
    before = roomy.num_forward_calls
    with slow_prefill():
        num_passes = _leave_when(roomy, body, path, lambda: roomy.num_forward_calls > before + 2)
    assert num_passes < 150, "most of the prompt was not computed"
    assert roomy.health()["num_running"] == 0


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_decode_frees_its_row(roomy: AppUnderTest, path: str, stream: bool) -> None:
    """An answer of thousands of tokens is given up soon after the client's leave, streamed or not."""
    body = plain_body(path, stream=stream, max_tokens=20_000)
    num_passes = _leave_when(roomy, body, path, lambda: roomy.app.health()[1]["num_decoding"] == 1)
    assert num_passes < 10_000, "most of the answer was not written"
    assert roomy.health()["num_running"] == 0
    assert eventually(lambda: any("cancelled" in line for line in roomy.lines()[-1:]))


@pytest.mark.parametrize("num_clients", [12, pytest.param(200, marks=pytest.mark.long)])
def test_many_clients_that_leave_leave_nothing_behind(roomy: AppUnderTest, num_clients: int) -> None:
    """No row, no thread, no socket, but a line each; a neighbour's greedy text is that of a quiet run."""
    assert roomy.chat(max_tokens=2).finish_reason == "length"
    assert eventually(lambda: roomy.app.health()[1]["num_open_connections"] == 0)
    files, threads = num_open_files(), set(threading.enumerate())
    quiet, num_lines = roomy.chat(WORDS, max_tokens=60), len(roomy.lines())
    long = [300 + number % 600 for number in range(3_000)]
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(roomy.chat, WORDS, max_tokens=60)
        for number in range(num_clients):
            in_prefill, stream = number % 2 == 0, number % 4 < 2
            prompt: Any = long if in_prefill else "x"
            body = plain_body(COMPLETION_PATH, prompt=prompt, stream=stream, max_tokens=5_000)
            with roomy.connect() as client:
                client.send(encode_request("POST", COMPLETION_PATH, body))
                if stream:
                    assert client.read_head()[0] == 200
                    if not in_prefill:
                        client.read_chunk()
                elif number % 3:
                    time.sleep(0.01)
        assert neighbour.result() == quiet
    # only once the server has heard of all that left does it mean something that nothing runs
    assert eventually(lambda: len([line for line in roomy.lines()[num_lines:] if "cancelled" in line]) == num_clients)
    assert eventually(roomy.is_idle)
    assert eventually(lambda: set(threading.enumerate()) <= threads)
    assert eventually(lambda: num_open_files() <= files)
    health = roomy.health()
    assert (health["num_running"], health["num_waiting"], health["num_open_connections"]) == (0, 0, 1)
    assert roomy.chat(WORDS, max_tokens=60) == quiet


# --- failing alone ----------------------------------------------------------------------------------------------------


def _plant(monkeypatch: pytest.MonkeyPatch, seed: int, step: int) -> None:
    """The sampler of rows with this seed raises at this step."""
    real = decode_group.sampler_for

    def sampler_for(params: Any, *more: int) -> Any:
        sampler, steps = real(params, *more), iter(range(10_000))
        if params.seed != seed:
            return sampler

        def breaking(logprobs: mx.array) -> mx.array:
            if next(steps) == step:
                raise RuntimeError("planted")
            return sampler(logprobs)

        return breaking

    monkeypatch.setattr(decode_group, "sampler_for", sampler_for)


@pytest.mark.parametrize("planted", ["sampler", "grammar"])
def test_a_row_that_raises_fails_alone(roomy: AppUnderTest, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """It is a 500, or an error event in its stream; its neighbours' texts are those of a quiet run."""
    quiet = [roomy.chat(f"{WORDS} {number}", max_tokens=20) for number in range(3)]
    fields: dict[str, Any] = {"seed": 13, "temperature": 1, "max_tokens": 20}
    if planted == "sampler":
        _plant(monkeypatch, 13, 8)
    else:
        fields |= {"response_format": {"type": "json_object"}, "thinking": "off"}
        calls: defaultdict[Any, Iterator[int]] = defaultdict(count)  # of each row its own, whichever comes first

        def breaking(self: Any, tokens: mx.array, logits: mx.array) -> mx.array:
            if next(calls[self]) == 8:
                raise RuntimeError("planted")
            return logits

        monkeypatch.setattr(GrammarProcessor, "__call__", breaking)
    with ThreadPoolExecutor(5) as pool:
        neighbours = [pool.submit(roomy.chat, f"{WORDS} {number}", max_tokens=20) for number in range(3)]
        streamed = pool.submit(roomy.post, CHAT_PATH, chat_body("x", stream=True, **fields))
        plain = pool.submit(roomy.post, CHAT_PATH, chat_body("x", **fields))
    assert [neighbour.result() for neighbour in neighbours] == quiet
    assert plain.result().status == 500 and is_error_form(plain.result())
    assert plain.result().error["code"] == "engine_failure"
    events = streamed.result().events
    error = json.loads(next(event for event in events if '"error"' in event))
    assert streamed.result().status == 200 and "planted" in error["error"]["message"]
    assert len(events) > 2, "what was written before the failure was sent"
    assert not any('"finish_reason":"stop"' in event.replace(" ", "") for event in events)
    serves(roomy)


# --- many at once, overload, silence ----------------------------------------------------------------------------------


def test_eight_streams_at_once_get_the_texts_of_one_by_one(roomy: AppUnderTest) -> None:
    """Greedy answers to prompts of many lengths do not depend on who else is served."""
    prompts = [WORDS * (1 + 3 * number) for number in range(8)]

    def ask(prompt: str) -> Chat:
        body = chat_body(prompt, max_tokens=8, stream=True, stream_options={"include_usage": True})
        return joined(chunks_of(roomy.post(CHAT_PATH, body)))

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
    assert len({answer.content for answer in together}) > 1


def test_a_seed_repeats_and_greedy_repeats(roomy: AppUnderTest) -> None:
    """The same seed gives the same text, another one another text, also beside other rows."""
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    first = roomy.both(seed=7, **drawn)
    assert roomy.chat(seed=8, **drawn).content != first.content
    with ThreadPoolExecutor(3) as pool:
        again = [pool.submit(roomy.chat, seed=7, **drawn) for _ in range(3)]
    assert all(answer.result() == first for answer in again)
    assert roomy.both(max_tokens=16) == roomy.both(max_tokens=16)


def test_a_full_queue_is_a_429_and_drains(tmp_path: Any) -> None:
    """Beyond running and waiting rows a request is told to come back; who waited is served when a row leaves."""
    with serving_app(tmp_path, max_concurrent_requests=1, max_queued_requests=1) as app:
        running, waiting = app.connect(), app.connect()
        endless = plain_body(CHAT_PATH, stream=True, max_tokens=50_000)
        running.send(encode_request("POST", CHAT_PATH, endless))
        assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
        waiting.send(encode_request("POST", CHAT_PATH, plain_body(CHAT_PATH, stream=True)))
        assert waiting.read_head()[0] == 200, "headers go out before the row has its turn"
        for path in (CHAT_PATH, COMPLETION_PATH):
            refused = app.post(path, plain_body(path, stream=True))
            assert refused.status == 429 and refused.error["type"] == "rate_limit_error"
            assert refused.error["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
        assert app.health()["num_waiting"] == 1
        running.close()
        assert b"".join(iter(waiting.read_chunk, b"")).endswith(b"data: [DONE]\n\n")
        waiting.close()
        serves(app)


def test_a_row_that_memory_cannot_hold_is_a_503(tmp_path: Any) -> None:
    """It says what it needs and when to come back; a smaller one is served."""
    with serving_app(tmp_path, max_batch_bytes=2**19) as app:
        before = app.num_forward_calls
        for stream in (False, True):
            response = app.post(COMPLETION_PATH, plain_body(COMPLETION_PATH, prompt=[300] * 5_000, stream=stream))
            assert response.status == 503 and response.error["code"] == "memory_exhausted"
            assert int(response.headers["retry-after"]) > 0 and "MAX_BATCH_BYTES" in str(response.error["message"])
        assert app.num_forward_calls == before
        serves(app)


def test_a_silent_stream_says_nothing_from_time_to_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long prefill deltas with nothing in them keep the client waiting, and they change nothing of the answer."""
    real = Prefill.step

    def slow_step(prefill: Prefill, *arguments: Any) -> int:
        time.sleep(0.01)  # so that it takes long on a fast machine too
        return real(prefill, *arguments)

    monkeypatch.setattr(Prefill, "step", slow_step)
    with serving_app(tmp_path, web={"keep_alive_seconds": 0.05}, prefill_step_size=16) as app:
        prompt = WORDS * 30
        chunks = chunks_of(app.post(CHAT_PATH, chat_body(prompt, stream=True, max_tokens=4)))
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert len([delta for delta in deltas if delta == {"reasoning_content": ""}]) >= 3, deltas
        assert joined(chunks).content == app.chat(prompt, max_tokens=4).content
        body = plain_body(COMPLETION_PATH, prompt=f"Another {prompt}", stream=True)
        completion = chunks_of(app.post(COMPLETION_PATH, body))
        assert len([chunk for chunk in completion if chunk["choices"][0]["text"] == ""]) >= 3
