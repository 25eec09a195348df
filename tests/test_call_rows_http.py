"""A model whose template writes calls in a form that nobody knows, over HTTP: read, held, forced, and replayed."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.template_folders import add_weights, template_folder
from kvserve.core import GenerationRequest, JsonObject, ToolCallBlock
from kvserve.engine import decode_group
from kvserve.engine.rows import RequestHandle
from kvserve.prompt.call_words import CallWords
from tests.models import tiny_model
from tests.prompt.call_forms import SMALL, source_of
from tests.prompt.vocabularies import SHARED
from tests.requests.test_serve import TOOLS, fits
from tests.serving import CHAT_PATH, SCRIPT_SEED, AppUnderTest, chat_body, serving_app, whole
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


@contextlib.contextmanager
def prompts_of(app: AppUnderTest) -> Iterator[list[tuple[int, ...]]]:
    """The ids of every prompt that the engine is given meanwhile."""
    engine, prompts = app.served.engine, list[tuple[int, ...]]()
    submit = engine.submit

    def seen(request: GenerationRequest) -> RequestHandle:
        prompts.append(request.prompt.ids)
        return submit(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", seen)
        yield prompts


def notes_of(app: AppUnderTest, **fields: object) -> str:
    """What the request line says beside its numbers of a request with these fields."""
    response = app.post(CHAT_PATH, chat_body("Hi.", max_tokens=2, **fields))
    assert response.status == 200, response.body
    return app.line_of(str(response.json["id"]))


def test_a_strict_tool_is_held_in_a_form_that_nobody_knows(app: AppUnderTest) -> None:
    """The call obeys the schema, though the model wants another; what it says before is its own."""
    fields = {"max_tokens": 200, "parallel_tool_calls": False}
    with wishing(app, f"Look:\n{BAD}") as wish:
        free = app.chat(tools=TOOLS, **fields, **wish)
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
    real = decode_group.processors_for

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        read[:] = tokens.tolist()
        return logits

    def processors_for(params: Any, num_prompt_tokens: int) -> list[Any]:
        return [look] if params.seed == SCRIPT_SEED else real(params, num_prompt_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_group, "processors_for", processors_for)
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


@pytest.mark.long
@pytest.mark.skipif(SHARED is None, reason="the templates in shared/ are not here")
@pytest.mark.parametrize("name", ["gemma4", "lfm2_5_8b"])
def test_a_forced_call_between_marks_is_the_beginning_of_the_next_prompt(name: str, tmp_path: Path) -> None:
    """The same of real templates whose strings stand between marks, with a text that holds some of what ends one."""
    city = "it's Oslo, 'x', a=1 {b: [1]}"
    parameters: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    with serving_app(tmp_path, model_path=str(add_weights(template_folder(name, tmp_path))), max_kv_size=4096) as app:
        assert not any("JSON form" in line for line in app.lines()), app.lines()
        row = app.served.output_format.row
        wanted = CallWords(row).calls([ToolCallBlock("", "get_weather", json.dumps({"city": city, "days": 2}))])
        asked = {"role": "user", "content": "How is it in Oslo?"}
        with wishing(app, wanted) as wish:
            first = app.chat([asked], tools=tools, tool_choice="required", max_tokens=200, headers=NAMED, **wish)
        [(called, arguments)] = first.calls
        assert called == "get_weather" and json.loads(arguments) == {"city": city, "days": 2}
        assert first.usage is not None and first.finish_reason == "tool_calls"
        response = app.post(CHAT_PATH, chat_body(answered(asked, called, arguments), tools=tools, max_tokens=1), NAMED)
        explained = app.get(f"/v1/cache/explain/{response.json['id']}").json
        assert explained["cause"] == "nothing lost", explained
        num_cached_tokens = whole(response.json).num_cached_tokens
        assert num_cached_tokens is not None
        assert num_cached_tokens >= first.usage["prompt_tokens"] + first.num_completion_tokens - 2


def test_a_template_whose_turns_are_not_found_is_said_with_the_reason(app: AppUnderTest, tmp_path: Path) -> None:
    """Once when the model is described; the other one's turns are found."""
    said = "answers do not keep their own tokens in the next prompt"
    roles = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with serving(tmp_path, roles) as other:
        assert [
            f"{said}: no token is known that begins a message" in line for line in other.lines() if said in line
        ] == [True]
    assert not any(said in line for line in app.lines())


