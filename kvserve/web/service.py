"""What the web server needs of the process it fronts: contracts only, kept by `app.py` and `pipeline.py`."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvserve.core import AnswerEvent, JsonObject, RequestDefaults, RequestId, Turn
from kvserve.protocols.openai_models import ModelCard


class NamedModel(Protocol):
    """A model as far as the web server knows it."""

    @property
    def name(self) -> str:
        """The name that answers carry."""


class RunningTurn(Protocol):
    """A submitted turn."""

    @property
    def request_id(self) -> RequestId:
        """The id of its request."""

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """The answer as it comes; `Waiting` at least every `poll_seconds` while nothing does; ends after `Finished`.

        Raises RequestError if generation failed.
        """

    def cancel(self) -> None:
        """Nobody wants the rest: the row is freed and the events end soon. Idempotent, from any thread."""


class Service[Model: NamedModel](Protocol):
    """The process behind the server. Every method may be called from any thread."""

    @property
    def defaults(self) -> RequestDefaults:
        """The operator's settings for requests that say nothing."""

    def resolve_model(self, name: str | None) -> Model:
        """The model that serves this name. Raises NotFound in strict mode, NotReady while loading."""

    def list_models(self) -> Sequence[ModelCard]:
        """The served models, the loaded one first; empty while loading."""

    def health(self) -> tuple[int, JsonObject]:
        """Status (200, or 503 while loading) and body of GET /health."""

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady while loading."""

    def explain(self, request_id: str) -> JsonObject:
        """The body of GET /v1/cache/explain/{request_id}: what was reused, and why not more. Raises NotFound."""

    def clear_cache(self) -> None:
        """Forget everything that the caches and records keep. Raises NotReady while loading."""

    def serve(self, turn: Turn, served: Model) -> RunningTurn:
        """Submit a turn. Raises RequestError (400, 429, 503) before anything is computed."""


# Routes hand the model from `resolve_model` to `serve` and read nothing but its name.
type WebService = Service[Any]
