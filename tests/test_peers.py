"""The comparison with other servers: how answers are read, what passes for another order, and a run in small."""

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.client import BenchmarkError
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.peer_nouns import MODELS, Figures, PeerModel, Turn
from benchmarks.peer_plots import PLOTS, draw
from benchmarks.peer_report import BEGIN, END, KEPT, PAGE, report, with_section
from benchmarks.peer_rows import (
    SERVERS,
    Row,
    are_apart,
    losses,
    machines,
    medians,
    scenario_table,
    servers_table,
    turned,
)
from benchmarks.peer_scenarios import SCENARIOS, figures_of, shortened
from benchmarks.peer_servers import (
    PEERS,
    Installed,
    Peer,
    ServerProcess,
    install_commands,
    last_error,
    recipe,
    tree_bytes,
)
from benchmarks.peer_wire import READERS, Answer, Asking, Piece, Usage, events, streamed
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, Request
from benchmarks.reuse_scenarios import Sizes
from tests.models import tiny_model

STREAMS: Mapping[str, list[dict[str, Any]]] = {
    CHAT: [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"reasoning_content": "Well"}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 60}},
        },
    ],
    MESSAGES: [
        {
            "type": "message_start",
            "message": {
                "usage": {
                    "input_tokens": 20,
                    "cache_read_input_tokens": 60,
                    "cache_creation_input_tokens": 10,
                    "output_tokens": 0,
                }
            },
        },
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "Well"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Yes"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "f{}"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
    ],
    RESPONSES: [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.reasoning_text.delta", "delta": "Well"},
        {"type": "response.output_text.delta", "delta": "Yes"},
        {"type": "response.function_call_arguments.delta", "delta": "f{}"},
        {
            "type": "response.completed",
            "response": {
                "usage": {"input_tokens": 90, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 60}}
            },
        },
    ],
}


@pytest.mark.parametrize("path", STREAMS)
def test_each_protocols_stream_says_the_same(path: str) -> None:
    """Words, thinking, calls and usage, whatever the fields are called."""
    usage, said = Usage(), Piece()
    for event in STREAMS[path]:
        piece = READERS[path](event)
        usage = usage.and_then(piece.usage)
        said = Piece(said.content + piece.content, said.reasoning + piece.reasoning, said.call + piece.call)
    assert said == Piece("Yes", "Well", "f{}")
    assert usage == Usage(90, 60, 5)


@pytest.mark.parametrize("path", STREAMS)
def test_what_a_server_does_not_say_is_not_taken_for_nothing(path: str) -> None:
    """Without a count of cached tokens there is none, which is not none cached."""
    plain: dict[str, dict[str, Any]] = {
        CHAT: {"usage": {"prompt_tokens": 9, "completion_tokens": 1}},
        MESSAGES: {"usage": {"input_tokens": 9, "output_tokens": 1}},
        RESPONSES: {"response": {"usage": {"input_tokens": 9, "output_tokens": 1}}},
    }
    assert READERS[path](plain[path]).usage == Usage(9, None, 1)


def test_events_are_read_however_lines_are_spaced() -> None:
    """With and without a blank behind the colon, among comments and names of events."""
    lines = [b": hello\n", b"event: x\n", b'data: {"a": 1}\n', b"\n", b'data:{"a": 2}\r\n', b"data: [DONE]\n"]
    assert list(events(lines)) == [{"a": 1}, {"a": 2}]


def test_a_request_asks_all_servers_the_same() -> None:
    """Greedily, streamed, with one limit, whatever the client had sent."""
    body = {"model": "m", "max_completion_tokens": 9, "max_tokens": 8, "temperature": 1, "messages": []}
    asked = streamed(CHAT, body, "peer", 3)
    assert asked["model"] == "peer" and asked["stream"] and asked["temperature"] == 0
    assert (asked["max_tokens"], asked.get("max_completion_tokens")) == (3, None)
    assert streamed(RESPONSES, body, "peer", 3).keys() >= {"max_output_tokens"}


