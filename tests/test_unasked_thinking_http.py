"""Who wants no thinking gets none, on models whose chat template has no switch: over HTTP, in every protocol."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvserve.engine import decode_group
from tests.anthropic_serving import MESSAGES_PATH, ask_both, events_of, messages_body
from tests.laws import sampled, sampled_cells
from tests.models import tiny_model
from tests.requests.test_serve import SCHEMA, TOOLS, fits, without_space
from tests.serving import SCRIPT_SEED, AppUnderTest, serving_app, writing
from tests.test_call_rows_http import prompts_of
from tests.test_promises_http import STRICT_TOOLS

RESPONSES_PATH = "/v1/responses"
NO_WORD: dict[str, Any] = {}
ASKED = {"type": "adaptive"}
ANSWER = "Hello."
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
SWITCH = "{%- if enable_thinking is defined and enable_thinking is false %}"
KINDS = {
    "gpt_oss": (
        "gpt_oss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    "opened": ("qwen3_5", "", "</think>", "\n\n"),
    "opens itself": ("qwen3", "<think>", "</think>", "\n\n"),
}
"""(family, what the model writes before its thinking, behind it, and before its answer); of the Qwens the template has
lost its switch, as R1 and MiniMax have none: it ends inside thinking always, or the model begins it."""


EVERY_RUN = ("gpt_oss", "opened")


@pytest.fixture(scope="module", params=sampled(KINDS, EVERY_RUN))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def without_switch(family: str, root: Path) -> Path:
    """The family's model with a template that thinks whatever it is told."""
    folder = Path(shutil.copytree(tiny_model(family), root / "model"))
    if family != "gpt_oss":
        file = folder / "chat_template.jinja"
        template = file.read_text()
        assert template.count(SWITCH) == 1
        file.write_text(template.replace(SWITCH, "{%- if false %}"))
    return folder


