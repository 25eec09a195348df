"""What the compared servers are asked: conversations, recorded clients, a restart, streams at once, an edit.

It knows requests, their order and what is measured of their answers; not which server answers, nor how it was started.
Reuse is what a server says itself (`usage`), over all requests but the first; what was possible is `frozen.py`'s bound.
"""

import signal
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.anthropic_bodies import without_thinking
from benchmarks.client import BenchmarkError
from benchmarks.decode_rate import tokens_per_second
from benchmarks.frozen import Possible
from benchmarks.led_server import OWN_HEADERS
from benchmarks.peer_nouns import Figures, PeerModel, Scenario, Stage, Turn
from benchmarks.peer_wire import Asking
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, Reply, Request, Wire, read_recordings, shared_folder
from benchmarks.reuse_scenarios import Ask, Talk, Words, carrier, discarded_tool_loop, user_turns
from benchmarks.reuse_scenarios import Reply as TalkReply

EDITS_FILE = Path(__file__).with_name("speculation_prompts.toml")
CALM_SECONDS = 1.0
BEFORE_END_SECONDS = 1.0
"""Between an answer's end and the signal that ends the server."""

LIST = f"Go on with this list and never stop: {'tree, ' * 24}tree,"
"""Asked for an answer that does not end while another prompt is read: the model that talks goes on to its limit."""

NUM_RECORDED_REQUESTS = 4
RECORDED_ANSWER_TOKENS = 8
RECORDED_CHARACTERS, NUM_RECORDED_TOOLS = 1_200, 3
"""What a recorded text and a list of tools are cut to: whole, a prompt of 17,000 tokens takes a minute on two cores."""

EDIT_TOKENS = 100


# --- conversations ----------------------------------------------------------------------------------------------------


def branches(words: Words) -> Talk:
    """A person goes back to the second turn and says it otherwise, goes on there, and returns to where it had been."""
    said = [words.system()]
    for _ in range(words.sizes.num_turns):
        said.append(words.user())
        said.append((yield Ask(tuple(said))).echoed())
    edited = [*said[:3], words.user()]
    edited += [(yield Ask(tuple(edited))).echoed(), words.user()]
    yield Ask(tuple(edited))
    yield Ask((*said, words.user()))


def led(stage: Stage, talk: Talk) -> list[Turn]:
    """Lead a conversation to its end; the server's own answers are what comes back to it."""
    turns: list[Turn] = []
    try:
        ask = next(talk)
        while True:
            turns.append(asked(stage, ask))
            answer = turns[-1].answer
            ask = talk.send(TalkReply(answer.reasoning, answer.content, 0, 0, 0, answer.first_token_seconds))
    except StopIteration:
        return turns


def asked(stage: Stage, ask: Ask) -> Turn:
    """One request of a conversation. Servers know the switch for thinking by one of two names."""
    body = {"messages": list(ask.messages), **({"tools": list(ask.tools)} if ask.tools else {})}
    body |= {"chat_template_kwargs": {"enable_thinking": ask.thinking}, "enable_thinking": ask.thinking}
    answer = stage.ask(CHAT, body, {}, stage.model.answer_tokens).answer()
    return Turn(Request(body, Reply(answer.reasoning, answer.content)), answer)


def figures_of(turns: Sequence[Turn], possible: Sequence[Possible]) -> Figures:
    """Of a conversation: cold is its first request; warm and reuse are of the last ones, whose bounds are given.

    A server that says in some answer how many tokens it had means none where it does not; others say nothing.
    """
    counted = turns[len(turns) - len(possible) :]
    prompts = [turn.answer.usage.num_prompt_tokens or 0 for turn in counted]
    says_any = any(turn.answer.usage.num_cached_tokens is not None for turn in turns)
    num_cached = sum(turn.answer.usage.num_cached_tokens or 0 for turn in counted)
    num_possible = sum(each.num_reusable_tokens for each in possible)
    num_prompt = sum(each.num_prompt_tokens for each in possible)
    return Figures(
        reuse=num_cached / sum(prompts) if says_any and all(prompts) else None,
        possible=num_possible / num_prompt if num_prompt else None,
        prompt_share=sum(prompts) / num_prompt if num_prompt and all(prompts) else None,
        cold_seconds=turns[0].answer.first_token_seconds,
        warm_seconds=median(turn.answer.first_token_seconds for turn in counted),
        tokens_per_second=_rate(turns),
    )