NO_USAGE = Usage()


def answer(times: Sequence[float], usage: Usage = NO_USAGE) -> Answer:
    return Answer(0.0, tuple((at, Piece("x")) for at in times), usage)


def test_the_longest_gap_is_the_one_beside_the_other_prompt() -> None:
    """A gap that only overlaps counts whole; one before or behind does not; a stream that ended early is no answer."""
    running = answer([1, 9, 10, 13, 14, 30])
    assert running.longest_gap_seconds(9.5, 13.5) == 3
    assert running.longest_gap_seconds(11, 12) == 3
    with pytest.raises(BenchmarkError, match="over before"):
        running.longest_gap_seconds(9.5, 30)


def test_reuse_leaves_the_first_request_out_and_stays_empty_where_no_answer_says_any() -> None:
    """Over all tokens of the later prompts."""

    def turn(seconds: float, num_prompt: int, num_cached: int | None) -> Turn:
        said = answer([seconds, seconds + 1, seconds + 2], Usage(num_prompt, num_cached, 3))
        return Turn(Request({"messages": []}, None), said)

    bounds = [Possible(100, 90), Possible(100, 70)]
    found = figures_of([turn(8, 50, 0), turn(2, 100, 80), turn(4, 100, 60)], bounds)
    assert (found.reuse, found.possible, found.cold_seconds, found.warm_seconds) == (0.7, 0.8, 8, 3)
    assert found.prompt_share == 1
    cut = figures_of([turn(8, 50, 0), turn(2, 40, 30), turn(4, 40, 30)], bounds)
    assert (cut.reuse, cut.prompt_share) == (0.75, 0.4), "a prompt that is cut is easily reused"
    assert figures_of([turn(8, 50, None), turn(2, 100, 80), turn(4, 100, None)], bounds).reuse == 0.4
    assert figures_of([turn(8, 50, None), turn(2, 100, None), turn(4, 100, None)], bounds).reuse is None
    assert figures_of([turn(8, 50, 0), turn(2, 100, 80), turn(4, 100, 60)], bounds[1:]).reuse == 0.6


def test_a_recorded_request_is_cut_in_the_same_way_each_time() -> None:
    """What two requests have in common they still have; what is short stays as it was."""
    long = "".join(chr(97 + number % 26) for number in range(9_000))
    first = shortened({"tools": [1, 2, 3, 4, 5, 6], "messages": [{"content": long}], "store": False})
    second = shortened({"tools": [1, 2, 3, 4, 5, 6], "messages": [{"content": long}, {"content": "short"}]})
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1] == {"content": "short"}
    assert (first["tools"], first["store"]) == ([1, 2, 3], False)
    assert len(first["messages"][0]["content"]) == 1_200
    assert "tools" not in shortened({"messages": []})
    unthinking = shortened({"messages": [], "thinking": {"type": "adaptive"}, "output_config": {}})
    assert unthinking == {"messages": [], "thinking": {"type": "disabled"}}


# --- rows -------------------------------------------------------------------------------------------------------------


def row(server: str, **figures: float) -> Row:
    return Row("user turns", "qwen3", server, Figures(**figures), 1, "", "a machine")


@pytest.mark.parametrize(
    ("kept", "now", "is_told"),
    [
        ((1.0, 2.0), (1.5, 1.6), False),
        ((1.0, 2.0), (2.0, 1.0), True),
        ((1.0, 2.0), (1.05, 1.0), True),
        ((1.0, 1.05), (1.05, 1.0), False),
        ((0.0, 0.5), (0.5, 0.0), True),
    ],
)
def test_another_order_is_told_where_figures_are_apart(
    kept: tuple[float, float], now: tuple[float, float], is_told: bool
) -> None:
    """By more than ten per cent in one of the two runs."""
    rows = [[row(name, warm_seconds=value) for name, value in zip(("a", "b"), run, strict=True)] for run in (kept, now)]
    assert bool(turned(*rows)) is is_told


