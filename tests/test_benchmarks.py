"""What the benchmarks compute from what they measured; the measuring itself is theirs alone."""

import random
import socket
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import (
    blas,
    closed_loop,
    image_memory,
    open_loop,
    paused_loop,
    real_loop,
    reuse,
    reuse_scenarios,
    soak,
    written,
)
from benchmarks.client import BenchmarkError, Stream
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.kept import RESULTS, KeptRows, Part
from benchmarks.memory import slope
from benchmarks.mixed_lengths import Round
from benchmarks.model_free import ModelFree, Told
from benchmarks.open_loop import Counts, Judged, Played, Row, play, pooled, report, row_of, table
from benchmarks.prompts import num_common
from benchmarks.recordings import MESSAGES, Conversation, Reply, Request, shared_folder, unthinking
from benchmarks.reuse_oracle import CONVENTIONS, PLAYED_FAMILIES, RECORDED_FAMILIES
from kvserve.web.exchange import encode_event
from tests.models import tiny_model


@given(rise=st.floats(-100, 100), start=st.floats(-100, 100), num=st.integers(2, 50))
def test_the_slope_of_a_line_is_its_rise(rise: float, start: float, num: int) -> None:
    """Points on a line give the line back."""
    xs = [2.0 * number for number in range(num)]
    assert slope(xs, [start + rise * x for x in xs]) == pytest.approx(rise, abs=1e-6)


def test_noise_around_a_level_has_no_slope_and_a_leak_has() -> None:
    """A leak that is smaller than the noise of a single reading is seen all the same."""
    rng = random.Random(2)
    xs = [float(number) for number in range(100)]
    noise = [rng.uniform(-50, 50) for _ in xs]
    assert abs(slope(xs, noise)) < 0.3
    assert slope(xs, [value + x for value, x in zip(noise, xs, strict=True)]) > 0.7


@given(cuts=st.lists(st.integers(1, 400), max_size=6))
def test_a_streamed_answer_is_read_whatever_its_packets_are(cuts: list[int]) -> None:
    """Text, its first arrival and usage are there wherever the bytes were cut."""
    said = [{"choices": [{"delta": {"content": text}}]} for text in ("Well", ", yes.")]
    wire = b"HTTP/1.0 200 OK\r\nX: y\r\n\r\n: hello\n\n" + b"".join(map(encode_event, [*said, {"usage": {"n": 2}}]))
    stream = Stream(socket.socket(), 0.0)
    for number, (start, end) in enumerate(pairwise([0, *sorted(cuts), len(wire)]), 1):
        if start < end:
            stream.feed(wire[start:end], float(number))
    stream.connection.close()
    assert "".join(text for _, text in stream.texts()) == "Well, yes."
    assert stream.first_text_at == stream.texts()[0][0]
    assert stream.usage() == {"n": 2}


def test_an_error_answer_is_told_whenever_one_looks() -> None:
    """An answer that is none never passes for a short one, not at the second look either."""
    with socket.socket() as connection:
        stream = Stream(connection, 0.0)
        stream.feed(b"HTTP/1.0 503 Service Unavailable\r\n\r\n", 1.0)
        for look in (lambda: stream.first_text_at, stream.texts, stream.usage, stream.texts):
            with pytest.raises(BenchmarkError, match="503"):
                look()


