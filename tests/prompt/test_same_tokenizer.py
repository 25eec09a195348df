"""Two tokenizers are the same where every token, every added token and every text has the same ids; the first
difference is named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve.prompt.same_tokenizer import first_difference
from kvserve.prompt.tokenizer import load_tokenizer
from tests.models import tiny_model


def _of(family: str, folder: Path, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """A folder with a family's tokenizer, edited."""
    folder.mkdir()
    for path in tiny_model(family).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    edit(content)
    file.write_text(json.dumps(content), "utf-8")
    return folder


def _swapped(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    [first, second, *_] = [token for token, id in sorted(vocabulary.items(), key=lambda item: item[1]) if id >= 400]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def _with_added(content: dict[str, Any]) -> None:
    added = {"id": 5000, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append({**added, "normalized": False, "special": True})


def _stripping(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["lstrip"] = True


def _unmerged(content: dict[str, Any]) -> None:
    content["model"]["merges"].clear()


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    own, other = load_tokenizer(tiny_model("qwen3")), load_tokenizer(_of("qwen3", tmp_path / "copy"))
    assert first_difference(own, other) is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_swapped, r"the token '.+' has the id \d+ here and \d+ there"),
        (_with_added, r"the token '<new>' has no id here and \d+ there"),
        (_stripping, r"the added token '.+' is 0? ?.*special.* here and .*special, lstrip.* there"),
        (_unmerged, r"['\"]Hello.*['\"] is \[.+\] \(behind \d+ ids\) here and \[.+\] \(behind \d+ ids\) there"),
    ],
)
def test_the_first_difference_is_named(edit: Callable[[dict[str, Any]], object], words: str, tmp_path: Path) -> None:
    own, other = load_tokenizer(tiny_model("qwen3")), load_tokenizer(_of("qwen3", tmp_path / "other", edit))
    assert own.vocab_size == other.vocab_size or edit is _with_added, "their number tells nothing"
    found = first_difference(own, other)
    assert found is not None
    assert re.match(words, found), found
