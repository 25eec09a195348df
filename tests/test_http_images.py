"""Images over HTTP: what a client sends, what it costs the first time and the second, and what is refused."""

import gc
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kvserve.app.server
from kvserve.core import ImageInput
from tests.engine.visions import VISION, data_url, picture
from tests.laws import IS_FULL, sampled, sampled_cells
from tests.prompt.test_images_remote import certificate, running_host, sends
from tests.prompt.test_images_source import BAD, encoded
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, encode_request, eventually, serving_app

MIN_REUSE = 0.94
MAX_TAIL_TOKENS = 14
LONG = " The reader knows the project and wants the facts in order." * 30


def image_part(image: Image.Image, form: str = "PNG") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image, form)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": [text_part(part) if isinstance(part, str) else part for part in parts]}


def ask(app: AppUnderTest, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body of an answer of eight greedy tokens."""
    body = {"messages": list(messages), "max_tokens": 8, "temperature": 0, "enable_thinking": False, **fields}
    response = app.post(CHAT_PATH, body)
    assert response.status == 200, response.body
    return dict(response.json)


def ask_patiently(app: AppUnderTest, *messages: dict[str, Any]) -> dict[str, Any]:
    """The body of an answer of one token, however long its prompt takes."""
    connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=300)
    try:
        body = {"messages": list(messages), "max_tokens": 1, "temperature": 0, "enable_thinking": False}
        connection.request("POST", CHAT_PATH, json.dumps(body), {"Content-Type": "application/json"})
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def said(body: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": body["choices"][0]["message"]["content"]}


def reuse(body: dict[str, Any]) -> tuple[int, int]:
    """Tokens found and tokens of the prompt."""
    usage = body["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def all_but_the_tail(body: dict[str, Any]) -> bool:
    """Whether the same prompt was found, up to where an assistant's turn begins."""
    found, total = reuse(body)
    return found >= total - MAX_TAIL_TOKENS


@pytest.fixture(scope="module", params=sampled(VISION, ("qwen3_5_vl",)))
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    folder = tmp_path_factory.mktemp(request.param)
    with serving_app(folder, family=request.param) as under_test:
        yield under_test


@sampled_cells(lambda app, **_: app == "qwen3_5_vl")
def test_the_second_turn_finds_its_image(app: AppUnderTest) -> None:
    """Its KV is there, the tower is not asked again, and no counter moves."""
    app.clear_cache()
    calls = app.get("/v1/cache").json["num_tower_calls"]
    question = user("What is this? ", image_part(picture(1, 256, 256)), " Describe it, please." + LONG)
    first = ask(app, question)
    second = ask(app, question, said(first), user("And why?"))
    found, total = reuse(second)
    assert found / total >= MIN_REUSE, (found, total)
    report = app.get("/v1/cache").json
    assert report["num_tower_calls"] - calls == 1
    assert report["counters"]["vlm_retreat"] == 0
    assert report["counters"]["exact_key_rejected_by_model_lcp"] == 0


@sampled_cells(lambda app, **_: app == "qwen3_5_vl")
def test_another_file_of_the_same_pixels_is_the_same_image(app: AppUnderTest) -> None:
    """PNG or BMP: what counts is what is seen."""
    app.clear_cache()
    first = ask(app, user("Look: ", image_part(picture(1)), " well?"))
    second = ask(app, user("Look: ", image_part(picture(1), "BMP"), " well?"))
    assert said(first) == said(second)
    assert all_but_the_tail(second)


@sampled_cells(lambda app, **_: app == "qwen3_5_vl")
def test_another_image_of_the_same_size_shares_nothing_past_it(app: AppUnderTest) -> None:
    """Nor does it count as a retreat: nothing was cut."""
    app.clear_cache()
    one, other = (user("Look: ", image_part(picture(seed)), " well?") for seed in (1, 2))
    expected = said(ask(app, other))
    app.clear_cache()
    ask(app, one)
    answer = ask(app, other)
    assert said(answer) == expected
    found, total = reuse(answer)
    assert found < total // 2
    assert app.get("/v1/cache").json["counters"]["vlm_retreat"] == 0


SOONER = {"gemma3_vl": (24, 128), "gemma4_vl": (24, 128), "glm4v": (2, 840)}
"""Images and their side, for 1,500 image tokens and more; the others take one of 640."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_second_request_answers_sooner(app: AppUnderTest, request: pytest.FixtureRequest) -> None:
    """With 1,500 image tokens and more, the time to the first token is at most 1/3.5 of the first request's, and the
    tower has looked at each image once."""
    app.clear_cache()
    num_images, side = SOONER.get(request.node.callspec.params["app"], (1, 640))
    calls = app.get("/v1/cache").json["num_tower_calls"]
    question = user(*(image_part(picture(100 + seed, side, side)) for seed in range(num_images)), "What is this?")
    num_text_tokens = ask_patiently(app, user("What is this?"))["usage"]["prompt_tokens"]
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        body = ask_patiently(app, question)
        seconds.append(time.perf_counter() - started)
    num_image_tokens = body["usage"]["prompt_tokens"] - num_text_tokens
    print(
        f"{num_image_tokens} image tokens: {seconds[0]:.2f} s, then {seconds[1]:.2f} s, 1/{seconds[0] / seconds[1]:.0f}"
    )
    assert num_image_tokens >= 1_500
    assert seconds[1] <= seconds[0] / 3.5, seconds
    report = app.get("/v1/cache").json
    assert report["num_tower_calls"] - calls == num_images
    assert report["counters"]["vlm_retreat"] == 0


def test_health_says_what_images_allow(app: AppUnderTest) -> None:
    """And the banner says it in words."""
    assert app.health()["images"] in ("anywhere", "whole")
    assert any("Images are taken" in line for line in app.lines())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("qwen"), family="qwen3_5_vl") as under_test:
        yield under_test


def test_images_in_tool_results(qwen: AppUnderTest) -> None:
    """A screenshot that a tool returned is seen, and its KV found again."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [
        user("Take a screenshot."),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text_part("here"), image_part(picture(3))]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    qwen.clear_cache()
    first = ask(qwen, *history, tools=tools)
    other = [*history[:2], {**history[2], "content": [text_part("here"), image_part(picture(6))]}]
    assert said(ask(qwen, *other, tools=tools)) != said(first)
    assert all_but_the_tail(ask(qwen, *history, tools=tools))


