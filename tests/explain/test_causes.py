"""The table of causes: none is missing, and each of its rows is reached by the facts that it is for."""

from typing import Any, get_args

from kvserve.core import RequestId, Reuse, Unshared, UnsharedReason
from kvserve.explain.causes import CAUSES, Cause, cause_of
from kvserve.explain.explanation import explained
from kvserve.explain.facts import PromptChanges, ReuseFacts
from kvserve.explain.raw_prompts import RawRecord
from kvserve.sessions.seen import pack_ids

BEFORE = RawRecord(
    request_id=RequestId("one"),
    owner="",
    text="",
    num_prompt_characters=0,
    packed_ids=pack_ids(range(400)),
    num_prompt_tokens=350,
)


def facts(**told: Any) -> ReuseFacts:
    """Of a prompt of 1,000 tokens, 100 of them reused, and 400 in the request before it."""
    usual: dict[str, Any] = {"before": BEFORE, "num_cached_tokens": 100, "num_history_tokens": 600, "reuse": Reuse()}
    return ReuseFacts(request_id=RequestId("two"), num_prompt_tokens=1000, **(usual | told))


def unshared(reason: UnsharedReason, num_there_tokens: int = 0, **told: Any) -> ReuseFacts:
    """The same where the shared cache gave no more, for this reason."""
    return facts(reuse=Reuse(unshared=Unshared(reason, num_there_tokens)), **told)


def changed(**told: Any) -> ReuseFacts:
    """The same, where all that was read before was there, and this is what differs."""
    return facts(find_changes=lambda: PromptChanges(**told))


def unreplayed(**told: Any) -> ReuseFacts:
    """The same of a model whose answers are not replayed."""
    return facts(unreplayed="no token ends one", find_changes=lambda: PromptChanges(**told))


RULE = frozenset({"clock"})
UNKNOWN = {"is_unknown": True, "before": None}
PLANTED: list[tuple[ReuseFacts, Cause, int]] = [
    (facts(num_missing_tokens=200, has_left=True, can_keep=False), "not kept", 200),
    (facts(num_missing_tokens=200, lacks_checkpoint=True), "no checkpoint", 200),
    (facts(num_missing_tokens=200, has_left=True), "evicted", 200),
    (facts(was_aborted=True), "aborted", 300),
    (facts(num_missing_tokens=64, has_left=True, is_reused=True), "nothing lost", 0),
    (unshared("slower", 700, is_reused=True), "shared cache not used", 600),
    (unshared("damaged", 700, is_new=True, before=None), "shared cache not used", 600),
    (unshared("slower", 164, is_reused=True), "nothing lost", 0),
    (unshared("slower", 700, num_missing_tokens=200, has_left=True), "evicted", 200),
    (unshared("away", **UNKNOWN, names_session=False, was_cleared=True), "shared cache not used", 500),
    (unshared("away", **UNKNOWN, is_reused=True), "nothing lost", 0),
    (unshared("away", is_new=True, before=None), "new conversation", 0),
    (unshared("not there", **UNKNOWN), "shared cache not used", 500),
    (unshared("not there", **UNKNOWN, was_cleared=True), "cache cleared", 500),
    (unshared("too short", **UNKNOWN, names_session=False), "no session", 500),
    (changed(parts_in_front=True, has_other_tools=True, changed_arguments={"x"}), "tools changed", 300),
    (changed(parts_in_front=True, changed_arguments={"x", "thinking"}), "template arguments changed", 300),
    (changed(parts_in_front=True, changed_arguments={"thinking"}), "thinking switched", 300),
    (changed(moved_rules=RULE, switched_rules=RULE, changes_message=True), "volatile value", 300),
    (changed(moved_rules=RULE, changed_rules=RULE, changes_message=True), "setting", 300),
    (changed(switched_rules=RULE, changes_message=True), "setting", 300),
    (facts(**UNKNOWN, looks_at_records=False, unread="read"), "setting", 500),
    (changed(has_other_tools=True, changes_tool=True, changes_message=True), "tools changed", 300),
    (changed(drops_thinking=True, changes_message=True), "thinking dropped", 300),
    (changed(has_other_tools=True, changed_arguments={"x"}, changes_message=True), "message changed", 300),
    (changed(leaves_out_messages=True), "messages left out", 300),
    (changed(is_written_differently=True), "written differently by the template", 300),
    (unreplayed(is_written_differently=True), "not replayed", 300),
    (unreplayed(is_written_differently=True, parts_in_front=True), "written differently by the template", 300),
    (unreplayed(changes_message=True), "message changed", 300),
    (changed(is_tokenised_differently=True), "tokenised differently", 300),
    (changed(is_read_again=True), "prompt changed", 300),
    (facts(**UNKNOWN, unread="read", find_other_model=lambda: "small"), "other model", 500),
    (facts(is_raw=True, num_cached_tokens=64, find_other_model=lambda: "small"), "other model", 536),
    (facts(**UNKNOWN, unread="read", names_session=False), "weights not known", 500),
    (facts(**UNKNOWN, unread="read", was_cleared=True, names_session=False), "no session", 500),
    (facts(**UNKNOWN, was_cleared=True), "cache cleared", 500),
    (facts(**UNKNOWN), "not seen since the start", 500),
    (facts(is_new=True, before=None, find_other_model=lambda: "small"), "new conversation", 0),
    (facts(is_raw=True, find_other_model=lambda: "small"), "new prompt", 0),
]


def test_the_first_row_that_applies_is_the_cause() -> None:
    """With the tokens that it cost: those that were known, or the history, less those that were reused."""
    told = [(explained(each).cause, explained(each).num_lost_tokens) for each, _, _ in PLANTED]
    assert told == [(cause, num_lost) for _, cause, num_lost in PLANTED]


def test_every_row_is_reached() -> None:
    """None stands behind one that always applies before it."""
    reached = {id(cause_of(each)) for each, _, _ in PLANTED}
    assert [row.cause for row in CAUSES if id(row) not in reached] == []


def test_the_table_has_every_cause() -> None:
    """Rows of one cause say the same of it and are alike in what they need."""
    assert {row.cause for row in CAUSES} == set(get_args(Cause.__value__))
    kinds = {(row.cause, row.summary, row.remedy, row.place is None, row.lost is None) for row in CAUSES}
    assert len(kinds) == len({row.cause for row in CAUSES})


def test_whose_setting_it_is_is_told() -> None:
    """The request's own field, the rules as a whole, or the policy of one rule."""
    one = facts(find_changes=lambda: PromptChanges(switched_rules=RULE), policies={"ids": "always"})
    told = [explained(each).decided_by for each in (facts(**UNKNOWN, looks_at_records=False), one)]
    assert told == ["cache_mode", "CACHE_RULE_POLICIES (clock=off)"]
    assert explained(facts(**UNKNOWN, find_other_model=lambda: "small")).decided_by == "small"
    assert explained(facts(**UNKNOWN, unread="still read")).decided_by == "still read"
    assert explained(unreplayed(is_written_differently=True)).decided_by == "no token ends one"
    assert explained(unshared("silent", **UNKNOWN)).decided_by == "it did not answer in time"
