"""Real text: the demo's model says, word for word, what it says on a server that remembers nothing; streamed and not,
after a kill, after its KV was evicted, beside neighbours, in promised forms. A server with a planted fault
is found out.

93 MB come from the package index that this machine's pip is set up for; where there is none the tests are skipped.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted import faulty_server
from tests.disk_servers import cache_report, clear, post
from tests.e2e.servers import ChatStream, ServerProcess, serving
from tests.serving import CHAT_PATH, Chat, chat_body, joined, whole

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

KEPT_SECONDS = 3.0
"""What is older outlives any kill."""

ANSWER_SECONDS = 600.0
SYSTEM = (
    "You answer questions about these notes. The Fox is a small boat. It left Lisbon on Monday with three sailors: "
    "Ana, Bruno and Clara. On Tuesday they lost a sail. On Wednesday they reached Porto, where Ana found a cat. They "
    "called the cat Storm."
)
QUESTIONS = (
    "What is the name of the boat?",
    "Who are the three sailors?",
    "What happened on Tuesday?",
    "What did they call the cat, and who found it?",
    "Write one sentence about the whole journey.",
)
STORIES = ("Tell a long story about a fox.", "Tell a long story about the sea.", "Describe a town in the mountains.")
NEVER_ENDING = {"logit_bias": {"0": -100, "2": -100}, "max_tokens": 2000}
"""Without `<|endoftext|>` and `<|im_end|>`, which end an answer."""

CACHE_BYTES = 16 * 2**20
"""About 350 tokens of this model: five turns."""

LONG = " ".join(
    f"On day {number} the boat sailed {number * 7 % 40} miles, and {name} wrote into the log what the wind was like."
    for number, name in enumerate(["Ana", "Bruno", "Clara"] * 4)
)

type Ask = Callable[..., Chat]


def plain(server: ServerProcess, messages: Sequence[Mapping[str, str]], **fields: Any) -> Chat:
    """A greedy answer in one piece."""
    return whole(post(server, CHAT_PATH, chat_body(list(messages), **{"max_tokens": 24, **fields})))


def streamed(server: ServerProcess, messages: Sequence[Mapping[str, str]], **fields: Any) -> Chat:
    """The same in pieces, put together."""
    body = chat_body(list(messages), **{"max_tokens": 24, "stream_options": {"include_usage": True}, **fields})
    return joined(ChatStream(server.port, **body).finish(ANSWER_SECONDS).events)


def turns(server: ServerProcess, ask: Ask, known: Sequence[Chat] = (), last: int = 5, **fields: Any) -> list[Chat]:
    """The conversation up to its turn `last`, with its own answers in it, from where the `known` ones end."""
    messages = [{"role": "system", "content": SYSTEM}]
    answers: list[Chat] = []
    for number, question in enumerate(QUESTIONS[:last]):
        messages.append({"role": "user", "content": question})
        answers.append(known[number] if number < len(known) else ask(server, messages, **fields))
        messages.append({"role": "assistant", "content": answers[-1].content})
    return answers


def num_known_tokens(answer: Chat) -> int:
    """Of the next prompt: all of this one and its answer."""
    assert answer.usage is not None
    return int(answer.usage["total_tokens"])


def assert_went_on(answers: Sequence[Chat], first: int = 1) -> None:
    """From the turn `first` on each found all that was there before; of an answer the last token may be another one."""
    for before, after in zip(answers[first - 1 :], answers[first:], strict=False):
        assert after.num_cached_tokens is not None and after.num_cached_tokens >= num_known_tokens(before) - 2


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies once the first server has fetched it."""
    return tmp_path_factory.mktemp("state")


@contextlib.contextmanager
def demo(folder: Path, state: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """The demo without anything computed ahead of a request."""
    options = {"with_proxy": False, "STATE_DIR": state, "PREWARM_PREFIXES": 0, "WARM_NEXT_TURN": "false", **options}
    with serving(folder, "--demo", *flags, **options) as server:
        server.wait_until_healthy()
        if "could not be fetched" in server.screen:
            pytest.skip("no package index here")
        yield server


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory, state: Path) -> Iterator[ServerProcess]:
    """A server that is asked with `ttl: 0` only."""
    with demo(tmp_path_factory.mktemp("forgetful"), state) as server:
        yield server


@pytest.fixture(scope="module")
def keeping(forgetful: ServerProcess, tmp_path_factory: pytest.TempPathFactory, state: Path) -> Iterator[ServerProcess]:
    """A server that keeps what it computes."""
    with demo(tmp_path_factory.mktemp("keeping"), state) as server:
        yield server


@pytest.fixture(scope="module")
def expected(forgetful: ServerProcess) -> list[Chat]:
    """The conversation on a server that remembers nothing."""
    answers = turns(forgetful, plain, ttl=0)
    assert [answer.num_cached_tokens for answer in answers] == [0] * len(QUESTIONS)
    assert cache_report(forgetful)["ram_bytes"] == 0
    return answers


def test_the_model_has_read_the_notes(expected: list[Chat]) -> None:
    """What is compared below is text that means something."""
    assert "Fox" in expected[0].content
    assert all(name in expected[1].content for name in ("Ana", "Bruno", "Clara"))