def test_order_is_asked_only_where_both_runs_have_both_figures() -> None:
    """What one run left out, or a server does not say, is no other order."""
    assert turned([row("a", reuse=0.9)], [row("a", reuse=0.1), row("b", reuse=0.9)]) == []
    assert turned([row("a", reuse=0.9), row("b")], [row("a", reuse=0.1), row("b", reuse=0.9)]) == []
    told = turned([row("a", reuse=0.9), row("b", reuse=0.5)], [row("a", reuse=0.5), row("b", reuse=0.9)])
    assert list(map(str, told)) == ["user turns, qwen3, reused: a : b was 90.0 % : 50.0 %, is 50.0 % : 90.0 %"]


def test_what_loses_is_told() -> None:
    """Where more is better and where less is, and not within the tolerance."""
    rows = [
        row("kvserve", reuse=0.5, warm_seconds=1.0, peak_bytes=100.0),
        row("mlx-lm", reuse=0.9, warm_seconds=0.5, peak_bytes=95.0),
        row("mlx-vlm", reuse=0.1, warm_seconds=2.0),
    ]
    assert list(losses(rows)) == [
        "user turns, qwen3, reused: 50.0 %, mlx-lm 90.0 %",
        "user turns, qwen3, first token, warm: 1.00 s, mlx-lm 0.50 s",
    ]
    rows[0] = row("kvserve", warm_seconds=1.0, prompt_share=1.05)
    rows[1] = row("mlx-lm", warm_seconds=0.5, prompt_share=0.99)
    rows[2] = row("mlx-vlm", warm_seconds=0.7, prompt_share=1.0)
    assert list(losses(rows)) == [
        "user turns, qwen3, first token, warm: 1.00 s, mlx-lm 0.50 s with 99.0 % of the prompt",
        "user turns, qwen3, first token, warm: 1.00 s, mlx-vlm 0.70 s",
    ], "whoever reads less hides nobody who is faster with all of it"
    assert are_apart(0, 1e-9) and not are_apart(0, 0)


def test_medians_are_of_the_rounds_that_have_a_figure() -> None:
    """One that was not measured in a round does not count as none."""
    found = medians([Figures(reuse=0.1), Figures(reuse=0.3, cold_seconds=2), Figures(reuse=0.2)])
    assert found == Figures(reuse=0.2, cold_seconds=2)
    assert medians([]) == Figures()


def test_a_table_says_why_a_server_has_no_figures() -> None:
    """In one line, beside those that have."""
    there = [row("kvserve", reuse=0.9, possible=0.92), replace(row("mlx-lm"), note="has no /v1/messages", num_rounds=0)]
    assert list(scenario_table(there))[2:] == [
        "| qwen3 | kvserve | 90.0 % (92.0 %) | 1 |  |",
        "| qwen3 | mlx-lm |  | 0 | has no /v1/messages |",
    ]


def test_each_model_has_its_own_start_and_its_own_machine() -> None:
    """A part that was measured again says nothing of the models that were not."""
    rows = [
        replace(row("kvserve", start_seconds=3.0), measured_on="a quiet machine"),
        replace(row("kvserve", start_seconds=9.0), measured_on="a quiet machine", scenario="branches"),
        replace(row("kvserve", start_seconds=32.0), model="SmolLM2-135M"),
        replace(row("kvserve"), scenario=SERVERS, model="", note="kvserve 1"),
    ]
    assert list(servers_table(rows))[0::2] == [
        "| Server | Versions, or why it takes no part | Started how | Ready after, SmolLM2-135M | Ready after, qwen3 |",
        "| kvserve | kvserve 1 | without LiteLLM; looks for no BLAS of its own | 32.00 s | 6.00 s |",
    ]
    assert machines(rows) == "SmolLM2-135M: a machine\n\nqwen3: a quiet machine"


