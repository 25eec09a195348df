"""Model folders of drawn templates: a small real tokenizer with the template's own tokens, the template, no weights.

It knows files and tokens; the templates are `drawn_templates.py`'s.
"""

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers, processors

from benchmarks.template_model import Model, load_model
from benchmarks.template_reference import Reference
from kvserve.demo.vocabulary import DemoControlTokens, train
from tests.prompt.drawn_templates import Drawn

_NO_TOKENS = DemoControlTokens((), (), (), "")
_NUM_TEXT_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Served:
    """A drawn template as the server has it, and as transformers has it."""

    drawn: Drawn
    model: Model
    reference: Reference


def serve(drawn: Drawn) -> Served:
    """Raises what the server raises at a start."""
    with tempfile.TemporaryDirectory(prefix="kvserve-drawn-") as scratch:
        folder = Path(scratch)
        write_folder(folder, drawn)
        return Served(drawn, load_model(folder), Reference(folder))


def write_folder(folder: Path, drawn: Drawn) -> None:
    """Fill an empty folder."""
    backend = _backend(drawn)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    special = {"bos_token": drawn.bos} if drawn.bos else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": drawn.stops[0], **special}
    config["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = [backend.token_to_id(token) for token in drawn.stops]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(drawn.source, encoding="utf-8")


def _backend(drawn: Drawn) -> tokenizers.Tokenizer:
    state = json.loads(_trained())
    for text in drawn.merged:
        _join(state["model"], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    # Some vocabularies join what stands on both sides of a border of words, a tag's last letter and a line end say.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not drawn.joins_words)
    kinds = [(text, kind) for text, kind in drawn.tokens if kind != "text"]
    backend.add_tokens([AddedToken(text, special=kind == "special", normalized=False) for text, kind in kinds])
    if drawn.bos:
        pair = (drawn.bos, backend.token_to_id(drawn.bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{drawn.bos} $A", special_tokens=[pair])
    return backend


@cache
def _trained() -> str:
    return str(train(_NO_TOKENS, _NUM_TEXT_TOKENS).tokenizer.to_str())


def _join(model: dict[str, Any], pieces: list[tuple[str, tuple[int, int]]]) -> None:
    """Make the whole text one token, its letters joined from the left."""
    letters = "".join(piece for piece, _ in pieces)
    joined = letters[:1]
    for letter in letters[1:]:
        pair, joined = [joined, letter], joined + letter
        if joined not in model["vocab"]:
            model["vocab"][joined] = len(model["vocab"])
        if pair not in model["merges"]:
            model["merges"].append(pair)
