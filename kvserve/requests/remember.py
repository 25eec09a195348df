"""What is kept of a turn when it is over: the conversation that the model has read and written, or the raw prompt, for
the next one to go on from. It joins rooms; when, and whether it may, `running_answer.py` says.
"""

from kvserve.core import TextBlock, Written
from kvserve.explain.raw_prompts import RawRecord
from kvserve.identity.conversations import RememberedTurn
from kvserve.requests.answer_state import AnswerState
from kvserve.sessions.lineage import Branch
from kvserve.sessions.seen import pack_ids


def remember(state: AnswerState, *, is_aborted: bool) -> Branch | None:
    """Keep what was read and written; the branch that it went on in, or None for a raw prompt."""
    submitted, said, conversations = state.submitted, state.said, state.submitted.served.conversations
    reading, prompt, session = submitted.reading, submitted.prompt, submitted.turn.session
    ids = _said_ids(state)
    num_computed_tokens = state.num_computed_tokens + len(ids) if is_aborted else None
    if reading is None:
        if not session.leaves_no_record:
            _remember_raw(state, ids, num_computed_tokens)
        return None
    is_written = bool(said.blocks) and bool(ids) and not prompt.continues
    written = Written(said, prompt.tail_ids, ids, prompt.opens_reasoning) if is_written else None
    return conversations.remember(
        reading,
        RememberedTurn(
            request_id=submitted.request_id,
            session=session,
            prompt=prompt.tokens,
            message_starts=prompt.message_starts,
            template_arguments=submitted.template_arguments,
            written=written,
            packed_prompt=submitted.packed_prompt,
            num_computed_tokens=num_computed_tokens,
        ),
    )


def _remember_raw(state: AnswerState, ids: tuple[int, ...], num_computed_tokens: int | None) -> None:
    """Keep a raw prompt and what was written to it, for the next one to be compared with."""
    submitted, text, conversations = state.submitted, state.submitted.prompt.text, state.submitted.served.conversations
    said = "".join(block.text for block in state.said.blocks if isinstance(block, TextBlock))
    conversations.raw_prompts.remember(
        RawRecord(
            request_id=submitted.request_id,
            owner=conversations.owner(submitted.turn.session).name,
            num_prompt_characters=len(text),
            text=text + said,
            packed_ids=submitted.packed_prompt + pack_ids(ids),
            num_prompt_tokens=submitted.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
    )


def _said_ids(state: AnswerState) -> tuple[int, ...]:
    """The tokens of what was said: a stop string and what the model wrote behind it are no part of that."""
    said, encode = state.answer.said_tokens(), state.submitted.served.tokenizer.encode
    return (*state.emitted[: said.num_tokens], *(encode(said.rest) if said.rest else ()))
