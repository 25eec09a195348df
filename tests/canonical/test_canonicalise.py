"""Laws of identity: it is stable, changes nothing, and of a longer history the beginning keeps its chain."""

import copy
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise, chain, is_shortened_too_much, num_chars
from kvserve.canonical.message_layout import canonical_arguments
from kvserve.canonical.rules import DEFAULT_RULES, RULES, select
from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from tests.canonical.texts import LEADING, LINES, REPORT, TRAILING
from tests.laws import IS_FULL, num_examples

SPANS = [
    render(word, "7k") for render in (*LEADING.values(), *LINES.values(), *TRAILING.values()) for word in ("a", "b")
]
OPENERS = [rule.form.opener for rule in RULES if rule.form is not None]
CARRIER = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
    '"none"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
)
PIECES = [
    *SPANS,
    *OPENERS,
    CARRIER,
    "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1;",
    "<total_tokens>12 tokens left</total_tokens>",
    "</system-reminder>",
    f"{REPORT}\n",
    "```",
    "Be brief.",
    "\n",
    "\n\n",
    " ",
    "é\ud800",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=6).map("".join)
TEXT_BLOCKS = TEXTS.map(TextBlock)
CALLS = st.builds(
    ToolCallBlock,
    st.sampled_from(["", "call_1", "call1"]),
    st.sampled_from(["bash", "read"]),
    st.sampled_from(['{"a": 1.0}', '{"a":1}', '{"b":[1,"é"],"a":null}', '{"a":1,"a":2}', "", "not json", "[1]"])
    | st.text(max_size=5),
)
RESULTS = st.builds(ToolResultBlock, st.sampled_from(["call_1", "call1"]), st.lists(TEXT_BLOCKS, max_size=2).map(tuple))
BLOCKS: st.SearchStrategy[Block] = st.one_of(
    TEXT_BLOCKS, st.builds(ThinkingBlock, TEXTS), CALLS, RESULTS, st.just(ImageBlock("data:image/png;base64,AA"))
)
ROLES: list[Role] = ["system", "user", "assistant", "tool"]
MESSAGES = st.builds(Message, st.sampled_from(ROLES), st.lists(BLOCKS, max_size=4).map(tuple))


@given(MESSAGES)
@settings(max_examples=num_examples(50), deadline=None)
def test_the_canonical_form_is_its_own_canonical_form(message: Message) -> None:
    """Canonicalising is idempotent, even where taking a span out lets two pieces meet."""
    once = canonicalise(message)
    if once.message is not None:
        twice = canonicalise(once.message)
        assert (twice.message, twice.digest) == (once.message, once.digest)


@given(MESSAGES)
@settings(max_examples=num_examples(50), deadline=None)
def test_the_message_stays_as_it_is(message: Message) -> None:
    """What the model reads is never touched by what it is known by."""
    before = copy.deepcopy(message)
    canonicalise(message)
    assert message == before


@given(st.lists(MESSAGES, max_size=4), MESSAGES)
@settings(max_examples=num_examples(50), deadline=None)
def test_appending_a_message_keeps_the_chain_before_it(messages: list[Message], added: Message) -> None:
    """Identity is per message: the chain of a history is the beginning of every longer one's."""
    known = [canonicalise(message) for message in messages]
    assert chain(b"r", [*known, canonicalise(added)])[: len(messages)] == chain(b"r", known)


@given(MESSAGES, MESSAGES)
@settings(max_examples=num_examples(50), deadline=None)
def test_equal_digests_are_equal_canonical_messages(one: Message, other: Message) -> None:
    """The digest stands for the whole canonical form: role, name, blocks, and where one ends and the next begins."""
    first, second = canonicalise(one), canonicalise(other)
    assert (first.digest == second.digest) == (first.message == second.message)


