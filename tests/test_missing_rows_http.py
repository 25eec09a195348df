"""A model with fewer rows than its tokenizer has tokens: what it is made to write, it has rows for."""

import json
import shutil
from collections.abc import Iterator

import mlx.core as mx
import pytest

from kvserve.prompt.tokenizer import load_tokenizer
from tests.models import tiny_model
from tests.serving import AppUnderTest, serving_app, writing

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"const": True}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """Its model was never enlarged for the tags of its template from the end of thinking on."""
    root = tmp_path_factory.mktemp("app")
    folder = shutil.copytree(tiny_model("qwen3"), root / "model")
    [num_rows] = load_tokenizer(folder).encode("</think>")
    config = json.loads((folder / "config.json").read_text())
    [weights] = folder.glob("*.safetensors")
    arrays = {
        name: array[:num_rows] if array.shape[0] == config["vocab_size"] else array
        for name, array in mx.load(str(weights)).items()
    }
    mx.save_safetensors(str(weights), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": num_rows}))
    with serving_app(root, model_path=str(folder)) as app:
        yield app


def test_its_thinking_ends_at_its_limit(app: AppUnderTest) -> None:
    """By the letters of the tag."""
    with writing(app, "<think>\n", ends=False) as fields:
        chat = app.chat("Hello.", reasoning={"max_tokens": 6}, max_tokens=40, **fields)
    assert chat.reasoning and chat.content and "</think>" not in chat.reasoning + chat.content


def test_a_promised_form_begins_behind_its_thinking(app: AppUnderTest) -> None:
    """It waits for the letters of the tag, as the token never comes."""
    with writing(app, "<think>\n", ends=False) as fields:
        chat = app.chat("Hello.", response_format=FORM, max_tokens=60, **fields)
    assert chat.reasoning and json.loads(chat.content) == {"ok": True}


def test_its_start_says_what_it_lacks(app: AppUnderTest) -> None:
    """The tags, and that a prompt with one is refused, as one without thinking is here."""
    assert "the model has no row for a token of </think>, <tool_call>" in app.screen.getvalue()
    told = app.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False})
    assert told.status == 400 and "'</think>', token" in told.error["message"]
