"""Requests that ended, as the tests of the dashboard need them."""

from typing import Any

from kvserve.observe.ended_requests import EndedRequest


def ended(name: str, **fields: Any) -> EndedRequest:
    """A request of a thousand tokens, of which nine hundred were reused."""
    usual: dict[str, Any] = {
        "ended_at": 1_000.0,
        "principal": "-.-",
        "session": "",
        "conversation": "talk",
        "client": "curl/8.5",
        "model": "tiny",
        "protocol": "openai_chat",
        "num_prompt_tokens": 1_000,
        "num_cached_tokens": 900,
        "num_generated_tokens": 50,
        "num_prefilled_tokens": 100,
    }
    return EndedRequest(request_id=name, **{**usual, **fields})
