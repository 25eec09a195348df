"""Requests of one conversation have one key, and others another."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.recordings import read_recordings, shared_folder
from kvserve.core import JsonObject
from kvserve.protocols.session import ID_FIELDS, ID_HEADERS, SHARED_ID_FIELD
from kvserve.proxy.routing_key import routing_key

HELLO: dict[str, Any] = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]}


def without_ids(body: JsonObject) -> dict[str, Any]:
    """The body as a client sends it that names no session."""
    plain = copy.deepcopy(dict(body))
    for place in (plain, plain.get("metadata"), plain.get("extra_body"), plain.get("client_metadata")):
        if isinstance(place, dict):
            for name in (*ID_FIELDS, SHARED_ID_FIELD, "user_id"):
                place.pop(name, None)
    return plain


def test_a_recorded_session_has_one_key() -> None:
    """With the ids that its client sends, and by its first words alone; no two sessions share one."""
    shared = shared_folder()
    if shared is None:
        pytest.skip("needs the recordings in shared/ in or beside the repository")
    stated, begun = {}, {}
    for talk in read_recordings(shared):
        name = f"{talk.client}/{talk.name}"
        headers = [{key.lower(): value for key, value in request.headers.items()} for request in talk.requests]
        stated[name] = {routing_key(each.body, sent) for each, sent in zip(talk.requests, headers, strict=True)}
        plain = [{key: value for key, value in sent.items() if key not in ID_HEADERS} for sent in headers]
        begun[name] = {
            routing_key(without_ids(each.body), sent) for each, sent in zip(talk.requests, plain, strict=True)
        }
    assert {name: len(keys) for name, keys in stated.items() if len(keys) > 1} == {}
    side = {name for name, keys in begun.items() if len(keys) > 1}
    assert all("opencode" in name for name in side), "only a request for a title begins with other words"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((HELLO, {}), (HELLO, {"authorization": "Bearer other"})),
        ((HELLO, {}), ({**HELLO, "user": "anna"}, {})),
        ((HELLO, {"x-session-id": "1"}), (HELLO, {"x-session-id": "2"})),
        ((HELLO, {}), ({"messages": [{"role": "user", "content": "hallo"}]}, {})),
        (({"prompt": "a"}, {}), ({"prompt": "b"}, {})),
        (({"input": "a"}, {}), ({"input": "b"}, {})),
        (({**HELLO, "prompt_cache_key": "app"}, {}), ({"input": "x", "prompt_cache_key": "app"}, {})),
    ],
)
def test_what_tells_conversations_apart(
    one: tuple[JsonObject, Mapping[str, str]], other: tuple[JsonObject, Mapping[str, str]]
) -> None:
    """Who asks, the session, the first words; a key that an application gives all its users is no session."""
    assert routing_key(*one) == routing_key(*one) != routing_key(*other)


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [*HELLO["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "system", "content": "of another day"}, HELLO["messages"][1]]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "tools": [1]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
    ],
)
def test_what_does_not(other: JsonObject) -> None:
    """What comes later, instructions and tools, and how the words are wrapped."""
    assert routing_key(other, {}) == routing_key(HELLO, {})


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": 5}, {"messages": []}, {"messages": [5]}, {"messages": [{"role": "user"}]}, {"session_id": [1]},
     {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, {"prompt": [1, 2]},
     {"user": "\ud800"}],
)  # fmt: skip
def test_a_body_that_the_backend_will_refuse_has_a_key_too(body: JsonObject) -> None:
    """It is refused in the backend's words."""
    assert len(routing_key(body, {})) == 32
    assert routing_key(body, {}) == routing_key(json.loads(json.dumps(body)), {})
