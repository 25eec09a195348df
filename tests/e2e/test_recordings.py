"""Bodies that real clients sent, through both ports with streaming, read by the openai SDK.

Everything is sent as it was recorded but the answer's limit, which is lowered so that a test takes the time of the
prompt. The OpenClaw prompts are about 29,000 of the demo model's tokens, which take minutes on a CPU, so only two of
them are sent.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.conftest import connect
from tests.e2e.servers import ROOT, ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RECORDINGS = ROOT.parent / "shared" / "recordings"
PI = [f"pi-0.87-qwen/{number:02}" for number in range(1, 10)]
OPENCLAW = ["openclaw-2026.9.6/01", "openclaw-2026.9.6/06"]
NUM_ANSWER_TOKENS = 8
LIMITS = ("max_tokens", "max_completion_tokens")


def recorded_body(name: str) -> dict[str, Any]:
    """The recorded body with its own field for the answer's limit lowered."""
    path: Path = RECORDINGS / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"needs the recorded requests in {RECORDINGS}")
    body: dict[str, Any] = json.loads(path.read_text("utf-8"))["body"]
    return body | {field: NUM_ANSWER_TOKENS for field in LIMITS if field in body}


def answer(server: ServerProcess, front: str, body: dict[str, Any]) -> list[ChatCompletionChunk]:
    """The chunks that the SDK reads from the stream; fields that it does not know travel as extra_body."""
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "stream")}
    with connect(server, front) as client:
        stream = client.chat.completions.create(
            model=body["model"], messages=body["messages"], stream=True, extra_body=rest
        )
        assert stream.response.status_code == 200
        # The SDK takes whatever comes for a chunk; its own types say whether it is one.
        return [ChatCompletionChunk.model_validate(chunk.to_dict()) for chunk in stream]


@pytest.mark.parametrize("name", PI + OPENCLAW)
def test_a_recorded_request_is_answered_through_both_ports(open_server: ServerProcess, name: str) -> None:
    """200, a stream of well-formed chunks, one finish reason, usage; the model saw the same prompt behind LiteLLM."""
    body = recorded_body(name)
    assert body["stream"] is True
    for front in ("kvserve", "litellm"):
        chunks = answer(open_server, front, body)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert reasons in (["stop"], ["length"], ["tool_calls"])
        usage = chunks[-1].usage
        assert usage is not None
        assert 0 < usage.completion_tokens <= NUM_ANSWER_TOKENS
        assert usage.prompt_tokens > 1000
    direct, behind_proxy = open_server.prompts()[-2:]
    assert direct == behind_proxy
    last = body["messages"][-1]["content"]
    text = last if isinstance(last, str) else last[-1]["text"]
    assert text.strip() in direct
