"""LiteLLM's callback: it sends the client's own body and headers to the backend, and keeps the backend's own error. It
knows LiteLLM's call arguments, no HTTP.
"""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

from kvserve.proxy.asgi import causes
from kvserve.proxy.attempts import CURRENT_ATTEMPT
from kvserve.proxy.envelope import CURRENT_EXCHANGE, ProxyExchange, UpstreamError, api_base

# LiteLLM chooses the backend's name for the model.
_LITELLM_DECIDES = frozenset({"model"})


class RawBodyHook(CustomLogger):
    """Sends every field of the client's body to the backend unchanged.

    LiteLLM itself drops `user` and `metadata`, refuses `thinking` and `verbosity`, obeys `timeout`, `cache` and
    `fallbacks`, and rewrites messages for models that it knows. So the guard gives it a plain envelope, whose fields
    `extra_body` replaces when the request goes out.
    """

    async def async_pre_call_hook(
        self, user_api_key_dict: object, cache: object, data: dict[str, object], call_type: str
    ) -> dict[str, object]:
        """Adds the client's fields and headers just before LiteLLM chooses a backend."""
        exchange = CURRENT_EXCHANGE.get()
        if exchange is None:
            return data
        if exchange.instead_of_backend is not None:
            data["api_base"] = exchange.instead_of_backend
        data["extra_body"] = outgoing_fields(exchange, data)
        sent = data.get("headers")
        data["headers"] = {**(sent if isinstance(sent, dict) else {}), **exchange.headers}
        return data

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[dict[str, Any]],
        messages: object,
        request_kwargs: object = None,
        parent_otel_span: object = None,
    ) -> list[dict[str, Any]]:
        """Leaves the backend that the guard chose; before the first request there is no choice."""
        attempt = CURRENT_ATTEMPT.get()
        if attempt is None:
            return healthy_deployments
        base = api_base(attempt.backend)
        return [each for each in healthy_deployments if each["litellm_params"].get("api_base") == base]

    async def async_post_call_failure_hook(
        self,
        request_data: object,
        original_exception: BaseException,
        user_api_key_dict: object,
        traceback_str: str | None = None,
    ) -> HTTPException | None:
        """Keeps the backend's error for the guard: LiteLLM changes its text and sometimes its status. If LiteLLM's
        comments have begun a stream already, LiteLLM writes the returned error, or no reason without one. It says too
        whether the backend answered at all; requests that are passed on as they are come here as well."""
        if (attempt := CURRENT_ATTEMPT.get()) is not None:
            attempt.is_unreached = any(isinstance(cause, httpx.RequestError) for cause in causes(original_exception))
        exchange = CURRENT_EXCHANGE.get()
        if exchange is None:
            return None
        found = exchange.upstream_error = find_upstream_error(original_exception)
        return HTTPException(found.status, message_of(found)) if found is not None and exchange.has_begun else None


def outgoing_fields(exchange: ProxyExchange, data: Mapping[str, object]) -> dict[str, object]:
    """The fields that overwrite LiteLLM's: the client's own, with one exception.

    To count tokens, LiteLLM asks for the usage of every stream and removes it from the answer. Then its
    `stream_options` (the client's plus `include_usage`) stay, unless the client's are malformed: the backend refuses
    them.
    """
    fields = {name: value for name, value in exchange.body.items() if name not in _LITELLM_DECIDES}
    asked = fields.get("stream_options")
    if data.get("_litellm_strip_stream_usage") and (asked is None or isinstance(asked, dict)):
        fields["stream_options"] = data.get("stream_options")
    return fields


def find_upstream_error(error: BaseException) -> UpstreamError | None:
    """The HTTP answer at the root of LiteLLM's exceptions, None without one. LiteLLM adds empty answers to the chain;
    the deepest answer is the backend's."""
    found: UpstreamError | None = None
    for cause in causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, httpx.Response) and response.is_closed and response.status_code >= 400:
            content_type = response.headers.get("content-type", "application/json")
            retry_after = response.headers.get("retry-after")
            if response.content:
                found = UpstreamError(response.status_code, response.content, content_type, retry_after)
    return found


def message_of(error: UpstreamError) -> str:
    """The backend's error message; the whole body if it is not an error in OpenAI's form."""
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, TypeError, LookupError):
        return error.body.decode(errors="replace")


raw_body_hook = RawBodyHook()
