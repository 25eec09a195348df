"""Nobody's words reach another's prompt, or another's explanation: a span, thinking or a call's text comes back to the
client that shows it was there, and to nobody else. Here without a model; over HTTP in test_provenance_http.py.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import (
    Message,
    Principal,
    RequestId,
    Role,
    SamplingParams,
    SessionHint,
    TextBlock,
    ThinkingBlock,
    TokenSequence,
    ToolCallBlock,
    ToolSpec,
    Turn,
    Written,
)
from kvserve.explain.raw_prompts import RawRecord
from kvserve.identity.conversations import Conversations, RememberedTurn
from kvserve.identity.owner import is_telling
from kvserve.identity.reading import RecognisedTurn
from kvserve.identity.recognise import IdentitySettings
from kvserve.sessions.archive import Archive
from kvserve.sessions.seen import pack_ids
from tests.laws import num_examples
from tests.words_held import files_with, values_with

REMINDER = "<system-reminder>\nThe PIN is {}.\n</system-reminder>\n"
SENDER = 'Sender (untrusted metadata):\n```json\n{{\n  "sender": "{}"\n}}\n```\n\n'
INBOUND = '## Inbound Context (trusted metadata)\nAbout the message.\n```json\n{{\n  "chat": "{}"\n}}\n```\n'
INFO = 'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\n\n'

LONG = (
    "That is a good question, and here is what I would do about it: read what is there, write down what is amiss "
    "and ask the person who knows it best before anything is changed; the rest can wait until that is clear. "
    "Then take the smallest step that can be seen from outside, show it, and only then think about the next one, for "
    "most of what seems to be needed now will not be, and the rest will look different by the time one comes to it."
)
OTHER_LONG = (
    "An answer that some other server once gave, in as many words as the one above, so that nobody may say that it "
    "shows less because it is shorter than what a model of ours has written; a client brought it from somewhere else. "
    "It goes on like this for a while, because an answer of some length is what people are used to, and because a "
    "few more words cost a server next to nothing, whoever reads them."
)


def said(role: Role, text: str) -> Message:
    return Message(role, (TextBlock(text),))


def asked(*messages: Message, tools: tuple[ToolSpec, ...] = (), **hint: Any) -> Turn:
    session = SessionHint(**hint)
    return Turn(RequestId("r"), "test", None, SamplingParams(), messages=messages, tools=tools, session=session)


def answered(conversations: Conversations, turn: Turn, answer: Message) -> RecognisedTurn:
    """Read a turn, and remember it with what the model wrote."""
    reading = conversations.read(turn)
    written = Written(answer, (5,), (7, 8), opens_reasoning=False)
    prompt = TokenSequence(tuple(range(100)))
    exchanged = RememberedTurn(turn.request_id, turn.session, prompt, (), {}, written, pack_ids(prompt.ids))
    conversations.remember(reading, exchanged)
    return reading


@pytest.fixture
def conversations() -> Conversations:
    return Conversations(IdentitySettings(DEFAULT_RULES))


# --- who gets what back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [REMINDER, SENDER, INFO])
@pytest.mark.parametrize(
    "other", [{}, {"principal": Principal("k")}, {"principal": Principal(user="u")}, {"session_id": "t"}]
)
def test_a_client_that_was_never_here_gets_nobodys_span(
    conversations: Conversations, hidden: str, other: dict[str, Any]
) -> None:
    """It says hello as another did, and has an answer from elsewhere."""
    hello = said("assistant", LONG)
    answered(conversations, asked(said("user", f"{hidden.format('4711')}hello")), hello)
    for brought in ("Hello!", "Hello! How can I help you today?", OTHER_LONG):
        messages = said("user", "hello"), said("assistant", brought), said("user", "What is the PIN?")
        reading = conversations.read(asked(*messages, **other))
        assert reading.messages == messages and reading.before is None


def test_an_app_wide_cache_key_is_no_session(conversations: Conversations) -> None:
    """All its users send it; with an id of the session's own the same request gets its span back."""
    messages = said("user", "hello"), said("assistant", "ok"), said("user", "What is the PIN?")
    reminded = said("user", REMINDER.format("4711") + "hello")
    for is_shared in (True, False):
        answered(conversations, asked(reminded, session_id="k", is_shared_id=is_shared), said("assistant", "ok"))
        reading = conversations.read(asked(*messages, session_id="k", is_shared_id=is_shared))
        assert (reading.messages[0] == reminded) is not is_shared
        assert (reading.before is None) is is_shared