@pytest.fixture(scope="module")
def app(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    root = tmp_path_factory.mktemp("unasked")
    with serving_app(root, model_path=str(without_switch(KINDS[kind][0], root)), max_kv_size=768) as app:
        assert not app.served.template.accepts_thinking
        yield app


@contextlib.contextmanager
def thinking_first(app: AppUnderTest, kind: str, answer: str = ANSWER) -> Iterator[Mapping[str, Any]]:
    """The model wants to think and, once its thinking is closed, to answer, in requests that carry the yielded fields;
    whatever the request holds it to comes first."""
    _, opening, closing, between = KINDS[kind]
    encode, end = app.served.tokenizer.encode, min(app.served.tokenizer.stop_token_ids)
    closing_ids, said = list(encode(closing)), [*encode(between + answer), end]
    thought = [*encode(opening + "I think. " * 2), *closing_ids]
    real = decode_group.processors_for

    def wanted(written: list[int]) -> int:
        size = len(closing_ids)
        ends = (at + size for at in range(len(written)) if written[at : at + size] == closing_ids)
        start = next(ends, None)
        wishes, position = (thought, len(written)) if start is None else (said, len(written) - start)
        return wishes[min(position, len(wishes) - 1)]

    def processors_for(params: Any, num_prompt_tokens: int) -> list[Any]:
        def wish(tokens: mx.array, logits: mx.array) -> mx.array:
            token = wanted(tokens[num_prompt_tokens:].tolist())  # type: ignore[arg-type]
            return logits + 1000 * (mx.arange(logits.shape[-1]) == token)

        return [wish] if params.seed == SCRIPT_SEED else real(params, num_prompt_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_group, "processors_for", processors_for)
        yield {"seed": SCRIPT_SEED, "max_tokens": 120}


def num_written(app: AppUnderTest, kind: str) -> int:
    """The tokens of an answer whose thinking is closed where it begins; its stop token is one."""
    _, opening, closing, between = KINDS[kind]
    encode = app.served.tokenizer.encode
    return len(encode(opening)) + len(encode(closing)) + len(encode(between + ANSWER)) + 1


# --- no thinking ------------------------------------------------------------------------------------------------------


@sampled_cells(lambda kind: kind == "gpt_oss")
def test_a_quick_start_reads_the_text_of_its_first_block(app: AppUnderTest, kind: str) -> None:
    """Without `thinking`, and with it disabled; the model's first words are those behind its thinking."""
    with thinking_first(app, kind) as wish:
        for fields in (NO_WORD, {"thinking": {"type": "disabled"}}):
            message = ask_both(app, **fields, **wish)
            assert message["content"] == [{"type": "text", "text": ANSWER}]
            assert message["usage"]["output_tokens"] == num_written(app, kind)
            events = events_of(app.post(MESSAGES_PATH, messages_body(stream=True, **fields, **wish)))
            [start] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            assert start["type"] == "text"
        asked = ask_both(app, thinking=ASKED, **wish)
    assert [block["type"] for block in asked["content"]] == ["thinking", "text"], "the control: that is what it wants"


@sampled_cells(lambda kind, fields: kind == "opened" and "reasoning_effort" in fields)
@pytest.mark.parametrize("fields", [{"enable_thinking": False}, {"reasoning_effort": "none"}], ids=str)
def test_a_chat_that_switches_thinking_off_has_none(app: AppUnderTest, kind: str, fields: dict[str, Any]) -> None:
    """Streamed and not, and the usage says so: what opens and closes it are tokens of the answer, and no thought."""
    with thinking_first(app, kind) as wish:
        answer = app.both(**fields, **wish)
        asked = app.both(thinking="on", **wish)
    assert (answer.reasoning, answer.content) == ("", ANSWER)
    assert answer.usage is not None and asked.usage is not None
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert answer.num_completion_tokens == num_written(app, kind)
    assert asked.reasoning and asked.usage["completion_tokens_details"]["reasoning_tokens"] > 9


def test_a_response_without_effort_has_no_reasoning(app: AppUnderTest, kind: str) -> None:
    """No item of it either, streamed and not."""
    with thinking_first(app, kind) as wish:
        body = {**wish, "input": "Hello.", "temperature": 0, "repetition_penalty": 1, "reasoning": {"effort": "none"}}
        body["max_output_tokens"] = body.pop("max_tokens")
        whole: Any = app.post(RESPONSES_PATH, body).json
        streamed = app.post(RESPONSES_PATH, {**body, "stream": True}).body.decode()
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert whole["output"][0]["content"][0]["text"] == ANSWER
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    assert not [event["type"] for event in events if "reasoning" in event["type"]]
    [item] = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ANSWER


@sampled_cells(lambda kind: kind == "opened")
def test_a_promised_form_and_a_forced_call_come_without_thinking(app: AppUnderTest, kind: str) -> None:
    """What closes the thinking is let through, and the form follows; beside strict tools text does."""
    fields = {"enable_thinking": False, "parallel_tool_calls": False, **without_space(app)}
    with thinking_first(app, kind) as wish:
        formed = app.both(response_format=FORM, **fields, **wish)
        called = app.both(tools=TOOLS[:1], tool_choice="required", **fields, **wish)
        free = app.both(tools=STRICT_TOOLS, enable_thinking=False, **wish)
    assert formed.reasoning == called.reasoning == free.reasoning == ""
    assert free.content == ANSWER
    assert fits(json.loads(formed.content)) and formed.finish_reason == "stop"
    [(name, arguments)] = called.calls
    assert name == "get_weather" and fits(json.loads(arguments)) and called.finish_reason == "tool_calls"


# --- the next turn ----------------------------------------------------------------------------------------------------


def test_what_was_forced_is_replayed_as_it_was_written(app: AppUnderTest, kind: str) -> None:
    """The next prompt begins with all that was read and written, and as much of it is reused as where the model closed
    its thinking there itself: all, but that the state of sliding windows is one behind a stop token."""
    asked = [{"role": "user", "content": "One."}]
    _, opening, closing, between = KINDS[kind]
    encode, reused = app.served.tokenizer.encode, []
    scripts = (thinking_first(app, kind), writing(app, opening + closing + between + ANSWER))
    for script, session in zip(scripts, ("forced", "by itself"), strict=True):
        app.clear_cache()
        with script as wish, prompts_of(app) as prompts:
            headers = {"x-session-id": session}
            first: Any = app.post(MESSAGES_PATH, messages_body(asked, **{**wish, "max_tokens": 120}), headers).json
            history = [*asked, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Two."}]
            second: Any = app.post(MESSAGES_PATH, messages_body(history), headers).json
        written = (*prompts[0], *encode(opening), *encode(closing), *encode(between + ANSWER))
        assert prompts[1][: len(written)] == written, app.served.tokenizer.decode(prompts[1])
        reused.append(second["usage"]["cache_read_input_tokens"])
    assert reused[0] == reused[1] > len(prompts[0]) // 2
    assert kind == "gpt_oss" or reused[0] >= len(written) - 1


# --- what is left alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opened"], indirect=True)
def test_thinking_that_the_client_began_goes_on(app: AppUnderTest, kind: str) -> None:
    """Its own last message stands inside thinking: nothing else can be meant."""
    begun = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "<think>\nI see"}]
    with thinking_first(app, kind) as wish:
        answer = app.both(begun, enable_thinking=False, **wish)
    assert "I think." in answer.reasoning and answer.content == ANSWER
