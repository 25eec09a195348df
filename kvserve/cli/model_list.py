"""`kvserve models`: what can be served from this machine. It reads configurations and sizes of files, loads nothing."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kvserve.app.catalogue import Catalogue, CatalogueSettings, Disk, Listing, ModelSource
from kvserve.cli.output import json_option, printable_in, show
from kvserve.config import Settings, load_launch
from kvserve.engine.hub import download
from kvserve.engine.model_files import cached_folder, check_weights, hub_models, is_model_folder, weight_file_bytes
from kvserve.errors import ModelLoadError
from kvserve.settings.kinds import aliases_in
from kvserve.settings.model_config import own_context_limit, read_config
from kvserve.settings.start_checks import local_folder, model_folders

if TYPE_CHECKING:
    from rich.table import Table

type Where = Literal["MODEL_PATH", "MODEL_FOLDERS", "hub cache", "alias"]


@dataclass(frozen=True, slots=True)
class ServableModel:
    """One name: `folder` None where it is not on this machine yet, `fault` says why it cannot be loaded as it is.
    `weight_bytes` are those of its files, `context_tokens` for how long it was made (None: its config does not say)."""

    name: str
    where: Where
    alias_of: str | None = None
    folder: Path | None = None
    architecture: str | None = None
    weight_bytes: int = 0
    context_tokens: int | None = None
    fault: str | None = None


@click.command()
@click.option("--fetch", metavar="NAME", help="First download this model of the hub, or what is missing of it.")
@json_option
def models(fetch: str | None, as_json: bool) -> None:
    """Models that a request may name here, with the size of their weights: MODEL_PATH, those of MODEL_FOLDERS and of
    the hub's cache, and aliases.

    A model of the cache that is not MODEL_PATH is served under its hub name. With --fetch the one that was fetched is
    told alone.
    """
    settings = load_launch(("--no-proxy",)).settings
    found = [_looked_at(fetch, download(fetch), "hub cache")] if fetch is not None else list(_found(settings))
    show([asdict(each) for each in found], as_json, lambda: _table(found))


def _found(settings: Settings) -> Iterator[ServableModel]:
    """The default model, those of folders, those of the cache, then aliases; each folder once. Raises ModelLoadError
    for a MODEL_PATH that is no folder and no name."""
    folder = local_folder(settings.model_path) or cached_folder(settings.model_path)
    default = ModelSource(settings.model_path, folder or Path(settings.model_path), is_default=True)
    listings, seen = _catalogue(settings, default).listings(), set()
    for listing in listings:
        if listing.alias_of is None:
            seen.add(listing.source.folder.resolve())
            yield _listed(listing)
    for name, cached in hub_models():
        if cached.resolve() not in seen:
            yield _looked_at(name, cached, "hub cache")
    for listing in listings:
        if listing.alias_of is not None:
            yield ServableModel(listing.name, "alias", alias_of=listing.alias_of)


def _catalogue(settings: Settings, default: ModelSource) -> Catalogue:
    """The names of a server with these settings. Raises SettingError for a folder that is not there."""
    names = CatalogueSettings(aliases=aliases_in(settings.model_aliases), folders=model_folders(settings.model_folders))
    return Catalogue(default, names, Disk(cached_folder, is_model_folder))


def _listed(listing: Listing) -> ServableModel:
    source = listing.source
    if source.is_default and not source.folder.is_dir():
        return ServableModel(listing.name, "MODEL_PATH", fault="not on this machine: a start downloads it")
    return _looked_at(listing.name, source.folder, "MODEL_PATH" if source.is_default else "MODEL_FOLDERS")


def _looked_at(name: str, folder: Path, where: Where) -> ServableModel:
    try:
        config = read_config(folder)
        check_weights(folder)
    except (ModelLoadError, OSError) as error:
        return ServableModel(name, where, folder=folder, weight_bytes=weight_file_bytes(folder), fault=str(error))
    return ServableModel(
        name,
        where,
        folder=folder,
        architecture=config["model_type"],
        weight_bytes=weight_file_bytes(folder),
        context_tokens=own_context_limit(config),
    )


def _table(found: list[ServableModel]) -> "Table":
    from rich.table import Table

    table = Table("model", "where", "architecture", "weights", "context", "", box=None, pad_edge=False)
    for each in found:
        context = f"{each.context_tokens:,}" if each.context_tokens is not None else ""
        weights = f"{each.weight_bytes / 1e9:.2f} GB" if each.weight_bytes else ""
        what = each.fault or (f"= {each.alias_of}" if each.alias_of is not None else "")
        # Names, architectures and faults are made of what was downloaded.
        table.add_row(*map(printable_in, (each.name, each.where, each.architecture or "", weights, context, what)))
    return table
