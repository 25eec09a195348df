"""One model over two ranks writes what one rank writes, and finds what one rank finds: cold, warm, branched off, beside
others, and after a restart."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disk_servers import clear
from tests.e2e.servers import ServerProcess, serving, wait_until
from tests.models import tiny_model
from tests.ranked_servers import ALIKE, FOLLOWER, RankedServer, Written, ranked, start_script, write

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

QUANTISED = {"KV_BITS": 8, "KV_QUANT_SCHEME": "turboquant", "QUANTIZED_KV_START": 200}
CASES: list[tuple[str, dict[str, object]]] = [
    ("qwen3", {}),
    ("llama", {}),
    ("gpt_oss", {}),
    ("qwen3_5", {}),
    ("qwen3", QUANTISED),
]
"""Plain caches, windows with sinks, recurrent states, and KV that is quantised from within the prompt on."""

NEAR_TIE = 1e-3
"""Two tokens that are so close in their log-probabilities may change places: the parts of a sum are added in another
order."""

SHIPS = "Tell me of ships, of their sails and of the wind. " * 12
PROMPTS = (SHIPS, SHIPS, SHIPS + "And of harbours.")
"""Cold, warm, and one that branches off."""

BESIDE = tuple(f"{number} birds. {SHIPS}" for number in range(4))


def assert_same(found: Written, expected: Written) -> None:
    """The same tokens, up to the first near tie."""
    for place, (token, other) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        if token != other:
            assert expected.gaps[place] < NEAR_TIE, f"token {place} is {token!r} instead of {other!r}"
            return


def lives(port_of: Callable[[], int], restart: Callable[[], None]) -> list[Written]:
    """What is written to each prompt, and again after a restart."""
    written = [write(port_of(), text) for text in PROMPTS]
    with ThreadPoolExecutor(len(BESIDE)) as clients:
        written += clients.map(lambda text: write(port_of(), text), BESIDE)
    restart()
    return [*written, *(write(port_of(), text) for text in (PROMPTS[2], BESIDE[0]))]


def alone(folder: Path, family: str, settings: dict[str, object]) -> list[Written]:
    """The same by one rank."""
    servers: list[ServerProcess] = []

    def start() -> None:
        if servers:
            servers.pop().close()
        options = {"script": start_script(folder / "start"), "with_proxy": False, "DISK_CACHE_DIR": folder / "kv"}
        servers.append(ServerProcess(folder, "--model", str(tiny_model(family)), **options, **ALIKE, **settings))
        servers[0].wait_until_healthy()

    start()
    try:
        return lives(lambda: servers[0].port, start)
    finally:
        servers[0].close()


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_two_ranks_write_and_find_what_one_does(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    """Cold, warm, branch, four at once, restart; 48 tokens each."""
    expected = alone(tmp_path / "one", family, settings)
    with ranked(tmp_path / "two", family, **settings) as server:

        def restart() -> None:
            assert server.stop() == [0, 0], server.screens
            server.start()
            server.wait_until_ready()

        found = lives(lambda: server.lead.port, restart)
        assert server.stop() == [0, 0], server.screens
    for own, other in zip(found, expected, strict=True):
        assert_same(own, other)
    in_turn = [0, 1, 2, -2, -1]
    assert [found[each].num_cached_tokens for each in in_turn] == [expected[each].num_cached_tokens for each in in_turn]
    assert found[1].num_cached_tokens and found[-2].num_cached_tokens, "nothing was reused"


HALF_SILENT = """
from kvserve.engine.ranks import loading
real = loading.divide
def divide(module, config, place):
    real(module, config, place)
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0
loading.divide = divide
"""


def test_a_rank_that_adds_nothing_is_seen(tmp_path: Path) -> None:
    """The control of the comparison: half of the heads are silent."""
    with serving(
        tmp_path / "one", "--model", str(tiny_model("qwen3")), with_proxy=False, DISK_CACHE_DIR=tmp_path / "kv", **ALIKE
    ) as one:
        expected = write(one.wait_until_healthy().port, SHIPS)
    with ranked(tmp_path / "two", "qwen3", ("", HALF_SILENT)) as server:
        found = write(server.lead.port, SHIPS)
    with pytest.raises(AssertionError, match="instead of"):
        assert_same(found, expected)


def test_a_model_that_cannot_be_divided_says_so(tmp_path: Path) -> None:
    """Both ranks end with 1 and one sentence."""
    server = RankedServer(tmp_path, "gemma3")
    try:
        assert server.exit_codes(180) == [1, 1]
        for rank in server.ranks:
            assert "cannot be divided over 2 ranks" in rank.screen
    finally:
        server.close()


def test_other_settings_on_a_rank_are_refused(tmp_path: Path) -> None:
    """A rank that would cut prompts elsewhere computes nothing."""
    other = "import os\nos.environ['PREFILL_STEP_SIZE'] = '64'\n"
    server = RankedServer(tmp_path, "qwen3", ("", other))
    try:
        assert server.exit_codes(180) == [1, 1]
        assert "prefill_step_size" in server.ranks[FOLLOWER].screen
    finally:
        server.close()


def test_an_emptied_cache_is_empty_on_both(tmp_path: Path) -> None:
    """No file of either rank stays, and the next prompt is computed from its first token."""
    with ranked(tmp_path, "qwen3") as server:
        write(server.lead.port, SHIPS, 4)
        assert write(server.lead.port, SHIPS, 4).num_cached_tokens
        wait_until(lambda: len({file.parent for file in blobs(server)}) == 2, 60, lambda: server.screens)
        clear(server.lead)
        wait_until(lambda: not blobs(server), 60, lambda: str(blobs(server)))
        assert write(server.lead.port, SHIPS, 4).num_cached_tokens == 0


def blobs(server: RankedServer) -> list[Path]:
    return list(server.kv.rglob("*.safetensors"))
