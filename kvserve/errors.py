"""Every error that kvserve raises on purpose, drawn as a tree; each request error knows its HTTP status.

    KvserveError
    |- StartupError           the server cannot start: one paragraph, exit code not 0
    |  |- SettingError        a key, its value and what was expected
    |  |- PortTaken           somebody else listens there
    |  `- ModelLoadError      the folder, what is wrong with it and what to do
    |     `- ModelUnreachable nothing of it came: something else may be served
    `- RequestError           answered in the protocol's own error form
       |- BadRequest 400      |- ContextOverflow 400     |- Unauthorized 401      |- Forbidden 403
       |- NotFound 404        |  `- ModelNotFound 404    |- MethodNotAllowed 405  |- RequestTimeout 408
       |- Conflict 409        |- LengthRequired 411      |- BodyTooLarge 413      |- HeadersTooLarge 431
       |- QueueFull 429       |- LimitReached 429        |- NotReady 503          |- MemoryExhausted 503
       |- ModelUnavailable 500 |- StorageFailure 500    |- NoProgress 503        `- EngineFailure 500

Protocols turn a request error into their wire form; this file knows none of them. It runs under Python 3.9 too, for
`settings/start_checks.py`.
"""

from __future__ import annotations


class KvserveError(Exception):
    """The root: caught at the border of the process (start) or of a request, nowhere else."""


class StartupError(KvserveError):
    """The server cannot start; the message is one paragraph for the person who started it."""


class SettingError(StartupError):
    """A setting has a value that cannot be used."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key}={value!r} cannot be used: expected {expected}.")
        self.key = key
        self.value = value
        self.expected = expected


class PortTaken(StartupError):
    """A process that is not ours listens on the port; it was left alone."""


class ModelLoadError(StartupError):
    """The model folder is missing, broken or of an architecture that cannot be served."""


class ModelUnreachable(ModelLoadError):
    """The model would have to be fetched, and nothing of it came: the machine is offline, or nobody there has it."""


class RequestError(KvserveError):
    """A request that gets an error answer. `param` names the offending field where there is one."""

    status: int = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class BadRequest(RequestError):
    """The request is malformed, mistyped or contradictory."""

    status = 400


class ContextOverflow(BadRequest):
    """Prompt and context limit do not fit together."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, context_limit: int) -> None:
        super().__init__(
            f"The prompt has {num_prompt_tokens} tokens, the context limit is {context_limit} tokens "
            "(prompt and answer together). Shorten the conversation, or raise MAX_KV_SIZE if the model allows it.",
            param="messages",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_limit = context_limit


class Unauthorized(RequestError):
    """An API key is set and the request carries another one or none."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """A foreign Origin, a non-local Host, or a path that is not for the holder of this key."""

    status = 403


class NotFound(RequestError):
    """No such path, model or stored object."""

    status = 404


class ModelNotFound(NotFound):
    """No model of this name is on this machine."""

    code = "model_not_found"


class Conflict(RequestError):
    """What is to be made exists already."""

    status = 409


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    status = 405


class RequestTimeout(RequestError):
    """The request's headers or body did not arrive in time."""

    status = 408


class LengthRequired(RequestError):
    """A body without a usable length."""

    status = 411


class BodyTooLarge(RequestError):
    """The body is larger than the setting allows."""

    status = 413


class HeadersTooLarge(RequestError):
    """Too many or too long header lines."""

    status = 431


class QueueFull(RequestError):
    """As many requests wait as may wait."""

    status = 429
    code = "queue_full"


class LimitReached(RequestError):
    """The holder of a key asks more than it may."""

    status = 429
    code = "rate_limit_exceeded"


class NotReady(RequestError):
    """The model is still loading or the server is shutting down."""

    status = 503
    code = "not_ready"


class RankLost(RequestError):
    """The ranks that compute the model together do not any more; all of them end."""

    status = 503
    code = "rank_lost"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The model is computed by several ranks, and they have ended: {reason}. What was kept is on their disks: "
            "once they are started again, this request goes on from there.",
            retry_after_seconds=30,
        )


class MemoryExhausted(RequestError):
    """The row does not fit into memory and nothing can be evicted."""

    status = 503
    code = "memory_exhausted"


class ModelUnavailable(RequestError):
    """The model is here, but it cannot be loaded; another one goes on answering."""

    status = 500
    code = "model_load_failed"


class StorageFailure(RequestError):
    """What is to be kept cannot be written, or what was kept cannot be read."""

    status = 500
    code = "storage_failure"


class NoProgress(RequestError):
    """Nothing was computed for the request for as long as the watchdog allows."""

    status = 503
    code = "no_progress"

    def __init__(self, watchdog_seconds: float) -> None:
        super().__init__(
            f"Nothing was computed for this request for {watchdog_seconds:g} seconds (GENERATION_WATCHDOG_SECONDS). "
            "What was computed before is kept: sent again, it goes on from there.",
            retry_after_seconds=5,
        )


class EngineFailure(RequestError):
    """The model failed on this request; its neighbours go on."""

    status = 500
    code = "engine_failure"
