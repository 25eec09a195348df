"""The terminal on real rich consoles: what is said, when, and what cannot hurt."""

import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvserve.core import Awaiting, Drafted, Drafting, RequestId
from kvserve.observe.bars import LINE_SECONDS, SILENT_SECONDS
from kvserve.observe.terminal import BannerFacts, Terminal, banner_lines, curl_line, request_text
from kvserve.requests.request_facts import RequestFacts

ID = RequestId("a1b2c3")
BANNER = BannerFacts("0.1.0", "tiny", 131072, "http://127.0.0.1:8080", "http://127.0.0.1:4000")
DRAFTING = Drafting({"prediction": Drafted(1_000, 100), "records": Drafted(160, 30)}, num_steps=90, seconds_saved=3.12)
FACTS = RequestFacts(
    ID,
    "chat",
    "tiny",
    num_prompt_tokens=10432,
    num_cached_tokens=9980,
    num_completion_tokens=212,
    ttft_seconds=0.41,
    tokens_per_second=23.1,
    finish_reason="stop",
)


class Screen:
    """A terminal over a text buffer, with a clock that is set by hand."""

    def __init__(self, is_live: bool = False) -> None:
        self.seconds = 0.0
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=is_live, width=100, _environ={"TERM": "xterm"})
        self.terminal = Terminal(self.console, wall_clock=lambda: self.seconds, monotonic=lambda: self.seconds)

    @property
    def lines(self) -> list[str]:
        """What was written, without the time in front of a line."""
        return self.file.getvalue().splitlines()


@pytest.fixture
def plain() -> Screen:
    """Output into a file."""
    return Screen()


@pytest.fixture
def live() -> Iterator[Screen]:
    """Output on a terminal; no bar may be left when the test is over."""
    screen = Screen(is_live=True)
    yield screen
    for thread in threading.enumerate():
        if "RefreshThread" in type(thread).__name__:
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_the_banner_names_the_proxy_first_and_gives_a_command() -> None:
    """Both URLs in order, the model, the limit, a line to paste, the warnings."""
    lines = banner_lines(replace(BANNER, warnings=("KV_BITS acts later.",)))
    text = "\n".join(lines)
    assert text.index("http://127.0.0.1:4000/v1") < text.index("http://127.0.0.1:8080/v1")
    assert "tiny" in lines[0] and "131,072" in lines[0]
    assert lines[-1] == "! KV_BITS acts later."
    assert "  watch   http://127.0.0.1:8080/dashboard" in lines
    assert "random" not in text


def test_the_banner_names_device_and_models() -> None:
    """Where they are known; names come from folders and a hub, and move no cursor."""
    lines = banner_lines(replace(BANNER, device="CPU, 8.0 GB", models="a, \x1b[2Jb on demand"))
    assert "  device  CPU, 8.0 GB" in lines
    assert any(line.startswith("  models  a, ") and "\x1b" not in line for line in lines)
    assert not any(line.startswith(("  device", "  models")) for line in banner_lines(BANNER))