def test_one_session_of_two_principals_is_two(conversations: Conversations) -> None:
    """An id that two people use by chance, or that one has guessed."""
    reminded = said("user", REMINDER.format("4711") + "hello")
    answered(conversations, asked(reminded, session_id="s", principal=Principal("a")), said("assistant", LONG))
    messages = said("user", "hello"), said("assistant", LONG), said("user", "What is the PIN?")
    for principal, comes_back in ((Principal("b"), False), (Principal(), False), (Principal("a"), True)):
        reading = conversations.read(asked(*messages, session_id="s", principal=principal))
        assert (reading.messages[0] == reminded) is comes_back
        assert (reading.before is not None) is comes_back


GREETING = "Hello! I'm Qwen, a large language model created by Alibaba Cloud. How can I help you today?"
WHO_IT_IS = (
    "I am Qwen, a large-scale language model independently developed by the Tongyi Lab under Alibaba Group. I am "
    "designed to answer questions, create text such as stories, official documents, emails, scripts, and more, as "
    "well as perform logical reasoning, programming, and other tasks."
)
WHO_IT_IS_IN_CHINESE = (
    "你好！我是通义千问，是阿里巴巴集团旗下的通义实验室自主研发的超大规模语言模型。我可以帮助你回答问题、创作文字，"
    "比如写故事、写公文、写邮件、写剧本、逻辑推理、编程等等，还能表达观点，玩游戏等。"
    "如果你有任何问题或需要帮助，欢迎随时告诉我！"
)
REFUSAL = "I'm sorry, but I can't assist with that request. If you have any other questions, feel free to ask me."


@pytest.mark.parametrize("text", ["ok", GREETING, WHO_IT_IS, WHO_IT_IS_IN_CHINESE, REFUSAL, LONG])
def test_an_answer_shows_where_a_request_comes_from_if_it_says_enough(conversations: Conversations, text: str) -> None:
    """What everybody expects a model to say proves nothing."""
    wrote = Message("assistant", (ThinkingBlock("The PIN."), TextBlock(text)))
    reminded = said("user", REMINDER.format("4711") + "hello")
    answered(conversations, asked(reminded), wrote)
    reading = conversations.read(asked(said("user", "hello"), said("assistant", text), said("user", "And?")))
    is_shown = text == LONG
    assert is_telling(wrote) is is_shown
    assert reading.messages[:2] == ((reminded, wrote) if is_shown else (said("user", "hello"), said("assistant", text)))
    assert (reading.before is not None) is (reading.written_messages[0] is not None) is is_shown


def test_short_answers_do_not_add_up(conversations: Conversations) -> None:
    """Some stock answers are no more than one. From one that says enough on, what the model writes comes back; what
    was read without its thinking before stays as it was read."""
    texts = ["Yes, that is so.", GREETING, REFUSAL, LONG, "No."]
    thought = [Message("assistant", (ThinkingBlock(f"{n}."), TextBlock(text))) for n, text in enumerate(texts)]
    talk: list[Message] = [said("user", "Begin.")]
    back = []
    for number, text in enumerate(texts):
        reading = answered(conversations, asked(*talk), thought[number])
        back.append([message for message in reading.messages if message in thought])
        talk += [said("assistant", text), said("user", f"Next, {number}.")]
    back.append([message for message in conversations.read(asked(*talk)).messages if message in thought])
    assert back == [[], [], [], [], [thought[3]], [thought[3], thought[4]]]


def test_an_id_that_only_this_server_gave_shows_it_too(conversations: Conversations) -> None:
    """Also where a client took out all but letters and digits; another id, or none, shows nothing."""
    given_id = "call_0123456789abcdef01234567"
    wrote = Message("assistant", (ThinkingBlock("Look."), ToolCallBlock(given_id, "ls", "{}")))
    answered(conversations, asked(said("user", "Look.")), wrote)
    for call_id, is_shown in ((given_id, True), ("call0123456789abcdef01234567", True), ("c", False), ("", False)):
        echo = Message("assistant", (ToolCallBlock(call_id, "ls", "{}"),))
        reading = conversations.read(asked(said("user", "Look."), echo, said("user", "And?")))
        assert (ThinkingBlock("Look.") in reading.messages[1].blocks) is is_shown


