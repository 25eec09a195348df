"""How the server ends: by a signal in the middle of an answer, and when it is killed. Always with its LiteLLM.

LiteLLM takes 10 to 20 s to answer. The twenty endings therefore do not wait for it: the child is there and still
starting, and the stream goes through kvserve's own port. Four more wait, with a stream through each port.
"""

import http.client
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvserve.proxy.ownership import ProcessIdentity
from tests.e2e.conftest import Stage
from tests.e2e.servers import ChatStream, ServerProcess, can_listen, is_alive, serving, wait_until
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SIGNALS = [signal.SIGINT, signal.SIGTERM]
END_SECONDS = 5.0
NUM_TOKENS = 100_000


@pytest.fixture(autouse=True)
def alone(stage: Stage) -> None:
    """The server that other files share would only take time from these."""
    stage.clear()


def model_flag() -> str:
    """A model that never ends an answer by itself."""
    return f"--model={tiny_model('qwen3')}"


def running_proxy(server: ServerProcess) -> ProcessIdentity:
    """The LiteLLM process of this server, whether it answers already or not."""
    proxy = server.proxy_process()
    assert proxy is not None, server.screen
    return proxy


def check_end(server: ServerProcess, number: signal.Signals, streams: Sequence[ChatStream]) -> None:
    """Send the signal in the middle of the streams, and see what is left."""
    proxy = running_proxy(server)
    for stream in streams:
        stream.wait_for_output()
    seconds = server.end(number)
    print(f"{number.name}: {seconds:.2f} s")
    assert server.process.returncode == 0, server.screen
    assert seconds < END_SECONDS
    for stream in streams:
        assert stream.finish(60.0).was_stopped
    assert not is_alive(proxy)
    assert server.proxy_port is not None
    assert can_listen(server.port)
    assert can_listen(server.proxy_port)
    assert "Traceback" not in server.screen
    assert "error" not in server.screen


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("attempt", range(10))
def test_a_signal_during_a_stream(tmp_path: Path, number: signal.Signals, attempt: int) -> None:
    """The stream ends with an error, LiteLLM is gone though it was still starting, exit code 0, within five seconds."""
    with serving(tmp_path, model_flag()) as server:
        server.wait_until_healthy()
        check_end(server, number, [ChatStream(server.port, max_tokens=NUM_TOKENS)])


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("attempt", range(2))
def test_a_signal_during_streams_through_both_ports(tmp_path: Path, number: signal.Signals, attempt: int) -> None:
    """The same with LiteLLM answering: the stream through it ends with an error as the direct one does."""
    with serving(tmp_path, model_flag()) as server:
        server.wait_until_proxy_ready()
        ports = [server.port_of(front) for front in ("kvserve", "litellm")]
        check_end(server, number, [ChatStream(port, max_tokens=NUM_TOKENS) for port in ports])


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_reaches_every_request(tmp_path: Path, number: signal.Signals) -> None:
    """A stream that decodes, one in its prefill and one that waits all end with an error; without LiteLLM."""
    with serving(tmp_path, model_flag(), with_proxy=False, MAX_CONCURRENT_REQUESTS=2) as server:
        server.wait_until_healthy()
        decoding = ChatStream(server.port, max_tokens=NUM_TOKENS)
        decoding.wait_for_output()
        long_prompt = [{"role": "user", "content": "one word and another " * 8000}]
        prefilling = ChatStream(server.port, max_tokens=NUM_TOKENS, messages=long_prompt)
        server.wait_for(num_decoding=1, num_prefilling=1)
        waiting = ChatStream(server.port, max_tokens=NUM_TOKENS)
        server.wait_for(num_decoding=1, num_prefilling=1, num_waiting=1)
        seconds = server.end(number)
        assert server.process.returncode == 0, server.screen
        assert seconds < END_SECONDS
        for stream in (decoding, prefilling, waiting):
            assert stream.finish(60.0).was_stopped
        assert "Traceback" not in server.screen


def test_a_killed_server_takes_litellm_with_it(tmp_path: Path) -> None:
    """After SIGKILL the stream breaks off, LiteLLM ends by itself, and the next start on the same ports serves."""
    with serving(tmp_path, model_flag()) as server:
        server.wait_until_proxy_ready()
        proxy = running_proxy(server)
        stream = ChatStream(server.port, max_tokens=NUM_TOKENS)
        stream.wait_for_output()
        server.end(signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.finish(60.0)
        wait_until(lambda: not is_alive(proxy), 60, lambda: "LiteLLM outlives its server")
    with serving(tmp_path, model_flag(), port=server.port, proxy_port=server.proxy_port) as successor:
        successor.wait_until_proxy_ready()
        for front in ("kvserve", "litellm"):
            assert ChatStream(successor.port_of(front), max_tokens=5).finish(60.0).finish_reasons == ["length"]


def test_a_start_right_after_a_kill(tmp_path: Path) -> None:
    """The port may still be held by the LiteLLM of the killed server: it is ours, so the next start takes it over."""
    with serving(tmp_path, model_flag()) as server:
        server.wait_until_proxy_ready()
        proxy = running_proxy(server)
        server.end(signal.SIGKILL)
    with serving(tmp_path, model_flag(), port=server.port, proxy_port=server.proxy_port) as successor:
        successor.wait_until_proxy_ready()
        assert not is_alive(proxy)
        assert running_proxy(successor) != proxy
