"""Sampling, limits and stops: ranges, defaults, and what is refused by name."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvserve.core import RequestDefaults, SamplingParams
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import ChatRequest
from kvserve.protocols.sampling_fields import NO_LIMIT

type Parse = Callable[..., ChatRequest]


def test_silence_gets_the_operators_settings(parse: Parse, defaults: RequestDefaults) -> None:
    """Missing and null fields leave the defaults, and no limit of tokens is invented."""
    turn = parse(temperature=None, seed=None, logit_bias=None, max_tokens=None, stop=None).turn
    assert turn.sampling == defaults.sampling
    assert (turn.max_tokens, turn.stop_strings) == (None, ())


def test_every_sampling_field_is_read(parse: Parse) -> None:
    """What a request says replaces the default of the same name."""
    turn = parse(
        temperature=0, top_p=1, top_k=5.0, min_p=0.2, repetition_penalty=1, repetition_context_size=64,
        presence_penalty=-2, frequency_penalty=2, seed=-(2**63), logit_bias={"50": -100, "7": 1.5},
    ).turn  # fmt: skip
    assert turn.sampling == SamplingParams(0.0, 1.0, 5, 0.2, 1.0, 64, -2.0, 2.0, -(2**63), ((7, 1.5), (50, -100.0)))


def test_minus_one_switches_top_k_off(parse: Parse) -> None:
    """Other local servers spell it so."""
    assert parse(top_k=-1).turn.sampling.top_k == 0


def test_a_seed_may_use_64_bits(parse: Parse) -> None:
    """Signed and unsigned 64-bit seeds are both in use."""
    assert parse(seed=2**64 - 1).turn.sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in ("1", True, -0.1, 2.01, 1e300, float("nan"), [], {})),
        *(("top_p", value) for value in ("x", -0.1, 1.1, True)),
        *(("top_k", value) for value in ("x", -2, 1.5, 2**40, True)),
        *(("min_p", value) for value in (-1, 2, "x")),
        *(("repetition_penalty", value) for value in (0, -1, 11, "x")),
        *(("repetition_context_size", value) for value in (0, -1, 1.5, "x")),
        *(("presence_penalty", value) for value in (-2.1, 2.1, "x")),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, "x")),
        *(("seed", value) for value in ("1", 1.5, 2**64, -(2**63) - 1, True)),
        *(("max_tokens", value) for value in (0, -2, "5", 1.5, True, 2**31, float("inf"))),
        *(("max_completion_tokens", value) for value in (0, -2, "5")),
        *(("stop", value) for value in (5, {}, ["a"] * 17, ["x" * 513])),
        *(
            ("prediction", value)
            for value in (5, "x", {}, {"type": "content"}, {"type": "x", "content": "a"}, {"content": "a"})
        ),
        *(("speculation", value) for value in ("off", 0, 8)),
        *(("stream", value) for value in ("true", 1)),
        *(("stream_options", value) for value in (True, "x", [])),
        *(("user", value) for value in (5, {})),
        *(("store", value) for value in ("yes", 1)),
        *(("metadata", value) for value in ("x", [])),
        *(("service_tier", value) for value in (1, [])),
        *(("parallel_tool_calls", value) for value in ("x", 1)),
        *(("model", value) for value in (1, {})),
        *(("logit_bias", value) for value in ([], "x", 5, {str(i): 0 for i in range(1025)})),
        *(("n", value) for value in (0, 2, "1", True)),
        *(("logprobs", value) for value in (1, "x", [])),
        *(("top_logprobs", value) for value in (1, 20, False, 21, -1, 1.5, "x")),
    ],
)
def test_a_mistyped_field_is_named(parse: Parse, field: str, value: object) -> None:
    """Each field refuses other types and values out of range, and the error names it, nested or not."""
    with pytest.raises(BadRequest) as caught:
        parse(**{field: value})
    assert caught.value.param is not None and caught.value.param.partition(".")[0] == field
    assert field in caught.value.message
    with pytest.raises(BadRequest) as nested:
        parse(extra_body={field: value})
    assert str(nested.value.param).startswith(f"extra_body.{field}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias.\u0665"),
        ({"logit_bias": {"": 1}}, "logit_bias."),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_an_inner_field_is_named(parse: Parse, body: dict[str, object], param: str) -> None:
    """Errors inside arrays and objects carry the whole path."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param


