"""Streams over real sockets: order of events, silence, clients that leave or do not read, and nothing left behind."""

import contextlib
import gc
import json
import os
import select
import sys
import threading
import time

import pytest

from kvserve.core import BEGIN_HEADER, ContentDelta, GenerationDone, GenerationTiming, TokenDelta
from kvserve.errors import EngineFailure, NotReady
from tests.web.fakes import (
    CHAT,
    FINISHED,
    HELLO,
    PATIENCE_SECONDS,
    SETTINGS,
    BroughtTurn,
    FakeService,
    RawClient,
    Served,
    encode_request,
    eventually,
    num_live_threads,
    serving,
)

STREAM = {**CHAT, "stream": True}
STREAM_WIRE = encode_request("POST", "/v1/chat/completions", STREAM)
WHOLE_WIRE = encode_request("POST", "/v1/chat/completions", CHAT)


def deltas(events: list[str]) -> list[object]:
    """The delta of every chunk before `[DONE]`."""
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]


def test_headers_and_role_go_out_before_anything_is_computed() -> None:
    """A client that waits for prefill has its 200 and the role chunk already."""
    with serving(FakeService(script=(None,))) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        status, headers = client.read_head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert b'"role":"assistant"' in client.read_chunk()


def test_each_delta_is_a_write_of_its_own() -> None:
    """What the model wrote arrives when it was written, not when the answer is complete."""
    has_come = threading.Event()
    script = (ContentDelta("first"), has_come, ContentDelta("second"), FINISHED)
    silent = {"keep_alive_seconds": PATIENCE_SECONDS}
    with serving(FakeService(script=script), **silent) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        client.read_head()
        client.read_chunk()
        assert b"first" in client.read_chunk()
        has_come.set()
        assert b"second" in client.read_chunk()


def test_silence_is_broken_by_empty_deltas() -> None:
    """After the set time without output a chunk that says nothing is sent, again and again, and none in between."""
    is_enough = threading.Event()
    script = (is_enough, ContentDelta("at last"), FINISHED)
    with serving(FakeService(script=script), keep_alive_seconds=0.15) as served, served.connect() as client:
        started = time.monotonic()
        client.send(STREAM_WIRE)
        client.read_head()
        assert b'"role":"assistant"' in client.read_chunk()
        for _ in range(3):
            assert client.read_chunk() == b": 1 of 3 prompt tokens are read\n\n"
            assert b'"delta":{"reasoning_content":""}' in client.read_chunk()
        assert time.monotonic() - started > 0.3
        is_enough.set()
        while b"at last" not in (chunk := client.read_chunk()):
            assert b'"reasoning_content":""' in chunk or chunk.startswith(b": ")


def test_an_error_in_the_middle_is_the_last_event() -> None:
    """The stream ends well-formed after an error chunk; a whole answer becomes an error status."""
    with serving(FakeService(script=(ContentDelta("a"), EngineFailure("row failed")))) as served:
        with served.connect() as client:
            events = client.request("POST", "/v1/chat/completions", STREAM).events
            assert json.loads(events[-2])["error"]["message"] == "row failed" and events[-1] == "[DONE]"
            response = client.request("POST", "/v1/chat/completions", CHAT)
            assert (response.status, response.error["code"]) == (500, "engine_failure")
        assert served.reports == []


def test_events_that_stop_without_an_end_are_an_error() -> None:
    """An answer never passes for complete by breaking off."""
    with serving(FakeService(script=(ContentDelta("a"),))) as served, served.connect() as client:
        assert '"engine_failure"' in client.request("POST", "/v1/chat/completions", STREAM).events[-2]
        assert client.request("POST", "/v1/chat/completions", CHAT).status == 500


@pytest.mark.parametrize("wire", [STREAM_WIRE, WHOLE_WIRE])
@pytest.mark.parametrize("ends", ["close", "reset"])
def test_a_client_that_leaves_is_noticed_within_a_poll(wire: bytes, ends: str) -> None:
    """While nothing is generated the turn is cancelled as soon as the connection ends, streamed or not."""
    with serving(FakeService(script=(None,))) as served:
        client = served.connect()
        client.send(wire)
        turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
        time.sleep(0.1)
        assert not turn.cancelled.is_set()
        if ends == "reset":
            client.socket.setsockopt(1, 13, b"\x01\0\0\0\0\0\0\0")  # SOL_SOCKET, SO_LINGER: on, 0 s
        [entry] = served.server._connections._open
        turn.may_poll.clear()
        client.close()
        with contextlib.suppress(OSError, ValueError):  # it was noticed by a look that was under way
            select.select([entry.connection], [], [], PATIENCE_SECONDS)  # until the end has arrived
        num_polls = turn.num_polls
        turn.may_poll.set()
        assert turn.cancelled.wait(PATIENCE_SECONDS)
        assert turn.num_polls <= num_polls + 2, "one may have been under way"


