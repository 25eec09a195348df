"""What MLX computes on here. It loads nothing and computes nothing."""

from dataclasses import dataclass

import mlx.core as mx

from kvserve.engine.memory import memory_bytes


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`kind` is what MLX computes on unless it is told otherwise, `name` what the device calls itself, if it does;
    `memory_bytes` what MLX may use of the machine's memory."""

    kind: str
    has_metal: bool
    name: str | None
    memory_bytes: int


def device_facts() -> DeviceFacts:
    """The default device."""
    info = mx.device_info()
    name = info.get("device_name")
    kind = "gpu" if mx.default_device().type == mx.gpu else "cpu"
    return DeviceFacts(kind, mx.metal.is_available(), str(name) if name else None, memory_bytes())
