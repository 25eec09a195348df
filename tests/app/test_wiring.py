"""Settings reach the room that acts on them."""

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvserve.app.proxy_wiring import access_warnings, named_backends, own_backend, proxy_settings
from kvserve.app.wiring import (
    catalogue_settings,
    engine_settings,
    identity_settings,
    observability_settings,
    remote_pictures,
    request_defaults,
    response_store,
    web_settings,
)
from kvserve.config import Settings, setting_key
from kvserve.engine.quantised import KvSettings
from kvserve.proxy.backends import BackendAddress

HERE = str(Path(__file__).parent)
"""A folder that is there."""


def every_room(settings: Settings) -> SimpleNamespace:
    """What the rooms are given."""
    return SimpleNamespace(
        defaults=request_defaults(settings),
        engine=engine_settings(settings),
        identity=identity_settings(settings),
        catalogue=catalogue_settings(settings, settings.listed_model_id),
        web=web_settings(settings),
        proxy=proxy_settings(settings, own_backend(settings, 1)),
        behind=named_backends(settings),
        pictures=remote_pictures(settings),
        seeing=observability_settings(settings),
        responses=response_store(settings, "on", print),
    )


PLACES: list[tuple[str, str, str, object]] = [
    # (setting, what somebody writes, where it acts, what must stand there)
    ("MODEL_STRICT", "true", "catalogue.is_strict", True),
    ("MODEL_ALIASES", "fast=some-model, claude-*=default", "catalogue.aliases",
     {"fast": "some-model", "claude-*": "default"}),
    ("MODEL_FOLDERS", HERE, "catalogue.folders", (Path(HERE),)),
    ("PROXY_MODEL_ID", "openai/house", "proxy.listed_model_id", "openai/house"),
    ("PROXY_MODEL_ID", "openai/house", "catalogue.default_names", ("openai/house", "house")),
    ("MLX_HOST", "127.0.0.9", "web.host", "127.0.0.9"),
    ("MLX_HOST", "127.0.0.9", "proxy.backends", (BackendAddress("kvserve", "http://127.0.0.9:1"),)),
    ("MLX_PORT", "1234", "web.port", 1234),
    ("PROXY_PORT", "4321", "proxy.port", 4321),
    ("PROXY_HOST", "127.0.0.8", "proxy.host", "127.0.0.8"),
    ("BACKENDS", "a=http://k%2F@one:81", "behind", (BackendAddress("a", "http://one:81", "k/"),)),
    ("BACKEND_MAX_WAITING", "3", "proxy.max_waiting", 3),
    ("MAX_KV_SIZE", "1001", "engine.max_kv_size", 1001),
    ("PROMPT_CACHE_MAX_ENTRIES_GLOBAL", "7", "engine.cache.max_entries", 7),
    ("PROMPT_CACHE_MAX_ENTRIES_PER_SESSION", "3", "engine.cache.max_entries_per_owner", 3),
    ("PROMPT_CACHE_TTL_SECONDS", "61", "engine.cache.ttl_seconds", 61),
    ("PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", "62", "engine.cache.owner_idle_seconds", 62),
    ("PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", "62", "identity.limits.idle_seconds", 62),
    ("PROMPT_CACHE_BLOCK_SIZE", "32", "engine.cache.block_size", 32),
    ("PROMPT_CACHE_MAX_BYTES", "8GB", "engine.cache.max_bytes", 8 * 10**9),
    ("SESSION_RECORDS_MAX_BYTES", "9MB", "identity.limits.max_bytes", 9 * 10**6),
    ("SESSION_RECORDS_MAX_BYTES", "9MB", "engine.records_bytes", 9 * 10**6),
    ("CACHE_USE_BLOCK_INDEX", "false", "engine.cache.use_index", False),
    ("CACHE_CANONICALIZE_TOOL_CONTEXT", "false", "identity.rules.rules", ()),
    ("CACHE_VLM_IMAGE_IDENTITY", "false", "identity.rules.tells_images_apart", False),
    ("CACHE_SESSION_PARTITIONING", "false", "identity.is_partitioned", False),
    ("CACHE_NORM_SAFETY_CHECK", "true", "identity.checks_shortening", True),
    ("NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT", "true", "identity.digests_writes", True),
    ("DISK_CACHE_DIR", "/kv", "engine.disk.folder", Path("/kv")),
    ("DISK_CACHE_MAX_BYTES", "3GB", "engine.disk.max_bytes", 3 * 10**9),
    ("DISK_CACHE_MIN_FREE_BYTES", "5GB", "engine.disk.min_free_bytes", 5 * 10**9),
    ("DISK_CACHE_TTL_HOURS", "2", "engine.disk.ttl_hours", 2),
    ("DISK_CACHE_TTL_HOURS", "2", "identity.limits.keep_seconds", 7200),
    ("WARM_MAX_TOKENS", "100", "engine.warming.max_tokens", 100),
    ("WARM_MAX_TIME_SHARE", "0.25", "engine.warming.time_share", 0.25),
    ("DEFAULT_TEMPERATURE", "0.7", "defaults.sampling.temperature", 0.7),
    ("DEFAULT_TOP_P", "0.8", "defaults.sampling.top_p", 0.8),
    ("DEFAULT_TOP_K", "9", "defaults.sampling.top_k", 9),
    ("DEFAULT_MIN_P", "0.3", "defaults.sampling.min_p", 0.3),
    ("DEFAULT_REPETITION_PENALTY", "1.5", "defaults.sampling.repetition_penalty", 1.5),
    ("DEFAULT_REPETITION_CONTEXT_SIZE", "11", "defaults.sampling.repetition_context_size", 11),
    ("DEFAULT_MAX_TOKENS", "12", "defaults.max_tokens", 12),
    ("DEFAULT_THINKING", "false", "defaults.thinking", False),
    ("PRESERVE_THINKING", "false", "defaults.preserve_thinking", False),
    ("GENERATION_WATCHDOG_SECONDS", "13", "engine.watchdog_seconds", 13),
    ("STREAM_SHARE", "0.25", "engine.stream_share", 0.25),
    ("MAX_CONCURRENT_REQUESTS", "2", "engine.max_concurrent_requests", 2),
    ("MAX_QUEUED_REQUESTS", "5", "engine.max_queued_requests", 5),
    ("MAX_BATCH_BYTES", "6GB", "engine.max_batch_bytes", 6 * 10**9),
    ("PREFILL_STEP_SIZE", "256", "engine.prefill_step_size", 256),
    ("IMAGE_FEATURE_MAX_BYTES", "64MiB", "engine.image_feature_bytes", 64 * 2**20),
    ("SPECULATION", "8", "engine.drafts.max_num_tokens", 8),
    ("SPECULATION", "off", "engine.drafts.is_on", False),
    ("SPECULATION_EXACT", "true", "engine.drafts.is_exact", True),
    ("WIRED_LIMIT", "3GiB", "engine.wired_bytes", 3 * 2**30),
    ("WIRED_LIMIT", "AUTO", "engine.wired_bytes", None),
    ("API_KEY", "secret", "web.api_key", "secret"),
    ("API_KEY", "secret", "proxy.api_key", "secret"),
    ("API_KEYS_FILE", "/etc/keys.toml", "proxy.api_keys_file", "/etc/keys.toml"),
    ("ALLOWED_ORIGINS", "https://a.example, https://b.example", "web.allowed_origins",
     ("https://a.example", "https://b.example")),
    ("ALLOWED_ORIGINS", "https://a.example", "proxy.allowed_origins", ("https://a.example",)),
    ("ALLOWED_HOSTS", "box.local", "web.allowed_hosts", ("box.local",)),
    ("ALLOWED_HOSTS", "box.local", "proxy.allowed_hosts", ("box.local",)),
    ("MAX_REQUEST_BODY_BYTES", "1MiB", "web.max_body_bytes", 2**20),
    ("MAX_REQUEST_BODY_BYTES", "1MiB", "proxy.max_body_bytes", 2**20),
    ("MAX_CONNECTIONS", "17", "web.max_connections", 17),
    ("MAX_HEADER_BYTES", "2048", "web.max_header_bytes", 2048),
    ("HEADER_TIMEOUT_SECONDS", "3", "web.header_timeout_seconds", 3),
    ("BODY_TIMEOUT_SECONDS", "4", "web.body_timeout_seconds", 4),
    ("IDLE_CONNECTION_SECONDS", "6", "web.idle_timeout_seconds", 6),
    ("STATE_DIR", "/state", "proxy.state_dir", Path("/state")),
    ("RESPONSES_KEEP_DAYS", "0.5", "responses.keep_seconds", 43_200),
    ("ENABLE_REQUEST_LOGGING", "false", "seeing.writes_traces", False),
    ("LOG_ROOT", "/traces", "seeing.log_root", Path("/traces")),
    ("LOG_KEEP_DAYS", "3", "seeing.num_trace_days", 3),
    ("EXPLANATIONS_KEPT", "19", "seeing.num_explanations", 19),
    ("DASHBOARD_SHOW_TEXT", "true", "seeing.shows_text", True),
    ("VLM_CACHE_DEBUG", "true", "seeing.shows_image_cuts", True),
]  # fmt: skip