def test_only_the_models_thinking_comes_back(conversations: Conversations) -> None:
    """A client brought thinking from elsewhere: it is rendered where it is sent, and comes back to nobody."""
    brought = Message("assistant", (ThinkingBlock("My doctor says so."), TextBlock(OTHER_LONG)))
    for hint in ({}, {"session_id": "s"}):
        answered(conversations, asked(said("user", "hello"), brought, said("user", "Go.")), said("assistant", LONG))
        messages = said("user", "hello"), said("assistant", OTHER_LONG), said("user", "Go."), said("assistant", LONG)
        reading = conversations.read(asked(*messages, said("user", "And?"), **hint))
        assert reading.messages[:4] == messages


@pytest.mark.parametrize("hidden", [REMINDER, INFO])
def test_where_two_were_given_the_same_answer_neither_gets_the_others_words(
    conversations: Conversations, hidden: str
) -> None:
    """Both said hello, both got the same long answer, nobody can tell who asks now: also of an id that moved, and where
    the block that it stands in is sent again."""
    for secret in ("4711", "0815"):
        answered(conversations, asked(said("user", f"{hidden.format(secret)}hello")), said("assistant", LONG))
    for sent in ("hello", f"{hidden.format('4711')}hello"):
        messages = said("user", sent), said("assistant", LONG), said("user", "And?")
        assert conversations.read(asked(*messages)).messages == messages


@pytest.mark.parametrize("hint", [{"ttl_seconds": 0.0}, {"cache_mode": "prefix"}])
def test_who_leaves_no_trace_gets_nothing_and_is_not_taken_for_another(
    conversations: Conversations, hint: dict[str, Any]
) -> None:
    """It gets the same answer as somebody before it, unseen, and goes on as everybody does."""
    reminded = said("user", REMINDER.format("4711") + "hello")
    answered(conversations, asked(reminded), said("assistant", LONG))
    messages = said("user", "hello"), said("assistant", LONG), said("user", "And?")
    assert conversations.read(asked(*messages[:1], **hint)).messages == messages[:1]
    assert conversations.read(asked(*messages, **hint)).messages == messages
    assert conversations.read(asked(*messages)).messages == messages


def escaped(text: str) -> str:
    """The same text in JSON, six times as long."""
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize("is_first", [True, False])
def test_who_leaves_no_record_and_is_given_the_same_answer_gets_nobodys_words(
    conversations: Conversations, is_first: bool
) -> None:
    """Once it does leave one: nothing says which of the two it was, whoever came first."""
    hidden = said("user", REMINDER.format("4711") + "hello")
    wrote = Message("assistant", (ThinkingBlock("The PIN."), TextBlock(LONG)))
    turns = [asked(said("user", "hello"), ttl_seconds=0.0), asked(hidden)]
    for turn in turns if is_first else reversed(turns):
        thought = Message("assistant", (ThinkingBlock("Nothing."), TextBlock(LONG)))
        answered(conversations, turn, wrote if turn is turns[1] else thought)
    messages = said("user", "hello"), said("assistant", LONG), said("user", "What is the PIN?")
    reading = conversations.read(asked(*messages))
    assert reading.messages == messages and reading.before is None


def test_what_an_answer_shows_is_what_the_model_wrote(conversations: Conversations) -> None:
    """The same call in longer JSON shows no more of it."""
    path = "src/of/some/length/or_other.py" * 2
    wrote = Message("assistant", (ThinkingBlock("Look."), ToolCallBlock("", "list", f'{{"path":"{path}"}}')))
    answered(conversations, asked(said("user", "Look.")), wrote)
    spelt = f'{{"{escaped("path")}": "{escaped(path)}"}}'
    echo = Message("assistant", (ToolCallBlock("", "list", spelt),))
    assert is_telling(echo) and not is_telling(wrote)
    assert conversations.read(asked(said("user", "Look."), echo, said("user", "And?"))).messages[1] == echo


def test_a_client_is_compared_with_its_own_requests_only(conversations: Conversations) -> None:
    """Not with another's under another system prompt; its own is found again by what the model answered."""
    first, second = said("system", "You are Ann's helper."), said("system", "You are Bob's helper.")
    answered(conversations, asked(first, said("user", "hello")), said("assistant", LONG))
    talk = said("user", "hello"), said("assistant", LONG), said("user", "And?")
    assert conversations.read(asked(second, said("user", "hello"))).before is None
    assert conversations.read(asked(second, said("user", "hello"), said("assistant", "ok"), talk[2])).before is None
    assert conversations.read(asked(second, *talk)).before is not None
    assert conversations.read(asked(second, *talk, principal=Principal("k"))).before is None


