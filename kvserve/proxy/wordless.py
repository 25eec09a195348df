"""The log of LiteLLM's process without anybody's words: where something failed, and what kind of failure it was. It
knows Python's logging and nothing of LiteLLM.

An error that LiteLLM logs quotes what the backend answered, and that may quote the request.
"""

import logging
import traceback

from kvserve.proxy.asgi import App, Receive, Scope, Send

_MAX_CAUSES = 16


class WordlessLog:
    """Serves an application, and from its first request on keeps words out of every log record of this process. What
    fails before, at the start, is told in full: nobody has said anything yet."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._is_wordless = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        if scope["type"] == "http" and not self._is_wordless:
            self._is_wordless = True
            keep_words_out()
        await self._app(scope, receive, send)


def keep_words_out() -> None:
    """From now on a record has its time, level and place, and in the place of its text the kinds and the places of its
    exceptions. Changes the record factory of this process."""
    make = logging.getLogRecordFactory()

    def make_wordless(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        record.msg = _describe(error) if error is not None else "(its text is not kept: it may quote a request)"
        record.args, record.exc_info, record.exc_text, record.stack_info = (), None, None, None
        return record

    logging.setLogRecordFactory(make_wordless)


def _describe(error: BaseException) -> str:
    """An exception and its causes, the first one last: their types, and where each was raised, without their texts."""
    told: list[str] = []
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            break
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        places = [f"  {at.filename}:{at.lineno} in {at.name}" for at in traceback.extract_tb(cause.__traceback__)]
        told.append("\n".join([kind, *places]))
        cause = cause.__cause__ or cause.__context__
    return "\n".join(told)
