"""Tiny real models for the tests: `tiny_model(family)` builds each once per machine and hands out its folder.

Folders lie below the system's temporary directory, named by a digest of the builder's sources and arguments, so an
edit of the builder never meets an old model and parallel test processes share the work.
"""

import getpass
import tempfile
from pathlib import Path
from typing import Any

from kvserve.demo.build import build_digest, build_model
from kvserve.demo.families import TINY, ModelScale
from tests.pipelined import BAILING, bailing_model
from tests.recurrent import stand_in

TWO_LAYERS = ModelScale(num_layers=2)
"""One layer of each kind that a family has, at half the price of the demo's four: enough for most laws of caches; that
layers of one kind are told apart is shown with `DEEP` ones."""

DEEP = "deep-"
"""Before a family's name: the demo's own four layers, several of which keep the same kind of state."""

DEEP_ONES = (DEEP + "qwen3_5", DEEP + "gemma3")
"""Several recurrent states in a row, several windows."""


def tiny_model(family: str, *, answer_tokens: int | None = None, **arguments: Any) -> Path:
    """The folder of a tiny model, of the demo's families or `BAILING`; keyword arguments as in `build_model`.

    Unless `answer_tokens` is given the model never ends an answer by itself, so that tests decide on the length.
    """
    stand_in()
    if family == BAILING:
        return bailing_model()
    scale = TINY if family.startswith(DEEP) else TWO_LAYERS
    family = family.removeprefix(DEEP)
    arguments = {"scale": scale, "answer_tokens": answer_tokens} | arguments
    root = Path(tempfile.gettempdir()) / f"kvserve-test-models-{getpass.getuser()}"
    root.mkdir(mode=0o700, exist_ok=True)
    return build_model(family, root / f"{family}-{build_digest(family, **arguments)[:16]}", **arguments)
