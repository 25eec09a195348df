"""Everything that belongs to one model, as requests hold it from their first to their last step: its parts, and what of
them has to be forgotten with a turn. What is done with them is in `prompt_of_turn.py` and `serve.py`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvserve.core import Principal, RequestDefaults, Turn, Written
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.worker import Engine
from kvserve.identity.conversations import Conversations
from kvserve.output.formats import OutputFormat
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.control import spelt_ids
from kvserve.prompt.images import Images
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.requests.call_ids import CallIds
from kvserve.requests.turn_facts import Observer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that belongs to one model; a request holds it from its first to its last step.

    `added_tokens` are the tokenizer's with an id below `vocab_size`, once that is the model's own. `closing_ids` is how
    the model can write the end of its thinking; () where it cannot, or does not think.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    markers: MessageMarkers
    stitcher: Stitcher
    conversations: Conversations
    output_format: OutputFormat
    added_tokens: Mapping[str, int]
    closing_ids: tuple[int, ...]
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

    def with_rows(self, vocab_size: int) -> "ServedModel":
        """The same of a model that has rows for the tokens below `vocab_size`: what it is made to write has one. A tag
        whose own token has none is written in letters."""
        added = {token: id for token, id in self.added_tokens.items() if id < vocab_size}
        closing_ids, bounds = self.closing_ids, self.output_format.thinking_bounds
        missing = self.added_tokens.keys() - added.keys()
        if bounds is not None and any(token in bounds.closing for token in missing):
            closing_ids = spelt_ids(self.tokenizer, bounds.closing, missing)
        sized = replace(self, vocab_size=vocab_size, added_tokens=added)
        return replace(sized, closing_ids=closing_ids if sized.without_row(closing_ids) is None else ())

    def without_row(self, ids: Sequence[int]) -> int | None:
        """The first of these tokens that the model has no row for: MLX reads whatever lies behind its embeddings."""
        return next((token for token in ids if not 0 <= token < self.vocab_size), None)

    @property
    def may_lack_rows(self) -> bool:
        """Whether the tokenizer has tokens that its model does not: Gemma 3's has one for pictures, its models of text
        alone have no row for it."""
        return self.tokenizer.vocab_size > self.vocab_size

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


def has_rows(served: ServedModel, written: Written) -> bool:
    """Whether an answer is one of this model's tokens, and its tokenizer's."""
    ids = (*written.prefix_ids, *written.ids)
    return served.without_row(ids) is None and all(token < served.tokenizer.vocab_size for token in ids)
