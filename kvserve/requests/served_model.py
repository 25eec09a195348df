"""Everything that belongs to one model, as requests hold it from their first to their last step: its parts, and what of
them has to be forgotten with a turn. What is done with them is in `prompt_of_turn.py` and `serve.py`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvserve.core import Principal, RequestDefaults, Turn
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.worker import Engine
from kvserve.identity.conversations import Conversations
from kvserve.output.formats import OutputFormat
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.images import Images
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.requests.call_ids import CallIds
from kvserve.requests.turn_facts import Observer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that belongs to one model; a request holds it from its first to its last step."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    conversations: Conversations
    output_format: OutputFormat
    added_tokens: Mapping[str, int]
    engine: Engine
    defaults: RequestDefaults
    vocab_size: int
    context_limit: int
    observe: Observer
    keeps_kv: bool = True
    images: Images | None = None
    isolates_tenants: bool = False
    call_ids: CallIds | None = None
    unheld_calls: str | None = None
    """Why calls in the form of the model's own template are not held, where they are not."""

    drafts: DraftTexts | None = None
    """What next tokens are drafted from; None where nothing is drafted."""

    def clear(self) -> None:
        """Forget every conversation."""
        self.conversations.clear()
        self.clear_memos()
        if self.drafts is not None:
            self.drafts.clear()

    def clear_memos(self) -> None:
        """Forget the words of earlier prompts that are kept only to be faster."""
        self.stitcher.clear()
        self.template.clear()
        if self.call_ids is not None:
            self.call_ids.clear()
        self.conversations.clear_memos()
        if self.images is not None:
            self.images.clear()

    @contextmanager
    def keeping(self, turn: Turn) -> Iterator[bool]:
        """Something of a turn is read or rendered within the block: whether it may leave anything. Where it may not, it
        leaves no memos either."""
        with turn.keeping as may_keep:
            try:
                yield may_keep
            finally:
                if not may_keep:
                    self.clear_memos()

    def partition(self, principal: Principal) -> str:
        """Where the KV of a principal is: with tenants apart it finds its own only. Nobody has a partition with a name
        too, for what was kept while tenants were not apart is of all of them."""
        return self.partition_of(str(principal))

    def partition_of(self, name: str) -> str:
        """The same of the principal with this name (`str(Principal)`)."""
        return name if self.isolates_tenants else ""

    def is_thinking(self, turn: Turn) -> bool:
        """Whether a turn wants thinking: as it says, else as the server's default says."""
        return self.defaults.thinking if turn.thinking.enabled is None else turn.thinking.enabled