@pytest.mark.parametrize("slowdown", [1.0, 1.5, 4.0])
def test_rows_beside_a_long_one_are_compared_with_rows_of_their_own_length(slowdown: float) -> None:
    """Steps that cost more with every token are not taken for steps that a neighbour slows down, as they are where the
    rates alone before and after are averaged."""
    before, between, after = (0.0, 3.0), (3.0, 6.0), (6.0, 9.0)
    arrivals, now = list[float](), 0.0
    while now < after[1]:
        now += (1e-3 + 1.2e-6 * len(arrivals)) * (slowdown if between[0] <= now < between[1] else 1)
        arrivals.append(now)
    found = Round(arrivals, before, between, after)
    slowed = found.pace(between)
    assert found.slowdown(slowed) == pytest.approx(slowdown, rel=0.03)
    average = (1 / found.pace(before).seconds + 1 / found.pace(after).seconds) / 2
    assert average * slowed.seconds > 1.1 * slowdown


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_beginning_is_the_longest_one(base: list[int], one: list[int], other: list[int]) -> None:
    """Equal up to there, and different or at an end behind it."""
    a, b = [*base, *one], [*base, *other]
    length = num_common(a, b)
    assert len(base) <= length and a[:length] == b[:length]
    assert length in (len(a), len(b)) or a[length] != b[length]


def test_a_soak_fails_where_the_disk_or_memory_grows() -> None:
    """A record above the cap is allowed, a byte more is not; nor is a leak behind the warm-up."""
    watch = soak.Watch(Path(), soak.CAP_BYTES + 1000, 1000, 60, [float(number) for number in range(60)])
    disk: dict[str, object] = {"num_evicted": 1, "num_errors": 0}

    def missed(*rss_mib: float) -> list[bool]:
        watch.rss_bytes = [mib * 2**20 for mib in rss_mib]
        return [figure.is_missed for figure in soak._figures(watch, disk)]

    level = [200 + min(number, 20) + number % 2 for number in range(60)]
    assert missed(*level) == [False, False]
    assert missed(*(200 + number / 2 for number in range(60))) == [False, True]
    watch.peak_disk_bytes += 1
    assert missed(*level) == [True, False]


def test_pictures_fail_where_memory_grows_or_a_budget_is_passed() -> None:
    """What fills up before the twentieth picture is allowed, and noise, and one buffer more at the end; a megabyte
    of each that stays behind is not, nor is a byte above a budget."""
    at = list(range(5, 55, 5))

    def missed(rss_mib: list[float], num_bytes: int) -> list[bool]:
        rss = [mib * 2**20 for mib in rss_mib]
        seen = image_memory.Seen(at, rss, [2.0**24] * len(at), [num_bytes] * len(at), [0] * len(at), at[-1])
        return [figure.is_missed for figure in image_memory.figures([seen])]

    level = [300 + 10 * min(number, 20) + number % 2 * 4 for number in at]
    assert missed(level, image_memory.FEATURE_BYTES) == [False, False, False, False]
    assert missed([*level[:-1], level[-1] + 30], image_memory.FEATURE_BYTES) == [False, False, False, False]
    assert missed([300 + number for number in at], image_memory.FEATURE_BYTES) == [False, False, True, False]
    assert missed(level, image_memory.FEATURE_BYTES + 1) == [True, False, False, False]


def told(num_prompt: int, num_cached: int, num_possible: int, *, is_first: bool = False) -> Judged:
    return Judged(Told(num_prompt, num_cached, None), Possible(num_prompt, num_possible), is_first)


def test_shares_are_pooled_over_tokens_and_leave_first_requests_out() -> None:
    """A long prompt counts for more than a short one; what nobody can know counts only when asked for."""
    first, short, long = told(50, 0, 0, is_first=True), told(100, 50, 60), told(300, 300, 300)
    rows = [row_of(Played("c", "one", "f", (first, short))), row_of(Played("c", "two", "f", (long,)))]
    warm, every = pooled(rows, with_first=False), pooled(rows, with_first=True)
    assert (warm.num_requests, warm.reuse, warm.oracle) == (2, 0.875, 0.9)
    assert (every.num_requests, every.reuse, every.oracle) == (3, 350 / 450, 360 / 450)
    assert not warm.is_at_oracle


def row(client: str, name: str, family: str, num_cached: int, num_possible: int = 90) -> Row:
    return Row(client, name, family, Counts(1, 50, 0, 50, 0), Counts(2, 100, num_cached, 100, num_possible))


