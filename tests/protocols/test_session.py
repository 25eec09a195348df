"""Session hints: where an id may stand, which one counts, and lifetimes."""

import pytest

from kvserve.core import SessionHint
from kvserve.errors import BadRequest
from kvserve.protocols.session import ID_FIELDS, ID_HEADERS, read_session


def test_silence_is_an_empty_hint() -> None:
    """A request that says nothing, or says it emptily, has no hint."""
    assert read_session({}, {}) == SessionHint()
    assert read_session({"session_id": "", "thread_id": None}, {"x-session-id": " "}) == SessionHint()


@pytest.mark.parametrize("name", ID_FIELDS)
def test_an_id_is_found_in_every_place(name: str) -> None:
    """Each field name works in the body, extra_body, metadata and both nested."""
    for body in (
        {name: "s1"},
        {"extra_body": {name: "s1"}},
        {"metadata": {name: "s1"}},
        {"extra_body": {"metadata": {name: "s1"}}},
    ):
        assert read_session(body, {}).session_id == "s1"


@pytest.mark.parametrize("name", ID_HEADERS)
def test_an_id_is_found_in_every_header(name: str) -> None:
    """Each known header works, and the body goes before it."""
    assert read_session({}, {name: "s1"}).session_id == "s1"
    assert read_session({"thread_id": "mine"}, {name: "s1"}).session_id == "mine"


def test_the_first_name_of_the_first_place_counts() -> None:
    """Several ids at once are no contradiction."""
    body = {"prompt_cache_key": "c", "thread_id": "t", "metadata": {"session_id": "m"}}
    assert read_session(body, {}).session_id == "t"
    assert read_session({}, {"thread-id": "t", "session-id": "s"}).session_id == "s"


@pytest.mark.parametrize("body", [{"prompt_cache_key": "c"}, {"metadata": {"prompt_cache_key": "c"}}])
def test_a_cache_key_is_an_id_that_others_may_have_too(body: dict[str, object]) -> None:
    """It counts where nothing else names a session, and then it is nobody's own."""
    assert read_session(body, {}) == SessionHint("c", is_shared_id=True)
    assert read_session(body, {"session-id": "s"}) == SessionHint("s")
    assert read_session({**body, "session_id": "s"}, {}) == SessionHint("s")


def test_a_number_is_an_id() -> None:
    """Chat ids of messengers are numbers."""
    assert read_session({"metadata": {"chat_id": -100123}}, {}).session_id == "-100123"


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(0, 0.0), (3600, 3600.0), (1.5, 1.5), ("5m", 300.0), ("1h", 3600.0), ("24h", 86400.0), ("90", 90)],
)
def test_a_ttl_is_seconds_or_a_duration(ttl: object, seconds: float) -> None:
    """Numbers are seconds, strings carry a unit."""
    assert read_session({"ttl": ttl}, {}).ttl_seconds == seconds


def test_cache_mode_is_read() -> None:
    """`prefix` and `full` are the two modes."""
    assert read_session({"cache_mode": "prefix"}, {}).cache_mode == "prefix"
    assert read_session({"metadata": {"cache_mode": "full"}}, {}).cache_mode == "full"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session_id": 1.5}, "session_id"),
        ({"session_id": True}, "session_id"),
        ({"session_id": "x" * 513}, "session_id"),
        ({"metadata": {"thread_id": ["a"]}}, "metadata.thread_id"),
        ({"session_id": "fine", "chat_id": {}}, "chat_id"),
        ({"cache_mode": "half"}, "cache_mode"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": "soon"}, "ttl"),
        ({"ttl": "5 weeks"}, "ttl"),
        ({"ttl": 1e300}, "ttl"),
        ({"ttl": "999999999d"}, "ttl"),
        ({"extra_body": []}, "extra_body"),
    ],
)
def test_a_mistyped_hint_is_named(body: dict[str, object], param: str) -> None:
    """Wrong types are a 400 even where another id would do."""
    with pytest.raises(BadRequest) as caught:
        read_session(body, {})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("sent", "client"),
    [
        ("claude-cli/2.1.331 (external, cli)", "claude-cli/2.1.331"),
        ("OpenAI/Python 1.109.1", "OpenAI/Python 1.109.1"),
        ("codex_cli_rs/0.169.0 (Linux 6.1; x86_64) unknown", "codex_cli_rs/0.169.0"),
        ("ai-sdk/openai-compatible/1.0.0", "ai-sdk/openai-compatible/1.0.0"),
        ("opencode/0.3.0-dev.12 ai-sdk", "opencode/0.3.0-dev.12"),
        ("node", ""),
        ("sk-live-abc123", ""),
        ("sk-live-abc123/1.0", ""),
        ("alice.smith", ""),
        ("curl/8.5.0-alice", ""),
        ("", ""),
        ("please fix my house", ""),
        ("house/4711-is-my-secret-number-of-old", ""),
        ("x" * 33 + "/1.0", ""),
        ("caf\u00e9/1.0", ""),
    ],
)
def test_a_client_is_known_by_its_product(sent: str, client: str) -> None:
    """Name and version at the beginning of its User-Agent; whatever else stands there is read by nobody."""
    assert read_session({}, {"user-agent": sent}).client == client
    assert read_session({}, {}).client == ""
