"""One model over two ranks writes what one rank writes, and finds what one rank finds: cold, warm, branched off, beside
others, and after a restart. Its prompts are made by a seed (`RANK_TEXT_SEED`).

Most answers are led to what one rank wrote by a clear margin, and are the same to the last token; the others may part
from it at a near tie, as the parts of a sum are added in another order.
"""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvserve.prompt.tokenizer import load_tokenizer
from tests.disk_servers import clear, request
from tests.e2e.servers import ServerProcess, serving, wait_until
from tests.led_texts import NUM_TOKENS
from tests.models import DEEP, tiny_model
from tests.pipelined import BAILING
from tests.ranked_servers import ALIKE, FOLLOWER, NEAR_TIE, RankedServer, Written, ranked, start_script, write
from tests.seeded_prompts import seeded_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

QUANTISED = {"KV_BITS": 8, "KV_QUANT_SCHEME": "turboquant", "QUANTIZED_KV_START": 200}
CASES: list[tuple[str, dict[str, object]]] = [
    ("qwen3", {}),
    ("llama", {}),
    ("gpt_oss", {}),
    ("qwen3_5", {}),
    ("qwen3", QUANTISED),
    ("qwen3_next", {}),
    (DEEP + "qwen3_next", {}),
    (BAILING, {}),
]
"""Plain caches, windows with sinks, recurrent states, and KV that is quantised from within the prompt on. Then
pipelines: rank 0 has the keys and the other one the states; it has both; both have both."""

SEED = int(os.environ.get("RANK_TEXT_SEED", str(random.randrange(2**16))))
NUM_WORDS = 120

SHIPS = seeded_text(SEED, 0, NUM_WORDS)
PROMPTS = (SHIPS, SHIPS, SHIPS + " And of harbours.")
"""Cold, warm, and one that branches off."""

BESIDE = tuple(f"{number} birds. {seeded_text(SEED, number + 1, NUM_WORDS)}" for number in range(4))
MAX_OTHER_CACHED = 8
"""Tokens of a message's beginning, which prompts that come at once have or have not from one another."""

NOT_LED = tuple(seeded_text(SEED, number + 10, NUM_WORDS) for number in range(4))


def assert_same(found: Written, expected: Written) -> None:
    """The same tokens, up to the first near tie."""
    for place, (token, other) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        if token != other:
            assert expected.gaps[place] < NEAR_TIE, f"token {place} is {token!r} instead of {other!r}"
            return


def assert_led(found: Written, expected: Written) -> None:
    """The same tokens, every one; whoever is led to was asked for one token more."""
    assert (len(found.tokens), len(expected.tokens)) == (NUM_TOKENS, NUM_TOKENS + 1)
    for place, (token, other) in enumerate(zip(found.tokens, expected.tokens, strict=False)):
        assert token == other, f"token {place} is {token!r} instead of {other!r}"


def written(family: str, port: int, text: str, num_tokens: int = NUM_TOKENS) -> Written:
    """An answer that does not end by itself."""
    return write(port, text, num_tokens, never=load_tokenizer(tiny_model(family)).stop_token_ids)


def lives(
    family: str, port_of: Callable[[], int], restart: Callable[[], None], num_tokens: int
) -> tuple[list[Written], ...]:
    """What is written to each prompt, and again after a restart: what is led, and what is not."""

    def answer(text: str, length: int) -> Written:
        return written(family, port_of(), text, length)

    def beside(texts: tuple[str, ...], length: int) -> list[Written]:
        with ThreadPoolExecutor(len(texts)) as clients:
            return list(clients.map(lambda text: answer(text, length), texts))

    led = [answer(text, num_tokens) for text in PROMPTS]
    led += beside(BESIDE, num_tokens)
    restart()
    led += [answer(text, num_tokens) for text in (PROMPTS[2], BESIDE[0])]
    freely = beside(NOT_LED, NUM_TOKENS)
    freely += [answer(text, NUM_TOKENS) for text in (NOT_LED[0], NOT_LED[0] + " And of harbours.")]
    return led, freely


