"""A log without words: what a record still says once a request has come."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from kvserve.proxy.asgi import Receive, Scope, Send
from kvserve.proxy.entry import WordlessLog

WORD = "MARZIPAN"


@pytest.fixture(autouse=True)
def own_factory() -> Iterator[None]:
    """The process's own records afterwards."""
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def fail() -> None:
    """An error with a cause, both of which quote somebody."""
    try:
        raise KeyError(WORD)
    except KeyError as error:
        raise ValueError(f"It says {WORD}.") from error


def serve(kind: str) -> None:
    """One scope of this kind; the application logs what fails."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        log = logging.getLogger("of an application")
        try:
            fail()
        except ValueError:
            log.exception("Failed on %s", WORD)
        log.error(f"{WORD} and %s", WORD)

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    asyncio.run(WordlessLog(app)({"type": kind}, nothing, nothing))  # type: ignore[arg-type]


def test_from_the_first_request_on_a_log_has_no_words(caplog: pytest.LogCaptureFixture) -> None:
    """The kinds of the errors and where they were raised stay, so that a fault can be found."""
    serve("http")
    assert WORD not in caplog.text
    failed, said = caplog.records
    text = failed.getMessage()
    assert "builtins.ValueError" in text and "builtins.KeyError" in text and "in fail" in text
    assert said.levelno == logging.ERROR and said.name == "of an application"


def test_what_fails_at_the_start_is_told_in_full(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has said anything yet."""
    serve("lifespan")
    assert f"Failed on {WORD}" in caplog.text and f"It says {WORD}." in caplog.text
