"""The framing of event streams: byte for byte, and whatever a text contains."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import JsonObject
from kvserve.errors import EngineFailure, RequestError
from kvserve.web.exchange import NAMED, EventStream, encode_event, encode_json


def error_chunk(error: RequestError) -> JsonObject:
    return {"error": error.message}


def test_a_chunked_stream_byte_for_byte() -> None:
    """One write per send, a chunk each; the end carries `[DONE]` and the last chunk."""
    writes: list[bytes] = []
    stream = EventStream(writes.append, error_chunk, is_chunked=True)
    stream.send([{"a": 1}, {"b": "é"}])
    stream.send([])
    stream.end()
    events = b'data: {"a":1}\n\ndata: {"b":"\\u00e9"}\n\n'
    assert writes == [b"%x\r\n%b\r\n" % (len(events), events), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


def test_an_unchunked_stream_is_the_events_alone() -> None:
    """For HTTP/1.0 the end of the connection is the end."""
    writes: list[bytes] = []
    stream = EventStream(writes.append, error_chunk, is_chunked=False)
    stream.send([{"a": 1}])
    stream.end()
    assert b"".join(writes) == b'data: {"a":1}\n\ndata: [DONE]\n\n'


def test_an_error_is_the_last_event_and_only_of_an_open_stream() -> None:
    """A failure after the end changes nothing."""
    writes: list[bytes] = []
    stream = EventStream(writes.append, error_chunk, is_chunked=False)
    stream.fail(EngineFailure("broken"))
    stream.fail(EngineFailure("again"))
    assert b"".join(writes) == b'data: {"error":"broken"}\n\ndata: [DONE]\n\n'


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_stays_one_line(text: str) -> None:
    """No text breaks an event, not even for clients that split lines as Unicode does; lone surrogates survive."""
    event = encode_event({"text": text})
    assert event.decode("ascii").splitlines() == [event[:-2].decode("ascii"), ""]
    assert json.loads(event[len("data: ") :]) == {"text": text}


def test_nan_is_no_json() -> None:
    """A number that JSON lacks is a defect of the server, not a broken answer."""
    with pytest.raises(ValueError):
        encode_json({"x": float("nan")})


def test_a_named_stream_byte_for_byte() -> None:
    """Each event has its type as its name; the end is the last chunk alone, and an error is an event like others."""
    writes: list[bytes] = []
    stream = EventStream(writes.append, error_chunk, is_chunked=True, framing=NAMED)
    stream.send([{"type": "ping"}, {"type": "stop", "b": "é"}])
    stream.end()
    events = b'event: ping\ndata: {"type":"ping"}\n\nevent: stop\ndata: {"type":"stop","b":"\\u00e9"}\n\n'
    assert writes == [b"%x\r\n%b\r\n" % (len(events), events), b"0\r\n\r\n"]
    writes.clear()
    failing = EventStream(writes.append, lambda error: {"type": "error", "m": error.message}, False, NAMED)
    failing.fail(EngineFailure("broken"))
    failing.end()
    assert b"".join(writes) == b'event: error\ndata: {"type":"error","m":"broken"}\n\n'
