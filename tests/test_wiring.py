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
