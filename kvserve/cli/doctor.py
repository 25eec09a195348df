"""`kvserve doctor`: what a start depends on, looked at before one or after one that failed, and a text for an issue
that holds nothing private. It changes nothing.

What a person reads may name paths, programs and values. What is meant for others (`shared`) is made of versions,
numbers and names of settings only: no path, no host, no user, no key, no name of a model.
"""

import importlib.metadata
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kvserve import __version__
from kvserve.app.blas import active_blas, fault_of
from kvserve.cli.asking import Address, NoAnswer, url_of
from kvserve.cli.finding import ANSWERS, Finding, State
from kvserve.cli.output import gib, json_option, printable_in, show
from kvserve.config import Launch, Settings, load_launch, setting_key
from kvserve.errors import ModelLoadError, SettingError, StartupError
from kvserve.proxy.keys_file import refuse_unusable_keys
from kvserve.settings.blas_files import computes_on_gpu, how_to_install, library_files
from kvserve.settings.kinds import KINDS
from kvserve.settings.ports import describe_holder, error_of_binding, somebody_listens
from kvserve.settings.rank_variables import COORDINATOR, JACCL, RANK, RING, half_told, own_address
from kvserve.settings.start_checks import local_folder, refuse_unusable_folder, refuse_unusable_start

MARKS: Mapping[State, str] = {"ok": "ok  ", "note": "note", "bad": "BAD "}
SHOWN_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "litellm")
PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?\s*==\s*([A-Za-z0-9.]+)")
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
PYTHON = (3, 12)
ANY_VERSION = frozenset({"pip"})
"""It fetches the demo's model, as every version can."""

OWN_FIELDS = frozenset({"blas", "num_agents", "num_open_connections", "proxy", "uptime_seconds", "version"})
"""GET /health has them in every state; it is not likely that another program has all of them."""

LOOKED_AT = {
    "BLAS": "blas_library",
    "MLX_PORT": "mlx_port",
    "PROXY_PORT": "proxy_port",
    "disk": "disk_cache_dir",
    "model": "model_path",
}
"""Findings that judge a setting by themselves."""