def _rate(turns: Iterable[Turn]) -> float | None:
    """Of answers one after another; None where none is long enough, or long it is not said."""
    rates = []
    for turn in turns:
        try:
            rates.append(tokens_per_second([turn.answer.arrived]))
        except BenchmarkError:
            continue
    return median(rates) if rates else None


def _conversation(lead: Callable[[Words], Talk]) -> Callable[[Stage], Figures]:
    def play(stage: Stage) -> Figures:
        turns = led(stage, lead(_words(stage)))
        possible = stage.possible([turn.request for turn in turns])
        return figures_of(turns, possible[1:])

    return play


def _words(stage: Stage) -> Words:
    return Words(stage.model.sizes, takes_tools=stage.model.convention.takes_tools, seed=stage.seed)


def _restarted(how: signal.Signals) -> Callable[[Stage], Figures]:
    """The last turn comes after a restart: it alone counts."""

    def play(stage: Stage) -> Figures:
        words = _words(stage)
        turns = led(stage, user_turns(words))
        said = [*turns[-1].request.body["messages"]]
        last = turns[-1].answer
        said += [TalkReply(last.reasoning, last.content, 0, 0, 0, 0.0).echoed(), words.user()]
        time.sleep(BEFORE_END_SECONDS)
        stage.restart(how)
        turns.append(asked(stage, Ask(tuple(said))))
        possible = stage.possible([turn.request for turn in turns])
        return replace(figures_of(turns, possible[-1:]), tokens_per_second=None)

    return play


# --- recorded clients -------------------------------------------------------------------------------------------------


def _recorded(client: str) -> Callable[[Stage], Figures]:
    """What a client sent, its own recorded answers included; the server's are short and come back to nobody."""

    def play(stage: Stage) -> Figures:
        if (shared := shared_folder()) is None:
            raise BenchmarkError("there are no recordings here")
        requests = next(talk.requests for talk in read_recordings(shared) if talk.client == client)
        turns = []
        for request in [each for each in requests if each.body.get("tools")][:NUM_RECORDED_REQUESTS]:
            headers = {name: value for name, value in request.headers.items() if name not in OWN_HEADERS}
            request = replace(request, body=shortened(request.body), reply=None)
            answer = stage.ask(request.path, request.body, headers, RECORDED_ANSWER_TOKENS).answer()
            turns.append(Turn(request, answer))
        possible = stage.possible([turn.request for turn in turns])
        return replace(figures_of(turns, possible[1:]), tokens_per_second=None)

    return play


def shortened(body: Wire) -> Wire:
    """The same body with its first tools and without the middle of long texts, the same text always in the same way.
    Where a client has its thinking left out of the stream, a short answer would show nothing: it asks for none.
    """
    cut: Wire = {name: _shortened(value) for name, value in body.items() if name != "tools"}
    if "thinking" in body:
        cut = without_thinking(cut) | {"thinking": {"type": "disabled"}}
        cut.pop("output_config", None)
        cut.pop("context_management", None)
    return cut | ({"tools": body["tools"][:NUM_RECORDED_TOOLS]} if body.get("tools") else {})


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > RECORDED_CHARACTERS:
        return value[: RECORDED_CHARACTERS // 2] + value[-RECORDED_CHARACTERS // 2 :]
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return {name: _shortened(each) for name, each in value.items()} if isinstance(value, dict) else value


# --- streams and edits ------------------------------------------------------------------------------------------------


def _four_streams(stage: Stage) -> Figures:
    """Four short prompts at once; the rate is that of all together, from sending to the last word."""
    words = _words(stage)
    asking = [_question(stage, words.user()["content"], stage.model.stream_tokens) for _ in range(4)]
    answers = [each.answer() for each in asking]
    num_tokens = sum(answer.arrived.num_tokens for answer in answers)
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent_at for answer in answers)
    return Figures(
        cold_seconds=median(answer.first_token_seconds for answer in answers),
        tokens_per_second=num_tokens / seconds,
        longest_gap_seconds=max(
            (after - before for answer in answers for before, after in pairwise(answer.times)), default=None
        ),
    )


