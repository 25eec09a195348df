"""Two tokens are drawn before the first request comes, so that it need not wait for the kernels. It knows no cache."""

from kvserve.core import GenerationFailed, GenerationRequest, RequestId, SamplingParams, TokenSequence
from kvserve.engine.rows import Generation, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.errors import ModelLoadError


def draw_two_tokens(scheduler: Scheduler, sampling: SamplingParams) -> None:
    """Draw two tokens as a request would: kernels are compiled at their first use, which can take seconds.

    Raises ModelLoadError for a model that loads but cannot generate.
    """
    request = GenerationRequest(RequestId("warm-up"), TokenSequence((0, 0)), 2, sampling, frozenset())
    generation = Generation(request)
    scheduler.add(Row(generation, lambda: None))
    while not scheduler.is_idle:
        scheduler.tick()
    for batch in generation.batches(0):
        if batch and isinstance(batch[-1], GenerationFailed):
            raise ModelLoadError(f"The model was loaded, but it cannot generate: {batch[-1].error}")