def test_a_typed_placeholder_is_no_image(qwen: AppUnderTest) -> None:
    """It is text of many tokens, and needs no picture."""
    typed = ask(qwen, user("What does <|image_pad|> mean? And <|vision_start|>?"))
    assert typed["usage"]["prompt_tokens"] > ask(qwen, user("What does it mean? And this?"))["usage"]["prompt_tokens"]
    before = qwen.get("/v1/cache").json["num_tower_calls"]
    ask(qwen, user("<|vision_start|><|image_pad|><|vision_end|>", image_part(picture(9)), "<|image_pad|>"))
    assert qwen.get("/v1/cache").json["num_tower_calls"] == before + 1


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_a_clear_400(qwen: AppUnderTest, case: str) -> None:
    """The message says what is wrong, and the server serves on."""
    source, reason = BAD[case]
    if case in ("too many pixels", "too many bytes"):
        pytest.skip("within the server's own limits")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": source or " "}}]}
    response = qwen.post(CHAT_PATH, {"messages": [message], "max_tokens": 2})
    assert response.status == 400, response.body
    assert reason in response.json["error"]["message"]
    assert qwen.post(CHAT_PATH, chat_body(max_tokens=2)).status == 200


def test_more_images_than_the_context_holds(tmp_path: Path) -> None:
    """A 400 with both numbers."""
    with serving_app(tmp_path, family="qwen3_5_vl", max_kv_size=2048) as app:
        parts = [image_part(picture(seed % 3, 128, 128)) for seed in range(200)]
        response = app.post(CHAT_PATH, {"messages": [user(*parts)], "max_tokens": 2})
        assert response.status == 400
        assert response.json["error"]["code"] == "context_length_exceeded"
        assert app.post(CHAT_PATH, chat_body(max_tokens=2)).status == 200


def test_a_text_model_reads_that_there_is_an_image(tmp_path: Path) -> None:
    """In every protocol, in tool results too; the line says so, and the next turn finds all of the prompt."""
    with serving_app(tmp_path) as app:
        words = "[An image that this model cannot see]"
        told = ask(app, user(LONG, text_part(f"\n{words}")))  # words of the server's have a line of their own
        shown = ask(app, user(LONG, image_part(picture(1))))
        assert said(shown) == said(told) and shown["usage"]["prompt_tokens"] == told["usage"]["prompt_tokens"]
        assert "the model sees no images: 1" in app.line_of(shown["id"])
        assert app.health()["images"] is None
        history = [user(LONG, image_part(picture(1))), said(shown), user("and", image_part(picture(2)))]
        again = ask(app, *history)
        assert reuse(again)[0] >= shown["usage"]["prompt_tokens"] - MAX_TAIL_TOKENS

        source = {"type": "base64", "media_type": "image/png", "data": data_url(picture(3)).partition(",")[2]}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
        counts = [
            app.post("/v1/messages/count_tokens", {"messages": [user("go"), called, user(each)]}).json["input_tokens"]
            for each in (result, {**result, "content": words})
        ]
        assert counts[0] == counts[1]
        item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(picture(4))}]}
        assert app.post("/v1/responses", {"input": [item], "max_output_tokens": 2}).status == 200


def test_a_line_tells_where_images_were_cut(tmp_path: Path) -> None:
    """With VLM_CACHE_DEBUG: the spans, how much was found, and the first ids."""
    with serving_app(tmp_path, family="qwen3_5_vl", vlm_cache_debug=True) as app:
        ask(app, user("Look: ", image_part(picture(1)), " well?"))
        [line] = [line for line in app.lines() if " images [" in line]
        assert "0 of" in line and "ids " in line
        ask(app, user("Only text."))
        assert sum(" images [" in line for line in app.lines()) == 1


