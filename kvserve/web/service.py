"""The contracts that the web server needs; `app/` and `requests/` implement them."""

from collections.abc import Generator, Sequence
from threading import Semaphore
from typing import Protocol

from kvserve.core import JsonObject, RequestDefaults, Turn
from kvserve.engine.warming import Warming
from kvserve.observe.observability import Observability
from kvserve.protocols.model_cards import ModelCard
from kvserve.protocols.responses_store import ResponseStore
from kvserve.requests.agent_turns import Agents
from kvserve.requests.deferred import ClientTurn
from kvserve.requests.served_model import ServedModel


class WebService(Protocol):
    """The process behind the server. Every method may be called from any thread."""

    defaults: RequestDefaults
    """The operator's defaults for requests."""

    agents: Agents
    """The agents whose history the server keeps."""

    responses: ResponseStore
    """The responses that clients may name again."""

    observability: Observability
    """What the server sees of its requests."""

    watchers: Semaphore
    """One slot for each page that may watch at once."""

    def begin(self, turn: Turn) -> ServedModel:
        """The model that a parsed turn names. From now on the turn counts as running if its owner is forgotten. Raises
        NotFound in strict mode, NotReady while loading."""

    def list_models(self) -> Sequence[ModelCard]:
        """The served models, the loaded one first; empty while loading."""

    def health(self) -> tuple[int, JsonObject]:
        """Status (200, or 503 while loading) and body of GET /health."""

    def drain(self, *, is_draining: bool) -> JsonObject:
        """Tell those who ask for /health whether new requests should go elsewhere; the answer says what runs here."""

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady while loading."""

    def clear_cache(self) -> bool:
        """Forget all caches and records; False where a file may still name requests. Raises NotReady while loading."""

    def forget(self, session: str | None, principal: str | None) -> JsonObject:
        """Forget the data of a session, of a principal (by its name), or of a principal's session, and return how much
        that was; None means any, and at least one is given. Raises BadRequest for a session if a principal's sessions
        share their data."""

    def count_tokens(self, turn: Turn, served: ServedModel) -> int:
        """The number of a turn's prompt tokens; nothing is computed. Raises BadRequest."""

    def prewarm(self, turn: Turn, served: ServedModel) -> Warming:
        """Queue the prefix that requests like this begin with. Raises RequestError."""

    def load(self, turn: Turn, served: ServedModel) -> Generator[None]:
        """Have the model loaded, with a place in the queue for the turn that says so: ends once it is. Raises
        RequestError."""

    def serve(self, turn: Turn, served: ServedModel) -> ClientTurn:
        """Submit a turn. Raises RequestError (400, 429, 503) before anything is computed."""