def test_a_client_that_leaves_behind_a_pipelined_request_is_noticed() -> None:
    """Unread bytes do not hide the end of the connection."""
    with serving(FakeService(script=(None,))) as served:
        client = served.connect()
        client.send(WHOLE_WIRE + WHOLE_WIRE)
        turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
        time.sleep(0.1)
        assert not turn.cancelled.is_set()
        client.close()
        assert turn.cancelled.wait(PATIENCE_SECONDS)
        assert eventually(lambda: served.server.num_open_connections == 0)
        assert served.service.turns.empty()


def num_descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("num_clients", [8, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("script", "num_chunks"), [((None,), 1), ((*[ContentDelta("x"), 0.02] * 500,), 3)], ids=["prefill", "decode"]
)
def test_many_disconnects_leave_nothing(script: tuple[object, ...], num_chunks: int, num_clients: int) -> None:
    """Every turn is cancelled and ended; no thread and no descriptor stays, with the server still serving."""
    service = FakeService(script=script)
    with serving(service, max_connections=256) as served:
        with served.connect() as client:
            client.request("GET", "/health")
        assert eventually(lambda: num_live_threads(served.server) == 0)
        gc.collect()
        num_threads, num_files = threading.active_count(), num_descriptors()
        turns = []
        for _ in range(num_clients):
            client = RawClient(served.server.port)
            client.send(STREAM_WIRE)
            client.read_head()
            for _ in range(num_chunks):
                client.read_chunk()
            client.close()
            turns.append(service.turns.get(timeout=PATIENCE_SECONDS))
        assert all(turn.ended.wait(PATIENCE_SECONDS) and turn.cancelled.is_set() for turn in turns)
        assert eventually(lambda: (threading.active_count(), num_descriptors()) == (num_threads, num_files))
        assert (served.server.num_open_connections, num_live_threads(served.server)) == (0, 0)
        assert served.reports == []
        service.script = HELLO
        with served.connect() as client:
            assert client.request("POST", "/v1/chat/completions", STREAM).events[-1] == "[DONE]"


def test_a_client_that_never_reads_loses_its_turn() -> None:
    """Once the buffers are full the write times out, the turn is cancelled and the thread is free again."""
    script = (*[ContentDelta("x" * 100_000)] * 2000, FINISHED)
    with serving(FakeService(script=script), write_timeout_seconds=0.3) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
        assert turn.cancelled.wait(PATIENCE_SECONDS)
        assert eventually(lambda: num_live_threads(served.server) == 0)


def test_waiting_costs_no_cpu() -> None:
    """Ten waiting streams sleep between their looks at the client: there is no more than one in each interval."""
    with serving(FakeService(script=(None,))) as served:
        clients = [served.connect() for _ in range(10)]
        for client in clients:
            client.send(STREAM_WIRE)
            client.read_head()
        turns = [served.service.turns.get(timeout=PATIENCE_SECONDS) for _ in clients]
        begun, before = time.monotonic(), [turn.num_polls for turn in turns]
        assert eventually(lambda: all(turn.num_polls >= num + 10 for turn, num in zip(turns, before, strict=True)))
        num_looks = [turn.num_polls - num for turn, num in zip(turns, before, strict=True)]
        # one was under way at the beginning
        assert max(num_looks) <= (time.monotonic() - begun) / SETTINGS.poll_seconds + 1, num_looks
        for client in clients:
            client.close()


def brought(served: Served) -> BroughtTurn:
    """The turn of the request that came, once its own thread waits for tokens."""
    turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
    assert isinstance(turn, BroughtTurn)
    turn.wait_until_idle()
    return turn


def bring(turn: BroughtTurn, *tokens: int) -> None:
    """Each of these tokens, on this thread."""
    for token in tokens:
        turn.wait_until_idle()
        turn.generation.put(TokenDelta(token))


DONE = GenerationDone("length", 3, 0, 2, GenerationTiming(0.0, 0.0, 0.0))


def test_words_are_sent_by_the_thread_that_brings_them_and_the_end_by_the_stream_s_own() -> None:
    """The stream is what it would be on one thread."""
    service = FakeService(script=(ContentDelta("Hel"), ContentDelta("lo")), turn=BroughtTurn)
    with serving(service) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        turn = brought(served)
        bring(turn, 0, 1)
        turn.wait_until_idle()
        turn.generation.put(DONE)
        got = deltas(client.read_response().events)
        assert got == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
        assert turn.threads[:2] == ["MainThread"] * 2 and turn.threads[2] != "MainThread"
    assert turn.ended.is_set() and not turn.cancelled.is_set()


def told(events: list[str]) -> list[object]:
    """The deltas that say something: on a slow machine empty ones keep a stream alive."""
    return [delta for delta in deltas(events) if delta != {"reasoning_content": ""}]


def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    """What its socket does not take is left to its own thread, which waits for it; the others' words go out. Nothing of
    it is lost when it reads again."""
    service = FakeService(script=(ContentDelta("x" * 30_000_000), ContentDelta("lo")), turn=BroughtTurn)
    with (
        serving(service, write_timeout_seconds=PATIENCE_SECONDS) as served,
        served.connect() as slow,
        served.connect() as quick,
    ):
        slow.send(STREAM_WIRE)
        stuck = brought(served)
        quick.send(STREAM_WIRE)
        turn = brought(served)
        bring(stuck, 0)
        bring(turn, 1)
        turn.wait_until_idle()
        turn.generation.put(DONE)
        assert told(quick.read_response().events)[1] == {"content": "lo"}
        stuck.generation.put(TokenDelta(1))
        stuck.generation.put(DONE)
        got = told(slow.read_response().events)
        assert [len(str(delta)) for delta in got[1:]] == [30_000_000 + len("{'content': ''}"), 17, 2]
        assert stuck.threads[0] == "MainThread" and "MainThread" not in stuck.threads[1:]


def test_what_fails_on_another_thread_is_told_by_the_stream_s_own() -> None:
    """The error is the stream's last event, and the thread that brought the token knows nothing of it."""
    service = FakeService(script=(ContentDelta("a"), EngineFailure("row failed")), turn=BroughtTurn)
    with serving(service) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        bring(brought(served), 0, 1)
        events = client.read_response().events
        assert json.loads(events[-2])["error"]["message"] == "row failed" and events[-1] == "[DONE]"
        assert served.reports == []


def test_a_client_that_left_is_noticed_with_the_next_word() -> None:
    """The turn is cancelled and ended by its own thread, which no poll would have woken."""
    service = FakeService(script=(ContentDelta("a"), ContentDelta("b")), turn=BroughtTurn)
    with serving(service, poll_seconds=PATIENCE_SECONDS) as served:
        client = served.connect()
        client.send(STREAM_WIRE)
        turn = brought(served)
        bring(turn, 0)
        client.close()
        while not turn.cancelled.wait(0.05):  # until the end of the connection has arrived
            turn.generation.put(TokenDelta(1))
        assert turn.ended.wait(PATIENCE_SECONDS) and eventually(lambda: num_live_threads(served.server) == 0)


# --- a head that waits for the first word ----------------------------------------------------------------------------


def held_request(seconds: int, path: str = "/v1/chat/completions", body: object = STREAM) -> bytes:
    return encode_request("POST", path, body, {BEGIN_HEADER: str(seconds)})


def test_a_head_waits_for_the_first_word_where_a_proxy_asks_for_it() -> None:
    """Until then nothing is sent; then all of it comes as it would have."""
    has_come = threading.Event()
    with serving(FakeService(script=(has_come, *HELLO))) as served, served.connect() as client:
        client.send(held_request(60))
        served.service.turns.get(timeout=PATIENCE_SECONDS)
        assert not select.select([client.socket], [], [], 0.1)[0]
        has_come.set()
        held = client.read_response().events
        at_once = client.request("POST", "/v1/chat/completions", STREAM).events
    assert deltas(held) == deltas(at_once)


def test_a_head_waits_no_longer_than_asked() -> None:
    """Then the client gets its sign of life."""
    with serving(FakeService(script=(None,))) as served, served.connect() as client:
        started = time.monotonic()
        client.send(held_request(1))
        assert client.read_head()[0] == 200 and time.monotonic() - started > 0.9
        assert b'"role":"assistant"' in client.read_chunk()


def test_an_error_before_the_head_has_its_own_status() -> None:
    """A proxy can ask another server instead, and a client's library can try again."""
    fails = threading.Event()
    with serving(FakeService(script=(fails, NotReady("stopped")))) as served, served.connect() as client:
        client.send(held_request(60))
        served.service.turns.get(timeout=PATIENCE_SECONDS)
        fails.set()
        response = client.read_response()
        assert (response.status, response.error["message"]) == (503, "stopped")


def test_a_client_that_leaves_before_the_head_is_noticed() -> None:
    """Nothing is computed for it any more."""
    with serving(FakeService(script=(None,))) as served:
        client = served.connect()
        client.send(held_request(60))
        turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
        client.close()
        assert turn.cancelled.wait(PATIENCE_SECONDS)


def test_events_keep_their_order_behind_a_head_that_waited() -> None:
    """Anthropic's stream begins while the prompt is still read."""
    has_come = threading.Event()
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with serving(FakeService(script=(has_come, *HELLO))) as served, served.connect() as client:
        client.send(held_request(60, "/v1/messages", body))
        served.service.turns.get(timeout=PATIENCE_SECONDS)
        assert not select.select([client.socket], [], [], 0.1)[0]
        has_come.set()
        lines = client.read_response().body.decode().splitlines()
    kinds = [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("message_start") == 1


@pytest.mark.parametrize("asked", ["", "-1", "soon", "1.5", "٣"])
def test_what_is_no_number_of_seconds_holds_nothing_back(asked: str) -> None:
    """The head goes out at once."""
    with serving(FakeService(script=(None,))) as served, served.connect() as client:
        wire = encode_request("POST", "/v1/chat/completions", STREAM, {BEGIN_HEADER: "x"})
        client.send(wire.replace(b": x\r\n", f": {asked}\r\n".encode()))
        assert client.read_head()[0] == 200
