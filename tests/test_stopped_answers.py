"""A server that stops: every client hears that its answer was not finished, whichever protocol and SDK it uses, and in
whichever stage its request is.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.laws import sampled, sampled_cells
from tests.serving import AppUnderTest, chat_body, eventually, serving_app, slow_prefill

NUM_STOPS = 20
LONG = "word and another " * 2_500
ENDLESS = 50_000
SAMPLING: dict[str, Any] = {"extra_body": {"temperature": 0, "repetition_penalty": 1}}

type Ask = Callable[[], str]
"""Asks and says how it ended: `raised` an error of the server's, `told` so in the stream, or in words what else."""

type Client = Callable[[AppUnderTest, str, bool], Ask]
"""Prepares to ask something, streamed or not. SDKs import what they need when it is first used, which two threads must
not do at once: so here, and not when it is asked."""


def _openai(app: AppUnderTest) -> Any:
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{app.port}/v1", api_key="none", max_retries=0, timeout=120)


def _ended(ask: Callable[[], object]) -> str:
    """How a call of an SDK ended."""
    import anthropic
    import openai

    try:
        return f"passed for an answer: {ask()!r}"
    except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
        return f"torn off: {error.__cause__!r}"
    except (openai.APIError, anthropic.APIError) as error:
        return "raised" if _is_said(str(error)) else f"raised: {error}"


def _asking_openai(create: Callable[..., Any], stream: bool, **fields: Any) -> Ask:
    def ask() -> object:
        answer = create(model="m", max_tokens=ENDLESS, stream=stream, **fields, **SAMPLING)
        return [choice.finish_reason for chunk in answer for choice in chunk.choices] if stream else answer

    return lambda: _ended(ask)


def chat(app: AppUnderTest, said: str, stream: bool) -> Ask:
    create = _openai(app).chat.completions.create
    return _asking_openai(create, stream, messages=[{"role": "user", "content": said}])


def completion(app: AppUnderTest, said: str, stream: bool) -> Ask:
    return _asking_openai(_openai(app).completions.create, stream, prompt=said)


def message(app: AppUnderTest, said: str, stream: bool) -> Ask:
    import anthropic

    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{app.port}", api_key="none", max_retries=0, timeout=120)
    messages = client.messages
    said_by_user: Any = [{"role": "user", "content": said}]
    fields: Any = {"model": "m", "messages": said_by_user, "max_tokens": ENDLESS, **SAMPLING}

    def ask() -> object:
        if not stream:
            return messages.create(**fields)
        with messages.stream(**fields) as events:
            return events.get_final_message().stop_reason

    return lambda: _ended(ask)


def response(app: AppUnderTest, said: str, stream: bool) -> Ask:
    """A stream of this protocol says it in its last event, which the SDK hands on."""
    create = _openai(app).responses.create
    fields: Any = {"model": "m", "input": said, "max_output_tokens": ENDLESS, "stream": stream, **SAMPLING}

    def ask() -> str:
        if not stream:
            return _ended(lambda: create(**fields))
        *_, last = create(**fields)
        return "told" if last.type == "response.failed" and _is_said(last.response.error.message) else repr(last)

    return ask


def agent(app: AppUnderTest, said: str, stream: bool) -> Ask:
    name = "streamed" if stream else "whole"
    created = app.post("/v1/agents", {"agent_id": name})
    assert created.status == 201, created.body

    def ask() -> str:
        answer = app.post(f"/v1/agents/{name}/generate", chat_body(said, max_tokens=ENDLESS, stream=stream))
        if not stream:
            return "raised" if answer.status == 503 and _is_said(answer.error["message"]) else repr(answer.body)
        is_told = _is_said(answer.events[-2]) and not re.search(rb'"finish_reason":"', answer.body)
        return "told" if is_told else repr(answer.events[-3:])

    return ask


def _is_said(text: str) -> bool:
    return "not finished" in text or "before the answer was finished" in text


CLIENTS: tuple[Client, ...] = (chat, completion, message, response, agent)
NUM_REQUESTS = 2 * len(CLIENTS)


@contextlib.contextmanager
def asked_by_all(app: AppUnderTest, said: str) -> Iterator[dict[str, Future[str]]]:
    """All clients ask, streamed and not; at the end of the block the server stops."""
    prepared = {
        f"{client.__name__} {'streamed' if stream else 'whole'}": client(app, said, stream)
        for client in CLIENTS
        for stream in (True, False)
    }
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        try:
            yield {name: pool.submit(ask) for name, ask in prepared.items()}
        finally:
            app.app.stop()


def _num_rows(app: AppUnderTest, *stages: str) -> int:
    health = app.app.health()[1]
    return sum(health[f"num_{stage}"] for stage in stages or ("waiting", "prefilling", "decoding"))


def _heard(asked: dict[str, Future[str]]) -> dict[str, str]:
    return {name: future.result(60) for name, future in asked.items()}


@sampled_cells(lambda stage, **_: stage != "prefilling")
@pytest.mark.parametrize("_attempt", sampled(range(NUM_STOPS), {0}))
@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
def test_every_client_hears_that_its_answer_was_not_finished(tmp_path: Path, stage: str, _attempt: int) -> None:
    """Whether its request waits, is read or answered: an error in the stream or a 503, and never a finish reason."""
    rows = 1 if stage == "waiting" else NUM_REQUESTS
    said = LONG if stage == "prefilling" else "Hello there."
    stands_still = slow_prefill() if stage == "prefilling" else contextlib.nullcontext()
    settings: dict[str, Any] = {"prefill_step_size": 16, "max_concurrent_requests": rows, "max_kv_size": 100_000}
    with serving_app(tmp_path, **settings) as app, stands_still, asked_by_all(app, said) as asked:
        num_wanted = {"waiting": NUM_REQUESTS - 1, "prefilling": 1, "decoding": NUM_REQUESTS}[stage]
        assert eventually(lambda: _num_rows(app) == NUM_REQUESTS and _num_rows(app, stage) >= num_wanted), app.lines()
        app.app.stop()
        heard = _heard(asked)
    assert {name: ended for name, ended in heard.items() if ended not in ("raised", "told")} == {}


@sampled_cells(lambda stage: stage == "prefilling")
@pytest.mark.parametrize("stage", ["prefilling", "decoding"])
def test_an_engine_that_ends_under_its_requests_ends_them_the_same(tmp_path: Path, stage: str) -> None:
    """Nobody told the connections to stop: the rows' own end is an error too."""
    said = LONG if stage == "prefilling" else "Hello there."
    stands_still = slow_prefill() if stage == "prefilling" else contextlib.nullcontext()
    with serving_app(tmp_path, prefill_step_size=16, max_kv_size=100_000) as app, stands_still:
        prepared = [chat(app, said, stream) for stream in (True, False)]
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask) for ask in prepared]
            # Both: one that comes once the engine has ended hears that the server is going down.
            assert eventually(lambda: _num_rows(app) == len(asked) and _num_rows(app, stage) >= 1)
            threading.Thread(target=app.served.engine.stop).start()
            assert [future.result(60) for future in asked] == ["raised", "raised"]
