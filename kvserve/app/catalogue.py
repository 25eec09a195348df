"""What can be served under which name: the default model, aliases, and folders on this machine.

It decides by names and by files that are there; it fetches nothing, loads nothing and knows no request.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvserve.errors import ModelNotFound

BUILT_IN_ALIASES: Mapping[str, str] = {
    "gemma-3": "mlx-community/gemma-3-12b-it-4bit",
    "gpt-oss-20b": "mlx-community/gpt-oss-20b-MXFP4-Q4",
    "qwen2.5": "mlx-community/Qwen2.5-14B-Instruct-4bit",
    "qwen2.5-coder": "mlx-community/Qwen2.5-Coder-14B-Instruct-4bit",
    "llama-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
}
DEFAULT = "default"
"""As an alias's target: the default model, whichever it is."""

MLX_PUBLISHER = "mlx-community/"
"""Names that begin so mean these very weights and nothing else, also where they are absent."""

MAX_DEPTH = 2
"""So many levels below a folder models are looked for: a publisher's folder, and the model's."""

_PROVIDER = "openai/"
_FOLDER_NAME = re.compile(r"(?!\.{1,2}$)[^/\0]{1,200}")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FETCH = ".venv/bin/hf download"


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """A chat template that the operator gives, and where it was read."""

    path: Path
    source: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: the name that its answers carry, its folder, and the chat template that stands for the
    folder's, if one does. `is_default`: it is MODEL_PATH's, or the demo's."""

    name: str
    folder: Path
    chat_template: TemplateFile | None = None
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of what can be served; `alias_of` is the model's own name where the line is an alias."""

    name: str
    source: ModelSource
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogueSettings:
    """What the operator decides: own aliases (a name may end with `*`), folders whose sub-folders are models, further
    names of the default model, and whether a name that nobody knows is refused."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    default_names: tuple[str, ...] = ()
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """How folders are looked at: the cached folder of a hub name, if any, and whether a folder holds a model."""

    cached_folder: Callable[[str], Path | None]
    is_model_folder: Callable[[Path], bool]


class Catalogue:
    """The names of one server. Immutable; it looks at the disk anew each time, so that models may come and go."""

    def __init__(self, default: ModelSource, settings: CatalogueSettings, disk: Disk) -> None:
        self.default = default
        self._settings = settings
        self._disk = disk
        self._default_names = frozenset((default.name, *settings.default_names))
        self._exact = {name.lower(): target for name, target in settings.aliases.items() if not name.endswith("*")}
        self._patterns = {
            name.lower().removesuffix("*"): target for name, target in settings.aliases.items() if name.endswith("*")
        }

    def source(self, name: str | None) -> ModelSource:
        """The model that this name means; the default one for no name, and for a name that nobody knows.

        Raises ModelNotFound for known names whose weights are not on this machine, naming the command that fetches
        them, and in strict mode for names that nobody knows.
        """
        if name is None or name in self._default_names:
            return self.default
        plain = name.removeprefix(_PROVIDER)
        if plain in self._default_names:
            return self.default
        if (found := self._find(plain)) is not None:
            return self._unified(found)
        if self._settings.is_strict:
            raise ModelNotFound(f"The model {name!r} is not served here; {self.default.name!r} is.", param="model")
        return self.default

    def listings(self) -> list[Listing]:
        """What can be served: the default model, models in the operator's folders, then aliases of what is there."""
        sources = {self.default.name: self.default}
        for source in self._folder_models():
            unified = self._unified(source)
            sources.setdefault(unified.name, unified)
        aliases = {**BUILT_IN_ALIASES, **self._exact}
        targets = {alias: self._target(target) for alias, target in aliases.items() if alias not in sources}
        found = {alias: self._unified(source) for alias, source in targets.items() if source is not None}
        return [
            *(Listing(name, source) for name, source in sources.items()),
            *(Listing(alias, source, alias_of=source.name) for alias, source in sorted(found.items())),
        ]

    # --- names --------------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> ModelSource | None:
        """Own aliases first, then what is on the disk under this very name, then built-in aliases, then patterns."""
        alias = name.lower()
        if alias in self._exact:
            return self._alias(name, self._exact[alias])
        if (source := self._on_disk(name)) is not None:
            return source
        if alias in BUILT_IN_ALIASES:
            return self._alias(name, BUILT_IN_ALIASES[alias])
        fitting = [beginning for beginning in self._patterns if alias.startswith(beginning)]
        if fitting:
            return self._alias(name, self._patterns[max(fitting, key=len)])
        if name.startswith(MLX_PUBLISHER):
            raise _absent(name, name)
        return None

    def _alias(self, alias: str, target: str) -> ModelSource:
        source = self._target(target)
        if source is None:
            raise _absent(alias, self._end_of_chain(target))
        return source

    def _target(self, target: str) -> ModelSource | None:
        """What an alias stands for: the default model, a folder by its path, or a name of what is on the disk."""
        target = self._end_of_chain(target)
        if target == DEFAULT or target in self._default_names:
            return self.default
        if target.startswith(("/", "~", ".")):
            folder = Path(target).expanduser()
            return ModelSource(target, folder) if self._disk.is_model_folder(folder) else None
        return self._on_disk(target)

    def _end_of_chain(self, target: str) -> str:
        """An alias may stand for another one; in a circle each stands for itself."""
        seen: set[str] = set()
        while (alias := target.lower()) in self._exact and alias not in seen:
            seen.add(alias)
            target = self._exact[alias]
        return BUILT_IN_ALIASES.get(target.lower(), target) if self._on_disk(target) is None else target

    def _on_disk(self, name: str) -> ModelSource | None:
        """A model of the operator's folders or of the hub's cache. A client's name never leads out of them."""
        parts = name.split("/")
        if len(parts) <= MAX_DEPTH and all(_FOLDER_NAME.fullmatch(part) for part in parts):
            for root in self._settings.folders:
                if self._disk.is_model_folder(root.joinpath(*parts)):
                    return ModelSource(name, root.joinpath(*parts))
        if _HUB_NAME.fullmatch(name) is None:
            return None
        folder = self._disk.cached_folder(name)
        return ModelSource(name, folder) if folder is not None and self._disk.is_model_folder(folder) else None

    def _folder_models(self) -> Iterator[ModelSource]:
        """Models below the operator's folders, named by the way there; the first of a name counts."""
        seen: set[str] = set()
        for root in self._settings.folders:
            for depth in range(1, MAX_DEPTH + 1):
                for config in sorted(root.glob("*/" * depth + "config.json")):
                    name = config.parent.relative_to(root).as_posix()
                    if name not in seen and self._disk.is_model_folder(config.parent):
                        seen.add(name)
                        yield ModelSource(name, config.parent)

    def _unified(self, source: ModelSource) -> ModelSource:
        """The default model is one model, under whichever name it was found."""
        return self.default if source.folder.resolve() == self.default.folder.resolve() else source


def _absent(name: str, target: str) -> ModelNotFound:
    what = f"{name!r}" if name == target else f"{name!r} ({target})"
    begins = f"The weights of {what} are not on this machine"
    if _HUB_NAME.fullmatch(target) is None:
        return ModelNotFound(f"{begins}: there is no such model folder.", param="model")
    return ModelNotFound(
        f"{begins}, and a request never starts a download. Fetch them first: {_FETCH} {target}", param="model"
    )
