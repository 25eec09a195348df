"""Drafts on a whole server: whose words they come from and leave, where they are seen, and that they change no answer.
That no word of another reader is drafted is in `requests/test_drafts.py`, that drafts are exact in `engine/`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvserve.requests.drafts
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.pass_costs import PassCosts
from tests.laws import sampled
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, chunks_of, eventually, serving_app, writing
from tests.trace_lines import parse_line

ANN, BOB = {"x-api-key": "ann"}, {"x-api-key": "bob"}
SAID = "Tell me of the swans."
NUM_TOKENS = 24
"""Of an answer that is asked for again, less would not be looked into."""

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("speculation"), max_kv_size=1024, speculation="auto") as app:
        yield app


@pytest.fixture(autouse=True)
def nothing_kept(app: AppUnderTest) -> None:
    """Of the tests before."""
    app.clear_cache()
    assert num_kept_bytes(app) == 0


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's passes cost: all that is drafted is tried."""
    monkeypatch.setattr(PassCosts, "num_worth", lambda _self, chances, *_args, **_more: len(chances))
    monkeypatch.setattr(PassCosts, "is_worth_reading", lambda *_: True)


def texts(app: AppUnderTest) -> DraftTexts:
    found = app.served.drafts
    assert found is not None
    return found


def num_kept_bytes(app: AppUnderTest) -> int:
    """Once no drafter of an answer that is over holds anything beside what is kept."""
    assert eventually(lambda: app.is_idle() and not texts(app)._running)
    return texts(app).num_bytes


def ask(app: AppUnderTest, headers: dict[str, str] = ANN, **fields: Any) -> dict[str, Any]:
    response = app.post(CHAT_PATH, chat_body(SAID, **{"max_tokens": NUM_TOKENS, **fields}), headers)
    assert response.status == 200, response.body
    return dict(response.json)


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"])


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected tokens, as OpenAI has them."""
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def explained(app: AppUnderTest, answer_id: str, headers: dict[str, str] = ANN) -> dict[str, Any]:
    path = f"/v1/cache/explain/{answer_id}"
    assert eventually(lambda: app.get(path, headers).status == 200)
    return dict(app.get(path, headers).json)


def forget(app: AppUnderTest, query: str) -> None:
    with app.connect() as client:
        assert client.request("DELETE", f"/v1/cache?{query}", None, {"Connection": "close"}).status == 200


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_repeated_answer_is_drafted_and_seen_everywhere(app: AppUnderTest) -> None:
    """The same words as without drafts; usage, request line, explanation, trace, metrics and totals agree."""
    plain = ask(app, speculation=False)
    assert counted(plain["usage"]) == (0, 0) and explained(app, plain["id"])["speculation"] is None
    ask(app)
    before: Any = app.get("/v1/cache").json["speculation"]
    again = ask(app, session_id="swans")
    assert said(again) == said(plain)
    num_accepted, num_rejected = counted(again["usage"])
    assert num_accepted > 0
    told = explained(app, again["id"])["speculation"]
    assert (told["num_accepted_tokens"], told["num_drafted_tokens"]) == (num_accepted, num_accepted + num_rejected)
    num_steps = again["usage"]["completion_tokens"] - num_accepted
    assert told["num_steps"] == num_steps and told["tokens_per_step"] > 1
    by_source = told["by_source"]
    assert sum(each["num_accepted_tokens"] for each in by_source.values()) == num_accepted
    assert f"drafts: {num_accepted} of {num_accepted + num_rejected} right" in app.line_of(again["id"])
    after: Any = app.get("/v1/cache").json["speculation"]
    assert after["num_accepted_tokens"] == before["num_accepted_tokens"] + num_accepted
    metrics = app.get("/metrics").body.decode()
    for source in by_source:
        assert f'kvserve_accepted_draft_tokens_total{{model="{again["model"]}",source="{source}"}}' in metrics
    [trace] = app.log_root.rglob("cache-session-swans-*.log")
    assert parse_line(trace.read_text()).fields["speculation"] == told


@pytest.mark.parametrize("path", sampled([CHAT_PATH, RESPONSES, MESSAGES], (RESPONSES, MESSAGES)))
def test_each_protocol_tells_of_drafts_in_its_own_form(app: AppUnderTest, path: str) -> None:
    """Chats and responses have counts, streamed or not, Anthropic's messages have no place for them; all may forbid
    drafts."""
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "messages": [{"role": "user", "content": SAID}], "temperature": 0}
    if path == RESPONSES:
        body = {"max_output_tokens": NUM_TOKENS, "input": SAID, "temperature": 0}
    answers: list[Any] = [app.post(path, {**body, "repetition_penalty": 1}, ANN).json for _ in range(2)]
    assert explained(app, answers[1]["id"])["speculation"]["num_accepted_tokens"] > 0
    forbidden: Any = app.post(path, {**body, "repetition_penalty": 1, "speculation": False}, ANN).json
    assert explained(app, forbidden["id"])["speculation"] is None
    if path == MESSAGES:
        assert answers[1]["usage"].keys() == forbidden["usage"].keys()
        return
    assert counted(answers[1]["usage"])[0] > 0
    if path == RESPONSES:
        assert forbidden["usage"]["output_tokens_details"].keys() == {"reasoning_tokens"}
        return
    streamed = {**body, "repetition_penalty": 1, "stream": True, "stream_options": {"include_usage": True}}
    assert counted(chunks_of(app.post(path, streamed, ANN))[-1]["usage"])[0] > 0


def test_a_prediction_is_the_first_that_is_drafted_from(app: AppUnderTest) -> None:
    """A file that the client expects back, with a word changed: what the model writes of it is accepted."""
    text = "The swans swim on the lake. The geese fly over the hills."
    prediction = {"type": "content", "content": text.replace("geese", "storks")}
    with writing(app, text) as script:
        fields: dict[str, Any] = {"max_tokens": 60, "enable_thinking": False, **script}
        answer = ask(app, prediction=prediction, **fields)
        plain = ask(app, speculation=False, **fields)
    assert said(answer) == said(plain) and text in said(answer)
    assert explained(app, answer["id"])["speculation"]["by_source"]["prediction"]["num_accepted_tokens"] > 5


def test_what_another_one_said_makes_no_answer_faster(app: AppUnderTest) -> None:
    """To one who asks first the drafts are the same whether somebody else has asked the same before or not."""
    alone = explained(app, ask(app, BOB)["id"], BOB)["speculation"]
    app.clear_cache()
    ask(app, ANN)
    beside = explained(app, ask(app, BOB)["id"], BOB)["speculation"]
    assert _counts(beside) == _counts(alone)
    app.clear_cache()
    with all_one_reader():  # the control
        ask(app, ANN)
        assert _counts(explained(app, ask(app, BOB)["id"], BOB)["speculation"]) > _counts(alone)


def _counts(speculation: dict[str, Any] | None) -> int:
    return speculation["num_accepted_tokens"] if speculation is not None else 0


@contextmanager
def all_one_reader() -> Iterator[None]:
    """The planted fault: everybody is drafted from everybody's words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvserve.requests.drafts, "text_owner", lambda _session, _partition: TextOwner("anybody"))
        yield