@pytest.mark.parametrize("ask", [plain, streamed])
def test_five_turns_say_what_is_said_without_a_memory(keeping: ServerProcess, ask: Ask, expected: list[Chat]) -> None:
    """Word for word, with the same tokens counted, and each turn finds all of the ones before it."""
    clear(keeping)
    answers = turns(keeping, ask)
    assert answers == expected
    assert_went_on(answers)


def test_after_a_kill_the_conversation_goes_on_word_for_word(tmp_path: Path, state: Path, expected: list[Chat]) -> None:
    """Three turns, SIGKILL, two turns from disk."""
    with demo(tmp_path, state) as server:
        before = turns(server, plain, last=3)
        time.sleep(KEPT_SECONDS)
        server.end(signal.SIGKILL)
    with demo(tmp_path, state) as server:
        answers = turns(server, plain, before)
    assert answers == expected
    assert_went_on(answers)


def test_after_its_kv_was_evicted_the_conversation_goes_on_word_for_word(
    tmp_path: Path, state: Path, expected: list[Chat]
) -> None:
    """Three turns, another long prompt in a cache that holds one of both, two turns; nothing is on a disk."""
    with demo(tmp_path, state, "--no-disk-cache", PROMPT_CACHE_MAX_BYTES=CACHE_BYTES) as server:
        before = turns(server, plain, last=3)
        assert_went_on(before)
        num_before = cache_report(server)["num_evicted_tokens"]
        plain(server, [{"role": "user", "content": LONG}], max_tokens=1)
        assert cache_report(server)["num_evicted_tokens"] > num_before
        answers = turns(server, plain, before)
    assert answers == expected
    assert answers[3].num_cached_tokens is not None
    assert answers[3].num_cached_tokens < num_known_tokens(before[2]) // 2


@pytest.mark.parametrize("ask", [plain, streamed])
def test_beside_three_neighbours_the_same_is_said(tmp_path: Path, state: Path, ask: Ask, expected: list[Chat]) -> None:
    """Three long answers are written in the same steps from the first word to the last."""
    with demo(tmp_path, state) as server:
        neighbours = [ChatStream(server.port, **chat_body(story, **NEVER_ENDING), stream=True) for story in STORIES]
        for stream in neighbours:
            stream.wait_for_output()
        answers = turns(server, ask)
        health = server.health()
        assert health is not None and health[1]["num_running"] == len(neighbours)
        server.end(signal.SIGTERM)
        assert all(stream.finish(ANSWER_SECONDS).was_stopped for stream in neighbours)
    assert answers == expected
    assert_went_on(answers)


def test_a_server_with_a_planted_fault_is_found_out(tmp_path: Path, state: Path, expected: list[Chat]) -> None:
    """Its first turn, for which nothing is restored, is right; behind it the comparison fails."""
    with demo(tmp_path, state, script=faulty_server(tmp_path)) as server:
        answers = turns(server, plain)
    assert answers[0] == expected[0]
    assert answers != expected


# --- promised forms ---------------------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}, "is_capital": {"type": "boolean"}},
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}},
        "max_tokens": 64,
    },
    "call": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 64,
    },
    "stop": {"stop": [" five", "5"], "max_tokens": 64},
}
ASKED = {
    "schema": "Paris is the capital of France. Say it as JSON.",
    "call": "What is the weather like in Lisbon?",
    "stop": "Count from one to ten in words, with commas.",
}


def said_in_form(name: str, forgetful: ServerProcess, keeping: ServerProcess) -> Chat:
    """What is said without a memory, once it was said with one too: cold, warm, streamed, and behind an answer that was
    free."""
    messages, form = [{"role": "user", "content": ASKED[name]}], FORMS[name]
    first = plain(forgetful, messages, ttl=0, **form)
    assert first.num_cached_tokens == 0
    clear(keeping)
    cold, warm, pieces = (ask(keeping, messages, **form) for ask in (plain, plain, streamed))
    assert [cold, warm, pieces] == [first] * 3
    assert warm.usage is not None
    assert warm.num_cached_tokens == pieces.num_cached_tokens == warm.usage["prompt_tokens"] - 1
    return first


def test_a_promised_schema_is_kept_in_the_same_words(forgetful: ServerProcess, keeping: ServerProcess) -> None:
    """The JSON is the schema's, and says what was asked."""
    said = said_in_form("schema", forgetful, keeping)
    found = json.loads(said.content)
    assert said.finish_reason == "stop" and set(found) == set(CITY["properties"])
    assert (found["city"].lower(), found["country"].lower()) == ("paris", "france")
    assert isinstance(found["is_capital"], bool)


def test_a_forced_call_has_the_same_arguments(forgetful: ServerProcess, keeping: ServerProcess) -> None:
    """The tool is called, with what the question names."""
    said = said_in_form("call", forgetful, keeping)
    [(name, arguments)] = said.calls
    assert said.finish_reason == "tool_calls" and name == "get_weather"
    assert "Lisbon" in json.loads(arguments)["city"]


def test_a_stop_string_ends_the_same_text_at_the_same_place(forgetful: ServerProcess, keeping: ServerProcess) -> None:
    """What was said is the free answer up to the string."""
    said = said_in_form("stop", forgetful, keeping)
    free = plain(keeping, [{"role": "user", "content": ASKED["stop"]}], max_tokens=64).content
    ends = [free.find(stop) for stop in FORMS["stop"]["stop"] if stop in free]
    assert said.finish_reason == "stop" and said.content == free[: min(ends)]
    assert "four" in said.content or "4" in said.content
