"""What drafts did, added up over requests and told as JSON."""

from dataclasses import replace

from kvserve.core import Drafted, Drafting, RequestId
from kvserve.observe.draft_totals import DraftTotals, speculation_body
from kvserve.requests.request_facts import RequestFacts

DRAFTING = Drafting({"records": Drafted(4, 1), "conversation": Drafted(8, 6)}, num_steps=5, seconds_saved=1.23456)
FACTS = RequestFacts(RequestId("a"), "openai_chat", "tiny", drafting=DRAFTING, tokens_per_step=2.4)


def test_a_request_is_told_by_source() -> None:
    """In the order of their names, with what all of them did together; where nothing was drafted there is nothing."""
    assert speculation_body(DRAFTING, 2.4) == {
        "num_drafted_tokens": 12,
        "num_accepted_tokens": 7,
        "num_steps": 5,
        "tokens_per_step": 2.4,
        "seconds_saved": 1.235,
        "by_source": {
            "conversation": {"num_drafted_tokens": 8, "num_accepted_tokens": 6},
            "records": {"num_drafted_tokens": 4, "num_accepted_tokens": 1},
        },
    }
    assert speculation_body(Drafting(num_steps=9), None) is None


def test_totals_weigh_requests_by_their_steps() -> None:
    """Tokens a step are those of all steps; requests without a draft change nothing.
    Failures are counted beside them."""
    totals = DraftTotals()
    assert totals.body()["tokens_per_step"] is None
    totals.add(FACTS)
    totals.add(replace(FACTS, drafting=replace(DRAFTING, num_steps=15, seconds_saved=-1.0), tokens_per_step=1.2))
    totals.add(replace(FACTS, drafting=Drafting(num_steps=100), tokens_per_step=None))
    body = totals.body()
    assert (body["num_drafted_tokens"], body["num_accepted_tokens"], body["num_steps"]) == (24, 14, 20)
    assert (body["tokens_per_step"], body["seconds_saved"]) == (1.5, 0.235)
    assert body["num_failures"] == 0
    totals.add_failure()
    assert totals.body() == {**body, "num_failures": 1}