def test_the_page_has_the_kept_rows_and_no_path_of_a_machine() -> None:
    """Nobody edits the tables; a page without a place for them is refused."""
    rows = KEPT.read()
    assert with_section(PAGE.read_text("utf-8"), rows) == PAGE.read_text("utf-8")
    if rows:
        assert (PAGE.parent.parent / "benchmarks/results/peers.md").read_text("utf-8") == report(rows)
        assert not [each for each in rows if "/home/" in each.note or "/root/" in each.note or "/tmp/" in each.note]
    with pytest.raises(ValueError, match="no place"):
        with_section("# A page", rows)
    assert with_section(f"a {BEGIN}old{END} b", rows).startswith(f"a {BEGIN}\n")


@pytest.mark.long
def test_the_same_rows_make_the_same_plots(tmp_path: Path) -> None:
    """Byte for byte, without a date."""
    pytest.importorskip("matplotlib")
    rows = [replace(row("kvserve", reuse=0.9, possible=0.92, warm_seconds=0.1), model="qwen3_5")]
    for folder in ("a", "b"):
        draw(rows, tmp_path / folder)
    for name in PLOTS:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert b"<dc:date>" not in (tmp_path / "a" / name).read_bytes()


# --- processes --------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_a_process_and_all_below_it() -> None:
    """And of no other one."""
    assert tree_bytes(10, [(1, 0, 1000), (10, 1, 1), (11, 10, 2), (12, 11, 4), (13, 1, 8)]) == 7


def test_a_fault_is_told_without_folders() -> None:
    """The last line that tells one, in a form that fits into a table."""
    said = 'Traceback\n  File "/root/x/y.py"\nImportError: /opt/a b: no | file /tmp/one/two/lib.so\nbye\n'
    assert last_error(said) == "ImportError: a b: no / file lib.so"
    assert last_error("") == "it said nothing"


def test_an_environment_is_made_anew_where_its_packages_are_others() -> None:
    """On Linux what was pulled in for CUDA leaves; elsewhere the packages are as they are."""
    peer = next(each for each in PEERS if each.without)
    python = Path("env/bin/python")
    on_linux = [" ".join(command) for command in install_commands(peer, python, is_linux=True)]
    assert any(f"uninstall --yes {peer.without[0]}" in each for each in on_linux)
    assert any("--no-deps" in each and peer.instead[0] in each for each in on_linux)
    assert len(install_commands(peer, python, is_linux=False)) == 2
    assert recipe(peer) != recipe(replace(peer, instead=()))


HERE = Installed(sys.executable, {})


def test_a_server_that_does_not_start_is_told_with_its_last_error(tmp_path: Path) -> None:
    """And is gone."""
    peer = Peer("x", "x", lambda python, *_: [str(python), "-c", "raise OSError('no such thing')"], frozenset({CHAT}))
    with pytest.raises(BenchmarkError, match="OSError: no such thing"):
        ServerProcess(peer, HERE, tmp_path, tmp_path / "home").start()


def test_a_server_stands_still_goes_on_and_is_killed_with_its_children(tmp_path: Path) -> None:
    """A file server: asked while it stands still it answers as soon as it goes on; killed, it can be started again."""

    def command(python: Path, _model: Path, port: int, _home: Path) -> list[str]:
        return [str(python), "-S", "-m", "http.server", str(port), "--bind", "127.0.0.1"]

    peer = Peer("x", "x", command, frozenset({CHAT}), ready_path="/")
    with ServerProcess(peer, HERE, tmp_path, tmp_path / "home") as process:
        process.stand_still()
        assert process.peak_bytes > 2**20
        process.go_on()
        process.end(signal.SIGKILL)
        process.start()


# --- a run in small ---------------------------------------------------------------------------------------------------


