"""A turn from its HTTP body to its answer, on real models: channels, calls, promised forms, limits, counts.

Every question is asked twice, streamed and not: `both` shows that the answers are the same.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.core import Message, TextBlock
from tests.anthropic_serving import ask, num_prompt_tokens
from tests.engine.engines import FAMILIES
from tests.laws import IS_FULL, num_examples, sampled, sampled_cells
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    chat_body,
    chunks_of,
    serving_app,
    split_usage,
    whole,
    writing,
)

CONTEXT = 768
OPENED = ("qwen3_5", "glm4_moe_lite")
"""Families whose prompt ends inside thinking."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"city": "Oslo", "days": 3}

_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
_HARMONY = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}'
_ASSISTANT = "<|start|>assistant"
CALLS = {"qwen3": _HERMES, "qwen3_5": _CODER, "glm4_moe_lite": _GLM, "gpt_oss": _HARMONY}


def _written(family: str, thought: str, said: str, *calls: str) -> str:
    """What a model of the family writes for this thinking, text and calls; the prompt has opened what it opens."""
    if family == "gpt_oss":
        messages = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
        messages += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{said}"] if said else []
        return f"<|end|>{_ASSISTANT}".join([*messages, *calls])
    opening = "" if family in OPENED or not thought else "<think>\n"
    closing = f"{thought}\n</think>\n\n" if thought else ""
    return opening + closing + "\n".join([*([said] if said else []), *calls])