def test_an_answer_that_was_brought_finds_nobody(conversations: Conversations) -> None:
    """The model did not write it: two may have it from the same place."""
    for system in ("You are Ann's helper.", "You are Bob's helper."):
        talk = said("user", "hello"), said("assistant", OTHER_LONG), said("user", "And?")
        reading = answered(conversations, asked(said("system", system), *talk), said("assistant", LONG))
        assert reading.before is None


# --- telemetry -------------------------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version={}; cc_entrypoint=cli; cch={};"


def test_telemetry_is_what_anybody_sent_first(tmp_path: Path) -> None:
    """Whoever sends it in whichever session, after a restart too: what follows is a beginning that all share."""
    archive = [Archive(tmp_path, max_bytes=1 << 20, report=pytest.fail) for _ in range(1)]
    conversations = Conversations(IdentitySettings(DEFAULT_RULES), archive[0])
    first = said("system", BILLING.format("2.1.330", "00001"))
    answered(conversations, asked(first, said("user", "a"), session_id="a"), said("assistant", "ok"))
    later = said("system", BILLING.format("2.1.331", "00002"))
    for principal in (Principal("k"), Principal()):
        reading = conversations.read(asked(later, said("user", "b"), session_id="b", principal=principal))
        assert reading.messages[0] == first and reading.effects.replayed == {"cch", "billing_header"}
    conversations.close()
    again = Conversations(IdentitySettings(DEFAULT_RULES), Archive(tmp_path, max_bytes=1 << 20, report=pytest.fail))
    assert again.read(asked(later, said("user", "c"))).messages[0] == first
    again.close()


@pytest.mark.parametrize("words", ["my PIN is 4711", "x" * 60, "Ünsinn!"])
def test_words_are_no_telemetry(conversations: Conversations, words: str) -> None:
    """A version is a few letters and digits: whatever else stands in its place stays where it was sent."""
    answered(
        conversations, asked(said("system", BILLING.format(words, "0")), said("user", "a")), said("assistant", "ok")
    )
    mine = said("system", BILLING.format("2.1.331", "00002"))
    assert conversations.read(asked(mine, said("user", "b"))).messages[0] == mine


def test_a_counter_in_the_newest_turn_counts(conversations: Conversations) -> None:
    """What is left now is sent now; in history the model reads the count that it read."""
    left = "<total_tokens>{} tokens left</total_tokens>"
    talk = [said("user", "Go."), said("system", left.format(900))]
    answered(conversations, asked(*talk, session_id="s"), said("assistant", LONG))
    assert conversations.read(asked(talk[0], said("system", left.format(800)), session_id="s")).messages[1] == said(
        "system", left.format(800)
    )
    later = [talk[0], said("system", left.format(700)), said("assistant", LONG), said("user", "And?")]
    assert conversations.read(asked(*later, said("system", left.format(600)), session_id="s")).messages == (
        *talk,
        *later[2:],
        said("system", left.format(600)),
    )


