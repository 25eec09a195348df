"""The README's own calls, and the page of clients' lines for the SDKs, run as they are on both ports."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import pasted
from tests.e2e.installing import run
from tests.e2e.servers import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def called(command: list[str]) -> dict[str, Any]:
    """The JSON that a call with curl is answered with."""
    done = run([*command, "--silent", "--show-error", "--fail"], seconds=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_the_readmes_calls_show_what_is_reused(open_server: ServerProcess) -> None:
    """Asked the second time the question is known, but its last token is always computed; the explanation says the same
    of it. The question goes through LiteLLM, whoever asks for the explanation asks the server itself."""
    question, explain = pasted.readme_calls(open_server.port_of("litellm"), open_server.port_of("kvserve"))
    usage = [called(question)["usage"] for _ in range(2)][-1]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < num_cached < usage["prompt_tokens"]
    explained = called(explain)
    assert (explained["cached_tokens"], explained["num_prompt_tokens"]) == (num_cached, usage["prompt_tokens"])


@pytest.mark.parametrize("sdk", ["The anthropic SDK", "The openai SDK"])
def test_the_lines_for_an_sdk_print_an_answer(open_server: ServerProcess, front: str, sdk: str, tmp_path: Path) -> None:
    """As they stand there, but for the port."""
    script = tmp_path / "pasted.py"
    script.write_text(pasted.block(sdk, "python", open_server.port_of(front)), "utf-8")
    done = run([sys.executable, str(script)], seconds=200, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
