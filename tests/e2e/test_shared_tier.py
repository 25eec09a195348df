"""Servers that share a real Redis: what one computed the others read, and whatever becomes of that Redis costs a miss
and a count."""

from pathlib import Path

import pytest

from tests.e2e.sharing import (
    BOUND_SECONDS,
    OTHER_SESSION,
    SESSION,
    WORDS,
    _reading_pays,
    conversation,
    eventually,
    forget,
    ids_of,
    is_open,
    is_up,
    prompt_tokens,
    redis,
    remote,
    server_on,
    settle,
)
from tests.redis_servers import RedisServer, free_port, redis_server
from tests.relay import relay_to

__all__ = ["_reading_pays", "redis"]
pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "gemma3"])
def test_a_server_goes_on_with_what_another_computed(family: str, redis: RedisServer, tmp_path: Path) -> None:
    """It computes 5 % of the prompt at most, and writes what a server writes that was never told of any of it."""
    with server_on(tmp_path / "a", redis.url, family) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = conversation(a)
        settle(a)
        assert remote(a)["num_written"] > 0 and remote(a)["errors"] == {}
    with server_on(tmp_path / "b", redis.url, family) as b:
        eventually(lambda: is_up(b), "no connection")
        warm = b.chat(messages, headers=SESSION)
        assert warm.num_cached_tokens is not None
        assert prompt_tokens(warm) - warm.num_cached_tokens <= 0.05 * prompt_tokens(warm)
        assert remote(b)["num_hits"] == 1 and remote(b)["errors"] == {}
        eventually(lambda: 'tier="shared"' in b.get("/metrics").body.decode(), "it is not told where it came from")
    with server_on(tmp_path / "c", None, family) as c:
        assert c.chat(messages, headers=SESSION) == warm


def test_who_may_not_speak_to_it_reads_nothing(tmp_path: Path) -> None:
    """With TLS and a password all is as without; a wrong password, or a certificate of somebody else, is a miss."""
    with redis_server(tmp_path / "redis", password="a secret", is_tls=True) as redis:
        url = redis.url.replace("a secret", "a%20secret")
        with server_on(tmp_path / "a", url) as a:
            eventually(lambda: is_up(a), "no connection")
            messages = conversation(a, 2)
            settle(a)
            assert "secret" not in a.screen.getvalue() and "secret" not in a.get("/v1/cache").body.decode()
        with server_on(tmp_path / "b", url) as b:
            eventually(lambda: is_up(b), "no connection")
            assert (b.chat(messages, headers=SESSION).num_cached_tokens or 0) > 100
        for number, other in enumerate((url.replace("a%20secret", "no%20secret"), url.partition("?")[0])):
            with server_on(tmp_path / f"other{number}", other) as refused:
                eventually(lambda: refused.health()["shared_cache"] == "down", "it is not down")
                assert (refused.chat(messages, headers=SESSION).num_cached_tokens or 0) == 0
                assert remote(refused)["num_errors"] > 0 and "secret" not in refused.screen.getvalue()


def test_tenants_share_nothing(redis: RedisServer, tmp_path: Path) -> None:
    """Under TENANT_ISOLATION another principal's prompt finds nothing there, its own finds all."""
    one, other = {"authorization": "Bearer one"}, {"authorization": "Bearer other"}
    with server_on(tmp_path / "a", redis.url, tenant_isolation=True) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = conversation(a, 2, {**SESSION, **one})
        settle(a)
    with server_on(tmp_path / "b", redis.url, tenant_isolation=True) as b:
        eventually(lambda: is_up(b), "no connection")
        assert (b.chat(messages, headers={**SESSION, **other}).num_cached_tokens or 0) == 0
        assert (b.chat(messages, headers={**SESSION, **one}).num_cached_tokens or 0) > 100


def test_whom_one_server_forgets_all_forget(redis: RedisServer, tmp_path: Path) -> None:
    """Nothing of the session is in Redis, in the other server's RAM or on its disk; what another session had stays."""
    with server_on(tmp_path / "a", redis.url) as a, server_on(tmp_path / "b", redis.url) as b:
        eventually(lambda: is_up(a) and is_up(b), "no connection")
        kept = conversation(a, 1, OTHER_SESSION)
        messages = conversation(a, 2)
        settle(a)
        num_shared = b.chat(messages, headers=SESSION).num_cached_tokens or 0
        assert num_shared > 100
        settle(b)
        own = ids_of(a, "Question 1: " + WORDS.strip())
        assert redis.holds(own)
        num_before = len(redis.keys("b"))
        body = forget(a, "session=the-session")
        assert body["is_done"] is True
        assert 0 < len(redis.keys("b")) < num_before and len(redis.keys("u")) < num_before
        assert not redis.holds(own)
        names = {key.split(":")[4] for kind in "bm" for key in redis.keys(kind)}
        assert names <= {key.split(":")[4] for key in redis.keys("u")}

        files = tmp_path / "b" / "kv"

        def is_forgotten() -> bool:
            return not any(own in each.read_bytes() for each in files.rglob("*.safetensors"))

        eventually(is_forgotten, "the other server has not heard of it")
        eventually(lambda: is_open(b), "it does not end")
        assert (b.chat(messages, headers=SESSION).num_cached_tokens or 0) < num_shared
        assert (b.chat(kept, headers=OTHER_SESSION).num_cached_tokens or 0) > 50