def test_a_table_measured_in_parts_is_that_of_one_run(tmp_path: Path) -> None:
    """Each part brings its rows, in whatever order; a row that is measured again replaces the one before."""
    rows = [row("opencode", "a", "qwen3", 90), row("opencode", "b", "qwen3", 80), row("opencode", "a", "gemma3", 70)]
    one, parts = tmp_path / "one", tmp_path / "parts"
    one.mkdir()
    parts.mkdir()
    KeptRows("open_loop", Row, report, one).put(rows)
    kept = KeptRows("open_loop", Row, report, parts)
    kept.put([rows[2]])
    kept.put([row("opencode", "b", "qwen3", 1), rows[0]])
    assert kept.put([rows[1]]) == kept.read() == rows
    assert {file.name: file.read_text() for file in one.iterdir()} == {
        file.name: file.read_text() for file in parts.iterdir()
    }


def test_a_part_leaves_out_what_is_kept(tmp_path: Path) -> None:
    """Told apart by client, conversation and family; over when its seconds have passed."""
    kept = KeptRows("open_loop", Row, report, tmp_path)
    kept.put([row("c", "a", "qwen3", 90)])
    talks = [Conversation("c", name, ()) for name in "ab"]
    part = kept.part(is_missing=True, seconds=1000)
    assert [talk.name for talk in part.of(talks, "qwen3")] == ["b"]
    assert part.of(talks, "gemma3") == talks
    assert kept.part(is_missing=False, seconds=0) == Part(end=pytest.approx(0, abs=1e12))
    assert kept.part(is_missing=False, seconds=0).is_over() and not part.is_over()


def test_the_kept_tables_are_those_of_their_rows() -> None:
    """Nobody edits the Markdown; no bound is missed, no request differs, each conversation is there on every family."""
    rows = open_loop.KEPT.read()
    families = Counter((row.client, row.name) for row in rows)
    assert set(families.values()) == {len(PLAYED_FAMILIES)}
    assert not [line for line in table(rows) if "MISSED" in line]
    paired = real_loop.KEPT.read()
    sampled = Counter((row.client, row.name) for row in paired)
    assert set(sampled.values()) == {len(RECORDED_FAMILIES)}
    assert {client for client, _ in sampled} <= {row.client for row in rows}
    assert not [row for row in paired if row.num_differing]
    with_pauses = paused_loop.KEPT.read()
    with_families = ("qwen3", "qwen3_5")
    assert Counter((row.name, row.family) for row in with_pauses) == Counter(
        product(paused_loop.SESSIONS, with_families)
    )
    assert not [line for line in paused_loop.table(with_pauses) if "MISSED" in line]
    closed = closed_loop.KEPT.read()
    assert Counter((row.name, row.family) for row in closed) == Counter(product(closed_loop.SESSIONS, with_families))
    assert not [row for row in closed if row.misses]
    reports = {"open_loop": report(rows), "real_loop": real_loop.report(paired)}
    reports |= {"paused_loop": paused_loop.report(with_pauses), "closed_loop": closed_loop.report(closed)}
    for name, text in reports.items():
        assert (RESULTS / f"{name}.md").read_text("utf-8") == text


@pytest.mark.parametrize(("num_paused", "verdict"), [(96, "0.96, pass"), (95, "0.96, MISSED")])
def test_with_pauses_the_floor_is_the_bound(num_paused: int, verdict: str) -> None:
    """Of each session and of all of a kind; what was reused without them is shown beside it and decides nothing."""
    row = paused_loop.Row("pi-0.87-qwen", "pi-0.87-qwen", "qwen3", 8, 100, num_paused, 90, 10, 6)
    *_, of_session, of_all = paused_loop.table([row])
    cells = f"qwen3 | 8 | 100 | {num_paused / 100:.4f} | 10, 6 | 0.9000 | {verdict} |"
    assert (of_session, of_all) == (f"| pi-0.87-qwen | {cells}", f"| **PI** | {cells}")