def test_what_is_not_held_in_the_models_own_form_is_said(app: AppUnderTest, tmp_path: Path) -> None:
    """The reason once when the model is described, and in the line of every request whose calls are promised."""
    pairs = "{{ c.name }}({% for key, value in c.arguments.items() %}{{ key }}={{ value | trim }};{% endfor %})"
    template = SMALL["fences"].replace("<|end|>", END)
    start, end = template.index("{{ c.name }}"), template.index("</call>")
    promised: list[dict[str, object]] = [
        {"tools": STRICT_TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
    ]
    free: list[dict[str, object]] = [{}, {"tools": TOOLS}, {"tools": STRICT_TOOLS, "tool_choice": "none"}]
    reason = "it does not write every call as the row says"
    with serving(tmp_path, template[:start] + pairs + template[end:]) as other:
        assert sum(reason in line for line in other.lines()) == 1, other.lines()
        assert all(reason in notes_of(other, **fields) for fields in promised)
        assert not any(reason in notes_of(other, **fields) for fields in free)
    assert not any("model's own" in notes_of(app, **fields) for fields in promised), "a form that is known"
    assert not any("chat template" in line for line in app.lines())


# --- ids --------------------------------------------------------------------------------------------------------------


WRITTEN_ID, OTHER_ID = "abcdefghi", "AbCdEf123"
NEMO_CALLS = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}, "id": "%s"}, '
    '{"name": "get_time", "arguments": {}, "id": "%s"}]'
)


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    if SHARED is None:
        pytest.skip("the templates in shared/ are not here")
    with serving(tmp_path_factory.mktemp("nemo"), source_of("mistral_nemo").replace("eos_token", f"'{END}'")) as app:
        yield app


@pytest.mark.parametrize("headers", [NAMED, {}])
def test_results_name_the_ids_that_the_model_wrote(nemo: AppUnderTest, headers: dict[str, str]) -> None:
    """To the client each call has an id of the server's; the next prompt begins with all that the model wrote, and each
    result names the id of its call, in whichever order they come."""
    ids = (WRITTEN_ID, OTHER_ID)
    asked = {"role": "user", "content": f"How is it in Oslo? {headers}"}
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    with wishing(nemo, NEMO_CALLS % ids) as wish, prompts_of(nemo) as prompts:
        response = nemo.post(CHAT_PATH, chat_body([asked], **fields, **wish), headers)
        message = response.json["choices"][0]["message"]
        calls = message["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["get_weather", "get_time"]
        assert len({call["id"] for call in calls} - set(ids)) == 2, "an id that can be guessed shows nothing"
        said = {calls[0]["id"]: "Rain.", calls[1]["id"]: "Noon."}
        results = [{"role": "tool", "tool_call_id": each, "content": text} for each, text in said.items()]
        history = [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *reversed(results)]
        after = nemo.post(CHAT_PATH, chat_body(history, tools=TOOLS, max_tokens=1), headers)
    assert after.status == 200, after.body
    encode, decode = nemo.served.tokenizer.encode, nemo.served.tokenizer.decode
    written = prompts[0] + encode(NEMO_CALLS % ids)
    assert prompts[1][: len(written)] == written, decode(prompts[1])
    behind = decode(prompts[1][len(written) :])
    for text, written_id in zip(("Rain.", "Noon."), ids, strict=True):
        assert f'{{"content": {text}, "call_id": "{written_id}"}}' in behind
    cached = whole(after.json).num_cached_tokens
    assert cached is not None and cached >= len(written) - 1


def test_an_id_that_others_chose_names_no_call_of_the_models(nemo: AppUnderTest) -> None:
    """A client that sends the same call with an id of its own has that one rendered, or what stands for it: what the
    model wrote to somebody else stays with that one."""
    asked = {"role": "user", "content": "How is it in Rome?"}
    with wishing(nemo, NEMO_CALLS % (WRITTEN_ID, OTHER_ID)) as wish, prompts_of(nemo) as prompts:
        first = nemo.chat([asked], tools=TOOLS, tool_choice="required", max_tokens=300, **wish)
        named = zip(first.calls, (f"call{'0' * 24}", WRITTEN_ID.upper()), strict=True)
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for (name, arguments), call_id in named
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
        history = [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
        assert nemo.post(CHAT_PATH, chat_body(history, tools=TOOLS, max_tokens=1)).status == 200
    text = nemo.served.tokenizer.decode(prompts[1])
    assert WRITTEN_ID not in text and OTHER_ID not in text
    assert text.count(WRITTEN_ID.upper()) == 2, "nine letters and digits are written as they were sent"
