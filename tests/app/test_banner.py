"""What the banner says of the machine and of other models."""

import mlx.core as mx

from kvserve.app.banner import MAX_NAMED_MODELS, device_line, models_line
from kvserve.engine.device import DeviceFacts, device_facts
from kvserve.protocols.model_cards import ModelCard


def test_the_device_is_named_with_the_memory_that_mlx_may_use() -> None:
    """Metal is said where there is any; a device without a name is what it is."""
    mac = DeviceFacts("gpu", has_metal=True, name="Apple M4 Max", memory_bytes=27_900_000_000)
    assert device_line(mac) == "Apple M4 Max (GPU, Metal), 27.9 GB of memory for models and KV"
    linux = DeviceFacts("cpu", has_metal=False, name=None, memory_bytes=8_000_000_000)
    assert device_line(linux) == "CPU, 8.0 GB of memory for models and KV"
    here = device_line(device_facts())
    assert ("Metal" in here) == mx.metal.is_available()


def test_other_models_are_named_and_counted() -> None:
    """Not the one that is served, nor other names of one."""
    cards = [ModelCard("a", 0), ModelCard("a-fast", 0, alias_of="a")]
    assert models_line("a", cards) is None
    others = [ModelCard(f"m{number}", 0) for number in range(MAX_NAMED_MODELS + 2)]
    assert models_line("a", [*cards, *others[:2]]) == "m0, m1 on demand"
    assert models_line("a", [*cards, *others]) == "m0, m1, m2 and 2 more on demand"