def test_the_curl_line_survives_a_shell() -> None:
    """Quotes in a model's name do not break it, and its body is JSON; without a proxy it asks kvserve itself."""
    words = shlex.split(curl_line(replace(BANNER, model_name='it\'s "tiny" $HOME', proxy_url=None)))
    assert words[:2] == ["curl", "http://127.0.0.1:8080/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "tiny" $HOME'
    assert "Authorization: Bearer $API_KEY" in shlex.split(curl_line(replace(BANNER, needs_api_key=True)))


def test_the_demo_says_that_its_weights_are_random() -> None:
    """And what to set for a real model."""
    text = "\n".join(banner_lines(replace(BANNER, demo="tiny")))
    assert "random" in text
    assert "MODEL_PATH" in text


def test_the_demo_that_talks_names_its_licence_and_is_asked_something() -> None:
    """It does not pass for random, nor for a large model."""
    facts = replace(BANNER, demo="smollm2")
    text = "\n".join(banner_lines(facts))
    assert "SmolLM2-135M-Instruct (Apache-2.0)" in text and "often wrong" in text and "random" not in text
    body = json.loads(shlex.split(curl_line(facts))[-1])
    assert "capital of France" in body["messages"][0]["content"] and "max_tokens" not in body
    assert body["temperature"] == 0


def test_a_banner_line_is_never_wrapped(plain: Screen) -> None:
    """A command can be pasted whatever the width of the console."""
    plain.terminal.banner(replace(BANNER, model_name="m" * 300))
    assert len(plain.lines) == 5
    assert f"  try     {curl_line(replace(BANNER, model_name='m' * 300))}" in plain.lines


def test_a_request_is_one_line() -> None:
    """Tokens in, reused, out, seconds to the first token, tokens per second, the reason."""
    assert request_text(FACTS) == (
        "a1b2c3 chat 10,432 in (9,980 reused, 96 %) 212 out, first token 0.41 s, 23.1 tok/s, stop"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_cached_tokens": 0}, "10,432 in, 212 out"),
        (
            {"drafting": DRAFTING, "tokens_per_step": 2.36},
            "drafts: 130 of 1,160 right (100 from prediction, 30 from records), 2.4 tokens a step, 3.12 s saved, stop",
        ),
        (
            {"drafting": Drafting({"draft model": Drafted(9, 6)}, num_steps=4), "tokens_per_step": 2.5},
            "drafts: 6 of 9 right (draft model), 2.5 tokens a step",
        ),
        ({"drafting": replace(DRAFTING, seconds_saved=-0.2), "tokens_per_step": 1.0}, "1.0 tokens a step, 0.20 s lost"),
        ({"num_cached_tokens": 10431}, "(10,431 reused, 99 %)"),
        ({"num_cached_tokens": 10432}, "(10,432 reused, 100 %)"),
        ({"seconds_saved": 31.04}, "(9,980 reused, 96 %, about 31.0 s saved) 212 out"),
        ({"seconds_saved": 0.04}, "(9,980 reused, 96 %) 212 out"),
        ({"finish_reason": "length", "cut_by": "max_tokens"}, "length (max_tokens)"),
        ({"ttft_seconds": 41.96}, "first token 42.0 s"),
        ({"session": "0123456789abcdef"}, "chat [0123456789ab] 10,432"),
        ({"finish_reason": None, "error_status": 503, "notes": ("memory exhausted",)}, "error 503, memory exhausted"),
        ({"cause": "cch changed"}, "stop, why: cch changed"),
    ],
)
def test_what_a_request_line_says(change: dict[str, object], expected: str) -> None:
    """Each fact appears where it says something, and only there."""
    assert expected in request_text(replace(FACTS, **change))  # type: ignore[arg-type]


def test_the_first_warm_turn_says_what_it_was_spared(plain: Screen) -> None:
    """In a line of its own, with seconds where these are known."""
    plain.terminal.warm(replace(FACTS, seconds_saved=31.04), 2)
    plain.terminal.warm(FACTS, 3)
    said = [line.partition(" ")[2] for line in plain.lines]
    assert said == [
        "turn 2: 9,980 of 10,432 tokens reused, about 31.0 s saved",
        "turn 3: 9,980 of 10,432 tokens reused",
    ]


def test_a_request_that_got_nowhere_says_only_what_is_known() -> None:
    """No first token, no rate, no reason: no invented figures."""
    assert request_text(RequestFacts(ID, "chat", "tiny", error_status=400)) == "a1b2c3 chat 0 in, 0 out, error 400"


def test_only_another_model_than_the_banners_is_named(plain: Screen) -> None:
    """One model: no noise; a second one is named."""
    plain.terminal.banner(BANNER)
    plain.terminal.request_line(FACTS)
    plain.terminal.request_line(replace(FACTS, model="other"))
    assert "tiny" not in plain.lines[-2]
    assert "(other)" in plain.lines[-1]


def test_a_client_cannot_write_on_the_terminal(plain: Screen) -> None:
    """Escapes, line ends and markup in names and messages are shown, not obeyed."""
    plain.terminal.request_line(replace(FACTS, session="\x1b[2J\nfake", notes=("[bold]x[/bold]", "\x9b31m\u202e")))
    plain.terminal.error("[/] \r gone")
    assert len(plain.lines) == 2
    assert "\\x1b[2J\\nfa" in plain.lines[0]
    assert "[bold]x[/bold]" in plain.lines[0]
    assert plain.file.getvalue().replace("\n", "").isprintable()


def test_a_short_prefill_is_not_shown(plain: Screen) -> None:
    """Two thousand tokens in under two seconds are no news."""
    for num_done in (0, 1000, 2000):
        plain.seconds += 0.5
        plain.terminal.prefill(ID, num_done, 2000)
    assert plain.lines == []


def test_a_slow_prefill_is_shown_after_two_seconds(plain: Screen) -> None:
    """A short prompt that takes long is shown, with its speed."""
    plain.terminal.prefill(ID, 0, 1000)
    plain.seconds = 2.5
    plain.terminal.prefill(ID, 500, 1000)
    assert plain.lines == ["prefill a1b2c3: 500 of 1,000 tokens (50 %), 200 tok/s, about 2 s left"]


