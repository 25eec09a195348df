"""The contracts that the web server needs; `app/` and `requests/` implement them."""

from collections.abc import Sequence
from threading import Semaphore
from typing import Any, Protocol

from kvserve.core import JsonObject, RequestDefaults, Turn
from kvserve.protocols.model_cards import ModelCard
from kvserve.protocols.responses_store import ResponseStore
from kvserve.requests.agent_turns import Agents
from kvserve.requests.deferred import ClientTurn
from kvserve.warming.prewarming import Prewarming


class NamedModel(Protocol):
    """A model, as the web server knows it."""

    @property
    def name(self) -> str:
        """The model's name in answers."""


class Service[Model: NamedModel](Protocol):
    """The process behind the server. Every method may be called from any thread."""

    @property
    def defaults(self) -> RequestDefaults:
        """The operator's defaults for requests."""

    @property
    def agents(self) -> Agents:
        """The agents whose history the server keeps."""

    @property
    def responses(self) -> ResponseStore:
        """The responses that clients may name again."""

    def begin(self, turn: Turn) -> Model:
        """The model that a parsed turn names. From now on the turn counts as running if its owner is forgotten. Raises
        NotFound in strict mode, NotReady while loading."""

    def list_models(self) -> Sequence[ModelCard]:
        """The served models, the loaded one first; empty while loading."""

    def health(self) -> tuple[int, JsonObject]:
        """Status (200, or 503 while loading) and body of GET /health."""

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady while loading."""

    def explain(self, request_id: str | None, key: str) -> JsonObject:
        """The body of GET /v1/cache/explain/{request_id}: what was reused, and why not more; None is the newest
        finished request. Only requests of the key with this digest are found. Raises NotFound."""

    def metrics(self) -> bytes:
        """The body of GET /metrics, in Prometheus' text format."""

    def count_error(self, endpoint: str, status: int) -> None:
        """Count an error answer; `endpoint` is the route's path, empty for none."""

    @property
    def watchers(self) -> Semaphore:
        """A semaphore with one slot for each page that may watch at once."""

    def dashboard(self) -> JsonObject:
        """The dashboard's values, about a second old at most."""

    def clear_cache(self) -> None:
        """Forget all caches and records. Raises NotReady while loading."""

    def forget(self, session: str | None, principal: str | None) -> JsonObject:
        """Forget the data of a session, of a principal (by its name), or of a principal's session, and return how much
        that was; None means any, and at least one is given. Raises BadRequest for a session if a principal's sessions
        share their data."""

    def count_tokens(self, turn: Turn, served: Model) -> int:
        """The number of a turn's prompt tokens; nothing is computed. Raises BadRequest."""

    def prewarm(self, turn: Turn, served: Model) -> Prewarming:
        """Queue the prefix that requests like this begin with. Raises RequestError."""

    def serve(self, turn: Turn, served: Model) -> ClientTurn:
        """Submit a turn. Raises RequestError (400, 429, 503) before anything is computed."""

    def answered_in_words(self, turn: Turn, served: Model) -> None:
        """Record that a turn was answered without the model."""


# Routes pass the model from `begin` to `serve` and read only its name.
type WebService = Service[Any]
