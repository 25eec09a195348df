"""Whose words the drafts of a turn come from, and what a turn leaves for those of later ones. It joins the turn with
what drafts; no word of an answer depends on it, only how fast it comes."""

from typing import Final

from kvserve.core import AGENTS, SessionHint, Turn
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.requests.answer_facts import Submitted
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Prompt

MAX_CHARACTERS_A_TOKEN: Final = 16
"""A prediction of more characters than this for each token that the context holds is not read to its end."""


def drafter_of(turn: Turn, prompt: Prompt, served: ServedModel) -> TextDrafter | None:
    """What drafts the answer to a turn; None where nothing is drafted. Within the turn's `keeping`: what its principal
    may be drafted from holds the prompt from here on, unless the turn leaves no record."""
    if served.drafts is None or not turn.may_draft:
        return None
    owner = text_owner(turn.session, served.partition(turn.session.principal))
    return served.drafts.begin(
        owner, prompt.tokens.ids, _prediction(turn, served), keep=not turn.session.leaves_no_record
    )


def leave_for_drafts(submitted: Submitted) -> None:
    """Keep the answer for the drafts of later turns, once it is over. Within the turn's `keeping`."""
    drafts, drafter = submitted.served.drafts, submitted.drafter
    if drafts is not None and drafter is not None:
        drafts.end(drafter)


def text_owner(session: SessionHint, partition: str) -> TextOwner:
    """Whose words a turn's are. Agents have one principal, and who knows the name of one talks to that one: each is
    drafted from its own history."""
    if session.principal == AGENTS:
        partition = f"{partition}/{session.session_id}"
    return TextOwner(str(session.principal), session.session_id, partition, is_one_client=not session.is_shared_id)


def _prediction(turn: Turn, served: ServedModel) -> tuple[int, ...]:
    """The client's prediction in tokens."""
    text = turn.prediction[: served.context_limit * MAX_CHARACTERS_A_TOKEN]
    return tuple(served.tokenizer.encode(text)) if text else ()