@pytest.mark.parametrize(
    "other",
    [
        Message("user", (TextBlock("ab"),)),
        Message("user", (TextBlock("atextb"),)),
        Message("user", (TextBlock("a"), TextBlock("b "))),
        Message("user", (TextBlock("b"), TextBlock("a"))),
        Message("system", (TextBlock("a"), TextBlock("b"))),
        Message("user", (TextBlock("a"), TextBlock("b")), "ann"),
        Message("user", (TextBlock("a"), ImageBlock("b"))),
        Message("user", (TextBlock("a"), ToolResultBlock("", (TextBlock("b"),)))),
        Message("user", (TextBlock("a"), ThinkingBlock("b"))),
        Message("user", (TextBlock("a"), ToolCallBlock("", "b", ""))),
    ],
)
def test_whatever_has_a_meaning_is_part_of_identity(other: Message) -> None:
    """Neighbouring blocks never merge, kinds and roles never mix."""
    assert canonicalise(Message("user", (TextBlock("a"), TextBlock("b")))).digest != canonicalise(other).digest


def test_a_fields_end_is_part_of_identity() -> None:
    """No two lists of fields are the same bytes."""
    calls = [ToolCallBlock("", "ab", "c"), ToolCallBlock("", "a", "bc"), ToolCallBlock("", "", "abc")]
    assert len({canonicalise(Message("assistant", (call,))).digest for call in calls}) == 3


def test_a_tools_definition_is_part_of_identity() -> None:
    """A tool that is described otherwise, if only by the type of a number, that comes or goes: all are others."""
    tool = ToolBlock("look", "looks", '{"maximum": 1}')
    others = (
        replace(tool, name="see"),
        replace(tool, description="Looks"),
        replace(tool, description=None),
        replace(tool, parameters='{"maximum": 1.0}'),
        replace(tool, parameters=None),
        replace(tool, strict=True),
        replace(tool, is_removed=True),
    )
    for blocks in ((lambda block: (block,)), (lambda block: (ToolResultBlock("c", (block,)),))):
        digests = {canonicalise(Message("user", blocks(block))).digest for block in (tool, *others)}
        assert len(digests) == 1 + len(others)


def test_errors_and_images_of_results_are_part_of_identity() -> None:
    """A failed result is another one; so is another image of the same size."""
    result = ToolResultBlock("c", (TextBlock("a"), ImageBlock("data:1")))
    digests = {
        canonicalise(Message("tool", (block,))).digest
        for block in (
            result,
            replace(result, is_error=True),
            replace(result, blocks=(TextBlock("a"), ImageBlock("data:2"))),
            replace(result, blocks=(TextBlock("a"),)),
            replace(result, blocks=(ImageBlock("data:1"), TextBlock("a"))),
        )
    }
    assert len(digests) == 5


def test_the_meaning_tells_apart_what_the_client_may_leave_out() -> None:
    """Two senders of one text have one identity and two meanings; another message id does not change the meaning."""
    render = LEADING["conversation_info"]
    ann, ann_again, bob, bare = (
        canonicalise(Message("user", (TextBlock(text + "Hi"),)))
        for text in (render("ann", "1"), render("ann", "2"), render("bob", "1"), "")
    )
    assert ann.digest == bob.digest == bare.digest == bare.meaning
    assert ann.meaning == ann_again.meaning
    assert len({ann.meaning, bob.meaning, bare.meaning}) == 3