def test_the_floors_of_a_client_are_those_of_the_best_other_server() -> None:
    """By family: what reaches the hybrid's floor may miss the dense one's."""
    rows = [
        paused_loop.Row(name, name, family, 10, 1000, 991, 990, 0, 0)
        for name in paused_loop.CLAUDE_CODE
        for family in ("qwen3", "qwen3_5")
    ]
    verdicts = [line.split(" | ")[-1] for line in list(paused_loop.table(rows))[2:]]
    assert verdicts == [*["0.992, MISSED |"] * 2, *["0.989, pass |"] * 2, "0.992, MISSED |", "0.989, pass |"]


def test_the_table_of_reuse_has_a_row_for_whatever_is_played() -> None:
    """Every family that is played has conventions and every conversation its row, with others' figures where known."""

    def judged(num_cached_tokens: int) -> reuse.Judged:
        reply = reuse_scenarios.Reply("", "text", 100, num_cached_tokens, 4, 0.1)
        return reuse.Judged(reuse_scenarios.Ask(()), reply, 90)

    assert set(reuse.KINDS) <= set(CONVENTIONS)
    assert set(reuse.PEERS) <= set(product(reuse_scenarios.SCENARIOS, reuse.KINDS.values()))
    led = [
        reuse.Led(family, scenario, (judged(0), judged(85)), ((0.1, 0.5),))
        for family, scenario in product(reuse.KINDS, reuse_scenarios.SCENARIOS)
    ]
    lines = reuse.table(led).splitlines()
    assert len(lines) == 2 + len(led)
    assert lines[2] == f"| qwen3 | user turns | 2 | 0.850 | 0.900 | 90 | 0.20 | {reuse.PEERS['user turns', 'dense']} |"


def test_a_session_without_thinking_has_none_and_is_the_same_otherwise() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    said = {"type": "text", "text": "A hill."}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [thought, said]}]
    request = Request({"messages": messages, "thinking": {"type": "adaptive"}}, Reply("So.", "Trees."), path=MESSAGES)
    left = Request({"messages": messages[:1]}, None, path=MESSAGES)
    silent = unthinking(Conversation("c", "a", (request, left)))
    assert (silent.client, silent.name) == ("c", "a without thinking")
    assert silent.requests[0].body == {**request.body, "messages": [messages[0], {**messages[1], "content": [said]}]}
    assert silent.requests[0].reply == Reply("", "Trees.")
    assert silent.requests[1] == left


@pytest.mark.parametrize(
    ("num_cached", "num_possible", "verdict"),
    [
        (97, 98, "pass"),
        (96, 98, "MISSED (oracle)"),
        (95, 96, "MISSED (floor)"),
        (94, 99, "MISSED (oracle, floor)"),
        (94, 95, "pass, the floor lies above the oracle"),
    ],
)
def test_the_verdict_over_a_kind_of_traffic(num_cached: int, num_possible: int, verdict: str) -> None:
    """More than a hundredth below the oracle, or below a floor that the oracle reaches, is a miss."""
    line = list(table([row("pi-0.87-qwen", "n", "qwen3", num_cached, num_possible)]))[-1]
    assert line.split(" | ")[0] == "| **PI**" and line.split(" | ")[7] == verdict


def wire(*messages: tuple[str, str]) -> Request:
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return Request(body, Reply(content="It is so."))


