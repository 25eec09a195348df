"""A job as the prompt that is prefilled for it, and its handle, which any thread may wait for."""

import threading

from kvserve.core import ImageFacts, ImageInput, MessageStart, TokenSequence
from kvserve.engine.warming import Warming, WarmJob, WarmResult

TOKENS = TokenSequence((5, 6, 7, 8))


def test_a_prefix_is_prefilled_whole() -> None:
    """One token stands behind it, because the last one of a prompt is never prefilled; its end is a message's end."""
    starts = (MessageStart(0, is_user=False), MessageStart(2, is_user=True), MessageStart(4, is_user=False))
    request = WarmJob(TOKENS, "learned", starts, ends_before_user=True).as_request()
    assert request.prompt.ids[:-1] == TOKENS.ids and len(request.prompt) == 5
    assert request.message_starts == (*starts[:2], MessageStart(4, is_user=True))


def test_a_prefix_without_messages_is_one() -> None:
    """Its end is a place to keep a state at all the same."""
    request = WarmJob(TOKENS, "prewarm").as_request()
    assert request.message_starts == (MessageStart(0, is_user=False), MessageStart(4, is_user=False))


def test_whoever_waits_hears_of_the_end() -> None:
    """From another thread; until then there is no result."""
    warming = Warming(WarmJob(TOKENS, "prewarm"))
    assert (warming.result, warming.wait(0)) == (None, None)
    heard: list[WarmResult | None] = []
    waiter = threading.Thread(target=lambda: heard.append(warming.wait(60)))
    waiter.start()
    warming.drop("cleared")
    waiter.join(60)
    assert heard == [WarmResult("dropped", 4, reason="cleared")] == [warming.result]


def test_a_job_that_is_over_holds_no_image() -> None:
    """Handles are kept for a while, and the tower's input of one picture can take 100 MB."""
    image = ImageInput(ImageFacts("a" * 64, (7,)), dict)
    warming = Warming(WarmJob(TOKENS, "next_turn", images=(image,)))
    assert warming.job.images == (image,)
    warming.drop("cleared")
    assert warming.job.images == () and warming.job.tokens == TOKENS


def test_a_cancelled_job_is_only_asked_to_end() -> None:
    """Its engine ends it."""
    warming = Warming(WarmJob(TOKENS, "prewarm"))
    warming.cancel()
    warming.cancel()
    assert warming.is_cancelled and warming.result is None
