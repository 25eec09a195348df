"""The law of replay: the model is never blinded; and what each kind of message gets back from the past."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.message_replay import replay
from kvserve.canonical.rules import select
from kvserve.core import Block, ImageBlock, Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from tests.canonical.texts import LEADING, LINES, REPORT, TRAILING
from tests.canonical.versions import Version, echoes, may_be_as_seen, user, versions
from tests.laws import num_examples

# --- the law ---------------------------------------------------------------------------------------------------------


@given(versions(), st.booleans())
@settings(max_examples=num_examples(40), deadline=None)
def test_the_model_is_never_blinded(pair: tuple[Version, Version], in_history: bool) -> None:
    """Every edit survives, but for spans whose policy allows it and whose meaning is unchanged or left out."""
    fresh, seen = pair
    result = replay(fresh.message(), seen.message(), in_history=in_history).message
    choices = [
        [mine.text(), theirs.text()] if may_be_as_seen(mine, theirs, in_history) else [mine.text()]
        for mine, theirs in zip(fresh.slots(), seen.slots(), strict=True)
    ]
    fixed = [line for line in fresh.lines if isinstance(line, str)]
    if fixed != [line for line in seen.lines if isinstance(line, str)]:
        assert result == fresh.message()
    else:
        assert result in [fresh.message(list(texts)) for texts in product(*choices)]


@given(echoes())
@settings(max_examples=num_examples(50), deadline=None)
def test_what_means_the_same_is_read_as_before(pair: tuple[Version, Version]) -> None:
    """Where nothing was added or edited but volatile parts, history is rendered exactly as the model saw it."""
    fresh, seen = pair
    assert replay(fresh.message(), seen.message(), in_history=True).message == seen.message()


EVERYTHING = (
    "".join(LEADING[rule]("red", "blue") for rule in LEADING)
    + f"{REPORT}\n"
    + "\n".join(LINES[rule]("red", "12k") for rule in LINES)
    + "\nThanks."
    + TRAILING["aider_reminder"]("red", "")
)
VOLATILE = ("blue", "1m3s", "206k")


@given(st.data())
@settings(max_examples=num_examples(60), deadline=None)
def test_any_edit_of_one_character_survives(data: st.DataObject) -> None:
    """Inserted, deleted or changed anywhere outside of volatile parts, it reaches the model."""
    at = data.draw(st.integers(0, len(EVERYTHING) - 1))
    ranges = [(EVERYTHING.index(text), EVERYTHING.index(text) + len(text)) for text in VOLATILE]
    is_volatile = any(start <= at <= end for start, end in ranges)
    char = data.draw(st.sampled_from('aZ0 \n`"<>/*é'))
    kept = data.draw(st.sampled_from([0, 1]))
    edited = EVERYTHING[:at] + data.draw(st.sampled_from(["", char])) + EVERYTHING[at + kept :]
    result = replay(user(edited), user(EVERYTHING), in_history=True).message
    assert result == user(edited) or (is_volatile and result == user(EVERYTHING))


@given(st.data())
@settings(max_examples=num_examples(50), deadline=None)
def test_random_messages_never_gain_what_nobody_sent(data: st.DataObject) -> None:
    """Whatever is put together from pieces of spans: the result has the identity of what was sent, and the same fixed
    text; between messages of different identity nothing passes."""
    pieces = st.lists(st.sampled_from([*EVERYTHING.splitlines(keepends=True), "x", "\n"]), max_size=12).map("".join)
    blocks = st.lists(pieces, max_size=3)
    fresh, seen = user(*data.draw(blocks)), user(*data.draw(blocks))
    result = replay(fresh, seen, in_history=True)
    if canonicalise(fresh).digest != canonicalise(seen).digest:
        assert result.message == fresh
    else:
        assert canonicalise(result.message).digest == canonicalise(fresh).digest
    if result.message != fresh:
        assert result.fired


def test_statistics_in_anybody_elses_text_are_read_as_sent() -> None:
    """In a file that the user shows, and in the findings of a report: only the report's own last line is telemetry."""
    line, moved = LINES["run_statistics"]("k", "7k"), LINES["run_statistics"]("k", "8kk")
    for text in (f"{line}\n", f"a.log\n```\n{line}\n```\nIs that slow?", f"{REPORT}\n\nFindings:\n{line}\n\n{line}\n."):
        seen, fresh = user(text), user(text.replace(line, moved, 1))
        assert canonicalise(fresh).digest != canonicalise(seen).digest
        assert replay(fresh, seen, in_history=True).message == fresh
    report = f"{REPORT}\n\nFindings:\n{line}\n\n{line}\n."
    control = user(moved.join(report.rsplit(line, 1)))
    assert replay(control, user(report), in_history=True).message == user(report)