def test_thinking_with_its_rule_off_is_part_of_identity() -> None:
    """Its signature, the client's echo of ours, never is."""
    rules = select({"thinking": "off"})
    bare, thought, signed = (
        canonicalise(Message("assistant", (*blocks, TextBlock("Done."))), rules).digest
        for blocks in ((), (ThinkingBlock("hm"),), (ThinkingBlock("hm", "sig"),))
    )
    assert bare != thought == signed


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": "é"}', '{"b":"\\u00e9","a":1}'),
        ('{"a": 1.0, "b": 1e3, "c": -0.0}', '{"a":1,"b":1000,"c":0}'),
        ('{"a": {"x": [1, 2], "y": null}}', '{"a":{"y":null,"x":[1,2]}}'),
        ("{}", " { } "),
    ],
)
def test_arguments_that_parse_to_the_same_are_the_same(one: str, other: str) -> None:
    """Also what JavaScript makes of numbers."""
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": null}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1.5}', '{"a": 1.25}'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 9007199254740993.0}', '{"a": 9007199254740992}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": 1}', '{"a": 1'),
        ('{"a": "x"}', '{"a": "x "}'),
        ("1.0", "1"),
        ("", "{}"),
        ("[" * 5000, "[" * 5001),
        ('{"a": ' + "1" * 5000 + "}", '{"a": ' + "1" * 5001 + "}"),
    ],
)
def test_arguments_that_differ_stay_different(one: str, other: str) -> None:
    """Types, order of lists, numbers beyond a double, keys named twice, and what is not JSON at all."""
    assert canonical_arguments(one) != canonical_arguments(other)


# --- strictness ------------------------------------------------------------------------------------------------------

REMINDER = LEADING["system_reminder"]("a", "")
INFO = LEADING["conversation_info"]("ann", "7")
STATS = LINES["run_statistics"]("k", "7k")
REPORTED = f"{REPORT}\n\n"


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("user", "x" + REMINDER),
        ("user", REMINDER.replace("</system-reminder>", "")),
        ("user", REMINDER.replace("list", "<system-reminder>")),
        ("user", REMINDER.replace("\n</", "</")),
        ("user", "<system-reminder></system-reminder>\n"),
        ("user", REMINDER.strip() + " and so on"),
        ("user", "x\n" + INFO),
        ("user", INFO.replace('"ann"', "ann")),
        ("user", INFO.replace("{", "[").replace("}", "]")),
        ("user", INFO.replace("untrusted", "trusted")),
        ("user", INFO.replace("```json", "```")),
        ("user", STATS),
        ("user", f"See what it says:\n{REPORTED}{STATS}"),
        ("user", f"{REPORTED}see {STATS}"),
        ("user", REPORTED + STATS.replace("1m", "about 1m")),
        ("user", f"{REPORTED}{STATS}<end>"),
        ("user", TRAILING["aider_reminder"]("a", "") + "x" * 10 + "\n" * 30),
        ("user", TRAILING["aider_reminder"]("a", "").replace("5. The dividing line: =======\n", "")),
        ("user", "Rules:\n" + TRAILING["aider_reminder"]("a", "").lstrip()),
        ("user", CARRIER.replace('"none"', "none")),
        ("user", CARRIER + " and more"),
        ("user", "please read " + CARRIER),
        ("user", "<total_tokens>12 tokens left</total_tokens>"),
        ("user", "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1;"),
        ("system", "The note <total_tokens>12 tokens left</total_tokens> counts down."),
        ("system", "<total_tokens>12 tokens left</total_tokens>\nMore."),
        ("system", "Send x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1;"),
        ("system", "\nx-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1;"),
        ("system", "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; and then some"),
        ("system", "<!-- openclaw:attempt:DYNAMIC -->\nCurrent date: 2026-11-20\nTime zone: Europe/Berlin\n"),
        ("system", "## Inbound Context (trusted metadata)\nnone today\n"),
        ("system", "## Inbound Context (trusted metadata)\n```json\n{broken\n```\n"),
        ("system", REMINDER),
        ("system", REPORTED + STATS),
    ],
)
def test_what_is_not_the_recorded_form_is_left_alone(role: Role, text: str) -> None:
    """Another place, another role, a broken fence, a quotation: not ours to normalise."""
    message = Message(role, (TextBlock(text),))
    assert canonicalise(message).message == message
    assert not canonicalise(message).fired


def test_a_carrier_behind_a_reminder_has_no_identity_either() -> None:
    """What a message is known by never depends on whether it was canonicalised before."""
    known = canonicalise(Message("user", (TextBlock(REMINDER), TextBlock(CARRIER))))
    assert known.message is None
    assert known.fired == {"openclaw_carrier", "system_reminder"}


