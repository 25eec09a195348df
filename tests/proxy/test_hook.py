"""What the hook sends out and keeps, without a proxy around it."""

import asyncio
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import httpx
import pytest

from kvserve.proxy.attempts import CURRENT_ATTEMPT, Attempt
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.envelope import CURRENT_EXCHANGE, ProxyExchange, api_base


@cache
def hook() -> ModuleType:
    """The module that LiteLLM loads, with a base class that does nothing: LiteLLM itself takes seconds to import, and
    the tests of what passes through run the hook inside it."""
    base = ModuleType("litellm.integrations.custom_logger")
    base.CustomLogger = type("CustomLogger", (), {})  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("litellm", "litellm.integrations")}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {**packages, base.__name__: base}.items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.find_spec("kvserve.proxy.hook")
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return made


def in_exchange(exchange: ProxyExchange | None, data: dict[str, Any]) -> dict[str, Any]:
    """What the pre-call hook makes of `data`."""

    async def run() -> dict[str, Any]:
        CURRENT_EXCHANGE.set(exchange)
        return await hook().raw_body_hook.async_pre_call_hook(None, None, data, "acompletion")

    return asyncio.run(run())


def test_the_clients_body_and_headers_go_out() -> None:
    """Every field but the model's name, beside what LiteLLM forwards already."""
    exchange = ProxyExchange({"model": "m", "messages": [1], "user": "u"}, {"user-agent": "a"})
    data = in_exchange(exchange, {"model": "m", "messages": [], "headers": {"x-a": "1"}})
    assert data["extra_body"] == {"messages": [1], "user": "u"}
    assert data["headers"] == {"x-a": "1", "user-agent": "a"}


def test_a_call_of_litellms_own_is_left_alone() -> None:
    """Without a request of ours there is nothing to fill in."""
    assert in_exchange(None, {"model": "m"}) == {"model": "m"}


def test_a_warm_up_goes_elsewhere() -> None:
    """The backend hears nothing of it."""
    data = in_exchange(ProxyExchange({"model": "m"}, {}, instead_of_backend="http://there/v1"), {"model": "m"})
    assert data["api_base"] == "http://there/v1"
    assert "api_base" not in in_exchange(ProxyExchange({"model": "m"}, {}), {"model": "m"})


def test_litellms_question_for_usage_stays_where_it_will_remove_the_answer() -> None:
    """Only where it marked the stream, and only over a well-formed value."""
    asked = {"_litellm_strip_stream_usage": True, "stream_options": {"include_usage": True, "x": 1}}
    assert hook().outgoing_fields(ProxyExchange({"stream_options": {"x": 1}}, {}), asked) == {
        "stream_options": {"include_usage": True, "x": 1}
    }
    assert hook().outgoing_fields(ProxyExchange({"stream_options": 5}, {}), asked) == {"stream_options": 5}
    assert hook().outgoing_fields(ProxyExchange({"stream_options": None}, {}), {}) == {"stream_options": None}


def failed(status: int, text: str, headers: dict[str, str] | None = None) -> httpx.HTTPStatusError:
    """An exception as httpx raises it for an answer."""
    request = httpx.Request("POST", "http://backend/v1")
    response = httpx.Response(status, text=text, headers=headers, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


def test_the_deepest_answer_with_a_body_is_the_backends() -> None:
    """Empty answers that LiteLLM made up on the way are passed over."""
    outer, middle, root = failed(500, ""), failed(400, ""), failed(429, "full", {"retry-after": "7"})
    middle.__context__ = root
    outer.__cause__ = middle
    found = hook().find_upstream_error(outer)
    assert found is not None
    assert (found.status, found.body, found.retry_after) == (429, b"full", "7")


def test_without_an_answer_there_is_no_upstream_error() -> None:
    """A refused connection, or a chain of causes that bites its own tail."""
    first, second = ValueError("a"), OSError("b")
    first.__context__ = second
    second.__context__ = first
    assert hook().find_upstream_error(first) is None
    assert hook().find_upstream_error(failed(200, "fine")) is None


ONE, TWO = BackendAddress("one", "http://one/"), BackendAddress("two", "http://two")
DEPLOYMENTS = [
    {"model_name": name, "litellm_params": {"api_base": base}}
    for name in ("openai/m", "*")
    for base in ("http://one/v1", "http://two/v1")
]


def deployments_left(attempt: Attempt | None) -> list[dict[str, Any]]:
    """What LiteLLM may choose from."""

    async def run() -> list[dict[str, Any]]:
        CURRENT_ATTEMPT.set(attempt)
        return await hook().raw_body_hook.async_filter_deployments("m", DEPLOYMENTS, None)

    return asyncio.run(run())


@pytest.mark.parametrize("backend", [ONE, TWO])
def test_litellm_may_choose_what_the_guard_chose(backend: BackendAddress) -> None:
    """Under the listed name as under any other; a warm-up has no choice."""
    left = deployments_left(Attempt(backend))
    assert [each["model_name"] for each in left] == ["openai/m", "*"]
    assert {each["litellm_params"]["api_base"] for each in left} == {api_base(backend)}
    assert deployments_left(None) == DEPLOYMENTS


@pytest.mark.parametrize(
    ("error", "is_unreached"),
    [(httpx.ConnectError("refused"), True), (httpx.ReadError("reset"), True), (ValueError("other"), False)],
)
def test_a_server_that_gave_no_answer_is_told_from_one_that_did(error: Exception, is_unreached: bool) -> None:
    """Also where the error stands behind LiteLLM's own, and for requests that are passed on as they are."""
    attempt = Attempt(ONE)

    async def run() -> None:
        CURRENT_EXCHANGE.set(None)
        CURRENT_ATTEMPT.set(attempt)
        failure = RuntimeError("LiteLLM's words")
        failure.__cause__ = error
        await hook().raw_body_hook.async_post_call_failure_hook({}, failure, None)

    asyncio.run(run())
    assert attempt.is_unreached is is_unreached