# --- placement -------------------------------------------------------------------------------------------------------

TODO = LEADING["system_reminder"]("todo", "")
OTHER = LEADING["system_reminder"]("other", "")
RULES_FILE = LEADING["project_instructions"]("claude", "")


def test_a_reminder_that_is_gone_stands_where_it_stood() -> None:
    """As a block of its own between others, and in front of text in one block."""
    image = ImageBlock("data:image/png;base64,AA")
    seen = Message("user", (TextBlock("a"), TextBlock(TODO), image, TextBlock(OTHER + "b")))
    fresh = Message("user", (TextBlock("a"), image, TextBlock("b")))
    assert replay(fresh, seen, in_history=True).message == seen
    assert replay(fresh, seen, in_history=False).message == fresh


def test_a_file_with_a_reminder_stays_the_servers_words() -> None:
    """Also where all of it, or a part, is put back; of a client's own text the same words are another block."""
    whole, part = TextBlock(TODO, is_ours=True), TextBlock(OTHER + "b", is_ours=True)
    seen = Message("user", (TextBlock("a"), whole, part))
    fresh = Message("user", (TextBlock("a"), TextBlock("b", is_ours=True)))
    assert replay(fresh, seen, in_history=True).message == seen
    own = Message("user", (TextBlock("a"), TextBlock("b")))
    assert replay(own, seen, in_history=True).message == own
    assert canonicalise(own).digest != canonicalise(fresh).digest


def test_a_reminder_in_another_place_is_rendered_once() -> None:
    """A block that becomes part of the text is not also put back as a block."""
    seen, fresh = user(TODO, "go on"), user(TODO + "go on")
    result = replay(fresh, seen, in_history=True)
    assert result.message == fresh
    assert result.as_sent == {"system_reminder"}


def test_an_added_reminder_reaches_the_model() -> None:
    """What the model has not read yet is never taken away; beside it nothing is put back."""
    assert replay(user(TODO, "go on"), user("go on"), in_history=True).message == user(TODO, "go on")
    assert replay(user(OTHER, "go on"), user(TODO, "go on"), in_history=True).message == user(OTHER, "go on")


def test_nothing_is_put_back_where_several_may_have_left_it_out() -> None:
    """Two chats with one text and two senders: what is left out stays out, what is sent is paired as ever."""
    info = LEADING["conversation_info"]
    seen = user(info("ann", "1") + "Hi")
    result = replay(user("Hi"), seen, in_history=True, may_put_back=False)
    assert (result.message, result.as_sent) == (user("Hi"), {"conversation_info"})
    assert replay(user(info("ann", "2") + "Hi"), seen, in_history=True, may_put_back=False).message == seen


def test_one_of_two_reminders_gone_comes_back_in_its_place() -> None:
    """Order is kept, whichever of them is missing."""
    seen = user(TODO, OTHER, "go on")
    assert replay(user(OTHER, "go on"), seen, in_history=True).message == seen
    assert replay(user(TODO, "go on"), seen, in_history=True).message == seen
    swapped = user(OTHER, TODO, "go on")
    assert replay(swapped, seen, in_history=True).message == swapped


def test_instructions_that_are_taken_away_are_gone() -> None:
    """A project's instructions never come back from the past, and edits of them are read at once."""
    seen = user(RULES_FILE, TODO, "go on")
    result = replay(user("go on"), seen, in_history=True)
    assert result.message == user(TODO, "go on")
    assert (result.fired, result.as_sent) == ({"system_reminder"}, {"project_instructions"})
    edited = user(RULES_FILE.replace("Be claude", "Be Claude"), TODO, "go on")
    assert replay(edited, seen, in_history=True).message == edited


def test_switching_the_instructions_rule_off_does_not_widen_the_other() -> None:
    """Then a reminder with a project's instructions is plain text."""
    rules = select({"project_instructions": "off"})
    assert replay(user("go on"), user(RULES_FILE, "go on"), in_history=True, rules=rules).message == user("go on")
    assert canonicalise(user(RULES_FILE), rules).message == user(RULES_FILE)


def test_tool_results_are_rendered_as_sent() -> None:
    """Whatever a result looks like, no rule touches it; its call's id is that of the request."""
    text = "Current time is 10:00\n" + TODO + "Stats: runtime 1m • tokens 5"
    seen = Message("tool", (ToolResultBlock("call_1", (TextBlock(text),)),))
    other = Message("tool", (ToolResultBlock("call1", (TextBlock(text),)),))
    assert canonicalise(seen).digest == canonicalise(other).digest
    assert replay(other, seen, in_history=True).message == other
    edited = Message("tool", (ToolResultBlock("call_1", (TextBlock(text.replace("10:00", "10:01")),)),))
    assert canonicalise(seen).digest != canonicalise(edited).digest
    assert replay(edited, seen, in_history=True).message == edited
    inside = Message("user", (ToolResultBlock("call_1", (TextBlock(text),)), TextBlock(TODO + "x")))
    bare = Message("user", (ToolResultBlock("call_1", (TextBlock(text),)), TextBlock("x")))
    assert replay(bare, inside, in_history=True).message == inside


