"""`TENANT_ISOLATION` over HTTP: whose KV a request finds follows from its key and user; without it all share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import Principal, TokenSequence, principal_digest
from kvserve.engine.warming import Warming, WarmJob
from kvserve.engine.worker import Engine
from kvserve.warming.prewarming import warm_learned
from tests.agents import CARRIER, seen_prompts
from tests.laws import sampled
from tests.serving import AppUnderTest, eventually, serving_app, writing

SYSTEM = "You look at places and say what is there, in short and friendly words. " * 8
SAID = "Where is the harbour?"


@dataclass(frozen=True)
class Tenant:
    """A client with a key, and a user of it."""

    key: str | None = None
    user: str | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}

    @property
    def principal(self) -> Principal:
        return Principal(principal_digest("key", self.key or ""), principal_digest("user", self.user or ""))

    @property
    def fields(self) -> dict[str, Any]:
        return {"user": self.user} if self.user is not None else {}

    def num_cached(self, app: AppUnderTest, said: str = SAID, **fields: Any) -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
        chat = app.chat(messages, headers=self.headers, max_tokens=2, **self.fields, **fields)
        return chat.num_cached_tokens or 0


NOBODY, ONE, OTHER = Tenant(), Tenant("one"), Tenant("another")
THEIR_USERS = Tenant("one", "anna"), Tenant("one", "otto")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("apart"), tenant_isolation=True, warm_next_turn=True) as app:
        yield app


@pytest.fixture
def app(started: AppUnderTest) -> AppUnderTest:
    started.clear_cache()
    return started


@pytest.mark.parametrize(
    ("one", "other"), [(ONE, OTHER), (NOBODY, ONE), (ONE, NOBODY), THEIR_USERS], ids=["keys", "to", "from", "users"]
)
def test_a_tenant_finds_its_own_and_nobody_elses(app: AppUnderTest, one: Tenant, other: Tenant) -> None:
    """The same messages under another key or for another user are computed; under the same ones they are there."""
    assert one.num_cached(app) == 0
    assert other.num_cached(app) == 0
    assert one.num_cached(app) > 0 and other.num_cached(app) > 0


def test_without_the_setting_all_share(tmp_path: Path) -> None:
    """What another one asked is there, as it always was."""
    with serving_app(tmp_path) as app:
        assert ONE.num_cached(app) == 0
        assert OTHER.num_cached(app) > 0 and NOBODY.num_cached(app) > 0


def test_nobody_finds_nothing_of_before_it_was_set(tmp_path: Path) -> None:
    """What was kept while all shared is of everybody, so it is nobody's; without the setting it is there again."""
    for is_set, finds in ((False, False), (True, False), (False, True), (True, True)):
        with serving_app(tmp_path, tenant_isolation=is_set) as app:
            assert (NOBODY.num_cached(app) > 0) is finds, (is_set, finds)


def test_a_client_prewarms_for_itself(app: AppUnderTest) -> None:
    """The prefix that one asked for is there for its requests only."""
    body = {"messages": [{"role": "system", "content": SYSTEM}]}
    assert app.post("/v1/cache/prewarm", body, ONE.headers).json["computed"] > 0
    assert OTHER.num_cached(app) == 0
    assert ONE.num_cached(app) > 0


def test_what_comes_next_is_warmed_for_whom_it_was_learned_of(
    app: AppUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guess of a session's next request goes where that request will look."""
    jobs: list[WarmJob] = []
    real = Engine.warm

    def noted(self: Engine, job: WarmJob) -> Warming:
        jobs.append(job)
        return real(self, job)

    monkeypatch.setattr(Engine, "warm", noted)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SAID}, CARRIER]
    with writing(app, "It is behind the mill, on the other side of the river. <|im_end|>") as fields:
        app.chat(messages, headers=ONE.headers, **fields)
    assert eventually(lambda: bool(jobs))
    assert {job.partition for job in jobs} == {app.served.partition(Principal(principal_digest("key", "one")))}
    assert app.served.partition(Principal()) not in ("", jobs[0].partition)


