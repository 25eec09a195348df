"""Whose words the drafts of a turn come from, and what a turn leaves for those of later ones. It joins the turn with
what drafts; no word of an answer depends on it, only how fast it comes."""

from collections.abc import Callable, Sequence
from typing import Final

from kvserve.core import AGENTS, SessionHint, Turn
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.requests.answer_facts import Submitted
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Prompt

MAX_CHARACTERS_A_TOKEN: Final = 16
"""A prediction of more characters than this for each token that the answer may have is not read to its end."""


def drafter_of(turn: Turn, prompt: Prompt, max_tokens: int, served: ServedModel) -> TextDrafter | None:
    """What drafts the answer to a turn, of at most so many tokens; None where nothing is drafted. Within the turn's
    `keeping`: what its principal may be drafted from holds the prompt from here on, unless the turn leaves no record.
    """
    if (drafts := served.drafts) is None or not turn.may_draft:
        return None

    def begun() -> TextDrafter:
        owner = text_owner(turn.session, served.partition(turn.session.principal))
        said = predicted(turn.prediction, served.tokenizer.encode, max_tokens, served.vocab_size)
        return drafts.begin(owner, prompt.tokens.ids, said, keep=not turn.session.leaves_no_record)

    return costing_drafts_only(begun, served.observe.drafts_failed)


def leave_for_drafts(submitted: Submitted) -> None:
    """Keep the answer for the drafts of later turns, once it is over. Within the turn's `keeping`."""
    drafts, drafter = submitted.served.drafts, submitted.drafter
    if drafts is not None and drafter is not None:
        costing_drafts_only(lambda: drafts.end(drafter), submitted.served.observe.drafts_failed)


def costing_drafts_only[T](work: Callable[[], T], tell: Callable[[str], None]) -> T | None:
    """What is done for drafts; None where it raises, which `tell` hears of: the answer comes all the same."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - an answer is as right without drafts: they must not be its end
        tell(f"{type(error).__name__}: {error}")
        return None


def text_owner(session: SessionHint, partition: str) -> TextOwner:
    """Whose words a turn's are. Agents have one principal, and who knows the name of one talks to that one: each is
    drafted from its own history."""
    if session.principal == AGENTS:
        partition = f"{partition}/{session.session_id}"
    return TextOwner(str(session.principal), session.session_id, partition, is_one_client=not session.is_shared_id)


def predicted(text: str, encode: Callable[[str], Sequence[int]], max_tokens: int, num_rows: int) -> tuple[int, ...]:
    """A client's prediction in tokens: as many as the answer may have, and none from one on that the model has no row
    for, as drafts go through the model."""
    if not text:
        return ()
    ids = encode(text[: max_tokens * MAX_CHARACTERS_A_TOKEN])[:max_tokens]
    end = next((place for place, token in enumerate(ids) if token >= num_rows), len(ids))
    return tuple(ids[:end])