# --- assistants ------------------------------------------------------------------------------------------------------


def assistant(*blocks: Block) -> Message:
    return Message("assistant", blocks)


WRITTEN = assistant(
    ThinkingBlock("I look."),
    TextBlock("Now."),
    ThinkingBlock("And again."),
    ToolCallBlock("call_1", "bash", '{"command": "ls", "n": 1.0}'),
    ToolCallBlock("call_2", "bash", '{"command": "ls", "n": 1.0}'),
)


def test_lost_thinking_and_call_text_come_back_and_ids_stay() -> None:
    """The echo of a client that strips thinking, serialises compactly and rewrites ids."""
    echo = assistant(
        TextBlock("Now."),
        ToolCallBlock("call1", "bash", '{"n":1,"command":"ls"}'),
        ToolCallBlock("call2", "bash", '{"n":1,"command":"ls"}'),
    )
    result = replay(echo, WRITTEN, wrote=WRITTEN, in_history=True)
    expected = [*WRITTEN.blocks[:3]]
    expected += [ToolCallBlock(f"call{i}", "bash", '{"command": "ls", "n": 1.0}') for i in (1, 2)]
    assert result.message == assistant(*expected)
    assert (result.fired, result.as_sent) == ({"thinking", "call_arguments"}, {"call_ids"})


@pytest.mark.parametrize(
    "changed",
    [
        assistant(TextBlock("now."), *WRITTEN.blocks[3:]),
        assistant(*WRITTEN.blocks[3:]),
        assistant(TextBlock("Now."), WRITTEN.blocks[3]),
        assistant(TextBlock("Now."), ToolCallBlock("call_1", "Bash", '{"command": "ls", "n": 1.0}'), WRITTEN.blocks[4]),
        assistant(TextBlock("Now."), ToolCallBlock("call_1", "bash", '{"command": "ls", "n": 2}'), WRITTEN.blocks[4]),
        assistant(
            TextBlock("Now."), ToolCallBlock("call_1", "bash", '{"command": "ls", "n": true}'), WRITTEN.blocks[4]
        ),
        assistant(TextBlock("Now."), ToolCallBlock("call_1", "bash", '{"command": "ls", "n": 1'), WRITTEN.blocks[4]),
    ],
)
def test_a_turn_whose_meaning_was_changed_is_rendered_as_sent(changed: Message) -> None:
    """Another text, call, name or argument gets nothing back: no thinking that led elsewhere."""
    assert replay(changed, WRITTEN, wrote=WRITTEN, in_history=True).message == changed


def test_thinking_that_was_changed_is_rendered_as_sent() -> None:
    """Echoed thinking is never overwritten; a part of it counts as changed."""
    for echo in (
        assistant(ThinkingBlock("I look!"), TextBlock("Now."), *WRITTEN.blocks[2:]),
        assistant(ThinkingBlock("I look."), TextBlock("Now."), *WRITTEN.blocks[3:]),
    ):
        result = replay(echo, WRITTEN, wrote=WRITTEN, in_history=True)
        assert result.message == echo
        assert result.as_sent == {"thinking"}


THOUGHT = "First the files.\n\nThen what is in them; and last of all who wrote it."


@given(st.integers(0, len(THOUGHT)), st.integers(0, len(THOUGHT)), st.sampled_from(["", " ", "\n", "\u2026", "."]))
def test_thinking_that_was_cut_or_trimmed_brings_nothing_of_the_rest(start: int, end: int, mark: str) -> None:
    """A client echoes a piece of it, or white space for it, and leaves it out later: the model reads what was sent, and
    what was sent then is not taken for the model's own."""
    wrote = assistant(ThinkingBlock(THOUGHT), TextBlock("Now."))
    echo = assistant(ThinkingBlock(THOUGHT[start:end] + mark), TextBlock("Now."))
    bare = assistant(TextBlock("Now."))
    is_whole = echo == wrote
    assert replay(echo, wrote, wrote=wrote, in_history=True).message == echo
    assert replay(bare, echo, wrote=wrote, in_history=True).message == (wrote if is_whole else bare)
    assert replay(bare, echo, wrote=None, in_history=True).message == bare


