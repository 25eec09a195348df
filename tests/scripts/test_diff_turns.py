"""The trace reader on traces that a real server wrote, and on files that are none."""

from pathlib import Path

from kvserve.observe.trace import format_line
from tests.scripts.conftest import run_script, start_script
from tests.serving import serving_app

SYSTEM = {"role": "system", "content": "Be brief.\nAnswer in English."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def write(file: Path, *prompts: str | None) -> Path:
    """A trace with these prompts, one per turn."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, prompt in enumerate(prompts):
        said = {} if prompt is None else {"prompt": prompt}
        fields = {"time": f"2026-11-21T10:00:{number:02}", "request_id": f"req{number}", **said}
        lines.append(format_line("turn", **fields, num_prompt_tokens=100, num_cached_tokens=80))
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return file


def test_the_first_difference_of_a_real_trace_is_shown(tmp_path: Path) -> None:
    """A turn that continues the one before is told from one whose old question was edited."""
    with serving_app(tmp_path) as app:
        turns = [
            [SYSTEM, user("Count the marbles.")],
            [SYSTEM, user("Count the marbles."), {"role": "assistant", "content": "Nine."}, user("Again.")],
            [SYSTEM, user("Count the pebbles."), {"role": "assistant", "content": "Nine."}, user("Again.")],
        ]
        for messages in turns:
            app.chat(messages, max_tokens=1, session_id="s1", enable_thinking=True)
    (day,) = app.log_root.iterdir()
    done = run_script("diff_turns.py", str(day))
    assert done.returncode == 0, done.stderr
    assert ": 3 turns" in done.stdout
    assert "Count the " in done.stdout
    after = done.stdout.index('after  "pebbles.')
    assert done.stdout.index('before "marbles.') < after
    canonical = run_script("diff_turns.py", str(day), "--field", "canonical_prompt")
    assert 'after  "pebbles.' in canonical.stdout


def test_a_text_that_continues_and_one_that_differs(tmp_path: Path) -> None:
    """Line and column count from 1; the share in common decides the exit code where it is asked for."""
    file = write(tmp_path / "cache-session-a.log", "one\ntwo\n", "one\ntwo\nthree\n", "one\ntwx\nthree\n")
    done = run_script("diff_turns.py", str(file), "--min-common", "50")
    assert done.returncode == 1
    assert "continues req0 (8 characters)" in done.stdout
    assert "differs from req1 at line 2, column 3 (character 6, 42.9% of it)" in done.stdout
    assert "FAIL  req2" in done.stdout
    assert run_script("diff_turns.py", str(file), "--min-common", "40").returncode == 0


def test_interleaved_agents_are_compared_with_their_own(tmp_path: Path) -> None:
    """`--against nearest` finds the turn that a sub-agent's turns stand in front of."""
    file = write(tmp_path / "cache-session-a.log", "parent 1", "child 1", "parent 1 and 2", "child 1 and 2")
    done = start_script("diff_turns.py", str(file), "--against", "nearest")
    assert "continues req0 (8 characters)" in done.stdout
    assert "continues req1 (7 characters)" in done.stdout


def test_older_files_of_a_session_come_first(tmp_path: Path) -> None:
    """A rotated trace is one session, in the order of time."""
    write(tmp_path / "cache-session-a.1.log", "one")
    lines = write(tmp_path / "new.log", "one", "one two").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "cache-session-a.log").write_text(lines[1], "utf-8")
    done = run_script("diff_turns.py", str(tmp_path))
    assert done.stdout.count("===") == 1
    assert "continues req0" in done.stdout


def test_a_cut_line_and_a_prompt_that_was_too_long_are_said(tmp_path: Path) -> None:
    """Neither ends the script."""
    file = write(tmp_path / "cache-session-a.log", "one", None)
    file.write_text(file.read_text("utf-8") + 'turn time="2026', "utf-8")
    done = run_script("diff_turns.py", str(file))
    assert done.returncode == 0
    assert "too long for the trace" in done.stdout
    assert "cache-session-a.log:3: not a whole event" in done.stderr


def test_no_trace_is_exit_code_2(tmp_path: Path) -> None:
    """An empty folder and a missing file are named."""
    for path in (tmp_path, tmp_path / "missing.log"):
        done = run_script("diff_turns.py", str(path))
        assert done.returncode == 2
        assert str(path) in done.stderr