def _stall(stage: Stage) -> Figures:
    """Long prompts are read beside a running stream, one after another: its longest gap meanwhile, their first word."""
    running = _question(stage, f"{_words(stage).user()['content']} {LIST}", stage.model.running_tokens)
    running.wait_for_words()
    sizes = replace(stage.model.sizes, user_words=stage.model.long_words)
    words = Words(sizes, takes_tools=False, seed=stage.seed + 50)
    spans = []
    for _ in range(stage.model.num_rounds):
        time.sleep(CALM_SECONDS)
        beside = _question(stage, words.user()["content"], 2)
        spans.append((beside.sent_at, beside.wait_for_words()))
        beside.answer()
    time.sleep(CALM_SECONDS)
    answer = running.leave()
    return Figures(
        cold_seconds=median(end - start for start, end in spans),
        longest_gap_seconds=median(answer.longest_gap_seconds(start, end) for start, end in spans),
    )


def _edit(stage: Stage) -> Figures:
    """A file is to be written again with one change, the shortest of those that measure drafts."""
    asked_for = tomllib.loads(EDITS_FILE.read_text("utf-8"))
    said = min((each["said"] for each in asked_for["edit"]), key=len)
    messages = [{"role": "system", "content": asked_for["systems"]["edit"]}, {"role": "user", "content": said}]
    answer = stage.ask(CHAT, {"messages": messages}, {}, EDIT_TOKENS).answer()
    return Figures(
        cold_seconds=answer.first_token_seconds,
        tokens_per_second=tokens_per_second([answer.arrived]),
        longest_gap_seconds=max((after - before for before, after in pairwise(answer.times)), default=None),
    )


def _question(stage: Stage, said: str, num_tokens: int) -> Asking:
    body = {"messages": [{"role": "user", "content": said}], "chat_template_kwargs": {"enable_thinking": False}}
    return stage.ask(CHAT, {**body, "enable_thinking": False}, {}, num_tokens)


def _is_tiny(model: PeerModel) -> bool:
    return not model.is_talking


RECORDED: Mapping[str, tuple[str, str]] = {
    "Claude Code": ("claude-code-2.1.330", MESSAGES),
    "Codex": ("codex", RESPONSES),
    "PI": ("pi-0.87-qwen", CHAT),
    "opencode": ("opencode", CHAT),
}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("user turns", "a person and the model in turns, behind a system prompt", _conversation(user_turns)),
    Scenario(
        "tool loop",
        "calls and results that the client words in its own way, with thinking, then a new task",
        _conversation(discarded_tool_loop),
        suits=_is_tiny,
    ),
    Scenario(
        "carrier",
        "each request ends with a message that the next one lacks, with thinking",
        _conversation(carrier),
        suits=_is_tiny,
    ),
    Scenario(
        "branches", "back to the second turn, said otherwise, and return", _conversation(branches), suits=_is_tiny
    ),
    *(
        Scenario(
            f"recorded {client}",
            f"the first {NUM_RECORDED_REQUESTS} requests with tools of a recorded session over `{path}`, cut to "
            f"{NUM_RECORDED_TOOLS} tools and texts of at most {RECORDED_CHARACTERS:,} characters",
            _recorded(recording),
            path,
            has_rounds=False,
            suits=_is_tiny,
        )
        for client, (recording, path) in RECORDED.items()
    ),
    Scenario(
        "restart by SIGTERM",
        "user turns, a second, SIGTERM, a start, and the next turn, which alone counts",
        _restarted(signal.SIGTERM),
        has_rounds=False,
    ),
    Scenario(
        "restart by SIGKILL",
        "the same with SIGKILL for all its processes",
        _restarted(signal.SIGKILL),
        has_rounds=False,
    ),
    Scenario(
        "four streams", "four short prompts at once; the rate is that of all together", _four_streams, is_endless=True
    ),
    Scenario(
        "edit",
        f"a file is written again with one change, up to {EDIT_TOKENS} tokens",
        _edit,
        has_rounds=False,
        suits=lambda model: model.is_talking,
    ),
    Scenario(
        "stall",
        "a running stream while long prompts are read beside it, one after another; the median of its longest gaps",
        _stall,
        has_rounds=False,
        is_endless=True,
    ),
)
"""In the order in which they are played: a server may still write when a client has left. What a client recorded is the
same in each round, and longer than the context of the model that talks, which is asked little: it is slow."""
