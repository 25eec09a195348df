"""What the tests of real coding agents share: five turns of work on a small project, in which the scripted model runs a
command, reads a file and says that it is done. It knows no client and none of their tools' names.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvserve.demo.families import ModelScale
from tests.e2e.scripted import Call, Say, ScriptedServer, Step, TracedTurn

NUM_TURNS = 5
FIRST_JUDGED_TURN = 3
MIN_REUSE = 0.97
MAX_TOKENS = 512
SCALES = {
    "qwen3": ModelScale(num_layers=2, num_heads=1, num_kv_heads=1),
    "qwen3_5": ModelScale(num_heads=1, num_kv_heads=1),
}
"""A dense model, whose answers have no thinking, and a hybrid one that thinks before each answer. As little attention
as there can be: agents' prompts have 10,000 to 28,000 tokens, which a CPU has to prefill once."""
SHORT_RULES = "# Rules\n- Answer in English.\n"
RULES = "# Rules of this project\n" + "".join(
    f"- Rule {number}: keep the notes of part {number} in notes/{number}.txt, one line for each thing that was found.\n"
    for number in range(40)
)
NOTES = "marbles\nhail\n"


def make_project(project: Path, rules: str = RULES) -> None:
    """The files that the tools will find."""
    (project / "AGENTS.md").write_text(rules, "utf-8")
    (project / "notes.txt").write_text(NOTES, "utf-8")


def command_of(turn: int) -> str:
    """What the model runs in a turn: it leaves a file and says so."""
    return f"echo ran-{turn} | tee ran-{turn}.txt"


def done(turn: int) -> str:
    """The model's last words in a turn."""
    return f"Turn {turn} is done."


def steps_of(turn: int, run: Call, read: Call) -> list[Step]:
    """What the model does in one turn: it runs its command, in even turns reads the notes, and answers."""
    return [run, *([read] if turn % 2 == 0 else []), Say(done(turn))]


@contextlib.contextmanager
def turn_of(
    server: ScriptedServer,
    project: Path,
    turn: int,
    steps: Sequence[Step],
    is_of_agent: Callable[[TracedTurn], bool] = lambda _: True,
) -> Iterator[list[TracedTurn]]:
    """The client says something in this block; behind it the list has the requests of the turn that count.

    Shows that every step was asked for and that the command ran; prints the reuse of each request.
    """
    requests: list[TracedTurn] = []
    num_before = len(server.turns())
    server.steps[:] = steps
    yield requests
    assert server.steps == []
    requests += server.wait_for_turns(num_before, len(steps), is_of_agent)
    print(f"turn {turn}: {', '.join(f'{r.reuse:.1%} of {r.num_prompt_tokens:,}' for r in requests)}")
    assert (project / f"ran-{turn}.txt").read_text("utf-8") == f"ran-{turn}\n"


def judge(made: Sequence[Sequence[TracedTurn]]) -> None:
    """From the third turn on next to nothing is computed."""
    late = [request.reuse for requests in made[FIRST_JUDGED_TURN - 1 :] for request in requests]
    assert min(late) >= MIN_REUSE
