"""What a cause is decided by: a request beside the one before it. The nouns of facts only; it decides nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvserve.core import RequestId, Reuse
from kvserve.explain.difference import Difference
from kvserve.explain.raw_prompts import RawRecord
from kvserve.sessions.seen import TurnRecord

TOLERANCE_TOKENS = 64
"""So many known tokens or fewer may be computed again: that is the distance to a checkpoint, nothing that was lost."""


def nowhere() -> Difference | None:
    """The place of what does not differ."""
    return None


def no_model() -> str | None:
    """No other model has read anything."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChanges:
    """What differs between a request and the one before it.

    Of messages: `parts_in_front`: their prompts part before the answer, and not in the message that differs.
    `has_other_tools`: the tools that the model read are others, or stand elsewhere. `changed_arguments`: those of the
    template. Of the first message that differs: `moved_rules` say why (none for a change of meaning), and of these
    `changed_rules` have another policy than the table's; under `switched_rules`, which are off here, it would be the
    same; all that `changes_tool` changes is a tool that the message brings in; all that `drops_thinking` lacks, in the
    message or in the template's form of it, is what was thought. `is_written_differently`: no message differs.

    Of raw prompts: `is_tokenised_differently`: one text begins the other, and the tokens part within it.
    `is_read_again`: text behind the character where they part stands there in both.

    `place`: where the prompts part, `tool_place` as the first tool that is another one, `template_place` in the text
    that the template writes.
    """

    parts_in_front: bool = False
    has_other_tools: bool = False
    changed_arguments: frozenset[str] = frozenset()
    moved_rules: frozenset[str] = frozenset()
    changed_rules: frozenset[str] = frozenset()
    switched_rules: frozenset[str] = frozenset()
    changes_tool: bool = False
    drops_thinking: bool = False
    changes_message: bool = False
    leaves_out_messages: bool = False
    is_written_differently: bool = False
    is_tokenised_differently: bool = False
    is_read_again: bool = False
    place: Callable[[], Difference | None] = nowhere
    tool_place: Callable[[], Difference | None] = nowhere
    template_place: Callable[[], Difference | None] = nowhere


@dataclass(frozen=True, kw_only=True)
class ReuseFacts:
    """A request, the one `before` it, and `num_shared_tokens` of their common beginning, an answer included.

    `can_keep`: this model's KV can be kept. `is_reused`: all that was known of the prompt was there, or goes on in it.
    `num_missing_tokens` were read before, up to where any model can go on, and were not there: they have left
    (`has_left`), or are stored without a copy of the layers' state (`lacks_checkpoint`). `was_aborted`: what is missing
    is what the request before would have computed, had its client stayed.

    With no conversation to compare with: `is_new`, or `is_unknown` where the history holds answers, the last of which
    ends at `num_history_tokens` (a raw prompt is all history). `was_cleared`: somebody emptied the cache or had this
    client's words forgotten. `unread`: why nothing of before the start can be found.

    `unreplayed`: why answers of this model never keep their own tokens in the next prompt, "" where they do.

    `replayed_rules` let the model read what it read before; `policies` are those of the rules that are switched on.
    `num_rejected` messages were equal canonically and not for the model, and no rule says why. `find_changes` and
    `find_other_model` are called only where a row of the table asks for what they find.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    reuse: Reuse
    num_shared_tokens: int = 0
    before: TurnRecord | RawRecord | None = None
    can_keep: bool = True
    is_raw: bool = False
    is_reused: bool = False
    num_missing_tokens: int = 0
    lacks_checkpoint: bool = False
    has_left: bool = False
    was_aborted: bool = False
    is_new: bool = False
    is_unknown: bool = False
    num_history_tokens: int = 0
    looks_at_records: bool = True
    names_session: bool = True
    was_cleared: bool = False
    unread: str = ""
    unreplayed: str = ""
    replayed_rules: frozenset[str] = frozenset()
    policies: Mapping[str, str] = field(default_factory=dict)
    num_rejected: int = 0
    find_changes: Callable[[], PromptChanges] = PromptChanges
    find_other_model: Callable[[], str | None] = no_model

    @cached_property
    def changes(self) -> PromptChanges:
        """What differs from the request before."""
        return self.find_changes()

    @cached_property
    def other_model(self) -> str | None:
        """Another model of this process that has read what is sent."""
        return self.find_other_model()

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the request before, its answer included, that this prompt is long enough to go on from."""
        return min(len(self.before.ids), self.num_prompt_tokens - 1) if self.before is not None else 0
