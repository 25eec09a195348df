"""A model whose template writes calls in a form that nobody knows, over HTTP: read, held, forced, and replayed."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.prompt.call_forms import SMALL
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, serving_app, whole
from tests.test_pipeline import TOOLS, fits
from tests.test_promises_http import STRICT_TOOLS, wishing

NAMED = {"x-session-id": "rows"}
END = "<|eot_id|>"
BAD = '<|calls|><|call|>functions.get_weather:0<|args|>{"city": "Paris", "days": 3}<|call_end|><|calls_end|>'


@contextlib.contextmanager
def serving(root: Path, template: str) -> Iterator[AppUnderTest]:
    folder = Path(shutil.copytree(tiny_model("llama"), root / "model"))
    (folder / "chat_template.jinja").write_text(template)
    with serving_app(root, model_path=str(folder), max_kv_size=1024) as app:
        yield app


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving(tmp_path_factory.mktemp("rows"), SMALL["tags"].replace("<|end|>", END)) as app:
        yield app


def notes_of(app: AppUnderTest, **fields: object) -> str:
    """What the request line says beside its numbers of a request with these fields."""
    response = app.post(CHAT_PATH, chat_body("Hi.", max_tokens=2, **fields))
    assert response.status == 200, response.body
    return app.line_of(str(response.json["id"]))


def test_a_strict_tool_is_held_in_a_form_that_nobody_knows(app: AppUnderTest) -> None:
    """The call obeys the schema, though the model wants another; what it says before is its own."""
    fields = {"max_tokens": 200, "parallel_tool_calls": False}
    with wishing(app, f"Look:\n{BAD}") as wish:
        free = app.both(tools=TOOLS, **fields, **wish)
        held = app.both(tools=STRICT_TOOLS, **fields, **wish)
    assert free.calls == (("get_weather", '{"city": "Paris", "days": 3}'),), "the control: that is what the model wants"
    assert held.content == free.content
    [(name, arguments)] = held.calls
    assert name == "get_weather" and fits(json.loads(arguments)) and held.finish_reason == "tool_calls"


def test_a_forced_call_is_the_beginning_of_the_next_prompt(app: AppUnderTest) -> None:
    """It is written in the model's own form, so that its own tokens are read again: none of them is computed twice."""
    asked = {"role": "user", "content": "How is it in Oslo?"}
    with wishing(app, BAD.replace('": ', '":')) as wish:
        first = app.chat([asked], tools=TOOLS, tool_choice="required", max_tokens=200, headers=NAMED, **wish)
    [(name, arguments)] = first.calls
    assert first.usage is not None and first.finish_reason == "tool_calls"
    call = {"id": "call1", "type": "function", "function": {"name": name, "arguments": arguments}}
    history = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call1", "content": "Rain."},
    ]
    response = app.post(CHAT_PATH, chat_body(history, tools=TOOLS, max_tokens=1), NAMED)
    explained = app.get(f"/v1/cache/explain/{response.json['id']}").json
    assert explained["cause"] == "nothing lost", explained
    num_cached_tokens = whole(response.json).num_cached_tokens
    assert num_cached_tokens is not None
    assert num_cached_tokens >= first.usage["prompt_tokens"] + first.num_completion_tokens - 2


def test_what_is_not_held_in_the_models_own_form_is_said(app: AppUnderTest, tmp_path: Path) -> None:
    """The reason once when the model is described, and in the line of every request whose calls are promised."""
    pairs = "{{ c.name }}({% for key, value in c.arguments.items() %}{{ key }}={{ value }};{% endfor %})"
    template = SMALL["fences"].replace("<|end|>", END)
    start, end = template.index("{{ c.name }}"), template.index("</call>")
    promised: list[dict[str, object]] = [
        {"tools": STRICT_TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
    ]
    free: list[dict[str, object]] = [{}, {"tools": TOOLS}, {"tools": STRICT_TOOLS, "tool_choice": "none"}]
    reason = "its arguments are not one JSON object"
    with serving(tmp_path, template[:start] + pairs + template[end:]) as other:
        assert sum(reason in line for line in other.lines()) == 1, other.lines()
        assert all(reason in notes_of(other, **fields) for fields in promised)
        assert not any(reason in notes_of(other, **fields) for fields in free)
    assert not any("model's own" in notes_of(app, **fields) for fields in promised), "a form that is known"
    assert not any("chat template" in line for line in app.lines())
