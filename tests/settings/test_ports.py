"""Who holds a port: real listeners, and a /proc that tells nothing."""

import os
import socket
import sys
from pathlib import Path

import pytest

from kvserve.settings.ports import describe_holder, somebody_listens


def test_a_listener_is_seen() -> None:
    """A port that accepts is taken, also when the wildcard is asked for; a closed one is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert somebody_listens("127.0.0.1", port)
        assert somebody_listens("0.0.0.0", port)
    assert not somebody_listens("127.0.0.1", port)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells it in /proc")
def test_the_holder_is_named() -> None:
    """On Linux the process and its command line are told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = describe_holder(listener.getsockname()[1])
    assert text.startswith(f"process {os.getpid()} (") and "python" in text


def test_where_nothing_is_known_the_way_to_find_out_is(tmp_path: Path) -> None:
    """Without /proc the answer says which command may tell."""
    assert "lsof -nP -iTCP:4711" in describe_holder(4711, tmp_path)
