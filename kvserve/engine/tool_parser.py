"""The tool-call parser that mlx-lm knows for a model, as plain functions: `output/` reads text and imports no MLX."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer


@dataclass(frozen=True, slots=True)
class LibraryToolParser:
    """A call stands between the tags; `parse` takes the text between them and the tools in OpenAI's form."""

    open_tag: str
    close_tag: str
    parse: Callable[[str, list[dict[str, object]] | None], Any]


def library_tool_parser(folder: Path, template: str | None = None) -> LibraryToolParser | None:
    """What mlx-lm infers from a model's chat template and vocabulary; None where it finds no form of calls. `template`
    is the source of the template, where it is not the folder's own."""
    given = {"chat_template": template} if template is not None else None
    tokenizer = load_tokenizer(folder, given)  # type: ignore[no-untyped-call]
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is None:
        return None
    return LibraryToolParser(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser)