# --- the law ---------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Somebody with words of its own, and a conversation. What it was given it sends back, without thinking; hidden
    spans it says once."""

    name: str
    hint: SessionHint
    sent: list[Message] = field(default_factory=list)
    num_said: int = 0

    def secret(self) -> str:
        """A word that only this client has said."""
        self.num_said += 1
        return f"{self.name}{self.num_said}"

    def say(self, words: str, hidden: str | None) -> Message:
        """The newest message, with its hidden span; in history only the words are left."""
        words = words.format(self.name)
        self.sent.append(said("user", words))
        return said("user", hidden.format(self.secret()) + words) if hidden else self.sent[-1]


KEYS, USERS = ("", "k1", "k2"), ("", "u1", "u2")
SESSIONS = st.sampled_from([None, ("app", True), ("s1", False), ("s2", False)])


@st.composite
def hints(draw: st.DrawFn) -> SessionHint:
    principal = Principal(draw(st.sampled_from(KEYS)), draw(st.sampled_from(USERS)))
    session = draw(SESSIONS)
    if session is None:
        return SessionHint(principal=principal)
    return SessionHint(session[0], principal=principal, is_shared_id=session[1])


def are_one(one: SessionHint, other: SessionHint) -> bool:
    """Whether two hints say that it is the same client: then nothing can tell them apart."""
    is_own = one.session_id is not None and not one.is_shared_id and not other.is_shared_id
    return is_own and (one.session_id, one.principal) == (other.session_id, other.principal)


PAIRS = st.one_of(
    st.tuples(hints(), hints()).filter(lambda pair: not are_one(*pair)),
    st.sampled_from([None, "app"]).map(lambda session: (SessionHint(session, is_shared_id=session is not None),) * 2),
)
"""Half of them have records of their own, half share theirs."""

ACTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["hello", "And?", "I am {}."]),
        st.sampled_from([None, None, REMINDER, SENDER, INFO]),
        st.sampled_from(["own", "ok", "greeting", "short", "long"]),
        st.sampled_from(["", "brought", "restart", "begin"]),
        st.sampled_from(["", "", "", "ttl 0", "prefix", "aborted"]),
    ),
    min_size=2,
    max_size=10,
)
"""Per turn: who, its words, what it hides, what the model answers, what happens before, and how it is asked: some want
nothing kept, and some leave before the answer comes."""

type Act = tuple[int, str, str | None, str, str, str]


def model_answer(kind: str, client: Client) -> Message:
    """What the model writes: its own words for this client, or what it writes for everybody; it thinks of secrets."""
    texts = {"own": f"For {client.name}: {LONG}", "ok": "ok", "greeting": "Hello! How can I help you?", "long": LONG}
    texts["short"] = f"Fine, {client.name}."
    thought = ThinkingBlock(f"Thinking of {client.secret()}.")
    call = ToolCallBlock("call", "note", f'{{"of":  "{client.name}"}}')
    return Message("assistant", (thought, TextBlock(texts[kind]), *([call] if kind == "own" else [])))


def stripped(message: Message) -> Message:
    return Message(message.role, tuple(block for block in message.blocks if not isinstance(block, ThinkingBlock)))


MANNERS: dict[str, dict[str, Any]] = {"ttl 0": {"ttl_seconds": 0.0}, "prefix": {"cache_mode": "prefix"}}


def lead(pair: tuple[SessionHint, SessionHint], acts: list[Act], world: "World") -> int:
    """Play the acts; raises AssertionError where a word of one stands before the other. How many words came back."""
    clients = [Client("annemarie", pair[0]), Client("barnabas", pair[1])]
    num_back = 0
    for who, words, hidden, kind, before, manner in acts:
        client, other = clients[who], clients[1 - who]
        if before == "restart":
            world.restart()
        if before == "begin":
            client.sent.clear()
        if before == "brought":
            client.sent += [said("user", words.format(client.name)), said("assistant", OTHER_LONG)]
        history = list(client.sent)
        newest = client.say(words, hidden)
        hint = replace(client.hint, **MANNERS.get(manner, {}))
        turn = replace(asked(*history, newest), session=hint)
        reading = world.conversations.read(turn)
        told = repr((reading.messages, reading.rendered, reading.written_messages, reading.before))
        assert other.name not in told, f"{other.name} stands before {client.name}"
        num_back += reading.messages != (*history, newest)
        # of who leaves no record not even digests outlive the process: what it is given must be its own there
        leaves_digests_only = hint.leaves_no_record and isinstance(world, LastingWorld)
        answer = model_answer("own" if leaves_digests_only else kind, client)
        prompt = TokenSequence(tuple(range(100)))
        if manner == "aborted":  # what was written so far is kept, and the client may show it or not
            answer = Message("assistant", answer.blocks[:2])
        written = Written(answer, (5,), (7, 8), opens_reasoning=False)
        exchanged = RememberedTurn(turn.request_id, hint, prompt, (), {}, written, pack_ids(prompt.ids))
        world.conversations.remember(reading, exchanged)
        client.sent += [stripped(answer)] if manner != "aborted" or kind == "own" else []
    return num_back


class World:
    """A server that keeps nothing on disk: it cannot be restarted."""

    def __init__(self) -> None:
        self.conversations = Conversations(IdentitySettings(DEFAULT_RULES))

    def restart(self) -> None:
        """Nothing."""


class LastingWorld(World):
    """One that begins again with what it has kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.conversations = self._begin()

    def _begin(self) -> Conversations:
        archive = Archive(self._folder, max_bytes=1 << 30, report=pytest.fail)
        return Conversations(IdentitySettings(DEFAULT_RULES), archive)

    def restart(self) -> None:
        """Close, and begin again."""
        self.conversations.close()
        self.conversations = self._begin()


