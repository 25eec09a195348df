"""What the benchmarks of real vocabularies measure, on vocabularies that are always here, and that each can fail."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.client import BenchmarkError
from benchmarks.frozen import FrozenOracle
from benchmarks.model_free import ModelFree
from benchmarks.real_vocabularies import play, table
from benchmarks.recordings import Conversation, Reply, Request
from benchmarks.splitting import Spoken, answers
from benchmarks.template_folders import TEMPLATES, template_folder
from benchmarks.template_scripts import write_natively
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