@pytest.mark.parametrize("mode", ["silent", "dribble", "cut", "killed"])
def test_a_dead_silent_or_dribbling_redis_costs_a_miss(mode: str, redis: RedisServer, tmp_path: Path) -> None:
    """No request waits longer than the bound; once the server answers again, it is used again."""
    with server_on(tmp_path / "a", redis.url) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = conversation(a, 3)
        settle(a)
        expected = a.chat(messages, headers=SESSION).content
        settle(a)
    with relay_to(redis.port) as relay, server_on(tmp_path / "b", relay.url) as b:
        eventually(lambda: is_up(b), "no connection")
        if mode == "killed":
            redis.kill()
        elif mode == "cut":
            relay.cut()
        relay.mode = mode
        answer = b.chat(messages, headers=SESSION)
        assert answer.content == expected and (answer.num_cached_tokens or 0) == 0
        assert remote(b)["longest_wait_seconds"] <= BOUND_SECONDS
        told = b.get("/v1/cache/explain?last").json
        assert told["cause"] == "shared cache not used", told
        assert told["unshared"]["reason"] in ("silent", "away"), told
        eventually(lambda: not is_up(b), "nobody has noticed")
        assert remote(b)["num_errors"] > 0
        if mode != "killed":
            relay.mode = "pass"
            eventually(lambda: is_up(b), "it does not come back")
            settle(b)
            b.chat([*messages[:-1], {"role": "user", "content": "And then?"}], headers=SESSION)
            settle(b)
            assert remote(b)["num_written"] > 0


def test_a_redis_that_dies_while_it_is_read_costs_what_was_not_read(redis: RedisServer, tmp_path: Path) -> None:
    """In the middle of a blob: the request goes on within its bound."""
    with server_on(tmp_path / "a", redis.url) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = conversation(a, 3)
        settle(a)
        expected = a.chat(messages, headers=SESSION).content
        settle(a)
    with relay_to(redis.port) as relay, server_on(tmp_path / "b", relay.url) as b:
        eventually(lambda: is_up(b), "no connection")
        relay.num_answer_bytes = 0
        relay.silent_behind = sum(redis.client.strlen(key) for key in redis.keys("b")) // 2
        answer = b.chat(messages, headers=SESSION)
        assert answer.content == expected and 0 < remote(b)["longest_wait_seconds"] <= BOUND_SECONDS
        assert remote(b)["num_given_up"] == 1, (remote(b), relay.mode, relay.num_answer_bytes, relay.silent_behind)
        relay.cut()  # what it holds back ends, before the server does


