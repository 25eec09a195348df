"""aider works with the server for three turns, on both ports. It has no tools: the model lists a file, aider writes it.

What the model writes is scripted by grammars; everything else is real. The reuse of each request is printed.
"""

from pathlib import Path

import pytest

from tests.e2e.clients import set_up_aider
from tests.e2e.scripted import Say, ScriptedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_TURNS = 3
FIRST_NOTES = "marbles\n"


def notes_after(turn: int) -> str:
    """The file once a turn is done."""
    return FIRST_NOTES + "".join(f"turn {number}\n" for number in range(1, turn + 1))


@pytest.mark.parametrize("front", ["litellm", "kvserve"])
def test_aider_works_for_three_turns(scripted: ScriptedServer, tmp_path: Path, front: str) -> None:
    """Each listed file is written, the model sees it and what was said in the next turn, and system and examples are
    computed once."""
    scripted.app.clear_cache()
    aider = set_up_aider(tmp_path, scripted.port_of(front))
    notes = aider.project / "notes.txt"
    notes.write_text(FIRST_NOTES, "utf-8")
    counters = scripted.counters()
    for turn in range(1, NUM_TURNS + 1):
        scripted.steps[:] = [Say(f"I add a line.\n\nnotes.txt\n```\n{notes_after(turn)}```\n")]
        scripted.is_for_all, num_before = True, len(scripted.turns())
        try:
            printed = aider.say(f"Do part {turn}.", *(["--restore-chat-history"] if turn > 1 else []), "notes.txt")
        finally:
            scripted.is_for_all = False
        assert scripted.steps == [], printed
        [request] = scripted.wait_for_turns(num_before, 1, lambda _: True)
        print(f"turn {turn}: {request.reuse:.1%} of {request.num_prompt_tokens:,}")
        assert notes.read_text("utf-8") == notes_after(turn), printed
        assert notes_after(turn - 1) in request.prompt
        assert all(f"Do part {number}." in request.prompt for number in range(1, turn + 1))
        assert turn == 1 or request.reuse > 0.4
    assert scripted.counters() == counters