@pytest.mark.parametrize("is_set", sampled([False, True], (True,)))
def test_a_beginning_is_computed_for_whom_it_was_learned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    """For each that used it twice, the one that used it most first, and so many in all; where all share, once."""
    jobs: list[WarmJob] = []
    with serving_app(tmp_path, tenant_isolation=is_set) as app:
        for tenant, times in ((ONE, 2), (NOBODY, 3), (OTHER, 1)):
            for number in range(times):
                tenant.num_cached(app, f"And the {number}. mill?")
        monkeypatch.setattr(Engine, "warm", lambda _, job: jobs.append(job))
        for num in (4, 1):
            warm_learned(app.served, num)
        partitions = [
            app.served.partition(tenant.principal) for tenant in ((NOBODY, ONE, NOBODY) if is_set else (NOBODY,) * 2)
        ]
    assert [job.partition for job in jobs] == partitions
    assert len(set(partitions)) == (2 if is_set else 1)


def test_a_beginning_is_warm_at_the_start_for_its_tenant_only(tmp_path: Path) -> None:
    """Its KV is gone, what was learned is not: nobody else finds anything before its tenant asks, or behind it."""
    with serving_app(tmp_path, tenant_isolation=True, max_kv_size=1024) as app:
        for said in (SAID, "And the mill?"):
            ONE.num_cached(app, said)
    for kept in ("*.safetensors", "index*"):
        for file in (tmp_path / "kv").rglob(kept):
            file.unlink()
    with serving_app(tmp_path, tenant_isolation=True, max_kv_size=1024, prewarm_prefixes=4) as app:
        assert eventually(lambda: app.get("/v1/cache").json["warming"]["num_jobs_done"] == 1)
        assert OTHER.num_cached(app) == 0 and NOBODY.num_cached(app) == 0 and Tenant("one", "anna").num_cached(app) == 0
        assert ONE.num_cached(app) > len(SYSTEM.split())
        shown = str((app.get("/v1/cache").json, app.app.observability.dashboard()))
        assert "friendly" not in shown and "harbour" not in shown, "no text of it is shown"


def test_a_session_id_is_no_secret(app: AppUnderTest) -> None:
    """The dashboard shows it. Whoever names it under another principal has nothing of it in the prompt; under its own,
    the control, it is the client."""
    hidden = {"role": "user", "content": f"<system-reminder>\nThe PIN is opal4711.\n</system-reminder>\n{SAID}"}
    app.chat([hidden], headers=ONE.headers, session_id="sid-1", max_tokens=2)
    shown = str(app.app.observability.dashboard())
    assert "sid-1" in shown and "opal4711" not in shown
    for read in (app.get("/v1/cache").body, app.get("/metrics").body):
        assert b"sid-1" not in read
    said = [{"role": "user", "content": SAID}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "?"}]
    for tenant, is_its_own in ((OTHER, False), (NOBODY, False), (Tenant("one", "anna"), False), (ONE, True)):
        with seen_prompts() as prompts:
            app.chat(said, headers=tenant.headers, session_id="sid-1", max_tokens=2, **tenant.fields)
        assert ("opal4711" in app.served.tokenizer.decode(prompts[-1])) is is_its_own, tenant


def test_an_agents_status_knows_where_its_conversation_is(app: AppUnderTest) -> None:
    """Whosever key its turns came with, and its KV goes with it."""
    body = {"system_prompt": SYSTEM, "agent_id": "watcher"}
    assert app.post("/v1/agents", body, ONE.headers).status in (200, 201)
    said = {"messages": [{"role": "user", "content": SAID}], "max_tokens": 4}
    assert app.post("/v1/agents/watcher/generate", said, ONE.headers).status == 200
    assert app.get("/v1/agents/watcher").json["status"] == "hot"
    agent = app.app._agent_store.agent("watcher")
    before = app.served.engine.kept_tokens(TokenSequence(agent.context.ids))[0]
    with app.connect() as client:
        assert client.request("DELETE", "/v1/agents/watcher", None, {"Connection": "close"}).status in (200, 204)
    assert app.served.engine.kept_tokens(TokenSequence(agent.context.ids))[0] < before
