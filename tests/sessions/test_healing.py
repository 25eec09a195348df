"""What a client lost of the model's words comes back; what it changed stays as it sent it."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.canonical.message_layout import same_arguments
from kvserve.core import ImageBlock, Message, TextBlock, ThinkingBlock, ToolCallBlock
from kvserve.sessions.healing import HealingStore, healed
from tests.sessions.samples import Notebook, assistant, call, user, written

RAW = '{"command":  "ls -la", "deep": [1, true, {"a": null}]}'
COMPACT = json.dumps(json.loads(RAW), separators=(",", ":"))
WROTE = assistant("I look.", call(RAW), thinking="Which files?")
CHAIN = b"c" * 32


def store_of(message: Message = WROTE) -> HealingStore:
    store = HealingStore()
    store.remember(CHAIN, written(message))
    return store


def test_a_stripped_and_compacted_echo_is_what_the_model_wrote() -> None:
    """Thinking gone, arguments serialised again: both come back, the client's call id stays."""
    echo = assistant("I look.", call(COMPACT, call_id="its-own"))
    assert store_of().heal(echo, CHAIN, same_arguments) == assistant(
        "I look.", call(RAW, call_id="its-own"), thinking="Which files?"
    )


def test_a_whole_echo_is_the_same_object() -> None:
    """Where nothing was lost nothing is made."""
    echo = assistant("I look.", call(RAW, call_id="other"), thinking="Which files?")
    assert store_of().heal(echo, CHAIN, same_arguments) is echo


def test_another_place_is_not_healed() -> None:
    """The same words after another history are another place."""
    echo = assistant("I look.", call(COMPACT))
    assert store_of().heal(echo, b"d" * 32, same_arguments) is echo


def test_only_an_assistant_is_healed() -> None:
    """A user who says the model's words does not get its thoughts."""
    said = Message("user", (TextBlock("I look."),))
    assert store_of(assistant("I look.", thinking="Which files?")).heal(said, CHAIN, same_arguments) is said


@pytest.mark.parametrize(
    "echo",
    [
        assistant("I looked.", call(COMPACT)),
        assistant("I look.", call(COMPACT.replace("-la", "-l"))),
        assistant("I look.", call(COMPACT.replace("true", "1"))),
        assistant("I look.", call(COMPACT, name="sh")),
        assistant("I look."),
        assistant("I look.", call(COMPACT), call(COMPACT)),
        assistant("I look.", call(COMPACT), thinking="Which file?"),
        assistant("I look.", call("{broken")),
        Message("assistant", (TextBlock("I look."), ImageBlock("data:x"), call(COMPACT))),
    ],
    ids=["text", "argument", "type", "name", "call gone", "call more", "thinking", "broken", "image"],
)
def test_a_changed_meaning_is_left_as_it_was_sent(echo: Message) -> None:
    """One changed character of content, arguments or thinking: not a word of ours is put in."""
    assert store_of().heal(echo, CHAIN, same_arguments) is echo


THOUGHT = "First the files.\n\nThen what is in them; and last of all who wrote it."


@given(st.integers(0, len(THOUGHT)), st.integers(0, len(THOUGHT)), st.sampled_from(["", "\u2026", "."]))
def test_thinking_that_was_cut_brings_nothing_of_the_rest(start: int, end: int, mark: str) -> None:
    """A piece of it is the client's word, and so are its calls then; white space around all of it cuts nothing off."""
    wrote = assistant("I look.", call(RAW), thinking=THOUGHT)
    sent = THOUGHT[start:end] + mark
    echo = assistant("I look.", call(COMPACT), thinking=sent)
    got = healed(echo, wrote, same_arguments)
    thinking = "".join(block.text for block in got.blocks if isinstance(block, ThinkingBlock))
    if not sent.strip():
        assert got == wrote, "it was lost, not changed"
    elif sent == THOUGHT:
        assert got == wrote
    else:
        assert got is echo and thinking == sent


@pytest.mark.parametrize("edges", [("\n", ""), ("", "\n\n"), (" ", " ")])
def test_white_space_around_thinking_is_the_clients(edges: tuple[str, str]) -> None:
    """It is the same thinking; it stands in the prompt as it was sent."""
    sent = THOUGHT.join(edges)
    wrote = assistant("I look.", thinking=THOUGHT)
    got = healed(assistant("I look.", thinking=sent), wrote, same_arguments)
    assert [block.text for block in got.blocks if isinstance(block, ThinkingBlock)] == [sent]


def test_an_empty_thinking_block_is_lost_thinking() -> None:
    """A client that shows no thinking echoes an empty block: the text comes back in its place."""
    echo = Message("assistant", (ThinkingBlock("", "signed"), TextBlock("I look."), call(COMPACT)))
    assert store_of().heal(echo, CHAIN, same_arguments) == WROTE


def test_white_space_around_the_text_is_the_clients() -> None:
    """A trimmed text is the same text; it is sent on as the client has it."""
    wrote = assistant("\n\nDone.\n", thinking="Good.")
    assert healed(assistant("Done."), wrote, same_arguments) == assistant("Done.", thinking="Good.")


def test_thinking_between_calls_returns_to_its_place() -> None:
    """Interleaved thinking goes where it stood, if the blocks still stand in that order."""
    first, second = call('{"a": 1}', call_id="1"), call('{"b": 2}', call_id="2")
    wrote = Message("assistant", (ThinkingBlock("A"), first, ThinkingBlock("B"), second))
    assert healed(Message("assistant", (first, second)), wrote, same_arguments) == wrote