def alone(folder: Path, family: str, noted: Path, settings: dict[str, object]) -> tuple[list[Written], ...]:
    """The same by one rank, whose answers are noted."""
    servers: list[ServerProcess] = []
    script = start_script(folder / "start", f"\nfrom tests.led_texts import note\nnote({str(noted)!r})\n")

    def start() -> None:
        if servers:
            servers.pop().close()
        options = {"script": script, "with_proxy": False, "DISK_CACHE_DIR": folder / "kv"}
        servers.append(ServerProcess(folder, "--model", str(tiny_model(family)), **options, **ALIKE, **settings))
        servers[0].wait_until_healthy()

    start()
    try:
        return lives(family, lambda: servers[0].port, start, NUM_TOKENS + 1)
    finally:
        servers[0].close()


def led_by(noted: Path) -> str:
    """The code of a rank that is led."""
    return f"\nfrom tests.led_texts import lead\nlead({str(noted)!r})\n"


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_two_ranks_write_and_find_what_one_does(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    """Cold, warm, branch, four at once, restart; 48 tokens each; then four at once, one of them warm and a branch that
    nobody leads."""
    print(f"seed {SEED}")
    expected, expected_freely = alone(tmp_path / "one", family, tmp_path / "noted", settings)
    with ranked(tmp_path / "two", family, (led_by(tmp_path / "noted"), ""), **settings) as server:

        def restart() -> None:
            assert server.stop() == [0, 0], server.screens
            server.start()
            server.wait_until_ready()

        found, found_freely = lives(family, lambda: server.lead.port, restart, NUM_TOKENS)
        assert server.stop() == [0, 0], server.screens
    for own, other in zip(found, expected, strict=True):
        assert_led(own, other)
    for own, other in zip(found_freely, expected_freely, strict=True):
        assert_same(own, other)
    for own, other in zip((*found, *found_freely), (*expected, *expected_freely), strict=True):
        assert abs(own.num_cached_tokens - other.num_cached_tokens) <= MAX_OTHER_CACHED
    in_turn = [0, 1, 2, -2, -1]
    assert [found[each].num_cached_tokens for each in in_turn] == [expected[each].num_cached_tokens for each in in_turn]
    assert found_freely[-2].num_cached_tokens == expected_freely[-2].num_cached_tokens
    assert found[1].num_cached_tokens and found[-2].num_cached_tokens, "nothing was reused"
    assert found_freely[-1].num_cached_tokens and found_freely[-2].num_cached_tokens, "nothing was reused"


HALF_SILENT = """
from kvserve.engine.ranks import loading
real = loading.divide
def divide(module, config, place):
    span = real(module, config, place)
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0
    return span
loading.divide = divide
"""
STALE = """
import mlx.core as mx
from kvserve.engine.prefix_cache import PrefixCache
real = PrefixCache._restored
def restored(self, *what):
    lease, caches, num_tokens = real(self, *what)
    for cache in caches if num_tokens else ():
        cache.values = mx.roll(cache.values, 1, axis=2)
    return lease, caches, num_tokens
PrefixCache._restored = restored
"""


SILENT_LAYER = """
from kvserve.engine.ranks import loading
real = loading.divide
def divide(module, config, place):
    span = real(module, config, place)
    for layer in module.layers:
        layer.linear_attn.out_proj.weight = layer.linear_attn.out_proj.weight * 0
    return span
loading.divide = divide
"""
STALE_STATES = """
import mlx.core as mx
from kvserve.engine.prefix_cache import PrefixCache
real = PrefixCache._restored
def restored(self, *what):
    lease, caches, num_tokens = real(self, *what)
    for cache in caches if num_tokens else ():
        cache.cache = [mx.roll(array, 1, axis=-1) for array in cache.cache]
    return lease, caches, num_tokens
PrefixCache._restored = restored
"""


@pytest.mark.parametrize(
    ("family", "silent_fault", "stale_fault"),
    [("qwen3", HALF_SILENT, STALE), ("qwen3_next", SILENT_LAYER, STALE_STATES)],
)
def test_a_rank_that_adds_nothing_or_restores_other_rows_is_seen(
    family: str, silent_fault: str, stale_fault: str, tmp_path: Path
) -> None:
    """The control of the comparison, though the text is led: half of the heads, or a layer, are silent; or a follower
    is right until it begins with rows of the token before, or another state."""
    noted, texts = tmp_path / "noted", PROMPTS[:2]
    script = start_script(tmp_path / "start", f"\nfrom tests.led_texts import note\nnote({str(noted)!r})\n")
    options = {"script": script, "with_proxy": False, "DISK_CACHE_DIR": tmp_path / "kv", **ALIKE}
    with serving(tmp_path / "one", "--model", str(tiny_model(family)), **options) as one:
        expected = [written(family, one.wait_until_healthy().port, text, NUM_TOKENS + 1) for text in texts]
    with ranked(tmp_path / "silent", family, (led_by(noted), silent_fault)) as server:
        silent = written(family, server.lead.port, texts[0])
    with ranked(tmp_path / "stale", family, (led_by(noted), stale_fault)) as server:
        stale = [written(family, server.lead.port, text) for text in texts]
    with pytest.raises(AssertionError, match="instead of"):
        assert_led(silent, expected[0])
    assert_led(stale[0], expected[0])
    assert stale[1].num_cached_tokens
    with pytest.raises(AssertionError, match="instead of"):
        assert_led(stale[1], expected[1])


def test_a_model_that_cannot_be_divided_says_so(tmp_path: Path) -> None:
    """Both ranks end with 1 and one sentence."""
    server = RankedServer(tmp_path, "gemma3")
    try:
        assert server.exit_codes(180) == [1, 1]
        for rank in server.ranks:
            assert "cannot be divided over 2 ranks" in rank.screen
    finally:
        server.close()


SENDS_LATE = """
import mlx.core as mx
mx.depends = lambda arrays, _: arrays
"""
"""What a rank sends does not hang on its caches any more."""


@pytest.mark.parametrize(
    ("faults", "settings", "why"),
    [
        (("", SENDS_LATE), {}, "mlx-lm's pipeline of it does not work"),
        (("", ""), {"KV_BITS": 8}, "KV_BITS=8 cannot be used"),
    ],
)
def test_a_pipeline_that_cannot_serve_says_so(
    faults: tuple[str, str], settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    """Both ranks end with 1 and one sentence, before any waits for what never comes."""
    server = RankedServer(tmp_path, "qwen3_next", faults, **settings)
    try:
        assert server.exit_codes(180) == [1, 1]
        for rank in server.ranks:
            assert why in rank.screen
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
        wait_until(lambda: all(told_to_be_kept(server)), 60, lambda: str(told_to_be_kept(server)))
        clear(server.lead)
        wait_until(lambda: not blobs(server), 60, lambda: str(blobs(server)))
        wait_until(lambda: not any(told_to_be_kept(server)), 60, lambda: str(told_to_be_kept(server)))
        assert request(server.lead, "GET", "/v1/cache")["ranks"]["num_ranks"] == 2
        assert write(server.lead.port, SHIPS, 4).num_cached_tokens == 0


def told_to_be_kept(server: RankedServer) -> tuple[int, int]:
    """Bytes of the follower's KV in RAM and on disk, as rank 0 tells them; none before its first sign of life."""
    found = server.lead.health()
    assert found is not None
    ranks = found[1]["ranks"]
    [follower] = ranks["followers"]
    assert (ranks["num_ranks"], ranks["lost"], follower["rank"]) == (2, None, 1)
    if follower["num_disk_faults"] is None:
        return 0, 0
    assert follower["num_disk_faults"] == 0
    return follower["ram_bytes"], follower["disk_bytes"]


def blobs(server: RankedServer) -> list[Path]:
    return list(server.kv.rglob("*.safetensors"))
