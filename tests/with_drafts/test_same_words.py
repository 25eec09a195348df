"""A server that drafts at every step beside one that drafts nothing: to the same requests they say the same words, and
find as much of them again. And planted faults in what drafts leave behind, which the tests of this folder must notice.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvserve.engine import admission, decode
from kvserve.engine import rows as rows_module
from tests.engine.engines import NUM_ANSWER_TOKENS, let_prompts_take_no_time, prompt_of
from tests.engine.full_engines import budget_bytes
from tests.engine.moving_rows import put_backs_counted
from tests.engine.test_drafted_controls import FAULTS
from tests.laws import THREE_KINDS
from tests.requests.test_serve import SCHEMA, TOOLS, without_space
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    Chat,
    chat_body,
    encode_request,
    eventually,
    serving_app,
)
from tests.test_http import test_a_seed_repeats_and_greedy_repeats as seeds_repeat
from tests.with_drafts.trying import Tried

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 4}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
CALLING = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "thinking": "off"}
NUM_TOKENS = 40


@dataclass(frozen=True)
class Pair:
    """Two servers of one model."""

    family: str
    drafted: AppUnderTest
    plain: AppUnderTest

    def __iter__(self) -> Iterator[AppUnderTest]:
        return iter((self.drafted, self.plain))


@pytest.fixture(scope="module", params=THREE_KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family = str(request.param)
    with (
        serving_app(tmp_path_factory.mktemp("drafted"), family) as drafted,
        serving_app(tmp_path_factory.mktemp("plain"), family, speculation="off") as plain,
    ):
        yield Pair(family, drafted, plain)


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest) -> None:
    """Of the tests before."""
    if "pair" in request.fixturenames:
        for app in request.getfixturevalue("pair"):
            app.clear_cache()


def ways_of_asking(app: AppUnderTest, family: str) -> list[dict[str, Any]]:
    """What the requests of a conversation bring, one after the other: every way in which an answer may be drawn."""
    plain: dict[str, Any] = {"max_tokens": NUM_TOKENS}
    seeded = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    formed = {"response_format": FORM, "thinking": "off", "max_tokens": 120, **without_space(app)}
    called = [{**CALLING, "max_tokens": 140, **without_space(app)}] if family != "gemma3" else []
    thinking = [{"thinking": {"type": "enabled", "budget_tokens": 11}}] if family != "gemma3" else []
    ways = [{}, seeded, penalties, {"logit_bias": {"305": 3.0}}, formed, *called, *thinking, {"max_tokens": 1}, {}]
    return [{**plain, **way} for way in ways]


def conversation(app: AppUnderTest, family: str) -> list[Chat]:
    """A chat whose turns are asked in all these ways, every other one streamed, and whose client sends back what it
    was told."""
    messages: list[dict[str, Any]] = [dict(SYSTEM), {"role": "user", "content": "Look around."}]
    answers: list[Chat] = []
    for turn, fields in enumerate(ways_of_asking(app, family)):
        is_streamed = {"stream": True, "stream_options": {"include_usage": True}} if turn % 2 else {}
        answers.append(app.chat(messages, session_id="one", **fields, **is_streamed))
        messages.append({"role": "assistant", "content": answers[-1].content or "Nothing."})
        messages.append({"role": "user", "content": f"And then, after {turn}?"})
    return answers


def assert_same(drafted: list[Chat], plain: list[Chat]) -> None:
    """The same words, and no less of what was said is found."""
    assert drafted == plain
    assert all(
        (one.num_cached_tokens or 0) >= (other.num_cached_tokens or 0)
        for one, other in zip(drafted, plain, strict=True)
    )


# --- the same words ---------------------------------------------------------------------------------------------------


def test_a_conversation_has_the_same_answers(pair: Pair, tried: Tried) -> None:
    """However its answers are drawn and however much of the drafts is right; asked again too, when they are known."""
    tried.num_passes.clear()
    for _ in range(2):
        assert_same(*(conversation(app, pair.family) for app in pair))
    assert all(tried.num_passes[right] > 10 for right in ("none", "some", "all")), tried.num_passes
    assert tried.num_compared > 0 and tried.num_greedy > 0


def test_a_stop_string_ends_both_at_the_same_place(pair: Pair) -> None:
    """In the middle of an answer, whatever is drafted behind it, and so does what is asked next."""
    asked = {"max_tokens": NUM_TOKENS, "thinking": "off"}
    words = pair.plain.chat("Look.", **asked).content
    stop = words[len(words) // 2 : len(words) // 2 + 3]
    for app in pair:
        app.clear_cache()
    answers = [[app.chat("Look.", stop=[stop], **asked), app.chat("Look. And?")] for app in pair]
    assert_same(*answers)
    assert answers[0][0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_same_tokens(pair: Pair) -> None:
    asked = chat_body("Look.", max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=3)
    for _ in range(2):
        told: list[Any] = [app.post(CHAT_PATH, asked).json["choices"] for app in pair]
        one, other = ([entry for choice in choices for entry in choice["logprobs"]["content"]] for choices in told)
        assert [entry["token"] for entry in one] == [entry["token"] for entry in other]
        assert [entry["logprob"] for entry in one] == pytest.approx([entry["logprob"] for entry in other], abs=1e-3)


def test_answers_beside_one_another_are_those_of_a_server_without_drafts(pair: Pair) -> None:
    """Rows that join and leave: some go on by themselves."""
    asked = [("Look at the hill. " * (1 + 3 * number), 12 + 30 * number) for number in range(3)]
    for _ in range(2):
        told = []
        for app in pair:
            with ThreadPoolExecutor(len(asked)) as pool:
                told.append(list(pool.map(lambda each, app=app: app.chat(each[0], max_tokens=each[1]), asked)))
        assert told[0] == told[1]


def test_an_answer_that_is_left_in_the_middle_is_asked_again(pair: Pair) -> None:
    """What was kept of it is a part of the whole one."""
    messages = [dict(SYSTEM), {"role": "user", "content": "Look around."}]
    told = []
    for app in pair:
        before = len(app.lines())
        with app.connect() as client:
            body = chat_body(messages, max_tokens=5_000, stream=True)
            client.send(encode_request("POST", CHAT_PATH, body))
            client.read_head()
            for _ in range(9):
                client.read_chunk()
        assert eventually(lambda app=app, before=before: any("cancelled" in line for line in app.lines()[before:]))
        assert eventually(app.is_idle)
        whole = app.chat(messages, max_tokens=NUM_TOKENS)
        told.append([whole, app.chat([*messages, {"role": "assistant", "content": whole.content}, messages[1]])])
    assert told[0] == told[1]


@pytest.mark.parametrize("family", THREE_KINDS)
def test_a_server_that_starts_again_goes_on(family: str, tmp_path: Path) -> None:
    """From the disk: what drafts left there is what a server without them reads, and the other way round."""
    told: dict[tuple[str, str], list[Chat]] = {}
    for before, behind in (("auto", "off"), ("off", "auto"), ("off", "off")):
        folder = tmp_path / f"{before} {behind}"
        with serving_app(folder, family, speculation=before) as app:
            first = conversation(app, family)
        with serving_app(folder, family, speculation=behind) as app:
            told[before, behind] = [*first, *conversation(app, family)]
    plain = told["off", "off"]
    for each in told.values():
        assert_same(each, plain)
    assert sum(answer.num_cached_tokens or 0 for answer in plain[len(plain) // 2 :]) > 500


def test_a_row_that_is_put_back_goes_on(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers outgrow the memory: one waits, and enters again where it was."""
    asked = [
        {"prompt": prompt_of(60, seed), "max_tokens": 200, "temperature": 0, "repetition_penalty": 1} for seed in (0, 1)
    ]
    expected: list[Any] = [pair.plain.post(COMPLETION_PATH, body).json["choices"] for body in asked]
    for module in (rows_module, admission):
        monkeypatch.setattr(module, "ANSWER_ALLOWANCE_TOKENS", NUM_ANSWER_TOKENS)
    monkeypatch.setattr(decode, "extra_padding_tokens", lambda *_: 10**12)  # each by itself, as of other lengths
    let_prompts_take_no_time(monkeypatch)
    sizes = pair.plain.served.engine.wait_until_ready(0).sizes
    with (
        serving_app(tmp_path, pair.family, max_batch_bytes=budget_bytes(sizes, 680, 0.99), disk_cache="off") as app,
        put_backs_counted() as rows,
        ThreadPoolExecutor(2) as pool,
    ):
        told: list[Any] = [answer.json["choices"] for answer in pool.map(lambda b: app.post(COMPLETION_PATH, b), asked)]
    assert told == expected
    assert rows


# --- planted faults ---------------------------------------------------------------------------------------------------

NOTICED = (
    "KV is not trimmed",
    "KV is trimmed too far",
    "one row more is kept",
    "a rejected token is kept",
    "states stay where they are",
    "a state is stale",
    "a window keeps a wrong row",
    "a window loses a right row",
)


@pytest.mark.parametrize(("name", "pair"), [(name, FAULTS[name].family) for name in NOTICED], indirect=["pair"])
def test_a_planted_fault_is_noticed(name: str, pair: Pair, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the model says or in what is kept. It comes behind the start, which would find it."""
    FAULTS[name].plant(monkeypatch)
    conversation(pair.drafted, pair.family)
    assert tried.take_wrong()


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_a_test_that_runs_again_here_can_fail(pair: Pair, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compares what a server says with what it said before, with the fault and without."""
    seeds_repeat(pair.drafted)
    assert not tried.take_wrong()
    FAULTS["a rejected token is kept"].plant(monkeypatch)
    with pytest.raises(AssertionError):
        seeds_repeat(pair.drafted)
    tried.take_wrong()
