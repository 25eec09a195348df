"""Who sends a request: keys and users in every form in which clients were recorded to send them."""

import json
from collections.abc import Callable

import pytest

from kvserve.core import KEY_HEADER, NO_KEY, NOBODY, JsonObject, key_digest
from kvserve.protocols.session import read_principal, stable_user

UUIDS = ("88e8b20a-8795-4300-b62f-4dd08f1b8304", "1cb3ea4d-976d-4eea-8348-b2146025f9ef")


def claude_code(session: str, device: str = "39051bac63f3") -> str:
    """As Claude Code 2.1.330 sends it."""
    return json.dumps({"device_id": device, "account_uuid": "", "session_id": session})


def old_claude_code(session: str, user: str = "6d7e") -> str:
    """As it did before."""
    return f"user_{user}_account__session_{session}"


def test_without_key_and_user_it_is_nobody() -> None:
    """Nobody has a name all the same, by which its words can be forgotten."""
    assert read_principal({"user": " ", "metadata": {"user_id": ""}}, {"x-session-id": "s"}) == NOBODY
    assert str(NOBODY) == "-.-"


@pytest.mark.parametrize("body", [{"user": "ann"}, {"safety_identifier": "ann"}, {"metadata": {"user_id": "ann"}}])
def test_a_user_is_one_whichever_field_names_it(body: JsonObject) -> None:
    """And another than every other user, with the same key too."""
    key = {"authorization": "Bearer k"}
    assert read_principal(body, key) == read_principal({"user": "ann"}, key)
    assert read_principal(body, key) != read_principal({"user": "bob"}, key)
    assert read_principal(body, key) != read_principal(body, {})


@pytest.mark.parametrize("form", [claude_code, old_claude_code])
def test_the_session_is_no_part_of_the_user(form: Callable[..., str]) -> None:
    """Claude Code writes its session into its user id: another one every day, the same person."""
    one, other = (read_principal({"metadata": {"user_id": form(session)}}, {}) for session in UUIDS)
    assert one == other != NOBODY
    assert read_principal({"metadata": {"user_id": form(UUIDS[0], "other")}}, {}) != one


@pytest.mark.parametrize("user", ['{"session_id": "s"}', "session_12345678", "{}", '{"account_uuid": ""}'])
def test_a_mere_session_is_no_user(user: str) -> None:
    """Nothing is left of it."""
    assert read_principal({"metadata": {"user_id": user}}, {}) == NOBODY


@pytest.mark.parametrize("user", ["ann@example.org", "user_session", "{broken", "[1]", "Ünal"])
def test_any_other_user_is_taken_as_it_is(user: str) -> None:
    """What looks like none of the recorded forms is a name."""
    assert stable_user(user) == user


def test_a_key_is_one_whichever_header_carries_it() -> None:
    """And the proxy, which carries its own, tells the client's digest instead."""
    digest = key_digest({"authorization": "Bearer secret"})
    assert (
        digest == key_digest({"x-api-key": "secret"}) == key_digest({KEY_HEADER: digest, "authorization": "Bearer x"})
    )
    assert digest != key_digest({"authorization": "Bearer other"}) and "secret" not in digest
    assert key_digest({KEY_HEADER: NO_KEY, "authorization": "Bearer x"}) == key_digest({}) == ""