def test_only_thinking_that_the_model_wrote_comes_back() -> None:
    """What a client once sent as thinking, of another server's model perhaps, is rendered where it is sent again."""
    brought = assistant(ThinkingBlock("Mine."), TextBlock("Now."))
    echo = assistant(TextBlock("Now."))
    for wrote in (None, echo, assistant(ThinkingBlock("Hm."), TextBlock("Now."))):
        result = replay(echo, brought, wrote=wrote, in_history=True)
        assert (result.message, result.as_sent) == (echo, {"thinking"})
    assert replay(echo, brought, wrote=brought, in_history=True).message == brought


def test_thinking_that_was_added_is_rendered_as_sent() -> None:
    """The model wrote none; the client's word counts."""
    bare = assistant(TextBlock("Now."))
    echo = assistant(ThinkingBlock("Hm."), TextBlock("Now."))
    assert replay(echo, bare, in_history=True).message == echo


@pytest.mark.parametrize("edges", [("\n\n", "\n\n"), ("", " "), (" \t", "\r\n")])
def test_white_space_around_an_answer_is_as_sent_and_the_thinking_comes_back(edges: tuple[str, str]) -> None:
    """A server or a client that trims answers loses nothing by it: the text is the client's, the rest the model's."""
    wrote = assistant(ThinkingBlock("Hm."), TextBlock("Now  I\nread."), ToolCallBlock("a", "read", '{"n": 1}'))
    text = TextBlock(f"{edges[0]}Now  I\nread.{edges[1]}")
    echo = assistant(text, ToolCallBlock("a", "read", '{"n":1}'))
    assert canonicalise(echo).digest == canonicalise(wrote).digest
    result = replay(echo, wrote, wrote=wrote, in_history=True)
    assert result.message == assistant(ThinkingBlock("Hm."), text, ToolCallBlock("a", "read", '{"n": 1}'))
    assert (result.fired, result.as_sent) == ({"thinking", "call_arguments"}, {"answer_edges"})


def test_white_space_alone_beside_calls_is_no_text() -> None:
    """An answer whose text is empty and one whose text is a line end are the same answer."""
    call = ToolCallBlock("a", "read", "{}")
    for one, other in product(
        (assistant(call), assistant(TextBlock("\n\n"), call), assistant(TextBlock(""), call)), repeat=2
    ):
        assert canonicalise(one).digest == canonicalise(other).digest
        assert replay(one, other, in_history=True).message == one


def test_white_space_inside_an_answer_counts() -> None:
    """Only the ends are trimmed: another line in the middle is another answer, and so is a user's other space."""
    assert canonicalise(assistant(TextBlock("a  b"))).digest != canonicalise(assistant(TextBlock("a b"))).digest
    assert canonicalise(user("a ")).digest != canonicalise(user("a")).digest


def test_texts_of_assistants_have_no_spans() -> None:
    """An answer that quotes a reminder or tells the time is the model's own text."""
    for text in (TODO + "x", "Current time is 10:00", EVERYTHING.strip()):
        assert canonicalise(assistant(TextBlock(text))).message == assistant(TextBlock(text))
        assert replay(assistant(TextBlock("x")), assistant(TextBlock(text)), in_history=True).message == assistant(
            TextBlock("x")
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
@settings(deadline=None)
def test_any_serialisation_of_arguments_is_the_same_call(arguments: dict[str, object]) -> None:
    """Spacing, escapes and the order of keys are the serialiser's; the model reads what it wrote."""
    written = assistant(ToolCallBlock("a", "f", json.dumps(arguments)))
    echo = assistant(
        ToolCallBlock(
            "a", "f", json.dumps(dict(reversed(arguments.items())), ensure_ascii=False, separators=(",", ":"), indent=1)
        )
    )
    assert replay(echo, written, in_history=True).message == written
    changed = assistant(ToolCallBlock("a", "f", json.dumps({**arguments, "one more": 1})))
    assert replay(changed, written, in_history=True).message == changed


@pytest.mark.parametrize(
    ("wrote", "sends"),
    [
        ("1e400", "1e500"),
        ("0.1", "0.1000000000000000055"),
        ("12345678901234567.5", "12345678901234567.25"),
        ("9007199254740993", "9007199254740992.0"),
    ],
)
def test_numbers_that_round_to_one_double_are_two_numbers(wrote: str, sends: str) -> None:
    """What a client sends is not taken for what the model wrote because a float cannot tell them apart."""
    past, now = (Message("assistant", (ToolCallBlock("c", "f", f'{{"x": {value}}}'),)) for value in (wrote, sends))
    assert canonicalise(past).digest != canonicalise(now).digest
    assert replay(now, past, in_history=True).message == now
