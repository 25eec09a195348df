"""A chat template that the operator gives (CHAT_TEMPLATE): whose prompts it writes, what is kept under it, and what is
refused."""

import threading
from pathlib import Path

import pytest

from benchmarks.template_cases import user
from benchmarks.template_matrix import row_of
from benchmarks.template_model import load_model
from benchmarks.template_reference import Conversation, Reference, Rendered
from benchmarks.template_render import written as written_by
from kvserve.errors import ModelLoadError, SettingError
from tests.models import tiny_model
from tests.serving import serving_app, unstarted_app

PLAIN = (
    "{%- for message in messages %}[here is what {{ message.role }} says]{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
SAME_WORDS = "{#- says what the other one says #}" + PLAIN
QUESTION = "What stands in the file that the operator gave? " * 16


def written(folder: Path, source: str, name: str = "given.jinja") -> Path:
    file = folder / name
    file.write_text(source, encoding="utf-8")
    return file


def test_a_given_template_writes_the_prompts_of_its_model_alone(tmp_path: Path) -> None:
    """The prompt is the file's, the banner and /health name it; a model beside it has its own. A prompt in the same
    words finds its KV under another template, whose records are not this one's."""
    given = written(tmp_path, "\ufeff" + PLAIN)
    models = tmp_path / "models"
    models.mkdir()
    (models / "other").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path, chat_template=given, model_folders=(str(models),)) as app:
        assert app.health()["chat_template"] == str(given) and any(str(given) in line for line in app.lines())
        said = app.chat(QUESTION, max_tokens=4)
        prompt = f"[here is what user says]{QUESTION}<|im_end|>\n[assistant]"
        assert said.usage is not None and said.usage["prompt_tokens"] == len(app.served.tokenizer.encode(prompt))
        other = app.app.resolve_model("other").tokenizer
        assert other.chat_template == (models / "other" / "chat_template.jinja").read_text()
        assert app.get("/v1/cache").json["num_messages"] > 0
    with serving_app(tmp_path, chat_template=written(tmp_path, SAME_WORDS)) as app:
        assert app.get("/v1/cache").json["num_messages"] == 0
        assert (app.chat(QUESTION, max_tokens=4).num_cached_tokens or 0) > 100


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{% for message in messages %}\n{{ message.content }}\n{% if true %}{% endfor %}", "line 3"),
        ("a\n{{ messages | kvserve }}", "line 2"),
    ],
    ids=["a block is left open", "no such filter"],
)
def test_a_file_that_is_no_template_is_refused_with_its_line(tmp_path: Path, source: str, fault: str) -> None:
    """Before the model is looked for, in one line that names the file."""
    file = written(tmp_path, source)
    with pytest.raises(SettingError) as refused, unstarted_app(tmp_path, chat_template=file):
        pass
    said = str(refused.value)
    assert said.startswith(f"CHAT_TEMPLATE={str(file)!r}") and fault in said and "\n" not in said


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only on\nSundays') }}", "only on Sundays"),
        ("Hello!", "leaves out"),
        ("", "leaves out"),
    ],
    ids=["raises", "no messages", "empty"],
)
def test_a_template_that_writes_no_users_message_is_refused(tmp_path: Path, source: str, reason: str) -> None:
    """A folder's own is done without, in plain text; whoever names a file wants it."""
    file = written(tmp_path, source)
    with unstarted_app(tmp_path, chat_template=file) as app, pytest.raises(ModelLoadError) as refused:
        app.app.start(threading.Event())
    said = str(refused.value)
    assert said.startswith(f"CHAT_TEMPLATE={str(file)!r}") and reason in said and "\n" not in said


def test_a_file_is_judged_with_a_folders_tokenizer(tmp_path: Path) -> None:
    """By `check_template.py --template`: the prompts are the file's, and so is what transformers makes of it."""
    folder = tiny_model("qwen3")
    model, reference = load_model(folder, PLAIN), Reference(folder, PLAIN)
    said = Conversation((user("How is it?"),))
    wanted = reference.rendered(said)
    assert isinstance(wanted, Rendered) and written_by(model, said) == (wanted.text, reference.ids(wanted.text))
    assert wanted.text == "[here is what user says]How is it?<|im_end|>\n[assistant]"
    broken = row_of("x", folder, ("load",), written(tmp_path, "{% if %}"))
    assert [cell.verdict for cell in broken.cells] == ["miss"] and "line 1" in broken.cells[0].reason