def test_without_image_identity_answers_stay_those_of_the_image(tmp_path: Path) -> None:
    """Two images under one canonical key: the digests are verified all the same."""
    with serving_app(tmp_path, family="qwen3_5_vl", cache_vlm_image_identity=False) as app:
        one, other = (user("Look: ", image_part(picture(seed)), " well?") for seed in (1, 2))
        expected = said(ask(app, other))
        app.clear_cache()
        ask(app, one)
        answer = ask(app, other)
        assert said(answer) == expected
        assert reuse(answer)[0] < reuse(answer)[1] // 2


def test_pictures_of_named_hosts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same picture from a data URL and from an address is one image; another host is refused, as is a gone one."""
    with running_host(certificate(tmp_path)) as host:
        host.answers["/cat.png"] = sends(encoded(picture(1)))
        monkeypatch.setattr(kvserve.app.server, "remote_pictures", lambda settings: host.pictures())
        with serving_app(tmp_path, family="qwen3_5_vl") as app:
            here = ask(app, user("Look: ", image_part(picture(1)), " well?"))
            there = ask(
                app, user("Look: ", {"type": "image_url", "image_url": {"url": host.url("/cat.png")}}, " well?")
            )
            assert said(there) == said(here) and all_but_the_tail(there)
            assert app.get("/v1/cache").json["num_tower_calls"] == 1
            source = {"type": "image", "source": {"type": "url", "url": host.url("/cat.png")}}
            message = {"role": "user", "content": [text_part("Look: "), source, text_part(" well?")]}
            claude = app.post("/v1/messages", {"messages": [message], "max_tokens": 2})
            assert claude.status == 200 and app.get("/v1/cache").json["num_tower_calls"] == 1
            host.answers["/cat.png"] = sends(b"", status=404)
            for url, reason in ((host.url("/cat.png"), "answered 404"), ("https://other.test/a.png", "IMAGE_HOSTS")):
                part = {"type": "image_url", "image_url": {"url": url}}
                refused = app.post(CHAT_PATH, {"messages": [user("Look", part)], "max_tokens": 2})
                assert refused.status == 400 and reason in refused.json["error"]["message"]
            assert app.post(CHAT_PATH, chat_body(max_tokens=2)).status == 200


def num_pictures_held() -> int:
    """Pictures in memory as their clients sent them: whoever holds one of these holds the text of its data URL.

    No collection first: what waits for one may wait for long."""
    return sum(isinstance(each, ImageInput) for each in gc.get_objects())


def data_urls_held() -> set[str]:
    """Pictures as their clients sent them that any object holds."""
    held = gc.get_referents(*gc.get_objects())
    return {each for each in held if isinstance(each, str) and each.startswith("data:image/")}


def send_pictures(app: AppUnderTest) -> None:
    """In conversations that go on, streamed, and in requests that are refused."""
    for number in range(2 if IS_FULL else 1):
        question = user("Look: ", image_part(picture(70 + number)), " well?")
        ask(app, question, said(ask(app, question)), user("And why?"))
        app.chat([question], stream=True)
        assert app.post(CHAT_PATH, chat_body([question], max_tokens=0)).status == 400


def test_no_picture_outlives_its_request(tmp_path: Path) -> None:
    """As it was sent, a picture is let go of with its request, also where the next turn was guessed, the answer was
    streamed or broken off, the request was refused, and the conversation is on record."""
    with serving_app(tmp_path, family="qwen3_5_vl", warm_next_turn=True) as app:
        held_before, urls_before = num_pictures_held(), data_urls_held()
        send_pictures(app)
        with app.connect() as leaving:
            body = chat_body([user(image_part(picture(9)))], max_tokens=60, stream=True)
            leaving.send(encode_request("POST", CHAT_PATH, body))
            assert eventually(lambda: num_pictures_held() > held_before)
        assert eventually(lambda: app.is_idle() and num_pictures_held() == held_before), num_pictures_held()
        del body
        assert eventually(lambda: data_urls_held() <= urls_before), len(data_urls_held() - urls_before)


@pytest.mark.long
def test_after_a_restart_a_conversation_with_images_goes_on(tmp_path: Path) -> None:
    """Records, KV and what the model wrote are there again: the next turn reuses it, and the tower stays asleep."""
    question = user("What is this? ", image_part(picture(1, 256, 256)), " Describe it, please." + LONG)
    with serving_app(tmp_path, family="qwen3_5_vl") as app:
        first = ask(app, question, session_id="one")
        second = ask(app, question, said(first), user("And why?"), session_id="one")
        last = [question, said(first), user("And why?"), said(second), user("And then?")]
        expected = said(ask(app, *last, ttl=0, session_id="one"))
    with serving_app(tmp_path, family="qwen3_5_vl") as app:
        third = ask(app, *last, session_id="one")
        found, total = reuse(third)
        assert said(third) == expected
        assert found / total >= MIN_REUSE, (found, total)
        report = app.get("/v1/cache").json
        assert report["num_tower_calls"] == 0
        assert all(count == 0 for count in report["counters"].values()), report["counters"]