def test_it_says_who_waits_for_whom(plain: Screen) -> None:
    """With an estimate where there is one, in the characters that other lines show; a short wait is no news."""
    other = RequestId("req12ab34cd56ef78")
    for num_left, seconds in ((8_200, 12.4), (8_200, None), (100, None), (100, 1.9)):
        plain.terminal.awaits(ID, Awaiting(other, 8_200, num_left, seconds))
    waits = "a1b2c3 waits for req12ab34cd5 (prefilling the same 8,200 tokens)"
    assert [line.partition(" ")[2] for line in plain.lines] == [f"{waits}, about 12 s", waits]


def test_a_warm_request_is_not_a_long_prefill(plain: Screen) -> None:
    """What counts is what is left to compute, not the prompt's length."""
    plain.terminal.prefill(ID, 9000, 10000)
    assert plain.lines == []


def test_lines_of_a_long_prefill_are_few(plain: Screen) -> None:
    """A hundred steps in 100 s: one line at once, then at most one per tenth and five seconds."""
    for num_done in range(0, 10100, 100):
        plain.terminal.prefill(ID, num_done, 10000)
        plain.seconds += 1.0
    assert plain.lines[0] == "prefill a1b2c3: 0 of 10,000 tokens (0 %)"
    assert 9 <= len(plain.lines) <= 11
    assert "(90 %), 100 tok/s" in plain.lines[9]


def test_a_fast_long_prefill_writes_no_line_per_tenth(plain: Screen) -> None:
    """Ten tenths within five seconds are one line."""
    for num_done in range(0, 10100, 100):
        plain.terminal.prefill(ID, num_done, 10000)
        plain.seconds += LINE_SECONDS / 200
    assert len(plain.lines) == 1


def test_a_prefill_says_when_its_first_token_comes(plain: Screen) -> None:
    """What the engine knows of others that are before it counts, not this prompt's own speed."""
    plain.terminal.prefill(ID, 15, 23_793, 120.0)
    plain.seconds += SILENT_SECONDS
    plain.terminal.prefill(ID, 3_015, 23_793, 240.0)
    assert plain.lines == [
        "prefill a1b2c3: 15 of 23,793 tokens (0 %), about 120 s left",
        "prefill a1b2c3: 3,015 of 23,793 tokens (12 %), 100 tok/s, about 240 s left",
    ]


def test_a_very_slow_prefill_is_not_silent(plain: Screen) -> None:
    """Half a minute without a tenth of progress still brings a line, so that it does not look hung."""
    plain.terminal.prefill(ID, 0, 100_000)
    plain.seconds += SILENT_SECONDS
    plain.terminal.prefill(ID, 100, 100_000)
    assert len(plain.lines) == 2


def test_two_prefills_do_not_disturb_each_other(plain: Screen) -> None:
    """Each request has its own progress."""
    plain.terminal.prefill(ID, 0, 10000)
    plain.terminal.prefill(RequestId("other"), 0, 20000)
    assert [line.split(":")[0] for line in plain.lines] == ["prefill a1b2c3", "prefill other"]


def test_a_live_bar_appears_and_goes(live: Screen) -> None:
    """On a terminal a long prefill draws a bar with its counts; the request's line ends it."""
    live.terminal.prefill(ID, 0, 10000)
    live.seconds = 10.0
    live.terminal.prefill(ID, 4000, 10000)
    deadline = time.monotonic() + 60
    while "4,000 of 10,000 tokens (40 %), 400 tok/s" not in live.file.getvalue():
        assert time.monotonic() < deadline, live.file.getvalue()
        time.sleep(0.05)
    live.terminal.note("between")
    live.terminal.request_line(FACTS)
    text = live.file.getvalue()
    assert "prefill a1b2c3" in text
    assert "between" in text and "first token 0.41 s" in text


def test_a_prefill_that_is_complete_takes_its_bar_away(live: Screen) -> None:
    """No bar stands at 100 % while the answer is being written."""
    live.terminal.prefill(ID, 0, 10000)
    live.terminal.prefill(ID, 9999, 10000)
    live.terminal.prefill(ID, 10000, 10000)


def test_several_live_bars_share_the_screen(live: Screen) -> None:
    """The second bar may end before the first, and a bar may come after all have gone."""
    other = RequestId("other")
    live.terminal.prefill(ID, 0, 10000)
    live.terminal.prefill(other, 0, 10000)
    live.terminal.prefill_done(other)
    live.terminal.prefill(ID, 10000, 10000)
    live.terminal.prefill_done(ID)
    live.terminal.prefill(other, 0, 10000)
    live.terminal.prefill_done(other)
    live.terminal.prefill_done(other)


