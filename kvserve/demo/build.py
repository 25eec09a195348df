"""Builds one demo model as a Hugging Face folder: configuration, seeded weights, tokenizer, chat template.

It joins the tables of this room; `folder.py` owns the folder on disk. It knows nothing of serving.
"""

import hashlib
import importlib
import json
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from kvserve.demo.families import FAMILIES, SLOW, TINY, Family, ModelScale
from kvserve.demo.folder import make_folder
from kvserve.demo.vision_families import VISION_FAMILIES, media_ids
from kvserve.demo.vocabulary import Vocabulary, train, write_tokenizer
from kvserve.demo.weights import Array, TokenRoles, draw_parameter
from kvserve.errors import ModelLoadError

__all__ = ["FAMILIES", "SLOW", "TINY", "VISION_FAMILIES", "ModelScale", "build_digest", "build_model"]

ALL_FAMILIES = FAMILIES | VISION_FAMILIES
TEMPLATE_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a demo model."""

    family: str
    seed: int
    scale: ModelScale
    context_length: int
    answer_tokens: int | None

    def digest(self) -> str:
        """Hex digest over the arguments and the sources of this room: the folder's format version."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in sorted(Path(__file__).parent.rglob("*")):
            if source.suffix in {".py", ".jinja", ".toml", ".txt"}:
                digest.update(source.read_bytes())
        return digest.hexdigest()


def build_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    scale: ModelScale = TINY,
    context_length: int = 131072,
    answer_tokens: int | None = 150,
) -> Path:
    """Make the folder `directory` hold a random model of `family`, and return it.

    A complete folder of the same recipe is kept as it is, which takes about a millisecond; an older or damaged one of
    ours is replaced.

    Args:
        family: a key of `FAMILIES` or `VISION_FAMILIES`.
        seed: of the weights; the same arguments give byte-identical weights.
        context_length: the model's own limit, in tokens.
        answer_tokens: about how many tokens an answer has before the model ends it, at any temperature (on average, for
            qwen3; in other families it may be several times more or less); None: it never ends by itself.

    Raises:
        ModelLoadError: the family is unknown, or the folder holds something that this builder did not make.
    """
    if family not in ALL_FAMILIES:
        raise ModelLoadError(f"There is no demo family {family!r}; there are {', '.join(ALL_FAMILIES)}.")
    recipe = Recipe(family, seed, scale, context_length, answer_tokens)
    return make_folder(directory, recipe.digest(), partial(_write_folder, recipe))


def build_digest(family: str, **arguments: Any) -> str:
    """The digest that `build_model` would mark the folder with, given its keyword arguments."""
    defaults: dict[str, Any] = {"seed": 0, "scale": TINY, "context_length": 131072, "answer_tokens": 150}
    return Recipe(family, **(defaults | arguments)).digest()


def _write_folder(recipe: Recipe, building: Path) -> None:
    family = ALL_FAMILIES[recipe.family]
    vocabulary = train(family.control, recipe.scale.num_text_tokens)
    config = _configuration(family, recipe, vocabulary)
    _write_json(building / "config.json", config)
    _write_json(building / "generation_config.json", {"eos_token_id": vocabulary.end_ids(), "do_sample": True})
    write_tokenizer(vocabulary, building, recipe.context_length)
    shutil.copyfile(TEMPLATE_FOLDER / f"{family.template or family.name}.jinja", building / "chat_template.jinja")
    for name, content in family.processor_files.items():
        _write_json(building / name, dict(content))
    save_file(_weights(family, recipe, config, vocabulary), building / "model.safetensors", metadata={"format": "mlx"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _configuration(family: Family, recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    control = vocabulary.control
    config = family.configure(recipe.scale, vocabulary.num_rows, recipe.context_length)
    if family.processor_files:
        config |= media_ids(control, vocabulary)
    return config | {
        "architectures": [family.architecture],
        "eos_token_id": vocabulary.end_ids(),
        "pad_token_id": vocabulary.token_id(control.pad),
        "bos_token_id": None if control.bos is None else vocabulary.token_id(control.bos),
        "dtype": "float32",
    }


def _weights(family: Family, recipe: Recipe, config: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Array]:
    style = family.style(recipe.scale)
    roles = _token_roles(vocabulary, recipe)
    shapes = _parameter_shapes(config)
    names = [name for name in shapes if not (style.is_tied and name.endswith("lm_head.weight"))]
    return {name: draw_parameter(name, shapes[name], style, roles, recipe.seed) for name in names}


def _parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the architecture declares them; its own initial values stay lazy and are never computed."""
    # The argument classes of some architectures edit the dictionaries that they are given.
    own = json.loads(json.dumps(config))
    if "vision_config" in config:
        from mlx_vlm.utils import update_module_configs  # it takes seconds, and only these families need it

        architecture = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
        modules = ["text", "vision"]
        whole = architecture.ModelConfig.from_dict(own)
        arguments = update_module_configs(whole, architecture, own, modules)  # type: ignore[no-untyped-call]
    else:
        architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        arguments = architecture.ModelArgs.from_dict(own)
    model = architecture.Model(arguments)
    return {name: tuple(value.shape) for name, value in dict(tree_flatten(model.parameters())).items()}


def _token_roles(vocabulary: Vocabulary, recipe: Recipe) -> TokenRoles:
    """Sort the ids: control tokens and bytes that are no text are improbable, words likely; sentence ends may close."""
    tokenizer = vocabulary.tokenizer
    control_ids = {vocabulary.token_id(token) for token in vocabulary.control.all}
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()) if i not in control_ids}
    spoken = {i: text for i, text in texts.items() if text.isspace() or _is_printable(text)}
    closing = [i for i, text in spoken.items() if text.endswith((".", "!", "?"))]
    return TokenRoles(
        improbable_ids=tuple(i for i in range(vocabulary.num_rows) if i not in spoken),
        likely_ids=tuple(i for i, text in spoken.items() if _is_word(text)),
        end_id=vocabulary.end_ids()[0],
        closing_ids=() if recipe.answer_tokens is None else tuple(closing),
        closing_share=0.0 if recipe.answer_tokens is None else 1 / recipe.answer_tokens,
    )


def _is_printable(text: str) -> bool:
    return text.isprintable() and "\ufffd" not in text


def _is_word(text: str) -> bool:
    """A whole word rather than a piece of one: it brings its own space."""
    return text.startswith(" ") and text.strip().isalpha() and (len(text) > 3 or text in {" a", " I", " it", " is"})
