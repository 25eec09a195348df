"""What the banner says of the machine and of other models."""

from dataclasses import replace

import mlx.core as mx

from kvserve.app.banner import MAX_NAMED_MODELS, device_line, models_line
from kvserve.engine.device import DeviceFacts, device_facts
from kvserve.protocols.model_cards import ModelCard


def test_the_device_is_named_with_the_memory_that_mlx_may_use() -> None:
    """Metal is said where there is any; a device without a name is what it is."""
    mac = DeviceFacts("gpu", has_metal=True, name="Apple M4 Max", memory_bytes=27_900_000_000)
    assert device_line(mac) == "Apple M4 Max (GPU, Metal), 27.9 GB of memory"
    linux = DeviceFacts("cpu", has_metal=False, name=None, memory_bytes=8_000_000_000)
    assert device_line(linux) == "CPU, 8.0 GB of memory"
    here = device_line(device_facts())
    assert ("Metal" in here) == mx.metal.is_available()
    assert device_line(replace(mac, kind="cpu")) == "Apple M4 Max (CPU), 27.9 GB of memory"


def test_other_models_are_named_and_counted() -> None:
    """Not the one that is served, nor other names of one that is named."""
    cards = [ModelCard("a", 0), ModelCard("a-fast", 0, alias_of="a")]
    assert models_line("a", cards) is None
    assert models_line("a", [*cards, ModelCard("big", 0, alias_of="org/big")]) == "big on demand"
    others = [ModelCard(f"m{number}", 0) for number in range(MAX_NAMED_MODELS + 2)]
    assert models_line("a", [*cards, *others[:2]]) == "m0, m1 on demand"
    assert models_line("a", [*cards, *others]) == "m0, m1, m2 and 2 more on demand"
