"""How a backend is, from what it says of itself and from what it does not say."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from kvserve.core import JsonObject
from kvserve.proxy.backend_health import BackendState, Fleet, PlainAnswer, judge, look
from kvserve.proxy.backends import BackendAddress, rendezvous
from kvserve.proxy.entry import Backend
from tests.web.fakes import FakeService, serving

A, B, C = (BackendAddress(name, f"http://{name}") for name in "abc")
SECRET = "a-secret-of-both"
WELL: JsonObject = {"status": "ok", "knows_proxy": True, "draining": False, "num_waiting": 0}


@pytest.mark.parametrize(
    ("before", "status", "body", "after"),
    [
        ("starting", 200, WELL, "ready"),
        ("ready", 200, {**WELL, "num_waiting": 8}, "ready"),
        ("ready", 200, {**WELL, "num_waiting": 9}, "busy"),
        ("busy", 200, {**WELL, "num_waiting": 5}, "busy"),
        ("busy", 200, {**WELL, "num_waiting": 4}, "ready"),
        ("ready", 200, {**WELL, "draining": True}, "draining"),
        ("ready", 503, {**WELL, "draining": True}, "draining"),
        ("ready", 503, {**WELL, "status": "loading"}, "starting"),
        ("ready", 200, {**WELL, "knows_proxy": False}, "refused"),
        ("ready", 200, {"status": "ok"}, "refused"),
        ("ready", 403, {}, "refused"),
        ("ready", 500, {}, "down"),
        ("down", 200, WELL, "ready"),
    ],
)
def test_what_health_says_of_a_backend(before: BackendState, status: int, body: JsonObject, after: str) -> None:
    """Each state, from what it was; a busy one is ready again at half the bound."""
    assert judge(before, status, body, 8) == after


def fleet(**states: JsonObject) -> Fleet:
    known = Fleet((A, B, C), 8)
    for backend in known.backends:
        known.note_answer(backend, 200, states.get(backend.name, WELL))
    return known


def first(key: bytes, *, of: Fleet) -> str:
    return of.order(key)[0].name


def key_of(*wanted: str) -> bytes:
    """A key for which backends come in this order."""
    for number in range(1000):
        order = rendezvous(b"%d" % number, (A, B, C))
        if [each.name for each in order][: len(wanted)] == list(wanted):
            return b"%d" % number
    raise AssertionError(wanted)


@pytest.mark.parametrize("odd", [{**WELL, "num_waiting": 99}, {**WELL, "draining": True}, {**WELL, "knows_proxy": 1}])
def test_one_that_is_not_ready_is_passed_over_and_comes_back(odd: JsonObject) -> None:
    """Its sessions go to their second choice, all others stay where they are."""
    key = key_of("a", "b")
    known = fleet(a=odd)
    assert (first(key, of=known), first(key_of("c"), of=known)) == ("b", "c")
    known.note_answer(A, 200, WELL)
    assert first(key, of=known) == "a"


def test_who_refuses_the_proxy_is_never_asked() -> None:
    """Its users would be one there; a busy or a dying one is asked before nobody is."""
    known = fleet(a={**WELL, "knows_proxy": False}, b={**WELL, "num_waiting": 99})
    known.note_unreached(C)
    for number in range(20):
        assert [each.name for each in known.order(b"%d" % number)] == ["b", "c"]
    known = fleet(**{name: {**WELL, "knows_proxy": False} for name in "abc"})
    assert known.order(b"") == ()


def test_who_was_not_heard_to_believe_the_proxy_is_not_asked() -> None:
    """One that is slow to say so, and one that was gone: another process with another secret may answer there next. The
    one server that a proxy of its own has needs no such word."""
    known = Fleet((A, B), 8, is_watched=True)
    known.note_timeout(A)
    assert known.order(b"") == ()
    for backend in (A, B):
        known.note_answer(backend, 200, WELL)
    known.note_timeout(A)
    assert set(known.order(b"")) == {A, B}
    known.note_unreached(A)
    assert known.order(b"") == (B,)
    known.note_answer(A, 503, {**WELL, "status": "loading"})
    assert known.order(b"") == (B, A)
    assert Fleet((A,), 8).order(b"") == (A,)


def said(*answers: PlainAnswer | Exception) -> Callable[..., object]:
    pending = list(answers)

    async def ask(*_: object) -> PlainAnswer:
        answer = pending.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_a_late_answer_is_not_a_dead_server() -> None:
    """Three in a row are, and one refused connection is at once; between them one answer counts anew."""
    well = PlainAnswer(200, {}, json.dumps(WELL).encode())
    late = httpx.ReadTimeout("late")
    known = fleet()
    seen = []
    answers = (late, late, well, late, late, late, well, httpx.ConnectError("refused"), PlainAnswer(200, {}, b"<html>"))
    ask = said(*answers)
    for _ in answers:
        asyncio.run(look(known, A, ask, SECRET))  # type: ignore[arg-type]
        seen.append(known.state(A))
    assert seen == ["ready"] * 5 + ["down", "ready", "down", "refused"]


@pytest.mark.parametrize(("secret", "state"), [(SECRET, "ready"), ("another-secret-1", "refused"), ("", "refused")])
def test_a_server_with_another_secret_is_refused(secret: str, state: str) -> None:
    """Asked over a socket: it says itself whether it believes this proxy."""
    with serving(FakeService(), proxy_secret=secret) as served:
        here = BackendAddress("here", f"http://127.0.0.1:{served.server.port}")
        known = Fleet((here,), 8)
        asyncio.run(look(known, here, Backend().ask, SECRET))
        assert known.state(here) == state


def test_a_server_that_is_gone_is_down() -> None:
    """Nobody listens there any more."""
    with serving(FakeService(), proxy_secret=SECRET) as served:
        here = BackendAddress("here", f"http://127.0.0.1:{served.server.port}")
    known = Fleet((here,), 8)
    asyncio.run(look(known, here, Backend().ask, SECRET))
    assert known.state(here) == "down" and known.order(b"") == (here,)