@click.command()
@click.option("--issue", is_flag=True, help="Print a text to begin an issue with; nothing private stands in it.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, issue: bool, as_json: bool) -> None:
    """Look at versions, device, BLAS, ports, disk and model, and say what would be in a start's way.

    The exit code is 1 where something is.
    """
    found = list(findings())
    if issue and not as_json:
        click.echo(issue_text(found))
    else:
        rows = [{name: value for name, value in asdict(each).items() if name != "shared"} for each in found]
        show({"findings": rows, "issue": issue_text(found)}, as_json, lambda: _lines(found))
    ctx.exit(int(any(each.state == "bad" for each in found)))


def findings() -> Iterator[Finding]:
    """Everything; what depends on settings is left out where these cannot be read. Where they are those of a proxy
    that stands in front of servers elsewhere, what that depends on."""
    yield from _versions()
    try:
        launch = load_launch(("--no-proxy",))
        if not launch.settings.backends:
            launch = load_launch(())
    except StartupError as error:
        key = error.key if isinstance(error, SettingError) else "a name or a flag"
        name = "ranks" if key in (RANK, RING, JACCL, COORDINATOR) else "settings"
        yield _device()
        yield Finding(name, "bad", str(error), f"cannot be read ({key})")
        return
    if launch.settings.backends:
        from kvserve.cli.proxy_findings import proxy_findings

        yield _settings(launch)
        yield from proxy_findings(launch.settings)
        return
    yield _device()
    yield _settings(launch)
    yield from _ranks(launch)
    follows = launch.ranks is not None and not launch.ranks.leads
    ports = () if follows else _ports(launch.settings)  # rank 0 has them
    looked_at = [_blas(launch), *ports, _disk(launch.settings), _model(launch.settings)]
    yield from looked_at
    yield from _shared_cache(launch.settings)
    yield _start(launch, looked_at)


def issue_text(found: list[Finding]) -> str:
    """What an issue begins with."""
    facts = "\n".join(f"| {each.name} | {each.state} | {printable_in(each.shared)} |" for each in found)
    return (
        "### What happened\n\n(what you did, what you expected, what came instead)\n\n"
        "### What the terminal said\n\n(the lines around it; look for names and keys before you paste them)\n\n"
        f"### Where\n\n| | | |\n|---|---|---|\n{facts}"
    )


def _lines(found: list[Finding]) -> str:
    lines = [f"{MARKS[each.state]}  {each.name:10} {printable_in(each.text)}" for each in found]
    return "\n".join([*lines, "", "A text for an issue, without paths, names and keys: kvserve doctor --issue"])


# --- what is installed ------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.mac_ver()[0] or platform.release()} {platform.machine()}"
    yield Finding("kvserve", "ok", __version__, __version__)
    yield Finding("system", "ok", system, f"{platform.system()} {platform.mac_ver()[0]} {platform.machine()}")
    version = platform.python_version()
    is_known = sys.version_info[:2] == PYTHON and platform.python_implementation() == "CPython"
    said = f"{platform.python_implementation()} {version}"
    words = "" if is_known else "; kvserve needs CPython 3.12"
    yield Finding("python", "ok" if is_known else "bad", f"{said}{words}", said)
    installed = ", ".join(f"{name} {_installed(name) or 'missing'}" for name in SHOWN_PACKAGES)
    if others := unpinned(pins()):
        yield Finding("packages", "bad", f"not as tried: {'; '.join(others)}", f"{installed}; {'; '.join(others)}")
    else:
        yield Finding("packages", "ok", installed, installed)


def pins() -> dict[str, str]:
    """The versions that the package was tried with: of its metadata or, in a checkout, of requirements.txt."""
    try:
        lines = importlib.metadata.requires("kvserve") or []
    except importlib.metadata.PackageNotFoundError:
        lines = REQUIREMENTS.read_text("utf-8").splitlines() if REQUIREMENTS.exists() else []
    return {found[1]: found[2] for line in lines if (found := PIN.match(line))}


def unpinned(wanted: Mapping[str, str]) -> list[str]:
    """The packages that are missing or have another version than that."""
    there = {name: _installed(name) for name in wanted}
    return [
        f"{name} {there[name] or 'missing'} instead of {version}"
        for name, version in wanted.items()
        if (there[name] or "").partition("+")[0] != version and not (name in ANY_VERSION and there[name])
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- what computes ----------------------------------------------------------------------------------------------------


def _device() -> Finding:
    try:
        from kvserve.engine.device import device_facts

        facts = device_facts()
    except ImportError as error:
        return Finding("device", "bad", f"MLX cannot be loaded: {error}", "MLX cannot be loaded")
    text = f"{facts.kind}{f' ({facts.name})' if facts.name else ''}, Metal {'on' if facts.has_metal else 'off'}"
    text = f"{text}, {gib(facts.memory_bytes)} for MLX"
    is_slow_mac = sys.platform == "darwin" and not facts.has_metal
    return Finding("device", "bad" if is_slow_mac else "ok", text, text)


def _blas(launch: Launch) -> Finding:
    """Which BLAS a start would preload; that is tried as a start tries it."""
    setting = launch.settings.blas_library
    if sys.platform != "linux":
        return Finding("BLAS", "ok", "the system's own", "the system's own")
    if (active := active_blas()) is not None:
        name = active.name if active.name != Path(active.path).name else "one that does not tell its name"
        return Finding("BLAS", "ok", f"{active.name} ({active.path}), preloaded by hand", f"{name}, preloaded")
    if setting == "off" or (setting == "auto" and computes_on_gpu(Path(sys.prefix))):
        return Finding("BLAS", "ok", "none is wanted", "none is wanted")
    refused = []
    for path in library_files(setting, Path(sys.prefix)):
        fault = fault_of(path, launch.environment)
        if fault is None:
            return Finding("BLAS", "ok", str(path), path.name if setting == "auto" else "the one of BLAS_LIBRARY")
        refused.append(f"{path} is not used: {fault}")
    if setting != "auto":
        return Finding("BLAS", "bad", "; ".join(refused) or f"{setting} is not there", "the one of BLAS_LIBRARY fails")
    install = how_to_install(platform.machine(), f"{sys.executable} -m pip")
    text = "; ".join([*refused, f"the slow one of MLX's wheel, which matters for models in float32. Faster: {install}"])
    return Finding("BLAS", "note", text, f"the wheel's, {len(refused)} others refused")


# --- what a start needs -----------------------------------------------------------------------------------------------


def _settings(launch: Launch) -> Finding:
    """Which settings are not the defaults; of those that may be private only that they are set."""
    changed = {
        setting_key(name): getattr(launch.settings, name)
        for name, field in Settings.model_fields.items()
        if getattr(launch.settings, name) != KINDS[name].read(field.default)
    }
    shared = ", ".join(f"{key}={_harmless(value)}" for key, value in changed.items()) or "all as by default"
    names = ", ".join(changed) or "all as by default"
    warnings = " ".join(launch.warnings)
    return Finding("settings", "note" if warnings else "ok", f"{names}. {warnings}".removesuffix(". "), shared)


def _harmless(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool | int | float) else "(set)"


def _ports(settings: Settings) -> Iterator[Finding]:
    server = Address(url_of(settings.mlx_host, settings.mlx_port), api_key="")  # whoever listens there is not known yet
    health: Mapping[str, object] = {}
    if settings.mlx_port and somebody_listens(settings.mlx_host, settings.mlx_port):
        try:
            health = server.get("/health")
        except NoAnswer:
            health = {}
    is_kvserve = health.keys() >= OWN_FIELDS
    for key, host, port, is_ours in (
        ("MLX_PORT", settings.mlx_host, settings.mlx_port, is_kvserve),
        ("PROXY_PORT", "127.0.0.1", settings.proxy_port, is_kvserve and health["proxy"] in ("ready", "starting")),
    ):
        yield _port(key, host, port, is_ours)


def _port(key: str, host: str, port: int, is_ours: bool) -> Finding:
    if not port or not somebody_listens(host, port):
        return Finding(key, "ok", f"{port} is free", "free")
    if is_ours:
        return Finding(key, "ok", f"{port}: {ANSWERS}", ANSWERS)
    return Finding(key, "bad", f"{port} is taken by {describe_holder(port)}", "taken by another program")


def _ranks(launch: Launch) -> Iterator[Finding]:
    """Which of several ranks this is, and whether it can listen where its hostfile says."""
    if launch.ranks is None:
        if half := half_told(launch.environment):
            text = f"{', '.join(half)} alone, or with one host, starts no ranks: this computes by itself"
            yield Finding("ranks", "note", text, text)
        return
    place = str(launch.ranks)
    try:
        address = own_address(launch.environment)
    except SettingError as error:
        yield Finding("ranks", "bad", str(error), f"cannot be read ({error.key})")
        return
    if address is None:
        yield Finding("ranks", "ok", f"{place}, by {JACCL}", f"{place}, jaccl")
        return
    taken = f"it is taken by {describe_holder(address[1])}" if somebody_listens(*address) else ""
    if reason := taken or error_of_binding(*address):
        text = f"{place} cannot listen at {address[0]}:{address[1]}, as {RING} says: {reason}"
        yield Finding("ranks", "bad", text, f"{place} cannot listen where its hostfile says")
    else:
        yield Finding("ranks", "ok", f"{place}, {address[0]}:{address[1]} is free", f"{place}, ring")


def _disk(settings: Settings) -> Finding:
    folder = settings.disk_cache_dir
    try:
        refuse_unusable_folder(folder)
    except SettingError as error:
        return Finding("disk", "bad", str(error), "DISK_CACHE_DIR cannot be written to")
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free, least = shutil.disk_usage(there).free, settings.disk_cache_min_free_bytes
    text = f"{free / 1e9:.1f} GB are free"
    if free < least:
        return Finding("disk", "bad", f"{text} at {folder}, less than DISK_CACHE_MIN_FREE_BYTES: no KV is kept", text)
    return Finding("disk", "ok", f"{text} at {folder}", text)


def _shared_cache(settings: Settings) -> Iterator[Finding]:
    """Whether the server that REMOTE_CACHE_URL names answers, and whether it makes room: nothing is kept there."""
    if settings.remote_cache_url is None:
        return
    from kvserve.remote.redis_link import CONNECT_SECONDS, LinkFailed, RedisLink
    from kvserve.remote.room import RemoteRoom
    from kvserve.settings.redis_address import parse_address

    address, room = parse_address(settings.remote_cache_url), RemoteRoom()
    link = RedisLink(address, CONNECT_SECONDS)
    try:
        link.run([("PING",)], time.monotonic() + CONNECT_SECONDS)
        room.look(link)
    except LinkFailed as error:
        yield Finding("shared", "bad", f"{address.shown}: {error}", f"REMOTE_CACHE_URL: {error.kind}")
        return
    finally:
        link.close()
    policy = room.policy or "a policy that it does not tell"
    text = f"{(room.limit_bytes or 0) / 1e9:.1f} GB at most, {policy}"
    if room.policy == "noeviction":
        yield Finding("shared", "note", f"{address.shown}: {text}: once it is full nothing more is sent", text)
    else:
        yield Finding("shared", "ok", f"{address.shown}: {text}", text)


def _model(settings: Settings) -> Finding:
    """What of it can be judged before its weights are read. An architecture is told to others by the name that mlx-lm
    has for it: what else stands in a config may be anybody's words."""
    from kvserve.engine.model import check_folder
    from kvserve.engine.model_files import cached_folder, check_weights, weight_file_bytes
    from kvserve.engine.text_load import is_for_mlx_lm
    from kvserve.settings.model_config import read_config

    name = settings.model_path
    try:
        folder = local_folder(name) or cached_folder(name)
        if folder is None:
            absent = "not on this machine"
            return Finding("model", "note", f"{name} is {absent}: a start downloads it", absent)
        config = read_config(folder)
        check_folder(folder)
        check_weights(folder)
    except (ModelLoadError, OSError) as error:
        return Finding("model", "bad", str(error), "cannot be loaded")
    size = f"{weight_file_bytes(folder) / 1e9:.2f} GB"
    shared = config["model_type"] if is_for_mlx_lm(config) else "an architecture of mlx-vlm alone"
    return Finding("model", "ok", f"{name}: {config['model_type']}, {size}", f"{shared}, {size}")


def _start(launch: Launch, looked_at: Sequence[Finding]) -> Finding:
    """What a start refuses at once, in its own words, less what was found already and ports that are ours."""
    settings = launch.settings
    told = {LOOKED_AT[each.name] for each in looked_at if each.state == "bad" or each.shared == ANSWERS}
    told |= {"mlx_port"} if launch.ranks is not None and not launch.ranks.leads else set()
    asked = {name: value for name, value in settings if name not in told}
    try:
        refuse_unusable_start(asked, demo=None, with_proxy=launch.with_proxy, writes_kv=True)
        refuse_unusable_keys(settings.api_keys_file)
    except StartupError as error:
        key = error.key if isinstance(error, SettingError) else type(error).__name__
        return Finding("start", "bad", str(error), f"would be refused ({key})")
    return Finding("start", "ok", "nothing else is refused at once", "nothing else is refused at once")
