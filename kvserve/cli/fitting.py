"""`kvserve fit`: what a model takes in memory and how long a conversation fits, before anything is loaded. It knows
where a model may lie and how figures are shown; `engine/foreseen.py` finds them out."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvserve.cli.output import Json, gib, json_option, show
from kvserve.config import Settings, load_launch
from kvserve.errors import ModelLoadError
from kvserve.settings.kinds import KINDS
from kvserve.settings.rank_variables import RANK
from kvserve.settings.start_checks import local_folder

if TYPE_CHECKING:
    from kvserve.engine.foreseen import Fit, Foreseen, LayerCaches


class SizeOption(click.ParamType[int]):
    """A number of bytes, as settings take it."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        kind = KINDS["max_batch_bytes"]
        try:
            size = kind.read(value)
        except ValueError:
            size = None
        if not isinstance(size, int) or size <= 0:
            self.fail(f"{value!r} is no size such as 24GB or 22GiB.", param, ctx)
        return size


@click.command()
@click.argument("model", required=False)
@click.option("--memory", type=SizeOption(), help="What MLX may use, for another machine than this one: 24GB, 22GiB.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Over so many machines: what each of them holds.")
@json_option
def fit(model: str | None, memory: int | None, ranks: int, as_json: bool) -> None:
    """Weights, KV and context of MODEL, a folder or a hub name; MODEL_PATH without one.

    Nothing is loaded and nothing stays on this machine: of a model that is not here the hub is asked for its config and
    the sizes of its files. KV is counted in full precision.
    """
    launch = load_launch(("--no-proxy",))
    settings = launch.settings
    if ranks > 1 and launch.ranks is not None:  # MLX would wait for them
        raise click.UsageError(f"This is {launch.ranks}. Ask for --ranks without {RANK}.")
    name = model or settings.model_path
    found = _foreseen(name, ranks)
    fitted = _fit(found, settings, memory)
    show(_body(name, fitted), as_json, lambda: _lines(name, fitted, settings))


def _foreseen(name: str, ranks: int) -> "Foreseen":
    """Raises ModelLoadError."""
    folder = local_folder(name)
    from kvserve.engine.foreseen import foreseen_in, foreseen_of_hub  # seconds, which a name that is none need not take
    from kvserve.engine.hub import look_at_hub

    folder = folder or _whole_snapshot(name)
    if folder is not None:
        return foreseen_in(folder, ranks)
    told = look_at_hub(name)
    return foreseen_of_hub(told.config, told.weight_bytes, ranks)


def _whole_snapshot(name: str) -> Path | None:
    """The folder of a hub name whose weights are all here."""
    from kvserve.engine.model_files import cached_folder, check_weights

    folder = cached_folder(name)
    if folder is None:
        return None
    try:
        check_weights(folder)
    except ModelLoadError:  # a download that was broken off says less than the hub
        return None
    return folder


def _fit(found: "Foreseen", settings: Settings, memory: int | None) -> "Fit":
    from kvserve.engine.foreseen import fit
    from kvserve.engine.memory import WantedMemory, memory_bytes

    wanted = WantedMemory(kv_bytes=settings.prompt_cache_max_bytes, batch_bytes=settings.max_batch_bytes)
    return fit(found, memory or memory_bytes(), settings.max_kv_size, wanted)


def _body(name: str, fitted: "Fit") -> Json:
    found = fitted.foreseen
    return {
        "model": name,
        "num_ranks": found.num_ranks,
        "weight_bytes": found.weight_bytes,
        "weights_from": found.weights_from,
        "dtype": found.dtype,
        "is_dtype_known": found.is_dtype_known,
        "kv_bytes_per_10k_tokens": round(found.bytes_per_10k_tokens),
        "kv_fixed_bytes": found.sizes.fixed,
        "caches": [asdict(each) for each in found.caches],
        "memory_bytes": fitted.memory_bytes,
        "leaves_room": fitted.leaves_room,
        "kv_budget_bytes": fitted.plan.kv_bytes,
        "running_budget_bytes": fitted.plan.batch_bytes,
        "context_tokens": fitted.context_tokens,
        "is_cut_by": fitted.is_cut_by,
        "model_context_tokens": found.context_limit,
        "ram_tokens": fitted.ram_tokens,
    }


CUT_BY = {
    "memory": "what fits beside the weights (MAX_BATCH_BYTES)",
    "MAX_KV_SIZE": "MAX_KV_SIZE",
    "model": "all that the model was made for",
}


def _lines(name: str, fitted: "Fit", settings: Settings) -> str:
    found, plan = fitted.foreseen, fitted.plan
    dtype = found.dtype if found.is_dtype_known else f"{found.dtype}, which the config does not say"
    states = f" and {gib(found.sizes.fixed)} whatever the length" if found.sizes.fixed else ""
    ram = "any number of tokens" if fitted.ram_tokens is None else f"{fitted.ram_tokens:,} tokens"
    lines = [
        name if found.num_ranks == 1 else f"{name}, on each of {found.num_ranks} ranks",
        f"  weights  {gib(found.weight_bytes)} ({_SOURCES[found.weights_from]})",
        f"  KV       {gib(found.bytes_per_10k_tokens)} for 10,000 tokens{states} ({dtype})",
        *(f"             {_caches(each)}" for each in found.caches),
        f"  memory   {gib(fitted.memory_bytes)} for MLX; {gib(plan.batch_bytes)} for running conversations, "
        f"{gib(plan.kv_bytes)} for what is kept",
        f"  context  {fitted.context_tokens:,} tokens: {CUT_BY[fitted.is_cut_by]}",
        f"  kept     {ram} of all conversations in RAM, more on disk",
    ]
    if not fitted.leaves_room:
        lines.append("! Weights and budgets are more than MLX may use here: take a smaller model.")
    if settings.kv_bits is not None:
        lines.append(f"! KV_BITS={settings.kv_bits} makes KV smaller than that; how much the start finds out.")
    return "\n".join(lines)


_SOURCES = {
    "files": "its files",
    "hub": "the sizes of its files on the hub",
    "shapes": "counted from its config, without a vision tower",
    "written out": "counted from its config: its files are in FP8, which is loaded as 16 bits a number",
}


def _caches(caches: "LayerCaches") -> str:
    number = f"{caches.num_caches} x {caches.class_name}"
    if caches.kind == "window":
        return f"{number}: a window of {caches.window:,} tokens, {gib(caches.fixed_bytes)}"
    if caches.kind == "state":
        return f"{number}: a state, {gib(caches.fixed_bytes)}"
    what = f"{number}: {gib(10_000 * caches.bytes_per_token)} for 10,000 tokens"
    return f"{what}, {gib(caches.fixed_bytes)} besides" if caches.fixed_bytes else what
