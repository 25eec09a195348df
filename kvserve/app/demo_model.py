"""Which model `--demo` serves, and where it lies: the one that talks, the tiny random one where that was asked for or
nothing can be fetched. It joins the demo's builders and the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvserve.demo.build import build_model
from kvserve.demo.folder import remove_folder
from kvserve.demo.gguf import Precision
from kvserve.demo.smollm2 import LICENCE, WHEEL, build_smollm2, remove_smollm2
from kvserve.errors import ModelLoadError, ModelUnreachable
from kvserve.observe.terminal import Terminal, size_text
from kvserve.settings.flags import DemoKind
from kvserve.settings.start_checks import DEMO_NAMES


@dataclass(frozen=True, slots=True)
class DemoModel:
    """What is served as the demo. `warning` says why it is not what was asked for, if it is not."""

    kind: DemoKind
    folder: Path
    warning: str | None = None

    @property
    def name(self) -> str:
        return DEMO_NAMES[self.kind]


def demo_model(
    kind: DemoKind, state_dir: Path, environment: Mapping[str, str], terminal: Terminal, *, is_fast: bool
) -> DemoModel:
    """Fetch, convert or build what is not there yet. `is_fast`: a BLAS multiplies float32 faster than MLX multiplies 4
    bits. Raises ModelLoadError."""
    warning = None
    try:
        if kind == "smollm2":
            try:
                return DemoModel(kind, _smollm2(state_dir, environment, terminal, "float32" if is_fast else "4-bit"))
            except ModelUnreachable as error:
                warning = (
                    f"{error} Is this machine offline, or its package index without it? Instead of a model that talks "
                    "this is the tiny one of --demo tiny; the next start tries again."
                )
                terminal.note(warning)
        return DemoModel("tiny", build_model("qwen3", state_dir / DEMO_NAMES["tiny"]), warning)
    except OSError as error:
        raise ModelLoadError(f"The demo's model could not be written to {state_dir}: {error}") from None


def _smollm2(state_dir: Path, environment: Mapping[str, str], terminal: Terminal, precision: Precision) -> Path:
    state_dir.mkdir(parents=True, exist_ok=True)
    if not (state_dir / WHEEL.file_name).exists():
        terminal.note(f"The demo's model: {LICENCE} ({size_text(WHEEL.num_bytes)}); --demo-remove frees the space.")
    return build_smollm2(state_dir, DEMO_NAMES["smollm2"], precision, environment, terminal.working)


def remove_demo(state_dir: Path, terminal: Terminal) -> None:
    """Remove what `demo_model` made, and say how much that was."""
    num_bytes = remove_smollm2(state_dir, DEMO_NAMES["smollm2"]) + remove_folder(state_dir / DEMO_NAMES["tiny"])
    said = f"Removed the demo's models from {state_dir}: {size_text(num_bytes)}."
    terminal.note(said if num_bytes else f"There is no demo model in {state_dir}.")