def test_what_has_less_than_a_gigabyte_is_told_in_megabytes(plain: Screen) -> None:
    """Fetching and converting the demo's model."""
    with plain.terminal.working("fetching it") as tell:
        tell(9_300_000, 93_000_000)
        plain.seconds = 6.0
        tell(46_500_000, 93_000_000)
    assert "fetching it: 46 of 93 MB (50 %)" in plain.lines


def test_loading_says_when_it_is_done(plain: Screen) -> None:
    """In a file: a line when it begins, with bytes where they are known, and one when it is over."""
    with plain.terminal.loading("tiny") as tell:
        plain.seconds = 6.0
        tell(4_000_000_000, 16_000_000_000)
    assert plain.lines == [
        "loading tiny",
        "loading tiny: 4.0 of 16.0 GB (25 %)",
        "loading tiny: done after 6.0 s",
    ]


def test_what_answers_says_so_with_the_seconds_since_the_start() -> None:
    """Since the process began, which is before there was a terminal. One that answers again was started meanwhile: the
    time would be that of the whole server."""
    file = io.StringIO()
    clock = iter((24.0, 25.26, 3600.0))
    terminal = Terminal(Console(file=file, width=100), lambda: 0.0, lambda: next(clock), began_at=20.0)
    for name, port in (("kvserve", 8080), ("LiteLLM", 4000), ("LiteLLM", 4000)):
        terminal.ready(name, f"http://127.0.0.1:{port}")
    assert [line[9:] for line in file.getvalue().splitlines()] == [
        "kvserve is ready: http://127.0.0.1:8080, 4.0 s after the start",
        "LiteLLM is ready: http://127.0.0.1:4000, 5.3 s after the start",
        "LiteLLM is ready: http://127.0.0.1:4000",
    ]


def test_loading_that_fails_says_so_and_lets_the_error_through(live: Screen) -> None:
    """The bar goes away whatever happens in the block."""
    with pytest.raises(KeyError), live.terminal.loading("tiny"):
        raise KeyError("weights")
    assert "loading tiny: failed after 0.0 s" in live.file.getvalue()


def test_the_wall_clock_stands_in_front(plain: Screen) -> None:
    """Request lines, notes and errors carry the local time."""
    plain.terminal.note("hello")
    assert plain.lines[0][2] == plain.lines[0][5] == ":"
    assert plain.lines[0].endswith(" hello")


def test_threads_write_whole_lines(plain: Screen) -> None:
    """Eight threads at once: every line is whole and none is missing."""

    def write(thread: int) -> None:
        for number in range(50):
            plain.terminal.prefill(RequestId(f"{thread}"), number, 100)
            plain.terminal.request_line(replace(FACTS, request_id=RequestId(f"t{thread}n{number}")))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sorted(line.split()[1] for line in plain.lines) == sorted(f"t{t}n{n}" for t in range(8) for n in range(50))


def test_threads_share_the_live_screen(live: Screen) -> None:
    """Bars that come and go from eight threads while lines are written: no exception, nothing left."""

    def work(thread: int) -> None:
        for number in range(10):
            request_id = RequestId(f"t{thread}n{number}")
            live.terminal.prefill(request_id, 0, 10000)
            live.terminal.prefill(request_id, 5000, 10000)
            live.terminal.request_line(replace(FACTS, request_id=request_id))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [None] * 8
    assert live.file.getvalue().count("first token") == 80


def test_an_ascii_terminal_shows_escapes() -> None:
    """A name that the terminal's encoding lacks is written as escapes and stops nothing."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(Console(file=stream, force_terminal=False)).note("модель ä")
    stream.flush()
    assert b"\\u043c" in raw.getvalue()


def test_a_closed_output_stops_nothing() -> None:
    """Writing after the stream was closed is silently over."""
    stream = io.StringIO()
    terminal = Terminal(Console(file=stream, force_terminal=False))
    stream.close()
    terminal.note("nobody reads this")
    terminal.request_line(FACTS)


def test_a_reader_that_leaves_does_not_end_the_process() -> None:
    """`server | head -1`: after the pipe broke the process goes on and ends with its own exit code."""
    program = (
        "from rich.console import Console\n"
        "from kvserve.observe.terminal import Terminal\n"
        "import sys\n"
        "terminal = Terminal(Console())\n"
        "for number in range(200): terminal.note('x' * 1000)\n"
        "sys.exit(7)\n"
    )
    root = Path(__file__).resolve().parents[2]
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=sink, cwd=root)
    os.close(reading)
    assert process.wait(timeout=60) == 7


def test_a_bug_is_not_taken_for_a_closed_output(plain: Screen) -> None:
    """A ValueError that is none of the stream's comes through."""
    with pytest.raises(ValueError, match="bug"):
        plain.terminal._guard(lambda: int("bug"))
