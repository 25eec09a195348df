"""What the web server needs of the process it fronts: contracts only, kept by `app/` and `requests/`."""

from collections.abc import Sequence
from threading import Semaphore
from typing import Any, Protocol

from kvserve.core import JsonObject, RequestDefaults, Turn
from kvserve.protocols.openai_models import ModelCard
from kvserve.protocols.responses_store import ResponseStore
from kvserve.requests.agent_turns import Agents
from kvserve.requests.deferred import RunningTurn
from kvserve.warming.prewarming import Prewarming


class NamedModel(Protocol):
    """A model as far as the web server knows it."""

    @property
    def name(self) -> str:
        """The name that answers carry."""


class Service[Model: NamedModel](Protocol):
    """The process behind the server. Every method may be called from any thread."""

    @property
    def defaults(self) -> RequestDefaults:
        """The operator's settings for requests that say nothing."""

    @property
    def agents(self) -> Agents:
        """Agents whose history the server keeps."""

    @property
    def responses(self) -> ResponseStore:
        """The responses that clients may name again."""

    def begin(self, turn: Turn) -> Model:
        """A turn has been read, which is under way from here on for whoever forgets its owner: the model that it means.
        Raises NotFound in strict mode, NotReady while loading."""

    def list_models(self) -> Sequence[ModelCard]:
        """The served models, the loaded one first; empty while loading."""

    def health(self) -> tuple[int, JsonObject]:
        """Status (200, or 503 while loading) and body of GET /health."""

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady while loading."""

    def explain(self, request_id: str | None, key: str) -> JsonObject:
        """The body of GET /v1/cache/explain/{request_id}: what was reused, and why not more; None is the newest request
        that is over. Only requests of the key with this digest are known. Raises NotFound."""

    def metrics(self) -> bytes:
        """The body of GET /metrics, in Prometheus' text format."""

    def count_error(self, endpoint: str, status: int) -> None:
        """A request is answered with an error; `endpoint` is its row of the endpoint table, empty where it has none."""

    @property
    def watchers(self) -> Semaphore:
        """One for each page that may watch at the same time."""

    def dashboard(self) -> JsonObject:
        """What the dashboard shows now, about a second old at most."""

    def clear_cache(self) -> None:
        """Forget everything that the caches and records keep. Raises NotReady while loading."""

    def forget(self, session: str | None, principal: str | None) -> JsonObject:
        """Forget what is kept of a session, of a principal (by its name), or of a session of a principal, and say how
        much that was; None stands for any, at least one is given. Raises BadRequest for a session where the sessions of
        a principal share what is kept."""

    def count_tokens(self, turn: Turn, served: Model) -> int:
        """Prompt tokens of a turn that is only counted. Raises BadRequest."""

    def prewarm(self, turn: Turn, served: Model) -> Prewarming:
        """Have what requests like this begin with computed soon. Raises RequestError."""

    def serve(self, turn: Turn, served: Model) -> RunningTurn:
        """Submit a turn. Raises RequestError (400, 429, 503) before anything is computed."""

    def answered_in_words(self, turn: Turn, served: Model) -> None:
        """A turn is answered without the model: for those who watch."""


# Routes hand the model from `begin` to `serve` and read nothing but its name.
type WebService = Service[Any]
