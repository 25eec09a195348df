"""What the benchmarks of real vocabularies measure, on vocabularies that are always here, and that each can fail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vocabulary_loops
from benchmarks.client import BenchmarkError
from benchmarks.frozen import FrozenOracle
from benchmarks.model_free import ModelFree
from benchmarks.own_turn import Loop
from benchmarks.real_vocabularies import play, table
from benchmarks.recordings import MESSAGES, Conversation, Reply, Request
from benchmarks.splitting import Spoken, answers
from benchmarks.template_folders import TEMPLATES, WHOLE_VOCABULARIES, template_folder
from benchmarks.template_scripts import NativeScripts, write_natively
from tests.models import tiny_model

CALL = ("read_file", '{"path": "a  b.py", "lines": 3}')


@pytest.fixture(scope="module")
def model() -> ModelFree:
    return ModelFree(tiny_model("qwen3"), is_cuttable=True)


@pytest.mark.parametrize("kind", answers(100))
def test_an_answer_that_is_read_otherwise_is_no_figure(model: ModelFree, kind: str) -> None:
    """All of it must be read, thinking, text and calls."""
    spoken = Spoken.of(model, answers(3_000)[kind])
    spoken.check()
    assert spoken.seconds_per_token() > 0
    other = replace(spoken.said, content="No.", calls=(("write_file", '{"path": "b.py"}'),))
    with pytest.raises(BenchmarkError, match="another answer was read"):
        replace(spoken, said=other).check()


def test_a_session_that_is_not_found_again_is_seen(model: ModelFree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse is what prompts have in common with what was computed before, and less where KV is forgotten."""
    reply = Reply("", "It is so, and it stays so for as long as anybody looks.")
    said = {"role": "assistant", "content": reply.content}
    messages = [{"role": "system", "content": "You help. " * 30}, {"role": "user", "content": "Look."}]
    later = [*messages, said, {"role": "user", "content": "And now?"}]
    talk = Conversation("c", "n", tuple(Request({"messages": some}, reply) for some in (messages, later)))
    oracle = FrozenOracle("qwen3", tiny_model("qwen3"))
    row = play(talk, "qwen3", model, oracle)
    assert row.common > 0.5 and row.oracle is not None and row.lead >= -0.01
    assert "| n | 1 |" in list(table([row]))[2]
    serve = model.serve

    def forgetful(request: Request, number: int) -> object:
        model.engine.forget()
        return serve(request, number)

    monkeypatch.setattr(model, "serve", forgetful)
    forgotten = play(talk, "qwen3", model, oracle)
    assert forgotten.reuse == 0.0 and forgotten.lead < -0.5


@pytest.mark.skipif(not TEMPLATES, reason="the real templates (shared/templates) are not here")
def test_a_model_says_what_its_template_can_write(tmp_path: Path) -> None:
    """Llama's template writes one call alone, and no thinking; a folder without weights is enough to know that."""
    folder = template_folder("llama3_1", tmp_path)
    model = ModelFree(folder, is_cuttable=True)
    scripts = write_natively(model, folder)
    assert scripts.sayable(Reply("Hm.", "I look.", (CALL, CALL))) == Reply(calls=(CALL,))
    script = scripts(model.served, (), Reply("Hm.", "I look.", (CALL, CALL)))
    text = model.served.tokenizer.decode(script.ids)
    assert text.startswith('{"name": "read_file", "parameters": {') and "a  b.py" in text
    assert script.ids != model.served.tokenizer.encode(text), "they are odd tokens"


def test_a_warm_turn_brings_an_answer_that_no_client_gave_back_before(model: ModelFree) -> None:
    """What is measured of it has an answer and a result that are new to the server, behind a history that stays."""
    loop = Loop(60_000)
    for number, request in zip(range(3), loop.requests(), strict=False):
        model.serve(request, number)
    before, request = loop.turn(9)
    history = loop.body()["messages"]
    assert request.body["messages"][: len(before.body["messages"])] == before.body["messages"]
    assert before.reply is not None and before.reply.content not in str(before.body)
    [echoed, result] = request.body["messages"][len(history) :]
    assert echoed["content"] == before.reply.content and result["tool_call_id"] == echoed["tool_calls"][0]["id"]
    model.serve(before, 3)
    told = model.end(model.start(json.dumps(request.body).encode(), request, 4))
    assert told.num_replayed_turns == sum(message["role"] == "assistant" for message in request.body["messages"])
    assert loop.body()["messages"] == history and loop.turn(8)[0].body != before.body