class FakePeer(BaseHTTPRequestHandler):
    """Answers each chat with two words, and says that it had all messages but the last in its cache."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        num = len(body["messages"])
        usage = {"prompt_tokens": 10 * num, "completion_tokens": 2}
        usage |= {"prompt_tokens_details": {"cached_tokens": 10 * (num - 1)}}  # type: ignore[dict-item]
        if body["messages"][-1]["content"] == "fail":
            self.send_error(500, "no")
            return
        self.send_response(200)
        self.end_headers()
        said = [{"choices": [{"delta": {"content": word}}]} for word in ("Well", ", yes.")]
        for event in [*said, {"choices": [], "usage": usage}]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


class FakeStage:
    """A stage whose server is not started by anybody; an oracle that says what the server does."""

    def __init__(self, port: int, model: PeerModel) -> None:
        self.model, self.seed, self._port = model, 0, port

    def ask(self, path: str, body: Mapping[str, object], headers: Mapping[str, str], num_tokens: int) -> Asking:
        return Asking(self._port, path, streamed(path, body, "peer", num_tokens), headers)

    def restart(self, how: signal.Signals) -> None:
        raise AssertionError(how)

    def possible(self, requests: Sequence[Request]) -> list[Possible]:
        return [Possible(10 * len(each.messages), 10 * (len(each.messages) - 1)) for each in requests]


@pytest.fixture
def fake_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakePeer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_conversation_is_led_with_the_servers_own_answers(fake_port: int) -> None:
    """Four turns of 2, 4, 6 and 8 messages; reuse is what the server says of the last three."""
    model = next(each for each in MODELS if each.family == "qwen3")
    play = next(each.play for each in SCENARIOS if each.name == "user turns")
    found = play(FakeStage(fake_port, model))
    assert found.reuse == found.possible == 15 / 18
    assert found.cold_seconds and found.warm_seconds


def test_an_error_answer_ends_a_scenario(fake_port: int) -> None:
    """It never passes for a short answer."""
    stage = FakeStage(fake_port, MODELS[0])
    with pytest.raises(BenchmarkError, match="500"):
        stage.ask(CHAT, {"messages": [{"role": "user", "content": "fail"}]}, {}, 2).answer()


@pytest.mark.long
def test_two_servers_are_compared_side_by_side() -> None:
    """kvserve and mlx-lm's server on a tiny model: each has its row, with reuse within what was possible."""
    model = next(each for each in MODELS if each.family == "qwen3")
    small = replace(model, sizes=Sizes(system_words=80, user_words=8, result_words=8, num_turns=2), answer_tokens=6)
    wanted = peers.Wanted(
        [each for each in SCENARIOS if each.name in ("user turns", "restart by SIGKILL", "recorded Codex")],
        [each for each in PEERS if each.name in ("kvserve", "mlx-lm")],
        [small],
        num_rounds=1,
    )
    found = {(each.scenario, each.server): each for each in peers.run(wanted, Path("unused"), lambda _rows: None)}
    turns = [found["user turns", name].figures for name in ("kvserve", "mlx-lm")]
    for figures in turns:
        assert figures.reuse is not None and figures.possible is not None
        assert 0.5 < figures.reuse <= figures.possible + 0.02
        assert figures.peak_bytes and figures.cold_seconds and figures.start_seconds
    killed = found["restart by SIGKILL", "kvserve"].figures
    assert killed.reuse is not None and killed.reuse > 0.5
    assert found["restart by SIGKILL", "mlx-lm"].figures.reuse == pytest.approx(0, abs=0.1)
    assert "has no" in found["recorded Codex", "mlx-lm"].note
    assert {name for scenario, name in found if scenario == SERVERS} == {"kvserve", "mlx-lm"}


def test_what_could_be_reused_of_the_talking_model_is_judged_by_its_own_convention() -> None:
    """The oracle takes a convention of a model that is of no family listed."""
    talking = MODELS[0]
    assert talking.is_talking
    oracle = FrozenOracle("", tiny_model("qwen3"), talking.convention)
    said = [{"role": "user", "content": "Hello"}]
    first, again = (oracle.judge(Request({"messages": said}, None)) for _ in range(2))
    assert first.num_reusable_tokens == 0 and again.num_reusable_tokens == again.num_prompt_tokens - 1
