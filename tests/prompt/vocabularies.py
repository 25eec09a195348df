"""Real vocabularies with the chat templates of their families, and real templates with a small vocabulary, where the
shared test data are."""

import lzma
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import tokenizers

from benchmarks.recordings import shared_folder
from kvserve.prompt.tokenizer import load_tokenizer
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import Family, learned_family

REAL = {
    "qwen3": ("qwen3", "qwen3"),
    "qwen3_5": ("qwen3", "qwen3_5"),
    "qwen3_coder": ("qwen3", "qwen3_coder"),
    "gemma3": ("gemma3", "gemma3"),
    "gpt_oss": ("gptoss", "gpt_oss"),
    "llama3_1": ("llama3_1", "llama3_1"),
    "deepseek_v3_1": ("deepseek_v3", "deepseek_v3_1"),
}
"""(vocabulary, template) by the template's name."""


@cache
def real_family(name: str) -> Family:
    """Skips where the test data are not there."""
    shared = shared_folder()
    if shared is None or not (shared / "tokenizers").is_dir():
        pytest.skip("the real vocabularies are not here")
    vocabulary, source = REAL[name]
    with tempfile.TemporaryDirectory(prefix="kvserve-vocabulary-") as scratch:
        folder = Path(scratch)
        packed = shared / "tokenizers" / vocabulary
        (folder / "tokenizer.json").write_bytes(lzma.decompress((packed / "tokenizer.json.xz").read_bytes()))
        shutil.copyfile(packed / "tokenizer_config.json", folder / "tokenizer_config.json")
        shutil.copyfile(shared / "templates" / f"{source}.jinja", folder / "chat_template.jinja")
        tokenizer = load_tokenizer(folder)
    return learned_family(name, tokenizer)


SHARED = shared_folder()
TEMPLATES = sorted(file.stem for file in (SHARED / "templates").glob("*.jinja")) if SHARED is not None else []
_LOOKS_LIKE_A_TOKEN = re.compile(r"<[|｜]?[^<>\s'\"{}]{1,30}[|｜]?>|\[/?[A-Z_]{2,20}\]")


def tokens_in(source: str) -> list[str]:
    """All that looks like a token in a template's source."""
    return sorted(set(_LOOKS_LIKE_A_TOKEN.findall(source)))


@cache
def template_family(name: str) -> Family:
    """A real template with a small vocabulary, in which all that looks like a token in its source is one."""
    assert SHARED is not None
    source = (SHARED / "templates" / f"{name}.jinja").read_text("utf-8")
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(source))
    return learned_family(name, tokenizer_of(backend, source))