def test_thinking_whose_place_is_gone_is_not_guessed() -> None:
    """Where the client moved the text before the call nobody knows where the second thought stood."""
    wrote = Message("assistant", (ThinkingBlock("A"), call(RAW), ThinkingBlock("B"), TextBlock("Done.")))
    moved = Message("assistant", (TextBlock("Done."), call(COMPACT)))
    assert healed(moved, wrote, same_arguments) == Message("assistant", (TextBlock("Done."), call(RAW)))


def test_the_first_tokens_of_the_same_words_stay() -> None:
    """The model says the same with other tokens and another call id: the KV is there for the first ones."""
    store = store_of()
    store.remember(CHAIN, written(assistant("I look.", call(RAW, call_id="new"), thinking="Which files?"), 5, 5))
    found = store.find(CHAIN)
    assert found is not None and found.ids == (7, 8, 9)


@pytest.mark.parametrize(
    "other", [assistant("I look.", call(RAW), thinking="Hm."), assistant("I look.", call(COMPACT))]
)
def test_two_writings_at_one_place_heal_nothing(other: Message) -> None:
    """Nobody knows which of two thoughts or spellings a client means, not even after the first comes again."""
    store = store_of()
    store.remember(CHAIN, written(other))
    assert store.find(CHAIN) is None
    store.remember(CHAIN, written(WROTE))
    echo = assistant("I look.", call(COMPACT))
    assert store.heal(echo, CHAIN, same_arguments) is echo


def test_the_least_recently_used_leaves() -> None:
    """Finding and saying again are uses."""
    store = HealingStore(max_entries=3)
    for name in b"abc":
        store.remember(bytes([name]), written(user(chr(name))))
    store.find(b"a")
    store.remember(b"b", written(user("b")))
    store.remember(b"d", written(user("d")))
    assert list(store._entries) == [b"a", b"b", b"d"]


def test_bytes_are_bounded_too() -> None:
    """A few enormous thoughts push the older ones out; the count returns to zero."""
    store = HealingStore(max_bytes=100_000)
    for number in range(20):
        store.remember(bytes([number]), written(assistant("x", thinking="y" * 30_000)))
    assert len(store) == 3
    store.remember(b"big", written(assistant("x", thinking="y" * 200_000)))
    assert len(store) == 0 and store._num_bytes == 0


texts = st.text(max_size=20)
messages = st.lists(
    st.one_of(
        st.builds(TextBlock, texts),
        st.builds(ThinkingBlock, texts, st.none() | texts),
        st.builds(ToolCallBlock, texts, texts, texts),
    ),
    max_size=4,
).map(lambda blocks: Message("assistant", tuple(blocks)))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=2), messages), max_size=8))
def test_a_store_begins_where_another_one_ended(said: list[tuple[bytes, Message]]) -> None:
    """Writings, ambiguous places and the order of use survive being written down."""
    notebook = Notebook()
    store, other = HealingStore(journal=notebook), HealingStore(max_entries=3)
    for chain, message in said:
        store.remember(chain, written(message), until=100.0)
    other.load(notebook.rows())
    kept = list(store._entries.items())[-3:]
    assert list(other._entries.items()) == kept
    assert other._num_bytes == sum(entry.num_bytes for _, entry in kept)
    again = HealingStore()
    again.load(notebook.rows())
    assert all(again.find(chain) == store.find(chain) for chain, _ in said)
    store.clear()
    assert not notebook.bodies


def test_what_may_not_last_is_not_written_down() -> None:
    """A writing without a term is in RAM only; the same from a request that may last is written down; a contradiction
    is, without its words."""
    notebook = Notebook()
    store = HealingStore(journal=notebook)
    store.remember(CHAIN, written(WROTE))
    assert not notebook.bodies and store.find(CHAIN) is not None
    store.remember(CHAIN, written(WROTE), until=100.0)
    assert len(notebook.bodies) == 1
    store.remember(CHAIN, written(assistant("SECRET")))
    [body] = notebook.bodies.values()
    assert b"SECRET" not in body and b"I look." not in body
    again = HealingStore()
    again.load(notebook.rows())
    assert len(again) == 1 and again.find(CHAIN) is None


def test_places_go_when_their_term_is_over() -> None:
    """A later use lengthens the term; without a term a place stays until it is the least recently used one."""
    notebook = Notebook()
    store = HealingStore(journal=notebook)
    for chain, until in ((b"a", 10.0), (b"b", 10.0), (b"c", None), (b"b", 20.0)):
        store.remember(chain, written(WROTE), until)
    store.expire(15.0)
    assert list(store._entries) == [b"c", b"b"] and list(notebook.bodies) == [("healing", b"b")]


def test_clear_forgets_ambiguity_too() -> None:
    """After a clear the next writing is the only one."""
    store = store_of()
    store.remember(CHAIN, written(assistant("I look.")))
    store.clear()
    store.remember(CHAIN, written(WROTE))
    assert store.find(CHAIN) is not None


def test_many_threads_leave_the_store_whole() -> None:
    """Writers, readers and a clear at once: bytes and bounds hold, nobody fails."""
    store, errors = HealingStore(max_entries=20), []

    def work(seed: int) -> None:
        try:
            for number in range(300):
                chain = bytes([(number * seed) % 40])
                store.remember(chain, written(assistant(str(chain), thinking="t" * (number % 7 == 0))))
                store.heal(assistant(str(chain)), chain, same_arguments)
                if number % 100 == 99:
                    store.put_all()
        except Exception as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(store) <= 20
    store.clear()
    assert store._num_bytes == 0
