"""The doors between the rooms, and the borders where errors end, kept by reading the package's syntax trees; it imports
nothing of the package."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvserve"
MAX_LINES = 400
JOINERS = (
    "kvserve/identity/",
    "kvserve/requests/",
    "kvserve/observe/reports.py",
    "kvserve/observe/observability.py",
    "kvserve/observe/dashboard.py",
    "kvserve/observe/ended_requests.py",
    "kvserve/observe/history_file.py",
    "kvserve/warming/next_turn_predictor.py",
    "kvserve/warming/prewarming.py",
    "kvserve/warming/speculative_prefill.py",
    "kvserve/web/",
    "kvserve/app/",
    "kvserve/cli/",
)
OPEN_TO_ALL = ("kvserve.core", "kvserve.errors")
ORDER = (
    ("core", "errors"),
    ("settings",),
    ("remote",),
    ("config", "agents", "cache", "canonical", "demo", "drafting", "output", "prompt", "protocols", "sessions"),
    ("engine", "explain", "proxy"),
    ("identity",),
    ("requests",),
    ("observe", "warming"),
    ("web",),
    ("app",),
    ("cli",),
)
"""The packages and the files beside them. Each imports what stands in earlier rows only, the joiners too, so there is
no circle: what a package needs to know of a later one is handed to it."""
ROW_OF = {f"kvserve.{name}": number for number, row in enumerate(ORDER) for name in row}

MAX_BORDERS = 20
"""So many places at most where a failure of any kind ends: a request, a thread, a row, a start."""

REASON = re.compile(r"# noqa: BLE001 - \S")
CATCHES_ALL = re.compile(r"\b(Base)?Exception\b|\bexcept\s*:")
"""Stands in every source that has such a place: most need not be parsed again."""

NAMELESS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.Constant)
"""Nodes that hold no others."""

PROCESS_CALLS = ("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp")
PROCESS_CALL_PREFIXES = ("exec", "spawn")
THREAD_MAKERS = frozenset(
    {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "ThreadingMixIn", "ThreadingHTTPServer"}
    | {"ThreadingTCPServer", "ThreadingUDPServer", "start_new_thread", "to_thread", "run_in_executor"}
)


@dataclass(frozen=True, slots=True)
class Use:
    """One dotted name that a file imports or reads, e.g. `os.environ`, and where."""

    name: str
    line: int
    is_import: bool


@dataclass(frozen=True, slots=True)
class Door:
    """A kind of use that only the files under `allowed` (prefixes of repository paths) may make."""

    rule: str
    matches: Callable[[Use], bool]
    allowed: tuple[str, ...]


DOORS_BETWEEN = {
    "kvserve.engine": ("kvserve.cache", "kvserve.settings.model_config"),
    "kvserve.cache": ("kvserve.remote",),
    "kvserve.remote": ("kvserve.settings.redis_address",),
    "kvserve.canonical": ("kvserve.settings.rule_policies",),
    "kvserve.config": ("kvserve.settings",),
    "kvserve.explain": ("kvserve.sessions",),
    "kvserve.proxy": (
        *("kvserve.protocols.error_bodies", "kvserve.protocols.fields", "kvserve.protocols.session"),
        *("kvserve.canonical.canonicalise", "kvserve.settings.ports"),
    ),
    "kvserve.observe": ("kvserve.requests.request_facts",),
}
"""The engine owns the prefix tree (.context/decisions/0001), an explanation compares records, the terminal shows
facts of requests, the cache speaks to a server that others share (0096), the guard of port 4000 reads bodies and writes
errors as port 8080 does, and routes by what a conversation is; of what is looked at before a start, a few read the same
tables and files. Nobody else but the joiners looks into another room."""


def is_under(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or lies inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_mlx(use: Use) -> bool:
    return use.is_import and use.name.partition(".")[0].startswith("mlx")


def reads_environment(use: Use) -> bool:
    environment = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    return is_under(use.name, *environment) or is_under(use.name, "dotenv", "pydantic_settings")


def starts_process(use: Use) -> bool:
    module, _, name = use.name.rpartition(".")
    from_os = module == "os" and (name in PROCESS_CALLS or name.startswith(PROCESS_CALL_PREFIXES))
    return from_os or is_under(use.name, "subprocess", "multiprocessing", "pty", "asyncio.subprocess")


def speaks_redis(use: Use) -> bool:
    return use.is_import and use.name.partition(".")[0] == "redis"


def starts_thread(use: Use) -> bool:
    return use.name.rpartition(".")[2] in THREAD_MAKERS


DOORS = (
    Door("only the engine and the demo model import mlx*", is_mlx, ("kvserve/engine/", "kvserve/demo/")),
    Door("only one file imports redis", speaks_redis, ("kvserve/remote/redis_link.py",)),
    Door(
        "only config.py reads the environment; cli/starting.py hands it on, as start_llm.py does",
        reads_environment,
        ("kvserve/config.py", "kvserve/cli/starting.py"),
    ),
    Door(
        "only proxy/, app/blas.py, demo/fetch.py and cli/launching.py start processes",
        starts_process,
        ("kvserve/proxy/", "kvserve/app/blas.py", "kvserve/demo/fetch.py", "kvserve/cli/launching.py"),
    ),
    Door(
        "only the engine, who reads weights or writes files, who shares, who guesses, web server and proxy watcher "
        "start threads",
        starts_thread,
        (
            "kvserve/engine/worker.py",
            "kvserve/engine/token_dispatcher.py",
            "kvserve/engine/model_digest.py",
            "kvserve/engine/ranks/rank_link.py",
            "kvserve/cache/disk_worker.py",
            "kvserve/cache/disk_tier.py",
            "kvserve/remote/shared_server.py",
            "kvserve/sessions/archive.py",
            "kvserve/warming/speculative_prefill.py",
            "kvserve/web/",
            "kvserve/proxy/",
        ),
    ),
)


@cache
def doors_of(name: str, is_import: bool) -> list[Door]:
    """Those that a use of this name needs, on whatever line it stands."""
    return [door for door in DOORS if door.matches(Use(name, 0, is_import))]


def nodes_of(source: str) -> Iterator[ast.AST]:
    """Every node of a source but those in which nothing is named or imported, in no order."""
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                stack.extend(each for each in value if isinstance(each, ast.AST))
            elif isinstance(value, ast.AST) and not isinstance(value, NAMELESS):
                stack.append(value)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain that starts with a name, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imported_names(nodes: list[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """(local name, full dotted name, line) of every import, wherever it stands, importlib with a literal included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield local, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield "", target.value, node.lineno


