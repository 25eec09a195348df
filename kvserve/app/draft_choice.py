"""Which model drafts for another one: the one that DRAFT_MODEL names, where both have the same tokenizer. It reads
files, and loads nothing but tokenizers.
"""

from collections.abc import Callable
from pathlib import Path

from kvserve.app.catalogue import ModelSource
from kvserve.config import Settings
from kvserve.engine.model import check_folder
from kvserve.engine.model_files import check_weights, weight_file_bytes
from kvserve.errors import ModelLoadError
from kvserve.prompt.same_tokenizer import first_difference
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer


def draft_folder(
    settings: Settings, source: ModelSource, tokenizer: Tokenizer, note: Callable[[str], None]
) -> Path | None:
    """The folder of the model that drafts for this one; None where none does, which `note` hears the reason of.

    Raises ModelLoadError for one that cannot draft for MODEL_PATH's model; other models are served without it.
    """
    if (folder := settings.draft_model) is None:
        return None
    if settings.speculation == "off":
        note("DRAFT_MODEL does nothing: SPECULATION=off.")
        return None
    check_folder(folder)
    check_weights(folder)
    difference = first_difference(tokenizer, load_tokenizer(folder))
    if difference is None:
        return folder
    reason = f"it has another tokenizer than {source.name}: {difference}"
    if source.is_default:
        raise ModelLoadError(
            f"DRAFT_MODEL={str(folder)!r} cannot draft: {reason}. Take a smaller model of the same family."
        )
    note(f"DRAFT_MODEL does not draft for {source.name}: {reason}.")
    return None


def all_weight_file_bytes(settings: Settings, folder: Path) -> int:
    """Bytes of the weights that are loaded with a model, as its files tell."""
    drafts = settings.draft_model if settings.speculation != "off" else None
    return weight_file_bytes(folder) + (weight_file_bytes(drafts) if drafts is not None else 0)