def test_the_oracle_is_not_lowered_by_a_volatile_value_but_by_a_meaning() -> None:
    """A clock that moved is frozen, another word is not; a message that is gone takes with it what came behind."""
    oracle = FrozenOracle("qwen3", tiny_model("qwen3"))
    system, answer = "Help. Current time is 10:00", ("assistant", "It is so.")
    first = oracle.judge(wire(("system", system), ("user", "Look."), ("user", "A carrier.")))
    moved = oracle.judge(
        wire(("system", "Help. Current time is 11:11"), ("user", "Look."), answer, ("user", "And now?"))
    )
    other = oracle.judge(wire(("system", "Assist. Current time is 10:00"), ("user", "Look.")))
    assert first.num_reusable_tokens == 0
    assert 10 < moved.num_reusable_tokens < first.num_prompt_tokens
    assert other.num_reusable_tokens < 8 < moved.num_reusable_tokens


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_oracle_knows_where_words_end_that_are_joined_to_the_next(role: str) -> None:
    """Where turns must alternate a message ends inside its turn, and a state can be kept there."""
    oracle = FrozenOracle("gemma3", tiny_model("gemma3"))
    talk = [("user", "Look."), ("assistant", "I look."), *([("user", "Well?")] if role == "assistant" else [])]
    known = [*talk, (role, "It is a hill with a tree on it. " * 8)]
    other = {"user": "assistant", "assistant": "user"}[role]
    first = oracle.judge(wire(*known, (other, "And?"), ("user", "So?")))
    joined = oracle.judge(wire(*known, (role, "And a lake."), ("user", "So?")))
    assert joined.num_reusable_tokens > 0.8 * first.num_prompt_tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_conversation_without_a_model_reuses_prompt_and_answer(family: str) -> None:
    """The path without a model starts each turn where the last one ended, as the oracle beside it says."""
    folder, is_cuttable = tiny_model(family), CONVENTIONS[family].is_cuttable
    answer = "It is so, and it stays so for as long as anybody looks."  # enough to show whose conversation it is
    talk = [("system", "You help. " * 20), ("user", "Look."), ("assistant", answer), ("user", "And now?")]
    requests = tuple(wire(*talk[:length]) for length in (2, 4))
    played = play(
        Conversation("c", "n", requests),
        family,
        ModelFree(folder, is_cuttable=is_cuttable),
        FrozenOracle(family, folder),
    )
    counts = pooled([row_of(played)], with_first=False)
    assert counts.oracle > 0.5
    assert counts.is_at_oracle


def test_recordings_are_looked_for_in_and_beside_a_repository(tmp_path: Path) -> None:
    """None where there are none, so that a benchmark says so instead of failing."""
    (tmp_path / "repository").mkdir()
    assert shared_folder(tmp_path / "repository") is None
    (tmp_path / "shared").mkdir()
    assert shared_folder(tmp_path / "repository") == tmp_path / "shared"


@pytest.mark.parametrize(
    ("family", "num_bytes", "num_state_bytes", "is_missed"),
    [
        ("qwen3_5", 9000, 1500, False),
        ("qwen3_5", 9000, 1501, True),
        ("gemma3", 2000, 0, False),
        ("gpt_oss", 2001, 0, True),
    ],
)
def test_too_much_written_in_a_turn_is_missed(
    family: str, num_bytes: int, num_state_bytes: int, is_missed: bool
) -> None:
    """Of a hybrid states count, of a model with windows all bytes, against the KV of the turn's tokens."""
    turns = (written.Turn(num_bytes, num_state_bytes, 1, 10),) * 3
    assert written.figure(family, written.Loop(turns, 100.0, 1000)).is_missed == is_missed


def test_a_fast_blas_is_compared_by_the_clock_and_by_the_processors_time() -> None:
    """Each measurement has its row, each precision both sides and how often the one goes into the other."""
    found = {name: [blas.Taken(0.5, 0.4), blas.Taken(0.125, 0.2)] for name in blas.MEASUREMENTS}
    _, _, *rows = blas.table("OpenBLAS 1.2", {"float32": found, "4 bits": found}).splitlines()
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in blas.MEASUREMENTS]
    assert {row.partition(" | ")[2] for row in rows} == {" | ".join(["500 (400)", "125 (200)", "4.0 (2.0)"] * 2) + " |"}
