"""The tour against a real server: each step shows what was reused, and why not more."""

import re
import socket

import pytest

from kvserve.settings.flags import DemoKind
from tests.ports import free_port
from tests.scripts.conftest import run_script, script, start_script
from tests.serving import AppUnderTest


def test_the_tour_shows_what_each_step_reused(server: AppUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    """The second question reuses the first one's KV; an edited history what stands before the edit, and says so."""
    module = script("demo_tour.py")
    restarted: list[int] = []
    wire = module.Server(f"http://127.0.0.1:{server.port}", "none", 60.0)
    first, second, third, edited = module.lead(wire, lambda: restarted.append(1))
    shown = capsys.readouterr().out
    assert restarted == [1]
    assert first.num_cached_tokens == 0
    for before, after in ((first, second), (second, third)):
        assert after.num_cached_tokens >= before.num_prompt_tokens - 1
    assert first.num_prompt_tokens - 1 <= edited.num_cached_tokens < second.num_prompt_tokens
    assert "another text than before from message 3" in shown.rpartition("why not more: ")[2]
    assert len(re.findall(r"about \d+\.\d s saved", shown)) == shown.count("why not more: ") == 4
    assert "does not say" not in shown and "about 0.0 s saved" in shown.partition("2. ")[0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_tour_starts_a_server_of_its_own_and_ends_it() -> None:
    """With the tiny model; after the restart the conversation comes from disk. A start that fails says why."""
    kind: DemoKind = "tiny"
    done = start_script("demo_tour.py", "--demo", kind, f"--port={free_port()}", "--no-wait")
    assert done.returncode == 0, done.stdout + done.stderr
    reused = [int(number) for number in re.findall(r"prompt, (\d+) reused", done.stdout)]
    assert len(reused) == 4 and reused[0] == 0 and reused[2] > reused[1] and 0 < reused[3] < reused[2]
    assert re.search(r"http://127\.0\.0\.1:\d+/dashboard", done.stdout)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = run_script("demo_tour.py", "--demo", kind, f"--port={port}", "--no-wait")
    assert failed.returncode == 2 and "the server did not start" in failed.stderr and "MLX_PORT" in failed.stderr