@pytest.mark.parametrize("share", [2.0, 0.5])
def test_it_is_read_where_that_beats_computing(
    share: float, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a relay at twice the bandwidth that it tells as its break-even it reads, at half of that it computes."""
    monkeypatch.undo()  # here the rule is the matter, but not what a look of so short a prompt may cost
    monkeypatch.setattr("kvserve.cache.remote_tier.LOOKS_WORTH", 0.0)
    with server_on(tmp_path / "a", redis.url, prefill_step_size=8192) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = [conversation(a, 3, {"x-session-id": f"s{number}"}, f"Number {number}. ") for number in range(3)]
        settle(a)
    with relay_to(redis.port) as relay, server_on(tmp_path / "b", relay.url, prefill_step_size=8192) as b:
        eventually(lambda: is_up(b), "no connection")
        for number in range(4):
            b.chat(f"Another beginning, number {number}: " + 40 * WORDS, headers=OTHER_SESSION)
        eventually(lambda: remote(b)["break_even_bytes_per_second"] is not None, "nothing was measured")
        relay.cut()
        eventually(lambda: not is_up(b), "nobody has noticed")
        relay.bytes_per_second = share * remote(b)["break_even_bytes_per_second"]
        relay.mode = "pass"
        eventually(lambda: is_up(b), "it does not come back")
        before = remote(b)
        found = [b.chat(each, headers=SESSION).num_cached_tokens or 0 for each in messages]
        told = {key: remote(b)[key] - before[key] for key in ("num_hits", "num_declined", "num_given_up")}
        relay.cut()
        assert (told["num_hits"] >= 2) == (share > 1), (told, found, before)


def test_a_redis_that_is_not_there_yet_delays_nothing(tmp_path: Path) -> None:
    """The start and all requests go on; once it is there, what is computed is sent."""
    port = free_port()
    with server_on(tmp_path / "a", f"redis://127.0.0.1:{port}/0") as a:
        messages = conversation(a, 1)
        assert a.health()["shared_cache"] == "down" and remote(a)["longest_wait_seconds"] == 0
        with redis_server(tmp_path / "redis", port=port) as redis:
            eventually(lambda: is_up(a), "it is not found")
            a.chat(
                [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}], headers=SESSION
            )
            settle(a)
            assert redis.keys("b")
            redis.client.flushall()
            conversation(a, 3)
            settle(a)
            assert redis.keys("b"), "a server that was flushed is not filled again"


def test_what_was_flushed_costs_a_miss(redis: RedisServer, tmp_path: Path) -> None:
    """What another server computed is gone: it is computed again, with the same text, and nobody waits for it."""
    with server_on(tmp_path / "a", redis.url) as a, server_on(tmp_path / "b", redis.url) as b:
        eventually(lambda: is_up(a) and is_up(b), "no connection")
        messages = conversation(a, 3)
        expected = a.chat(messages, headers=SESSION).content
        settle(a)
        redis.client.flushall()
        answer = b.chat(messages, headers=SESSION)
        assert answer.content == expected and (answer.num_cached_tokens or 0) == 0
        assert remote(b)["longest_wait_seconds"] <= BOUND_SECONDS and remote(b)["errors"] == {}


def test_a_full_redis_is_left_alone(tmp_path: Path) -> None:
    """What does not fit is not sent, and counted; requests go on, here and on another server, with the same text."""
    options = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with (
        redis_server(tmp_path / "redis", *options) as redis,
        server_on(tmp_path / "a", redis.url) as a,
        server_on(tmp_path / "b", redis.url) as b,
    ):
        eventually(lambda: is_up(a) and is_up(b), "no connection")
        messages = conversation(a, 4)
        eventually(lambda: a.health()["shared_cache"] == "full", "it is not full")
        assert remote(a)["errors"].get("full", 0) > 0
        answers = [app.chat(messages, headers=SESSION).content for app in (a, b)]
        waits = [remote(app)["longest_wait_seconds"] for app in (a, b)]
    with server_on(tmp_path / "c", None) as c:
        assert answers == [c.chat(messages, headers=SESSION).content] * 2
    assert max(waits) <= BOUND_SECONDS


def test_another_models_kv_is_not_believed(redis: RedisServer, tmp_path: Path) -> None:
    """A server of another model finds nothing of this one's; put in the place of its own values they are refused."""
    written = dict[str, list[str]]()
    for family in ("llama", "qwen3"):
        with server_on(tmp_path / family, redis.url, family) as app:
            eventually(lambda: is_up(app), "no connection")
            before = set(redis.keys("b"))
            messages = conversation(app, 2)
            settle(app)
            written[family] = sorted(set(redis.keys("b")) - before)
            expected = app.chat(messages, headers=SESSION).content
            assert remote(app)["num_hits"] == 0, "it believed the other model's"
    values = [redis.client.get(key) for key in written["llama"]]
    for place, key in enumerate(written["qwen3"]):
        redis.client.set(key, values[place % len(values)])
    with server_on(tmp_path / "again", redis.url) as app:
        eventually(lambda: is_up(app), "no connection")
        answer = app.chat(messages, headers=SESSION)
        assert answer.content == expected and (answer.num_cached_tokens or 0) == 0
        assert remote(app)["errors"], "nobody has noticed"
        assert remote(app)["longest_wait_seconds"] <= BOUND_SECONDS


@pytest.mark.parametrize("kind", ["b", "m", "i", "u"])
@pytest.mark.parametrize("fault", ["flipped", "cut", "swapped", "wrong type"])
def test_what_was_altered_there_is_not_believed(kind: str, fault: str, redis: RedisServer, tmp_path: Path) -> None:
    """Every kind of value, altered in every way: the text is right, and no request above its bound."""
    with server_on(tmp_path / "a", redis.url) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = conversation(a, 2)
        settle(a)
        expected = a.chat(messages, headers=SESSION).content
    client = redis.client
    keys = redis.keys(kind)
    values = {key: client.dump(key) if kind == "u" else client.get(key) for key in keys}
    for place, key in enumerate(keys):
        if fault == "wrong type" or kind == "u":
            client.delete(key)
            client.rpush(key, "x")
        elif fault == "flipped":
            altered = bytearray(values[key])
            altered[len(altered) // 2] ^= 1
            client.set(key, bytes(altered))
        elif fault == "cut":
            client.set(key, values[key][: len(values[key]) // 2])
        else:
            client.set(key, values[keys[place - 1]])
    with server_on(tmp_path / "b", redis.url) as b:
        eventually(lambda: is_up(b), "no connection")
        answer = b.chat(messages, headers=SESSION)
        assert answer.content == expected and remote(b)["longest_wait_seconds"] <= BOUND_SECONDS
        if kind in ("b", "m") and (kind, fault) != ("m", "swapped"):  # that of another blob may be a shorter one
            assert answer.num_cached_tokens in (None, 0)