KEPT_ELSEWHERE = {
    # quantised KV and intervals, which depend on each other: below
    *("KV_BITS", "KV_QUANT_SCHEME", "KV_GROUP_SIZE", "QUANTIZED_KV_START"),
    *("EVICTION_INTERVAL_SECONDS", "KEEPALIVE_INTERVAL_SECONDS"),
    # rules, and pictures of named hosts: below too, for they have no value of their own to compare
    *("CACHE_RULE_POLICIES", "IMAGE_HOSTS", "IMAGE_FETCH_SECONDS", "IMAGE_FETCH_MAX_BYTES"),
    # where a request's KV is: tests/test_tenant_isolation.py
    "TENANT_ISOLATION",
    # what the process itself acts on: tests/app/, tests/warming/
    *("MODEL_PATH", "CHAT_TEMPLATE", "DRAFT_MODEL", "MODEL_FAMILY"),
    *("PROXY_STARTUP_WAIT_SECONDS", "WARM_NEXT_TURN", "PREWARM_PREFIXES", "BLAS_LIBRARY"),
    # between processes: tests/app/test_proxy_alone.py
    "PROXY_SECRET",
    # a server that others share: tests/app/test_shared_tier.py
    "REMOTE_CACHE_URL",
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that this machine says: no environment, no `.env` of the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(setting_key(name), raising=False)


@pytest.mark.parametrize(("key", "written", "place", "expected"), PLACES, ids=[f"{row[0]}-{row[2]}" for row in PLACES])
def test_a_setting_stands_where_it_acts(
    monkeypatch: pytest.MonkeyPatch, key: str, written: str, place: str, expected: object
) -> None:
    """Each value arrives in the room that acts on it, under the name it has there, and was not there before."""
    look = attrgetter(place)
    assert look(every_room(Settings())) != expected
    monkeypatch.setenv(key, written)
    assert look(every_room(Settings())) == expected


def test_no_setting_is_forgotten() -> None:
    """A setting that does nothing is a defect: whoever adds one says here where it acts."""
    assert {row[0] for row in PLACES} | KEPT_ELSEWHERE == {setting_key(name) for name in Settings.model_fields}
    assert not {row[0] for row in PLACES} & KEPT_ELSEWHERE


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_the_proxy_stays_on_loopback_and_finds_the_server(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Opening kvserve to a network opens LiteLLM to nobody."""
    monkeypatch.setenv("MLX_HOST", host)
    proxy = proxy_settings(Settings(), own_backend(Settings(), 1))
    assert (proxy.host, [each.url for each in proxy.backends]) == ("127.0.0.1", ["http://127.0.0.1:1"])


@pytest.mark.parametrize(
    ("host", "key", "is_warned"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "secret", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.168.1.5", "", True),
        ("box.local", "", True),
    ],
)
def test_an_open_server_is_warned_of(monkeypatch: pytest.MonkeyPatch, host: str, key: str, is_warned: bool) -> None:
    """An address of the network without a key: the start says what that means."""
    monkeypatch.setenv("MLX_HOST", host)
    monkeypatch.setenv("API_KEY", key)
    warnings = access_warnings(Settings())
    assert [f"MLX_HOST={host} without API_KEY" in warning for warning in warnings] == [True] * is_warned


def test_the_rules_get_their_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is switched off is not in the set; the others are."""
    before = {rule.name for rule in identity_settings(Settings()).rules.rules}
    assert "cch" in before
    monkeypatch.setenv("CACHE_RULE_POLICIES", "cch=off")
    assert {rule.name for rule in identity_settings(Settings()).rules.rules} == before - {"cch"}


def test_pictures_are_fetched_of_named_hosts_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name nothing fetches; with one both limits are the operator's."""
    assert remote_pictures(Settings()) is None
    for key, written in {"IMAGE_HOSTS": "nas", "IMAGE_FETCH_SECONDS": "7", "IMAGE_FETCH_MAX_BYTES": "1MB"}.items():
        monkeypatch.setenv(key, written)
    pictures = remote_pictures(Settings())
    assert pictures is not None
    assert (pictures.limits.seconds, pictures.limits.max_bytes) == (7, 10**6)


def test_the_engine_gets_the_settings_of_quantised_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four, under the names that users know."""
    assert engine_settings(Settings()).kv == KvSettings(None, "uniform", 64, 5000)
    for key, value in {
        "KV_BITS": "4",
        "KV_QUANT_SCHEME": "turboquant",
        "KV_GROUP_SIZE": "32",
        "QUANTIZED_KV_START": "0",
    }.items():
        monkeypatch.setenv(key, value)
    assert engine_settings(Settings()).kv == KvSettings(4, "turboquant", 32, 0)


def test_the_engine_gets_the_intervals_of_lifetimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be kept alive is looked for well within its interval, what is over at most every other one."""
    settings = engine_settings(Settings())
    assert (settings.cache.keep_alive_seconds, settings.cache.check_seconds, settings.idle_sweep_seconds) == (
        240,
        300,
        30,
    )
    monkeypatch.setenv("EVICTION_INTERVAL_SECONDS", "60")
    monkeypatch.setenv("KEEPALIVE_INTERVAL_SECONDS", "800")
    settings = engine_settings(Settings())
    assert (settings.cache.keep_alive_seconds, settings.cache.check_seconds, settings.idle_sweep_seconds) == (
        800,
        60,
        60,
    )