def uses(nodes: list[ast.AST]) -> Iterator[Use]:
    """Every import, and every name or attribute chain, with its imported alias resolved, that needs a door."""
    aliases: dict[str, str] = {}
    for local, full, line in imported_names(nodes):
        aliases[local] = full if local != full.partition(".")[0] else local
        yield Use(full, line, is_import=True)
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node)):
            head, dot, rest = name.partition(".")
            if doors_of(full := aliases.get(head, head) + dot + rest, is_import=False):
                yield Use(full, node.lineno, is_import=False)


def room_of(path: str) -> str:
    """The module prefix that a file belongs to: `kvserve.cache` for a room, `kvserve.config` for a top-level file."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:2])


def joins_rooms(path: str, use: Use) -> bool:
    """Whether the import leads from one room into another through no open door."""
    if not (use.is_import and is_under(use.name, "kvserve")) or path.startswith(JOINERS):
        return False
    room = room_of(path)
    return not is_under(use.name, room, *OPEN_TO_ALL, *DOORS_BETWEEN.get(room, ()))


def leads_back(path: str, use: Use) -> bool:
    """Whether the import is of another package that does not stand before this one."""
    if not use.is_import:
        return False
    room, other = room_of(path), ".".join(use.name.split(".")[:2])
    return room != other and ROW_OF.get(other, -1) >= ROW_OF.get(room, 0)


def violations(path: str, source: str) -> list[str]:
    """What one file of the package (path relative to the repository) does against the doors, as `path:line: rule`."""
    nodes = list(nodes_of(source))
    found = {
        (node.lineno, "imports are absolute") for node in nodes if isinstance(node, ast.ImportFrom) and node.level > 0
    }
    for use in uses(nodes):
        for door in doors_of(use.name, use.is_import):
            if not path.startswith(door.allowed):
                found.add((use.line, f"{door.rule} ({use.name})"))
        if joins_rooms(path, use):
            found.add((use.line, f"a room imports itself, core and errors ({use.name})"))
        if leads_back(path, use):
            found.add((use.line, f"a package imports earlier ones ({use.name})"))
    return [f"{path}:{line}: {rule}" for line, rule in sorted(found)]


def test_the_package_keeps_its_doors() -> None:
    """No file of the package reaches through a wall."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, "the package has no files"
    found = [v for file in files for v in violations(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_each_package_has_its_place_in_the_order() -> None:
    """No package, and no file beside them, is left out of what the order says."""
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {f"kvserve.{name}" for name in there - {"__init__"}} == set(ROW_OF)


def is_blind(node: ast.AST) -> bool:
    """Whether errors of any kind end here: an `except` or a `suppress` that takes all of them and raises none."""
    if isinstance(node, ast.ExceptHandler):
        types, body = node.type, node.body
        raises = any(isinstance(each, ast.Raise) for statement in body for each in ast.walk(statement))
    elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "suppress":
        types, raises = ast.Tuple(node.args), False
    else:
        return False
    caught = types.elts if isinstance(types, ast.Tuple) else [types]
    names = {dotted(each) if each is not None else "BaseException" for each in caught}
    return not raises and not names.isdisjoint({"Exception", "BaseException"})


def borders(source: str) -> Iterator[tuple[int, bool]]:
    """The line of each place of a file where errors of any kind end, and whether it says why."""
    lines = source.splitlines()
    for node in nodes_of(source) if CATCHES_ALL.search(source) else ():
        if is_blind(node):
            yield node.lineno, REASON.search(lines[node.lineno - 1]) is not None


def test_errors_of_any_kind_end_at_few_borders_each_with_its_reason() -> None:
    """Everywhere else the errors that may come are named, or raised as one that is."""
    found = [
        (f"{file.relative_to(ROOT)}:{line}", has_reason)
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, has_reason in borders(file.read_text("utf-8"))
    ]
    assert [place for place, has_reason in found if not has_reason] == []
    assert len(found) <= MAX_BORDERS, "\n".join(place for place, _ in found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("try:\n    f()\nexcept Exception:  # noqa: BLE001 - the thread goes on\n    pass", [True]),
        ("try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass", [False]),
        ("try:\n    f()\nexcept:\n    pass", [False]),
        ("try:\n    f()\nexcept (OSError, BaseException) as error:\n    g(error)", [False]),
        ("from contextlib import suppress\nwith suppress(Exception):\n    f()", [False]),
        ("import contextlib\nwith contextlib.suppress(OSError, Exception):\n    f()", [False]),
        ("try:\n    f()\nexcept Exception as error:\n    raise BadRequest('x') from error", []),
        ("try:\n    f()\nexcept (OSError, ValueError):\n    pass", []),
        ("from contextlib import suppress\nwith suppress(OSError):\n    f()", []),
    ],
)
def test_a_border_is_told_from_other_handlers(source: str, expected: list[bool]) -> None:
    """Each form of catching whatever comes is found, with and without its reason."""
    assert [has_reason for _, has_reason in borders(source)] == expected


CLASS = re.compile(r"^ *class (\w+)[\[(:]", re.MULTILINE)
"""The name of a class. A line of a text that begins so would be taken for one, too."""


def _crowded(files: Mapping[str, str]) -> list[str]:
    """Files that are too long to read at one sitting, and names of classes and files that stand for two things."""
    long = [name for name, text in files.items() if len(text.splitlines()) > MAX_LINES]
    classes = [name for text in files.values() for name in CLASS.findall(text)]
    stems = [Path(name).name for name in files if Path(name).name not in ("__init__.py", "__main__.py")]
    return sorted({*long, *(name for names in (classes, stems) for name, count in Counter(names).items() if count > 1)})


def test_files_stay_short_and_each_name_means_one_thing() -> None:
    """Negative controls: a line too many, a class and a file whose names are taken."""
    files = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert not _crowded(files)
    odd = {"a/x.py": "\n" * (MAX_LINES + 1), "a/y.py": "class A: pass", "b/y.py": "class A: pass"}
    assert _crowded(odd) == ["A", "a/x.py", "y.py"]


def test_scripts_speak_http_only() -> None:
    """No file in scripts/ imports the package; check_template.py, which needs no server, asks the benchmarks."""
    found = [
        f"{file.relative_to(ROOT)}:{use.line}: {use.name}"
        for file in sorted((ROOT / "scripts").rglob("*.py"))
        for use in uses(list(nodes_of(file.read_text("utf-8"))))
        if use.is_import and is_under(use.name, "kvserve")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("kvserve/cache/tree.py", "from kvserve.engine.worker import Worker", "a room imports itself"),
        ("kvserve/cache/tree.py", "def f():\n    import kvserve.sessions.turns", "a room imports itself"),
        ("kvserve/cache/tree.py", "from kvserve import sessions", "a room imports itself"),
        ("kvserve/cache/tree.py", "from kvserve.engine import snapshot", "a room imports itself"),
        ("kvserve/engine/worker.py", "from kvserve.prompt import template", "a room imports itself"),
        ("kvserve/cache/tree.py", "import importlib\nimportlib.import_module('kvserve.web')", "a room imports itself"),
        ("kvserve/core/__init__.py", "from kvserve.config import Settings", "a room imports itself"),
        ("kvserve/requests/serve.py", "from kvserve.observe.reports import trace_fields", "imports earlier ones"),
        ("kvserve/requests/serve.py", "from kvserve import warming", "imports earlier ones"),
        ("kvserve/observe/observability.py", "import kvserve.warming.prewarming", "imports earlier ones"),
        ("kvserve/web/service.py", "if TYPE_CHECKING:\n    from kvserve.app.server import App", "imports earlier ones"),
        ("kvserve/cache/tree.py", "from .sweep import Sweep", "imports are absolute"),
        ("kvserve/cache/tree.py", "import mlx.core as mx", "import mlx*"),
        ("kvserve/output/tool_parsers.py", "from mlx_lm.tool_parsers import json_tools", "import mlx*"),
        ("kvserve/requests/serve.py", "import mlx_vlm", "import mlx*"),
        ("kvserve/app/server.py", "import os\nos.environ['A']", "reads the environment"),
        ("kvserve/cli/fitting.py", "import os\nos.environ['A']", "reads the environment"),
        ("kvserve/app/server.py", "from kvserve.cli import commands", "imports earlier ones"),
        ("kvserve/app/server.py", "import os as o\no.getenv('A')", "reads the environment"),
        ("kvserve/proxy/litellm.py", "from os import environ", "reads the environment"),
        ("kvserve/app/server.py", "import subprocess", "start processes"),
        ("kvserve/app/server.py", "import os\nos.execv('a', ['a'])", "start processes"),
        ("kvserve/app/server.py", "from os import system as s", "start processes"),
        ("kvserve/engine/model.py", "import threading\nthreading.Thread(target=f)", "start threads"),
        ("kvserve/engine/model.py", "from concurrent.futures import ThreadPoolExecutor as T", "start threads"),
        ("kvserve/engine/model.py", "import threading\nclass A(threading.Thread): pass", "start threads"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, rule: str) -> None:
    """Each rule finds what it forbids, also behind an alias, inside a function or through importlib."""
    assert any(rule in violation for violation in violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvserve/cache/tree.py", "from kvserve.cache.block_hash import x\nfrom kvserve.core import y"),
        ("kvserve/cache/tree.py", "import kvserve.errors\nfrom kvserve import core"),
        ("kvserve/requests/serve.py", "from kvserve.engine.worker import Worker\nfrom kvserve.cache.tree import Tree"),
        ("kvserve/engine/prefix_cache.py", "from kvserve.cache.tree import PrefixTree"),
        ("kvserve/app/server.py", "from kvserve import __version__\nfrom kvserve.web.http_server import HttpServer"),
        ("kvserve/web/http_server.py", "from http.server import ThreadingHTTPServer\nfrom kvserve.protocols import p"),
        ("kvserve/engine/worker.py", "import threading\nimport mlx.core\nthreading.Thread(target=f)"),
        ("kvserve/sessions/turns.py", "import threading\nlock = threading.Lock()\nimport os\nos.replace('a', 'b')"),
        ("kvserve/proxy/litellm.py", "import subprocess, threading\nthreading.Thread(target=subprocess.run)"),
        ("kvserve/config.py", "import os\nos.environ['A']"),
        ("kvserve/demo/weights.py", "import mlx.core as mx"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    """The rules forbid no more than they say."""
    assert violations(path, source) == []
