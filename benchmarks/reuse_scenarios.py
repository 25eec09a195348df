"""Conversations as agents lead them, each a generator: it yields what the client sends and is sent the server's reply.

They know messages and their order; not who answers, nor how the answers are judged.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.reuse_oracle import Wire

type Talk = Generator["Ask", "Reply", None]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the whole conversation, as clients send it each time."""

    messages: tuple[Wire, ...]
    tools: tuple[Wire, ...] = ()
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. Seconds are from sending to the first piece of text."""

    reasoning: str
    content: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    first_text_seconds: float

    def echoed(self) -> Wire:
        """The answer as a client puts it into its next request."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of texts in words, and how often a conversation goes on."""

    system_words: int
    user_words: int
    result_words: int
    num_turns: int


class Words:
    """What people, tools and operators say: texts of the given lengths, no two alike, the same for the same seed."""

    def __init__(self, sizes: Sizes, *, takes_tools: bool, seed: int = 0) -> None:
        self.sizes = sizes
        self.takes_tools = takes_tools
        self._rng = random.Random(seed)
        self._systems: dict[str, Wire] = {}

    def system(self, name: str = "parent") -> Wire:
        """The system prompt of an agent, always the same for one name."""
        if name not in self._systems:
            self._systems[name] = {"role": "system", "content": self._write(self.sizes.system_words)}
        return self._systems[name]

    def user(self) -> Wire:
        return {"role": "user", "content": self._write(self.sizes.user_words)}

    def note(self) -> Wire:
        """A user message of the client's own making."""
        return {"role": "user", "content": f"Context of this request only: {self._write(self.sizes.user_words)}"}

    def result(self) -> str:
        return self._write(self.sizes.result_words)

    def _write(self, num_words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=num_words)).capitalize() + "."


def user_turns(words: Words) -> Talk:
    """A person and the model in turns; every answer comes back as it was given."""
    said = [words.system()]
    for _ in range(words.sizes.num_turns):
        said.append(words.user())
        said.append((yield Ask(tuple(said))).echoed())


def discarded_tool_loop(words: Words) -> Talk:
    """An agent calls tools, never as the model wrote it: other answers take the place of its own. Then a new task."""
    said, tools = [words.system(), words.user()], _TOOLS if words.takes_tools else ()
    for number in range(words.sizes.num_turns):
        yield Ask(tuple(said), tools, thinking=True)
        said += _call(words, number)
    said += [{"role": "assistant", "content": "All of it was read."}, words.user()]
    yield Ask(tuple(said), tools, thinking=True)


def carrier(words: Words) -> Talk:
    """Each request ends with a message that no later one has."""
    said = [words.system()]
    for _ in range(words.sizes.num_turns):
        said.append(words.user())
        said.append((yield Ask((*said, words.note()), thinking=True)).echoed())


def agents(words: Words) -> Talk:
    """A parent, two sub-agents under a system prompt of their own, the parent again, a rewind, and the way back."""
    parent = [words.system(), words.user()]
    for _ in range(2):
        parent += [(yield Ask(tuple(parent))).echoed(), words.user()]
    for _ in range(2):
        child = [words.system("child"), words.user()]
        child += [(yield Ask(tuple(child))).echoed(), words.user()]
        yield Ask(tuple(child))
    parent += [(yield Ask(tuple(parent))).echoed(), words.user()]
    rewound = [*parent[:3], words.user()]
    yield Ask(tuple(rewound))
    yield Ask(tuple(parent))


SCENARIOS: Mapping[str, Callable[[Words], Talk]] = {
    "user turns": user_turns,
    "tool loop, answers discarded": discarded_tool_loop,
    "carrier message": carrier,
    "parent, sub-agents, rewind, return": agents,
}

_TEXT = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face others level office door health person art
war history party result change morning reason research girl guy moment air teacher force education"""
_WORDS = _TEXT.split()

_TOOLS: tuple[Wire, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name, description in (("read_file", "Read a file."), ("list_files", "List the files of a folder."))
)


def _call(words: Words, number: int) -> Iterator[Wire]:
    """A call and its result; in words where the model's template knows no tools."""
    path, result = f"notes/{number}.txt", words.result()
    if not words.takes_tools:
        yield {"role": "assistant", "content": f"read_file {path}"}
        yield {"role": "user", "content": f"Result of read_file:\n{result}"}
        return
    function = {"name": "read_file", "arguments": f'{{"path": "{path}"}}'}
    call_id = f"call{number}"
    yield {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    yield {"role": "tool", "tool_call_id": call_id, "content": result}
