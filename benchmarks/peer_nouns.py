"""The nouns of the comparison with other servers: a model that all serve, a scenario, what is measured in it.

It knows what a scenario needs of a server, and which models there are; no request, no process and no table.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.frozen import Possible
from benchmarks.peer_wire import Answer, Asking
from benchmarks.recordings import CHAT, Request
from benchmarks.reuse_oracle import CONVENTIONS, Convention
from benchmarks.reuse_scenarios import Sizes


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A model that all servers serve, and how long what is asked of it is. `family` is a demo family, else it is the
    demo's model that talks. `answer_tokens` is a limit; a random model ends most answers before it, as others do.
    `running_tokens` is the limit of a stream beside which `long_words` are read."""

    name: str
    kind: str
    family: str
    convention: Convention
    sizes: Sizes
    answer_tokens: int
    stream_tokens: int
    running_tokens: int
    long_words: int
    num_rounds: int

    @property
    def is_talking(self) -> bool:
        return not self.family


def _tiny(family: str, kind: str) -> PeerModel:
    sizes = Sizes(system_words=350, user_words=20, result_words=30, num_turns=4)
    return PeerModel(family, kind, family, CONVENTIONS[family], sizes, 64, 96, 8192, 1200, num_rounds=3)


MODELS: tuple[PeerModel, ...] = (
    PeerModel(
        "SmolLM2-135M",
        "dense, talks",
        "",
        Convention(("<|im_end|>",), is_cuttable=True, takes_tools=False),
        Sizes(system_words=60, user_words=10, result_words=14, num_turns=3),
        answer_tokens=10,
        stream_tokens=20,
        running_tokens=800,
        long_words=120,
        num_rounds=1,
    ),
    _tiny("qwen3", "dense, tiny"),
    _tiny("gemma3", "sliding window, tiny"),
    _tiny("qwen3_5", "hybrid, tiny"),
)
"""The one that talks is slow with the wheel's BLAS, 0.1 s a token of a prompt: little is asked of it, once."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared; None is what was not measured, or what a server does not say. Reuse and what was possible are
    shares of prompt tokens. `prompt_share`: the tokens that a server says its prompts had, of those that the model's
    template makes of the requests: less than all shows the model less than the client sent."""

    reuse: float | None = None
    possible: float | None = None
    prompt_share: float | None = None
    cold_seconds: float | None = None
    warm_seconds: float | None = None
    tokens_per_second: float | None = None
    longest_gap_seconds: float | None = None
    peak_bytes: float | None = None
    start_seconds: float | None = None


FIGURES: Mapping[str, tuple[str, bool]] = {
    "reuse": ("reused", True),
    "prompt_share": ("prompt tokens, of the template's", True),
    "cold_seconds": ("first token, cold", False),
    "warm_seconds": ("first token, warm", False),
    "tokens_per_second": ("tokens per second", True),
    "longest_gap_seconds": ("longest gap", False),
    "peak_bytes": ("peak memory", False),
    "start_seconds": ("start", False),
}
"""Field -> heading, and whether more is better. What was possible is no server's figure."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation and its answer."""

    request: Request
    answer: Answer


class Stage(Protocol):
    """A running server as a scenario sees it."""

    model: PeerModel
    seed: int

    def ask(self, path: str, body: Mapping[str, object], headers: Mapping[str, str], num_tokens: int) -> Asking:
        """Send it greedily, as a stream, for so many tokens of an answer."""

    def restart(self, how: signal.Signals) -> None:
        """End the server, start it again on what it left on disk, and wait until it has answered something else."""

    def possible(self, requests: Sequence[Request]) -> list[Possible]:
        """What could have been reused of each, by a server that was asked them in this order."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that is asked of each server on its own, once in each round. `path` is the protocol that it takes;
    `has_rounds`: it is cheap enough to be asked several times, of servers that take turns. `is_endless`: a random model
    must not end its answers by itself."""

    name: str
    says: str
    play: Callable[[Stage], Figures]
    path: str = CHAT
    has_rounds: bool = True
    is_endless: bool = False
    suits: Callable[[PeerModel], bool] = field(default=lambda _model: True)
