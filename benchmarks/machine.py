"""What a table was measured on, in the line at its head."""

import os
import platform
from importlib.metadata import version

BUSY_LOAD_PER_CORE = 0.25


def machine(load_before: tuple[float, float, float]) -> str:
    """What was measured on, and whether others were at work on it: then a ratio says little."""
    num_cores = os.cpu_count() or 1
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    line = f"{platform.system()} {platform.machine()}, {num_cores} cores, {versions}; "
    line += f"load average {load_before[0]:.2f} before, {os.getloadavg()[0]:.2f} after."
    if load_before[0] > BUSY_LOAD_PER_CORE * num_cores:
        line += " The machine was busy before the first benchmark: measure again when it is not."
    return line