# --- in closed loop over HTTP ----------------------------------------------------------------------------------------

SMALL = "pi-0.87-anthropic"


def loop(name: str, num_requests: int, **control: Any) -> vocabulary_loops.Row:
    """The beginning of the smallest session on a real vocabulary."""
    talks = vocabulary_loops.sessions((SMALL,))
    if not talks:
        pytest.skip("the recordings and tokenizers (shared) are not here")
    talk = replace(talks[0], requests=talks[0].requests[:num_requests])
    with vocabulary_loops.served(name) as (server, writer, oracle):
        if control.get("forgets"):
            control = {"between": lambda number: server.forget() if number == 2 else None}
        asked = vocabulary_loops.play(talk, server, writer, oracle, **control)
    row = vocabulary_loops.row_of(talk, name, asked)
    print("\n".join((*vocabulary_loops.requests(row, asked), *vocabulary_loops.table([row]))))
    return row


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE_VOCABULARIES)
def test_a_recorded_session_is_found_again_on_a_real_vocabulary(name: str) -> None:
    """Four requests over HTTP, of which the last begins another answer: all that prompts have in common with what was
    read and written before is found, and the client hears each letter."""
    row = loop(name, 4)
    assert row.misses == () and row.common > 0.8 and row.num_answers == row.num_exact_answers == 4


@pytest.mark.long
def test_a_server_that_forgets_is_below_what_was_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of both bounds: KV that is forgotten, and an answer that is written otherwise."""
    name = next(iter(WHOLE_VOCABULARIES))
    assert loop(name, 4, forgets=True).misses == ("reuse",)
    native = NativeScripts._text
    monkeypatch.setattr(
        NativeScripts, "_text", lambda *given, **more: str(native(*given, **more)).replace("look", "lurk")
    )
    assert "letters" in loop(name, 2).misses


class Fluent:
    """Scripts of a template that can write everything but a second call."""

    def sayable(self, reply: Reply) -> Reply:
        return replace(reply, calls=reply.calls[:1])


@pytest.mark.parametrize(
    ("heard", "is_exact"),
    [
        (Reply("Hm.", "I look.", (CALL,)), True),
        (Reply(" Hm.\n", "I look.", (("read_file", '{"lines":3,"path":"a  b.py"}'),)), True),
        (Reply("Hm.", "I look.", (("read_file", '{"path": "a b.py", "lines": 3}'),)), False),
        (Reply("Hm.", "I  look.", (CALL,)), False),
        (Reply("", "I look.", (CALL,)), False),
        (Reply("Hm.", "I look.", (CALL, CALL)), False),
    ],
)
def test_the_letters_are_those_that_could_be_written(heard: Reply, is_exact: bool) -> None:
    """All of them but for white space around thinking and words; values of calls to the letter."""
    request = Request({"messages": []}, Reply("Hm.\n", "\nI look.", (CALL, CALL)), path=MESSAGES)
    scripts: Any = Fluent()
    assert vocabulary_loops.is_to_the_letter(request, heard, request.reply, scripts) is is_exact
    hidden = replace(request, body={"messages": [], "thinking": {"type": "adaptive", "display": "omitted"}})
    thoughtless = vocabulary_loops.is_to_the_letter(hidden, replace(heard, reasoning=""), request.reply, scripts)
    assert thoughtless is (is_exact or heard == Reply("", "I look.", (CALL,)))
    left, kept = replace(request, reply=None), Reply("Hm.", "I lo")
    assert vocabulary_loops.is_to_the_letter(left, Reply("Hm.", "I lo And"), kept, scripts)
    assert not vocabulary_loops.is_to_the_letter(left, Reply("Hm.", "I la"), kept, scripts)


@pytest.mark.parametrize(
    ("num_cached", "oracle", "num_exact", "misses"),
    [(90, None, 4, ()), (90, 0.92, 4, ("reuse",)), (88, None, 4, ("reuse",)), (90, 0.9, 3, ("letters",))],
)
def test_both_bounds_of_a_loop_are_kept(
    num_cached: int, oracle: float | None, num_exact: int, misses: tuple[str, ...]
) -> None:
    """More than a hundredth below what was in common, or the oracle, is a miss; so is an answer heard otherwise."""
    row = vocabulary_loops.Row("c", "s", "v", 3, 100, num_cached, 90, oracle, 4, num_exact)
    assert row.misses == misses
    assert list(vocabulary_loops.table([row]))[2].endswith(f"MISSED ({', '.join(misses)}) |" if misses else "pass |")