def test_spans_never_reach_into_another_block() -> None:
    """The halves of a form in two blocks are two texts."""
    for cut in range(1, len(REMINDER) - 1):
        halves = Message("user", (TextBlock(REMINDER[:cut]), TextBlock(REMINDER[cut:])))
        assert "system_reminder" not in canonicalise(halves).fired


def test_pieces_that_only_meet_without_a_span_are_no_form() -> None:
    """Taking something out must not make up what nobody sent."""
    nested = "<system-reminder>\nA\n" + REMINDER + "</system-reminder>\n"
    assert canonicalise(Message("user", (TextBlock(nested),))).message == Message("user", (TextBlock(nested),))
    inbound = '## Inbound Context (trusted metadata)\n```json\n{\n  "channel": "a"\n}\n```\n'
    around = "<!-- openclaw:attempt:DYNAMIC -->\n", "## Temporal Context\nCurrent date: 2026-11-20\nTime zone: UTC\n"
    assert canonicalise(Message("system", (TextBlock(inbound.join(around)),))).fired == set()
    assert canonicalise(Message("system", (TextBlock("".join([inbound, *around])),))).fired == {
        "inbound_context",
        "openclaw_attempt",
    }
    split = REPORTED + "Sender (untrusted metadata):\n" + STATS + "```json\n{}\n```\n\nhi"
    assert "sender_info" not in canonicalise(Message("user", (TextBlock(split),))).fired


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opener",
    [
        *OPENERS,
        "<system-reminder>\n<",
        f"{REPORT}\nStats: runtime 1m • ",
        "x-anthropic-billing-header: cc_version=1; a=",
        CARRIER[:90],
    ],
)
@pytest.mark.parametrize("filler", ["a", "\n", " ", "<", '"', "\\", "• ", "```", "\n```\n", "a=b;", "opener"])
def test_no_text_makes_the_search_slow(opener: str, filler: str) -> None:
    """50 kB (200 in make full) of anything behind or between openers take linear time, with and without line ends."""
    num_chars = 200_000 if IS_FULL else 50_000
    unit = opener if filler == "opener" else filler
    for text in (opener + unit * (num_chars // len(unit)), (opener + unit) * (num_chars // len(opener + unit))):
        for role in ("system", "user"):
            start = time.thread_time()
            canonicalise(Message(role, (TextBlock(text),)))
            # Linear is a few hundredths of a second; with the square of the length it would be minutes.
            assert time.thread_time() - start < 1.0, (opener, filler, role)


def test_a_flood_of_spans_is_plain_text() -> None:
    """A text that repeats a form more often than any client does is left alone, wherever the form stands."""
    for text in (LINES["current_time"]("a", "b") + "\n", REMINDER):
        few, many = (Message("user", (TextBlock(text * count + "x"),)) for count in (64, 65))
        assert canonicalise(few).fired
        assert canonicalise(many).message == many


def test_the_safety_check_counts_what_is_said() -> None:
    """Ten per cent less is too much, thinking does not count, and a message without identity has no characters."""
    message = Message("assistant", (ThinkingBlock("x" * 50), TextBlock("abc"), ToolCallBlock("i", "f", "{}")))
    assert num_chars(message) == 6
    assert num_chars(Message("tool", (ToolResultBlock("i", (TextBlock("abcd"), ImageBlock("x"))),))) == 4
    assert num_chars(None) == 0
    assert not is_shortened_too_much(0, 0)
    assert not is_shortened_too_much(100, 90)
    assert is_shortened_too_much(100, 89)


def test_every_rule_that_finds_spans_is_known_here() -> None:
    """Whoever adds a rule about users' text adds its form to the texts that the laws are tested with."""
    found = {rule.name for rule in DEFAULT_RULES.span_rules["user"]} - {"message_id"}
    assert found == {*LEADING, *LINES, *TRAILING}