@given(PAIRS, ACTS)
@settings(max_examples=num_examples(100), deadline=None)
def test_no_words_of_one_ever_stand_before_the_other(pair: tuple[SessionHint, SessionHint], acts: list[Act]) -> None:
    """Whatever two clients have in common: keys, users, an app's cache key, visible words, answers; not one session."""
    event(f"something comes back: {lead(pair, acts, World()) > 0}")


@given(PAIRS, ACTS)
@settings(max_examples=num_examples(4), deadline=None)
def test_nor_across_restarts(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[SessionHint, SessionHint],
    acts: list[Act],
) -> None:
    """What was written down belongs to whom it belonged."""
    world = LastingWorld(tmp_path_factory.mktemp("records"))
    lead(pair, [(*act[:4], act[4] or "restart", act[5]) for act in acts], world)
    world.conversations.close()


def test_the_law_would_see_a_leak() -> None:
    """The control: one session of one principal is one client, so that its words do come back to whoever uses it."""
    hint = SessionHint("s")
    acts: list[Act] = [
        (0, "hello", REMINDER, "ok", "", ""),
        (1, "hello", None, "ok", "", ""),
        (1, "And?", None, "ok", "", ""),
    ]
    with pytest.raises(AssertionError, match="annemarie stands before barnabas"):
        lead((hint, hint), acts, World())


def test_words_do_come_back_to_their_own() -> None:
    """And the other control: in the led conversations there is something to come back."""
    acts: list[Act] = [(0, "hello", REMINDER, "own", "", ""), (1, "hello", SENDER, "own", "", "")] * 3
    assert lead((SessionHint(), SessionHint()), acts, World()) == 4
    assert lead((SessionHint("s1"), SessionHint("s2")), acts, World()) == 4


# --- what is forgotten -----------------------------------------------------------------------------------------------

ANN, BOB = Principal("a"), Principal("b")


def fill(conversations: Conversations) -> None:
    """Two sessions of one principal, one of another under the same name, and somebody without any."""
    hints = {"annone": ("one", ANN), "anntwo": ("two", ANN), "bobone": ("one", BOB), "nobody": (None, Principal())}
    for word, (session, principal) in hints.items():
        hint = {"session_id": session, "principal": principal}
        prompt = TokenSequence(tuple(1000 + number + 100 * len(hint) for number in range(100)))
        for number in range(2):
            turn = asked(said("system", f"For {word}."), said("user", f"Ask {word} {number}."), **hint)
            reading = conversations.read(turn)
            answer = Message("assistant", (ThinkingBlock(f"Think {word}."), TextBlock(f"Tell {word}, {LONG}")))
            written = Written(answer, (5,), (7, 8), opens_reasoning=False)
            exchanged = RememberedTurn(turn.request_id, turn.session, prompt, (), {}, written, pack_ids(prompt.ids))
            conversations.remember(reading, exchanged)
        raw = RawRecord(
            request_id=RequestId("raw"),
            owner=reading.identity.owner.name,
            text=f"Raw {word}.",
            num_prompt_characters=4,
            packed_ids=b"",
            num_prompt_tokens=1,
        )
        conversations.raw_prompts.remember(raw)


@pytest.mark.parametrize(
    ("wanted", "gone"),
    [
        ({"session": "one"}, {"annone", "bobone"}),
        ({"principal": str(ANN)}, {"annone", "anntwo"}),
        ({"session": "one", "principal": str(BOB)}, {"bobone"}),
        ({"principal": str(Principal())}, {"nobody"}),
        ({"session": "three"}, set()),
    ],
)
def test_what_is_forgotten_is_held_nowhere(tmp_path: Path, wanted: dict[str, str], gone: set[str]) -> None:
    """Neither in memory nor in a file; what belongs to others is all there, also for the next process."""
    words = ("annone", "anntwo", "bobone", "nobody")
    conversations = Conversations(
        IdentitySettings(DEFAULT_RULES), Archive(tmp_path, max_bytes=1 << 30, report=pytest.fail)
    )
    fill(conversations)
    assert conversations.flush()
    assert all(values_with(conversations, word) and files_with(tmp_path, word.encode()) for word in words)
    conversations.forget(**wanted)
    for word in words:
        held = values_with(conversations, word), files_with(tmp_path, word.encode())
        assert held == ([], []) if word in gone else all(held), word
    conversations.close()
    again = Conversations(IdentitySettings(DEFAULT_RULES), Archive(tmp_path, max_bytes=1 << 30, report=pytest.fail))
    for word in words:
        kept = {text for text in values_with(again, word) if not text.startswith("Raw")}
        assert bool(kept) is (word not in gone), word
    again.close()