# --- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"ttl": 0}, {"cache_mode": "prefix"}, {"speculation": False}])
def test_a_request_that_leaves_no_record_leaves_nothing_to_draft_from(
    app: AppUnderTest, fields: dict[str, Any]
) -> None:
    """Neither its prompt nor its answer; others leave both, in the ledger."""
    ask(app, **fields, max_tokens=4)
    assert num_kept_bytes(app) == 0
    ask(app, max_tokens=4)
    num_bytes = num_kept_bytes(app)
    assert num_bytes > 0 and app.health()["memory"]["accounts"]["drafts"]["num_bytes"] == num_bytes


def test_a_request_that_leaves_no_record_is_drafted_from_its_own_words_alone(app: AppUnderTest) -> None:
    """Not from what the same client said before; its prediction is its own."""
    first = explained(app, ask(app, ttl=0)["id"])["speculation"]
    ask(app)
    assert _counts(explained(app, ask(app, ttl=0)["id"])["speculation"]) == _counts(first)


def test_who_is_forgotten_leaves_nothing_to_draft_from(app: AppUnderTest) -> None:
    """By session and by principal, and nobody else's words go."""

    def left() -> list[str | None]:
        return [text.owner.session for text in texts(app)._used]

    ask(app, ANN, session_id="one", max_tokens=4)
    ask(app, ANN, session_id="two", max_tokens=4)
    name = explained(app, ask(app, BOB, session_id="three", max_tokens=4)["id"], BOB)["principal"]
    assert left() == ["one", "two", "three"]
    forget(app, "session=one")
    assert left() == ["two", "three"]
    forget(app, f"principal={name}")
    assert left() == ["two"]
    forget(app, "session=two")
    assert num_kept_bytes(app) == 0


# --- what cannot be drafted -------------------------------------------------------------------------------------------


def test_a_model_that_cannot_try_drafts_is_served_without(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is indexed for it: the start has said why."""
    engine, factory = app.served.engine, app.app._pool._factory
    model = engine.wait_until_ready(0)
    assert engine.can_draft and factory.completed(app.served, model).drafts is texts(app)
    monkeypatch.setattr(engine._start, "can_draft", False)
    assert not engine.can_draft and factory.completed(app.served, model).drafts is None


@pytest.mark.parametrize(
    ("owner", "broken"), [(DraftTexts, "begin"), (DraftTexts, "end"), (TextDrafter, "propose")], ids=str
)
def test_no_answer_fails_because_of_its_drafts(
    app: AppUnderTest, monkeypatch: pytest.MonkeyPatch, owner: type, broken: str
) -> None:
    """What raises where drafts begin, while they are asked for, or where an answer is left for later ones, is told,
    counted, and nothing else: the answer is the same, and the next one is drafted."""

    def failing(*_args: Any, **_more: Any) -> Any:
        raise LookupError(f"no text to {broken} with")

    def num_failures() -> Any:
        return app.get("/v1/cache").json["speculation"]["num_failures"]  # type: ignore[index, call-overload]

    plain, before = ask(app, speculation=False), num_failures()
    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, failing)
        assert said(ask(app, session_id="swans")) == said(plain)
    assert any(f"LookupError: no text to {broken} with" in line for line in app.lines())
    assert eventually(lambda: num_failures() == before + 1)
    ask(app, session_id="swans")
    assert counted(ask(app, session_id="swans")["usage"])[0] > 0
    assert f"kvserve_draft_failures_total {before + 1}" in app.get("/metrics").body.decode()
