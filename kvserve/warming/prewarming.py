"""What is computed because a client says that it will come, or because most conversations begin with it.

    a client's messages and tools -> the prompt that a request with them would have -> what such requests have in common
    what a model was asked most often -> the same, as soon as the model is loaded

It joins rooms and writes prompts as requests do. What is reused is decided by their tokens, so nothing
here can hide anything; an engine that has something else to do does that first.
"""

from dataclasses import replace

from kvserve.core import Message, MessageStart, TextBlock, TokenSequence, Turn
from kvserve.engine.warming import Warming, WarmJob, WarmResult
from kvserve.errors import ContextOverflow, EngineFailure, NotReady
from kvserve.requests.prompt_of_turn import SharedBeginning, shared_beginning
from kvserve.requests.serve import preview
from kvserve.requests.served_model import ServedModel
from kvserve.warming.next_turn_predictor import FIRST_WORDS

WAIT_SECONDS = 600.0
"""An engine that found no time in so long will find none."""

UNKNOWN_TOKEN = "unknown token"


def prewarm(turn: Turn, served: ServedModel) -> Warming:
    """Have what requests with these messages and tools begin with computed soon, unless their owner was forgotten since
    the wish came. Raises RequestError."""
    with served.keeping(turn) as may_keep:
        job = _job(turn, served)
        if may_keep:
            return served.engine.warm(job)
    return _dropped(job, "forgotten")


def _dropped(job: WarmJob, reason: str) -> Warming:
    dropped = Warming(job)
    dropped.drop(reason)
    return dropped


def _job(turn: Turn, served: ServedModel) -> WarmJob:
    looked_at = turn if served.images is None else served.images.look(turn)
    beginning = _beginning(turn, looked_at, served)
    num_tokens = len(beginning.tokens)
    if num_tokens >= served.context_limit:
        raise ContextOverflow(num_tokens, served.context_limit)
    return WarmJob(
        beginning.tokens,
        "prewarm",
        beginning.message_starts,
        images=beginning.images_of(looked_at),
        partition=served.partition(turn.session.principal),
        owner=served.conversations.owner(turn.session).name,
    )


def warm_learned(served: ServedModel, num_beginnings: int) -> list[Warming]:
    """Have the beginnings computed that this model was asked most often; nobody waits for it. Where tenants are apart
    one is computed for each that used it twice, and for nobody else, to whom it would say that somebody used it; what
    is computed is nobody's by name, so that it goes with whoever is forgotten. One with a token that the model has no
    row for is dropped: it was learned before such prompts were refused.
    """
    learned = served.conversations.most_used_prefixes(num_beginnings)
    if served.isolates_tenants:
        wanted = [(num_uses, name, each) for each in learned for name, num_uses in each.uses]
        wanted.sort(key=lambda use: use[0], reverse=True)
    else:
        wanted = [(each.num_uses, "", each) for each in learned]
    jobs = [
        WarmJob(
            TokenSequence(beginning.ids),
            "learned",
            (MessageStart(beginning.first_message, is_user=False),),
            ends_before_user=True,
            partition=served.partition_of(name),
        )
        for _, name, beginning in wanted[:num_beginnings]
    ]
    return [
        served.engine.warm(job) if served.without_row(job.tokens.ids) is None else _dropped(job, UNKNOWN_TOKEN)
        for job in jobs
    ]


def raise_for(result: WarmResult) -> None:
    """Raises what a client must hear of a job that is over: it failed, or the engine goes."""
    if result.state == "failed":
        raise EngineFailure(f"The prefix could not be computed: {result.reason}")
    if result.reason in ("shutdown", "not ready"):
        raise NotReady("The model does not compute now.", retry_after_seconds=10)


def _beginning(turn: Turn, looked_at: Turn, served: ServedModel) -> SharedBeginning:
    """Behind a user's words or a tool's result comes the answer: all but the generation tail is shared. Behind anything
    else come somebody's words, which are not known."""
    if turn.messages and turn.messages[-1].role in ("user", "tool"):
        prompt = preview(turn, served)
        return SharedBeginning.of(prompt.tokens, prompt.message_starts, len(prompt.tokens) - len(prompt.tail_ids))
    return shared_beginning([_with_words(looked_at, words) for words in FIRST_WORDS], served)


def _with_words(turn: Turn, words: str) -> Turn:
    return replace(turn, messages=(*turn.messages, Message("user", (TextBlock(words),))))
