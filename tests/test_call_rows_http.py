"""A model whose template writes calls in a form that nobody knows, over HTTP: read, held, forced, and replayed."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvserve.core import JsonObject
from kvserve.engine import scheduler as scheduler_module
from tests.models import tiny_model
from tests.prompt.call_forms import SMALL
from tests.serving import CHAT_PATH, SCRIPT_SEED, AppUnderTest, chat_body, serving_app, whole
from tests.test_pipeline import TOOLS, fits
from tests.test_promises_http import STRICT_TOOLS, wishing

NAMED = {"x-session-id": "rows"}
END = "<|eot_id|>"
BAD = '<|calls|><|call|>functions.get_weather:0<|args|>{"city": "Paris", "days": 3}<|call_end|><|calls_end|>'


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    root = tmp_path_factory.mktemp("rows")
    folder = Path(shutil.copytree(tiny_model("llama"), root / "model"))
    (folder / "chat_template.jinja").write_text(SMALL["tags"].replace("<|end|>", END))
    with serving_app(root, model_path=str(folder), max_kv_size=1024) as app:
        yield app


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


CLOSING = "<|call_end|><|calls_end|>"


@contextmanager
def reading_along() -> Iterator[list[int]]:
    """The tokens that the model has read when it answers a request with SCRIPT_SEED."""
    read: list[int] = []
    real = scheduler_module.processors_for

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        read[:] = tokens.tolist()
        return logits

    def processors_for(params: Any, num_prompt_tokens: int) -> list[Any]:
        return [look] if params.seed == SCRIPT_SEED else real(params, num_prompt_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "processors_for", processors_for)
        yield read


def said(app: AppUnderTest, ids: list[int]) -> str:
    return app.served.tokenizer.decode(tuple(ids))


def answered(asked: JsonObject, name: str, arguments: str) -> list[JsonObject]:
    """The conversation after a call and its result."""
    call = {"id": "call1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call1", "content": "Rain."},
    ]


@pytest.mark.parametrize("forced", [False, True])
def test_the_one_call_that_is_allowed_is_closed_in_the_next_prompt(app: AppUnderTest, forced: bool) -> None:
    """The answer ends with its arguments. What the template writes behind them is read next, behind the very tokens
    that the model wrote, of which none is computed twice."""
    asked = {"role": "user", "content": f"How is it in Oslo, {forced}?"}
    named, fields = {"x-session-id": f"one call {forced}"}, {"tools": TOOLS, "max_tokens": 200}
    choice = {"tool_choice": "required"} if forced else {}
    with wishing(app, BAD.replace('": ', '":')) as wish:
        first = app.chat([asked], headers=named, parallel_tool_calls=False, **fields, **choice, **wish)
    [(name, arguments)] = first.calls
    assert first.usage is not None and first.finish_reason == "tool_calls"
    history = answered(asked, name, arguments)
    with reading_along() as read:
        response = app.post(CHAT_PATH, chat_body(history, tools=TOOLS, max_tokens=1, seed=SCRIPT_SEED), named)
    assert f"functions.{name}:0<|args|>{arguments}{CLOSING}{END}".replace(" ", "") in said(app, read).replace(" ", "")
    explained = app.get(f"/v1/cache/explain/{response.json['id']}").json
    assert explained["cause"] == "nothing lost", explained
    num_cached_tokens = whole(response.json).num_cached_tokens
    assert num_cached_tokens is not None
    assert num_cached_tokens >= first.usage["prompt_tokens"] + first.num_completion_tokens - 2


def test_a_forced_call_is_the_beginning_of_the_next_prompt(app: AppUnderTest) -> None:
    """It is written in the model's own form, so that its own tokens are read again: none of them is computed twice."""
    asked = {"role": "user", "content": "How is it in Oslo?"}
    with wishing(app, BAD.replace('": ', '":')) as wish:
        first = app.chat([asked], tools=TOOLS, tool_choice="required", max_tokens=200, headers=NAMED, **wish)
    [(name, arguments)] = first.calls
    assert first.usage is not None and first.finish_reason == "tool_calls"
    history = answered(asked, name, arguments)
    response = app.post(CHAT_PATH, chat_body(history, tools=TOOLS, max_tokens=1), NAMED)
    explained = app.get(f"/v1/cache/explain/{response.json['id']}").json
    assert explained["cause"] == "nothing lost", explained
    num_cached_tokens = whole(response.json).num_cached_tokens
    assert num_cached_tokens is not None
    assert num_cached_tokens >= first.usage["prompt_tokens"] + first.num_completion_tokens - 2