def test_what_asks_for_nothing_is_tolerated(parse: Parse) -> None:
    """The neutral values of unsupported fields pass, and so do fields that change nothing."""
    parse(n=1, logprobs=False, top_logprobs=0, user="u", store=False, metadata={"a": 1}, service_tier="auto")
    parse(n=1.0, logprobs=0, top_logprobs=None, n_unknown=[], safety_identifier=5)


def test_two_limits_must_agree(parse: Parse) -> None:
    """Either name sets the limit; two that differ are a contradiction."""
    assert parse(max_tokens=5).turn.max_tokens == 5
    assert parse(max_completion_tokens=6).turn.max_tokens == 6
    assert parse(max_completion_tokens=6, max_tokens=6.0).turn.max_tokens == 6
    with pytest.raises(BadRequest, match="differ") as caught:
        parse(max_completion_tokens=6, max_tokens=7)
    assert caught.value.param == "max_tokens"


def test_stops_are_one_or_several(parse: Parse) -> None:
    """A string is one stop; duplicates count once."""
    assert parse(stop="END").turn.stop_strings == ("END",)
    assert parse(stop=["b", "a", "b"]).turn.stop_strings == ("b", "a")
    assert parse(stop=[]).turn.stop_strings == ()


def test_an_empty_stop_stops_nothing(parse: Parse) -> None:
    """Clients send one where a setting is empty; of several the others count, also for how many there may be."""
    assert parse(stop="").turn.stop_strings == ()
    assert parse(stop=["", "END", ""]).turn.stop_strings == ("END",)
    assert len(parse(stop=["", *map(str, range(16))]).turn.stop_strings) == 16


def test_minus_one_is_no_limit_but_the_context(parse: Parse) -> None:
    """It is more than the server's default, which holds where nothing is said."""
    for name in ("max_tokens", "max_completion_tokens"):
        assert parse(**{name: -1}).turn.max_tokens == parse(**{name: -1.0}).turn.max_tokens == NO_LIMIT
    with pytest.raises(BadRequest, match="differ"):
        parse(max_tokens=-1, max_completion_tokens=5)


@pytest.mark.parametrize(
    "content", ["whole text", [{"type": "text", "text": "whole"}, {"type": "text", "text": " text"}]]
)
def test_a_prediction_is_read_and_changes_nothing_else(parse: Parse, content: object) -> None:
    """A text or parts of one; beside it the turn is the same."""
    turn = parse(prediction={"type": "content", "content": content}).turn
    assert turn == replace(parse().turn, prediction="whole text")


def test_a_request_may_forbid_drafts(parse: Parse) -> None:
    """By one switch, at the top or in `extra_body`; without it the server decides."""
    assert [parse(speculation=said).turn.may_draft for said in (None, True, False)] == [True, True, False]
    assert parse(extra_body={"speculation": False}).turn == replace(parse().turn, may_draft=False)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "ttl", "cache_mode", "session_id", "enable_thinking"])
def test_an_applications_own_metadata_never_refuses(parse: Parse, name: str) -> None:
    """Text that happens to have the name of a switch says nothing; a switch there still switches."""
    said = "x" * 600
    assert parse(metadata={name: said}).turn == parse(extra_body={"metadata": {name: said}}).turn == parse().turn
    assert parse(metadata={name: said, "reasoning_effort": "none"}).turn.thinking.enabled is False


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (False, False)),
        ({"stream": True}, (True, False)),
        ({"stream": True, "stream_options": {"include_usage": True}}, (True, True)),
        ({"stream": True, "stream_options": {"include_usage": False}}, (True, False)),
        ({"stream": True, "stream_options": {}}, (True, False)),
        ({"stream_options": {"include_usage": True}}, (False, False)),
    ],
)
def test_usage_in_a_stream_is_asked_for(parse: Parse, body: dict[str, object], expected: tuple[bool, bool]) -> None:
    """`stream_options` counts in a stream only, and is tolerated without one."""
    request = parse(**body)
    assert (request.stream, request.include_usage) == expected
