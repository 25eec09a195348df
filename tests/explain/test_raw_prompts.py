"""Raw prompts that were read: the one that begins most like a text is found, within its session and within limits."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import RequestId
from kvserve.explain.raw_prompts import SHORTEST_DIGESTED, RawPrompts, RawRecord, text_digests
from kvserve.sessions.seen import pack_ids


def record(name: str, text: str, owner: str = "", answer: str = "") -> RawRecord:
    text += answer
    return RawRecord(
        request_id=RequestId(name),
        owner=owner,
        text=text,
        num_prompt_characters=len(text) - len(answer),
        packed_ids=pack_ids(map(ord, text)),
        num_prompt_tokens=len(text),
    )


def test_the_longest_common_beginning_counts_then_what_goes_on_least_then_the_newest() -> None:
    """What another owner read is not compared with."""
    prompts, head = RawPrompts(), "All of them begin with the same words. " * 2
    for name, text in (("a", "one two"), ("b", "one tree"), ("c", "one tree"), ("f", "one tree!")):
        prompts.remember(record(name, head + text))
    prompts.remember(record("d", "other"))
    prompts.remember(record("e", f"{head}one tree house", owner="s"))
    found = [prompts.nearest(text, "") for text in (f"{head}one tree house", f"{head}one two!", "zebra")]
    assert [each.request_id for each in found if each is not None] == ["c", "a", "d"]
    mine = prompts.nearest("one", "s")
    assert mine is not None and mine.request_id == "e"
    assert prompts.nearest("one", "t") is None


def test_a_prompt_whose_first_word_changes_is_found_beside_short_ones() -> None:
    """They have as much in common with it: nothing."""
    prompts, text = RawPrompts(), "What stays is long. " * 20
    for name, each in (("a", "Hello."), ("b", f"1a81 {text}"), ("c", "A question?")):
        prompts.remember(record(name, each))
    found = prompts.nearest(f"2b93 {text}", "")
    assert found is not None and found.request_id == "b"


def test_what_may_be_anothers_is_found_by_who_repeats_its_answer() -> None:
    """A prompt that only begins alike, or brings an answer of its own, may come from anybody."""
    prompts, answer = RawPrompts(), "What the model wrote, and told to nobody else."
    prompts.remember(record("a", "A question. ", answer=answer))
    found = prompts.nearest(f"A question. {answer} And?", "", shown_by=lambda said: len(said) >= 40)
    assert found is not None and found.request_id == "a"
    for text in ("A question. ", f"A question. {answer[:-1]}", f"A question. Mine. {answer}"):
        assert prompts.nearest(text, "", shown_by=bool) is None and prompts.nearest(text, "") is not None
    found = prompts.nearest(f"A question. {answer}", "", shown_by=lambda said: len(said) >= 60)
    assert found is None, "it may be a word that all expect"


def test_records_and_bytes_are_bounded() -> None:
    """The oldest goes; one that is larger than all may be takes no place; cleared, nothing is left."""
    prompts = RawPrompts(max_prompts=2, max_bytes=4_000)
    for name in "abc":
        prompts.remember(record(name, name * 100))
    oldest = prompts.nearest("a" * 100, "")
    assert oldest is not None and oldest.request_id == "c", "a is forgotten"
    assert 0 < prompts.num_bytes <= 4_000
    prompts.remember(record("large", "x" * 4_000))
    assert prompts.nearest("x", "") is None and prompts.num_bytes == 0
    prompts.remember(record("d", "d"))
    prompts.clear()
    assert prompts.nearest("d", "") is None and prompts.num_bytes == 0


@given(st.text(max_size=40), st.integers(0, 60), st.text(max_size=9), st.text(max_size=9))
def test_texts_share_the_digests_of_what_they_begin_with(piece: str, times: int, one: str, other: str) -> None:
    """As many as lie in the common beginning, and the last one only where the texts are equal."""
    beginning = piece * times
    mine, theirs = text_digests(beginning + one, "me/s"), text_digests(beginning + other, "me/s")
    num_shared = len([length for n in range(9) if (length := SHORTEST_DIGESTED * 2**n) <= len(beginning)])
    assert mine[:num_shared] == theirs[:num_shared]
    assert (mine == theirs) == (one == other)
    assert mine[-1:] != theirs[-1:] or one == other


@given(st.text(min_size=1, max_size=2_000))
def test_texts_of_two_owners_share_no_digest(text: str) -> None:
    """The very same text under another principal, or in another session of the same one."""
    owners = ["/s", "me/", "me/s", "me/t"]
    digests = [digest for owner in owners for digest in text_digests(text, owner)]
    assert len(set(digests)) == len(digests)