@pytest.fixture(scope="module", params=CALLS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def app(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp(family), family, max_kv_size=CONTEXT) as app:
        yield app


STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
NUM_FREE_TOKENS = 32 if IS_FULL else 16

thinking = pytest.mark.parametrize("thinking", ["on", "off"])
whatever_form = pytest.mark.parametrize("family", sampled(CALLS, ("qwen3",)), indirect=True)
"""For what does not depend on how a family marks its thinking and its calls."""

whatever_call = sampled_cells(
    lambda family, thinking: family == "qwen3" or (thinking == "on" and family != "glm4_moe_lite")
)
"""For what does not depend on the form of its calls: glm4_moe_lite thinks as qwen3_5 does, and without thinking all
write text and nothing else."""


def without_space(app: AppUnderTest) -> dict[str, Any]:
    """Fields that keep a random model from filling JSON with white space, as far as the form allows that."""
    decode = app.served.tokenizer.decode
    space = [token for token in range(app.served.vocab_size) if decode([token]) and not decode([token]).strip()]
    return {"logit_bias": {str(token): -100 for token in space}}


def fits(value: object) -> bool:
    """Whether a value obeys SCHEMA."""
    assert isinstance(value, dict)
    days = value["days"]
    return set(value) == {"city", "days"} and value["city"] in ("Oslo", "Rome") and type(days) is int and 1 <= days <= 9


# --- channels and calls -----------------------------------------------------------------------------------------------


@thinking
@sampled_cells(lambda family, thinking: thinking == "on" and family in ("qwen3", "gpt_oss"))
def test_what_the_model_thinks_says_and_calls_reaches_its_channel(
    app: AppUnderTest, family: str, thinking: str
) -> None:
    """Thinking, text and a call in the family's own form; nothing of the markup is left, and all tokens count."""
    thought = "I have to look. Two cities?" if thinking == "on" else ""
    said = "Let me see." if family == "gpt_oss" else "Let me see.\n"  # what follows a text may be sent before its tag
    text = _written(family, thought, "Let me see.", CALLS[family])
    with writing(app, text) as fields:
        answer = app.both(tools=TOOLS, thinking=thinking, max_tokens=400, **fields)
    assert (answer.reasoning, answer.content, answer.finish_reason) == (thought, said, "tool_calls")
    [(name, arguments)] = answer.calls
    assert (name, json.loads(arguments)) == ("get_weather", ARGUMENTS)
    num_tokens = len(app.served.tokenizer.encode(text)) + 1
    num_thought = len(app.served.tokenizer.encode(thought))
    assert answer.usage is not None
    assert answer.num_completion_tokens == num_tokens
    assert num_thought <= answer.usage["completion_tokens_details"]["reasoning_tokens"] <= num_thought + 8


@whatever_form
def test_two_calls_in_one_turn_are_two_calls(app: AppUnderTest, family: str) -> None:
    """Both arrive, in order, with ids of their own."""
    if family == "gpt_oss":
        pytest.skip("one call per turn: a call ends it")
    text = _written(family, "", "", CALLS[family], CALLS[family])
    with writing(app, text) as fields:
        message = app.post(CHAT_PATH, chat_body(tools=TOOLS, thinking="off", max_tokens=400, **fields)).json
        answer = whole(message)
        assert app.chat(tools=TOOLS, thinking="off", max_tokens=400, **STREAMED, **fields) == answer
    assert [name for name, _ in answer.calls] == ["get_weather", "get_weather"]
    assert answer.content == "" and answer.finish_reason == "tool_calls"
    [choice] = message["choices"]  # type: ignore[misc]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2  # type: ignore[index]
    assert choice["message"]["content"] is None  # type: ignore[index]


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none"])
@sampled_cells(lambda family, tools: family == ("gpt_oss" if tools else "qwen3_5"))
def test_a_call_that_nobody_allowed_is_content(app: AppUnderTest, family: str, tools: Mapping[str, Any]) -> None:
    """Without tools, or with tool_choice none, what looks like a call is text, and none of it is lost."""
    text = _written(family, "", "", CALLS[family])
    with writing(app, text) as fields:
        answer = app.both(thinking="off", max_tokens=400, **tools, **fields)
    assert answer.calls == () and answer.finish_reason == "stop"
    assert "get_weather" in answer.content and "Oslo" in answer.content


@sampled_cells(lambda family: family == "qwen3")
def test_a_call_cut_by_the_limit_says_what_there_is(app: AppUnderTest, family: str) -> None:
    """Half a call has half its arguments and ends with `length`, what was cut before them is text, and the request line
    says whose limit it was."""
    text = _written(family, "", "", CALLS[family])
    limit = len(app.served.tokenizer.encode(text)) - 3
    with writing(app, text) as fields:
        body = app.post(CHAT_PATH, chat_body(tools=TOOLS, thinking="off", max_tokens=limit, **fields)).json
        answer = whole(body)
        assert app.chat(tools=TOOLS, thinking="off", max_tokens=limit, **STREAMED, **fields) == answer
        begun = app.both(tools=TOOLS, thinking="off", max_tokens=3, **fields)
    [(name, arguments)] = answer.calls
    assert name == "get_weather" and arguments.startswith('{"city": "Oslo"') and not arguments.endswith("}")
    assert (answer.content, answer.finish_reason, answer.num_completion_tokens) == ("", "length", limit)
    assert begun.calls == () and begun.content and text.startswith(begun.content)
    assert "length (max_tokens)" in app.line_of(str(body["id"]))


# --- stop strings -----------------------------------------------------------------------------------------------------


@sampled_cells(lambda family, **_: family == "qwen3")
@thinking
@whatever_call
def test_a_stop_string_cuts_the_content_exactly(app: AppUnderTest, family: str, thinking: str) -> None:
    """The text ends before it wherever the tokens' borders are; in thinking it means nothing."""
    thought = "Where, two." if thinking == "on" else ""
    text = _written(family, thought, "We count: one, two, three.")
    for stop, left in {"e, tw": "We count: on", "W": "", ".": "We count: one, two, three"}.items():
        with writing(app, text) as fields:
            answer = app.both(thinking=thinking, stop=["unseen", stop], max_tokens=200, **fields)
        assert (answer.reasoning, answer.content, answer.finish_reason) == (thought, left, "stop"), stop
        assert answer.num_completion_tokens <= len(app.served.tokenizer.encode(text))


@whatever_form
def test_a_stop_string_in_free_text_cuts_at_its_first_occurrence(app: AppUnderTest) -> None:
    """Whatever the model says: with a piece of it as stop string the same text comes up to that piece."""
    free = app.both(thinking="off", max_tokens=NUM_FREE_TOKENS)
    assert free.finish_reason == "length"
    for start in (0, len(free.content) // 2, len(free.content) - 6):
        stop = free.content[start : start + 5]
        answer = app.both(thinking="off", max_tokens=NUM_FREE_TOKENS, stop=stop)
        assert answer.content == free.content[: free.content.index(stop)]
        assert answer.finish_reason == "stop" and answer.num_completion_tokens <= free.num_completion_tokens


@whatever_form
def test_the_beginning_of_a_stop_string_is_not_lost(app: AppUnderTest, family: str) -> None:
    """What was held back because it might have become one comes at the end."""
    with writing(app, _written(family, "", "One, two, thr")) as fields:
        answer = app.both(thinking="off", stop=["three"], **fields)
    assert (answer.content, answer.finish_reason) == ("One, two, thr", "stop")


# --- promised forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "thinking"), [("required", "off"), ("function", "on")])
@sampled_cells(lambda family, choice, **_: (family, choice) in (("qwen3", "required"), ("qwen3_5", "function")))
def test_a_forced_call_comes_in_the_form_of_the_family(app: AppUnderTest, thinking: str, choice: str) -> None:
    """A model that would never call does; its arguments obey the schema, and thinking leaves them room."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    tools, wanted = (TOOLS[:1], "required") if choice == "required" else (TOOLS, named)
    fields = {"parallel_tool_calls": False, "thinking": thinking, "max_tokens": 140, **without_space(app)}
    answer = app.both(tools=tools, tool_choice=wanted, **fields)
    assert answer.content == "" and answer.finish_reason == "tool_calls"
    [(name, arguments)] = answer.calls
    assert name == "get_weather" and fits(json.loads(arguments))
    assert thinking == "on" or answer.reasoning == ""


@sampled_cells(lambda family, **_: family != "qwen3_5")
@thinking
@whatever_call
def test_json_of_a_schema_parses_and_obeys(app: AppUnderTest, family: str, thinking: str) -> None:
    """The content is the JSON and nothing else; thinking that finds no end is ended at half of the limit."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = app.both(response_format=form, thinking=thinking, max_tokens=80, **without_space(app))
    assert fits(json.loads(answer.content)) and answer.finish_reason == "stop" and answer.calls == ()
    assert answer.usage is not None
    num_thought = answer.usage["completion_tokens_details"]["reasoning_tokens"]
    if thinking == "off":
        assert answer.reasoning == "" and num_thought == 0
    elif family in OPENED:
        assert answer.reasoning and num_thought == 40
    else:
        assert num_thought <= 40


@sampled_cells(lambda family, thinking: family == "qwen3_5" or (family, thinking) == ("qwen3", "off"))
@thinking
@whatever_call
def test_a_json_object_parses(app: AppUnderTest, thinking: str) -> None:
    """Any object will do; the bias only makes a random model come to an end."""
    tokenizer = app.served.tokenizer
    bias = {str(tokenizer.token_id(char)): weight for char, weight in (('"', 40), ("}", 30))}  # strings end first
    answer = app.both(response_format={"type": "json_object"}, thinking=thinking, max_tokens=80, logit_bias=bias)
    assert isinstance(json.loads(answer.content), dict) and answer.finish_reason == "stop"


@whatever_form
def test_a_form_that_does_not_fit_is_cut_with_length(app: AppUnderTest) -> None:
    """A limit that no JSON fits into gives what was written, and says so."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = app.both(response_format=form, thinking="off", max_tokens=4)
    assert answer.finish_reason == "length" and answer.num_completion_tokens == 4


@pytest.mark.parametrize("schema", [{"const": "<think>"}, {"$ref": "#"}], ids=["tag", "endless"])
@sampled_cells(lambda family, schema: family == "qwen3_5")
def test_a_form_that_the_grammar_cannot_keep_is_never_passed_off_as_kept(
    app: AppUnderTest, schema: Mapping[str, Any]
) -> None:
    """Where the grammar breaks down the request fails: `stop` promises that the content is whole and valid JSON."""
    form = {"type": "json_schema", "json_schema": {"name": "hard", "schema": schema}}
    for stream in (False, True):
        response = app.post(CHAT_PATH, chat_body(response_format=form, thinking="off", max_tokens=40, stream=stream))
        if response.status == 200 and not stream:
            [choice] = response.json["choices"]  # type: ignore[misc]
            assert choice["finish_reason"] != "stop" or json.loads(choice["message"]["content"])  # type: ignore[index]


# --- limits and counts ------------------------------------------------------------------------------------------------


@thinking
@whatever_call
def test_counts_add_up(app: AppUnderTest, thinking: str) -> None:
    """Prompt tokens are those of the rendered prompt, completion tokens what was drawn; the total is their sum."""
    said = "How warm is it in Oslo?"
    answer = app.both(said, thinking=thinking, max_tokens=17)
    message = Message("user", (TextBlock(said),))
    prompt = app.served.template.render((message,), thinking=thinking == "on", preserve_thinking=True)
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == len(prompt.ids)
    assert answer.num_completion_tokens == 17 and answer.finish_reason == "length"
    assert answer.usage["total_tokens"] == len(prompt.ids) + 17
    assert answer.num_cached_tokens is not None and 0 <= answer.num_cached_tokens < len(prompt.ids)


@whatever_form
def test_the_request_line_counts_as_the_usage_does(app: AppUnderTest, family: str) -> None:
    """The stop token is a token in both."""
    with writing(app, _written(family, "", "All is well.")) as fields:
        body = app.post(CHAT_PATH, chat_body(thinking="off", **fields)).json
    usage: Any = body["usage"]
    line = app.line_of(str(body["id"]))
    assert f" {usage['prompt_tokens']} in" in line
    assert f" {usage['completion_tokens']} out, " in line
    assert line.endswith("stop")


@whatever_form
def test_a_limit_beyond_the_context_is_clamped(app: AppUnderTest) -> None:
    """Prompt and answer together fill the context exactly, and the request line says whose limit that was."""
    prompt = [300 + number % 500 for number in range(CONTEXT - 30)]
    for limit in (100_000, -1):
        body = {"prompt": prompt, "max_tokens": limit, "temperature": 0}
        answer: Any = app.post(COMPLETION_PATH, body).json
        assert answer["usage"]["completion_tokens"] == 30
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "length (context limit)" in app.line_of(answer["id"])


@whatever_form
def test_the_context_limit_is_told_from_a_limit_of_the_request(app: AppUnderTest, family: str) -> None:
    """In Anthropic's form, where a client compacts on the one and asks for more on the other; OpenAI's has `length`."""
    with writing(app, "word " * 100, ends=False) as fields:
        said = "and so on " * (200 if family == "gpt_oss" else 230)  # its template says more of itself
        for limit, reason in ((5, "max_tokens"), (100_000, "model_context_window_exceeded")):
            message = ask(app, said, max_tokens=limit, **fields)
            assert message["stop_reason"] == reason
        assert num_prompt_tokens(message) + message["usage"]["output_tokens"] == CONTEXT
        assert (
            app.post(CHAT_PATH, chat_body(said, max_tokens=100_000, **fields)).json["choices"][0]["finish_reason"]
            == "length"
        )


@whatever_form
def test_what_is_written_to_the_cache_is_told(app: AppUnderTest) -> None:
    """All of the prompt that was not cached, unless nothing is to be kept."""
    for fields, is_kept in (({}, True), ({"ttl": 0}, False)):
        usage: Any = app.post(CHAT_PATH, chat_body("Something new, said at length.", **fields)).json["usage"]
        details = usage["prompt_tokens_details"]
        assert details["cache_write_tokens"] == (usage["prompt_tokens"] - details["cached_tokens"] if is_kept else 0)


@pytest.mark.parametrize("prompt", ["Once upon a time there was", [301, 302, 303, 304]])
@whatever_form
def test_a_completion_is_all_text(app: AppUnderTest, prompt: object) -> None:
    """The prompt goes in as it is, tags come out as text, streamed as whole; a stop string ends it."""
    text = "<think>Two</think> and three, and that is all."
    with writing(app, text) as fields:
        for stop, wanted in ((None, text), (["three"], "<think>Two</think> and ")):
            body = {"prompt": prompt, "max_tokens": 60, "stop": stop, **fields}
            answer: Any = app.post(COMPLETION_PATH, body).json
            chunks = chunks_of(
                app.post(COMPLETION_PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
            )
            pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
            assert answer["choices"][0]["text"] == "".join(pieces) == wanted
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert split_usage(chunks[-1]["usage"])[0] == split_usage(answer["usage"])[0]
    encode = app.served.tokenizer.encode
    num_tokens = len(encode(prompt, add_special_tokens=True)) if isinstance(prompt, str) else 4
    assert answer["usage"]["prompt_tokens"] == num_tokens


@thinking
@whatever_call
def test_an_assistant_message_at_the_end_is_continued(app: AppUnderTest, thinking: str) -> None:
    """The model goes on where the message stops: the answer is what a raw continuation of that prompt is."""
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    answer = app.both(messages, thinking=thinking, max_tokens=12)
    said = (Message("user", (TextBlock("Count."),)), Message("assistant", (TextBlock("One, two,"),)))
    prompt = app.served.template.render(said, thinking=thinking == "on", preserve_thinking=True)
    assert prompt.text.endswith("One, two,") and not prompt.opens_reasoning
    raw: Any = app.post(
        COMPLETION_PATH,
        {"prompt": list(prompt.ids.ids), "max_tokens": 12, "temperature": 0, "repetition_penalty": 1},
    ).json
    assert answer.reasoning == "" and answer.content == raw["choices"][0]["text"]


# --- messages as agents send them -------------------------------------------------------------------------------------

_texts = st.sampled_from(["", "Hello.", "What is it?", "<think>x</think>y", "</tool_call>", "日本 ✓", "\n"])
_contents = st.one_of(_texts, st.none(), st.lists(_texts.map(lambda text: {"type": "text", "text": text}), max_size=2))
_calls = st.lists(
    st.builds(
        lambda number, arguments: {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": arguments},
        },
        st.integers(0, 3),
        st.sampled_from(['{"city": "Oslo", "days": 3}', "{}", "", "not json", '["a"]', '{"city": null}']),
    ),
    max_size=2,
)
_messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user", "user"]), "content": _contents}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": _contents},
        optional={"reasoning_content": _texts, "tool_calls": _calls},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": _contents},
        optional={"tool_call_id": st.integers(0, 3).map(lambda number: f"call_{number}")},
    ),
)


@sampled_cells(lambda any_family, **_: any_family == "gpt_oss")
@pytest.mark.parametrize("any_family", sampled(FAMILIES, ("qwen3_5", "gemma3", "gpt_oss")))
def test_whatever_shape_a_conversation_has_it_is_answered(
    any_family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Roles in any order, empty and missing parts, calls without results and results without calls: all are served."""
    with serving_app(tmp_path_factory.mktemp(any_family), any_family) as app, app.connect() as client:

        @settings(max_examples=num_examples(6), suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(_messages, min_size=1, max_size=5), st.booleans(), st.sampled_from(["on", "off", "low"]))
        def ask(messages: list[Any], with_tools: bool, thinking: str) -> None:
            tools = {"tools": TOOLS[:1]} if with_tools else {}
            body = chat_body(messages, max_tokens=1, thinking=thinking, **tools)
            response = client.request("POST", CHAT_PATH, body)
            assert response.status == 200, (messages, response.body)

        ask()
        assert not [line for line in app.lines() if "error" in line]
