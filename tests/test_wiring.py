"""Settings reach the room that acts on them."""

import pytest

from kvserve.config import Settings, setting_key
from kvserve.engine.quantised import KvSettings
from kvserve.wiring import engine_settings


def test_the_engine_gets_the_settings_of_quantised_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four, under the names that users know."""
    for name in Settings.model_fields:
        monkeypatch.delenv(setting_key(name), raising=False)
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
    for name in Settings.model_fields:
        monkeypatch.delenv(setting_key(name), raising=False)
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
