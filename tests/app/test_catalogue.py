"""Names: which model each one means, and what is said of weights that are not here."""

from pathlib import Path

import pytest

from kvserve.app.catalogue import BUILT_IN_ALIASES, Catalogue, CatalogueSettings, Disk, ModelSource
from kvserve.errors import ModelNotFound

GEMMA = "mlx-community/gemma-3-12b-it-4bit"


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def is_model(folder: Path) -> bool:
    return (folder / "config.json").exists()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A default model beside two others, one of them below its publisher's folder; a folder that is no model."""
    for name in ("default", "small", "org/large"):
        model_folder(tmp_path / "models" / name)
    (tmp_path / "models" / "notes").mkdir()
    return tmp_path / "models"


def catalogue(root: Path, cached: dict[str, Path] | None = None, **settings: object) -> Catalogue:
    default = ModelSource("the/default", root / "default")
    values = CatalogueSettings(**{"folders": (root,), "default_names": ("openai/house", "house"), **settings})  # type: ignore[arg-type]
    return Catalogue(default, values, Disk((cached or {}).get, is_model))


@pytest.mark.parametrize(
    "name",
    [
        None,
        "the/default",
        "openai/the/default",
        "house",
        "openai/house",
        "default",
        "claude-opus-4-5",
        "gpt-5.2-codex",
        "o3",
        "local",
        "x" * 500,
        "../default",
        "",
        "/etc",
        "some/thing",
    ],
)
def test_what_nobody_knows_means_the_default_model(root: Path, name: str | None) -> None:
    """No name, its own names, Claude's and GPT's names, and nonsense, which is never taken as a path."""
    assert catalogue(root).source(name) == ModelSource("the/default", root / "default")


@pytest.mark.parametrize("name", ["claude-opus-4-5", "gpt-5", "local", "", "notes", "../small"])
def test_a_strict_server_refuses_what_nobody_knows(root: Path, name: str) -> None:
    """The error names both; an alias with a star lets such names in again."""
    strict = catalogue(root, is_strict=True)
    with pytest.raises(ModelNotFound, match="the/default") as raised:
        strict.source(name)
    assert repr(name) in str(raised.value) and raised.value.param == "model"
    assert strict.source(None) == strict.source("house") == strict.default
    mapped = catalogue(root, is_strict=True, aliases={"claude-*": "default"})
    assert mapped.source("claude-opus-4-5") == mapped.default
    assert mapped.source("small").folder == root / "small"


def test_folders_are_models_by_the_way_to_them(root: Path) -> None:
    """One or two levels below the operator's folder; with LiteLLM's provider before it too."""
    names = catalogue(root)
    assert names.source("small") == names.source("openai/small") == ModelSource("small", root / "small")
    assert names.source("org/large") == ModelSource("org/large", root / "org" / "large")
    assert names.source("large") == names.default, "a part of the way is no name"


def test_aliases_stand_for_models_for_paths_and_for_each_other(root: Path, tmp_path: Path) -> None:
    """Case does not count, the longest pattern does, and an exact name comes before a pattern and before a folder."""
    other = model_folder(tmp_path / "elsewhere")
    names = catalogue(
        root,
        aliases={
            "fast": "small",
            "haiku": "FAST",
            "claude-*": "org/large",
            "claude-haiku*": "haiku",
            "there": str(other),
            "me": "default",
            "circle": "ring",
            "ring": "circle",
        },
    )
    small, large = ModelSource("small", root / "small"), ModelSource("org/large", root / "org" / "large")
    assert [names.source(name) for name in ("fast", "Fast", "haiku", "claude-haiku-4-5")] == [small] * 4
    assert names.source("claude-opus-4-5") == large
    assert names.source("there").folder == other
    assert names.source("me") == names.default
    with pytest.raises(ModelNotFound):
        names.source("circle")


@pytest.mark.parametrize("alias", BUILT_IN_ALIASES)
def test_absent_weights_are_an_error_with_the_command_that_fetches_them(root: Path, alias: str) -> None:
    """For the alias, for its target, and behind an own alias; nothing is said of the default model instead."""
    target = BUILT_IN_ALIASES[alias]
    names = catalogue(root, aliases={"mine": alias})
    for name in (alias, alias.upper(), target, "mine"):
        with pytest.raises(ModelNotFound, match="never starts a download") as raised:
            names.source(name)
        assert str(raised.value).endswith(f"hf download {target}")
        assert (raised.value.status, raised.value.code) == (404, "model_not_found")


def test_weights_in_the_hubs_cache_are_served(root: Path, tmp_path: Path) -> None:
    """Under the alias and under their full name, once they are whole."""
    folder = tmp_path / "snapshot"
    names = catalogue(root, cached={GEMMA: folder})
    with pytest.raises(ModelNotFound):
        names.source("gemma-3")
    model_folder(folder)
    assert names.source("gemma-3") == names.source(GEMMA) == ModelSource(GEMMA, folder)


def test_the_default_model_is_one_model_under_every_name(root: Path) -> None:
    """Its folder among the operator's is the same model, not a second one to be loaded."""
    names = catalogue(root, aliases={"again": str(root / "default")})
    assert names.source("again") == names.source("default") == names.default
    assert [listing.name for listing in names.listings()].count("the/default") == 1


def test_the_list_has_what_can_be_served_and_nothing_else(root: Path, tmp_path: Path) -> None:
    """Models by their own names, then aliases of what is here with what they stand for."""
    folder = model_folder(tmp_path / "snapshot")
    names = catalogue(root, cached={GEMMA: folder}, aliases={"fast": "small", "gone": "nobody/nothing", "c-*": "small"})
    listed = [(listing.name, listing.alias_of) for listing in names.listings()]
    assert listed == [
        ("the/default", None),
        ("small", None),
        ("org/large", None),
        ("fast", "small"),
        ("gemma-3", GEMMA),
    ]
    for listing in names.listings():
        assert names.source(listing.name) == listing.source
