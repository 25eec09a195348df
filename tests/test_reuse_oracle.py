"""Reuse over HTTP against an oracle: whatever the server has computed before, no later prompt pays for it again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.reuse import TOLERANCE_TOKENS, Judge, Judged, chat, clear_cache, play
from benchmarks.reuse_oracle import CONVENTIONS
from benchmarks.reuse_scenarios import SCENARIOS, Ask, Reply, Sizes, Words
from benchmarks.template_folders import WHOLE_VOCABULARIES
from kvserve.engine import prefix_cache
from tests.laws import IS_FULL, THREE_KINDS, sampled, sampled_cells
from tests.models import tiny_model
from tests.serving import AppUnderTest, serving_app

ANSWER_TOKENS = 12 if IS_FULL else 8
USER_TURNS, BRANCHES = "user turns", "parent, sub-agents, rewind, return"
FAMILIES = [family for family in CONVENTIONS if family not in WHOLE_VOCABULARIES]
EVERY_RUN = THREE_KINDS
"""glm4_moe_lite's caches can be cut at any token, as qwen3's can, and gpt_oss has windows, as gemma3 has: left to
`make full`."""
SIZES = Sizes(system_words=50, user_words=10, result_words=20, num_turns=3 if IS_FULL else 2)


@dataclass(frozen=True)
class Served:
    """A server on a tiny model, whose answers end by themselves now and then, and its judge."""

    family: str
    app: AppUnderTest
    judge: Judge

    def lead(self, scenario: str, send: Callable[[Ask], Reply] | None = None) -> list[Judged]:
        """A conversation with a server that knows nothing yet."""
        clear_cache(self.app.port)
        self.judge.forget()
        words = Words(SIZES, takes_tools=CONVENTIONS[self.family].takes_tools)
        return play(SCENARIOS[scenario](words), self.judge, send or self.send)

    def send(self, ask: Ask) -> Reply:
        return chat(self.app.port, ask, ANSWER_TOKENS)

    def send_to_emptied(self, ask: Ask) -> Reply:
        clear_cache(self.app.port)
        return self.send(ask)


@pytest.fixture(scope="module", params=sampled(FAMILIES, EVERY_RUN))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tiny_model(request.param, answer_tokens=20)
    with serving_app(tmp_path_factory.mktemp("served"), model_path=str(folder)) as app:
        yield Served(request.param, app, Judge(request.param, folder, ANSWER_TOKENS))


def assert_nothing_is_computed_twice(requests: list[Judged]) -> None:
    """Every request started where the oracle would."""
    assert max(each.num_missed_tokens for each in requests) <= TOLERANCE_TOKENS


def is_in_every_run(served: str, scenario: str) -> bool:
    """The scenario that comes back to all that it left where states are recurrent; the one that the controls below are
    played with where layers have windows, whose states are kept as the recurrent ones are."""
    if served == "gemma3":
        return scenario == USER_TURNS
    return served == "qwen3_5" and scenario == BRANCHES


@pytest.mark.parametrize("scenario", SCENARIOS)
@sampled_cells(is_in_every_run)
def test_whatever_was_computed_is_reused(served: Served, scenario: str) -> None:
    """Each request of the conversation starts where all that the server ever computed for it ends."""
    requests = served.lead(scenario)
    assert sum(each.num_possible_tokens for each in requests) > 0
    assert_nothing_is_computed_twice(requests)


@pytest.mark.parametrize("served", sampled(FAMILIES, ("qwen3_5",)), indirect=True)
def test_a_server_that_forgets_is_noticed(served: Served) -> None:
    """Negative control: emptied before each request, the server answers the same and reuses nothing."""
    requests = served.lead(USER_TURNS, served.send_to_emptied)
    assert all(each.reply.num_cached_tokens == 0 for each in requests)
    with pytest.raises(AssertionError):
        assert_nothing_is_computed_twice(requests)


@pytest.mark.long
@pytest.mark.parametrize("served", sampled(FAMILIES, ("qwen3_5",)), indirect=True)
def test_a_server_with_checkpoints_at_the_ends_of_prompts_only_is_noticed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: where layers cannot be cut, a carrier message then costs the whole prompt each time."""
    if CONVENTIONS[served.family].is_cuttable:
        pytest.skip("every layer can be cut: there are no checkpoints")
    real = prefix_cache.plan_stops
    monkeypatch.setattr(prefix_cache, "plan_stops", lambda *args, **kwargs: real(*args, **kwargs)[-1:])
    with pytest.raises(AssertionError):
        assert_nothing_is_computed_twice(served.lead("carrier message"))
