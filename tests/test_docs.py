"""What the documents say of settings, flags, endpoints and scripts is what the program has; links lead somewhere."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvserve.config import Settings, parse_flags, setting_key

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_README_BYTES = 8_000
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", ".context/**/*.md", ".claude/**/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
PROGRAM = sorted(
    path
    for pattern in ("*.py", "kvserve/**/*.py", "scripts/**/*.py", ".env.example", "Makefile", "pyproject.toml")
    for path in ROOT.glob(pattern)
)
"""Where messages and comments may name a page."""
KEYS = {setting_key(name) for name in Settings.model_fields}


def section(page: str, title: str) -> str:
    """The text of one section of a page of docs/, up to the next heading of the same level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert match, f"docs/{page} has no section {title!r}"
    return match[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row that starts with code, without the backticks around a cell."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip().removeprefix("`").removesuffix("`") for cell in line.strip("|").split(" | ")]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def settings_from(pairs: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that these lines of a `.env` make, without what the test's own environment says."""
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)
        monkeypatch.delenv(key.lower(), raising=False)
    file = folder / "settings.env"
    file.write_text("".join(f"{key}={value}\n" for key, value in pairs.items()), encoding="utf-8")
    return Settings(_env_file=file)  # type: ignore[call-arg]  # pydantic-settings reads it from kwargs


def settings_rows() -> list[list[str]]:
    """[key, default, meaning] of the tables of the page of settings."""
    return list(rows(section("settings.md", "Settings")))


def told_settings() -> dict[str, str]:
    """Key -> default of the page of settings."""
    return {key: "" if default == "(none)" else default for key, default, *_ in settings_rows()}


def example_settings() -> dict[str, str]:
    """Key -> value of the lines of .env.example that are settings, commented out as they are."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"#([A-Z][A-Z0-9_]*)=(.*)", line))}


def test_the_readme_is_short() -> None:
    """All else has its page."""
    assert len(README.encode()) <= MAX_README_BYTES


def test_every_page_is_in_the_list_under_its_question() -> None:
    """The list has each page of docs/, once, under the question that is its title; the README leads to the list."""
    listed = re.findall(r"^\| (.+) \| \[(.+)\]\(\2\) \|$", PAGES["README.md"], re.MULTILINE)
    titles = {name: page.partition("\n")[0].removeprefix("# ") for name, page in PAGES.items() if name != "README.md"}
    assert sorted((name, question) for question, name in listed) == sorted(titles.items())
    assert all(title.endswith("?") for title in titles.values())
    assert "](docs/README.md)" in README


def test_the_page_of_settings_has_every_setting_and_no_other() -> None:
    """One row per setting of config.py, each with a meaning."""
    assert sorted(key for key, *_ in settings_rows()) == sorted(KEYS)
    assert [row for row in settings_rows() if len(row) != 3 or not row[2]] == []


def test_the_page_of_settings_has_the_defaults_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Default column, written into a .env, changes nothing."""
    assert settings_from(told_settings(), tmp_path, monkeypatch) == settings_from({}, tmp_path, monkeypatch)


def test_the_example_has_every_setting_with_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.env.example with every line put into force is the defaults."""
    assert sorted(example_settings()) == sorted(KEYS)
    assert settings_from(example_settings(), tmp_path, monkeypatch) == settings_from({}, tmp_path, monkeypatch)


def test_the_example_changes_nothing_when_it_is_copied() -> None:
    """Every line of .env.example is empty or a comment."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []


def test_both_documents_show_the_same_defaults() -> None:
    """A default is spelled in one way."""
    assert told_settings() == example_settings()


def test_the_page_of_settings_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of start_llm.py are the rows of the table, those of install_and_run.py stand in the section."""
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    told = section("settings.md", "Flags")
    assert {cells[0].split()[0] for cells in rows(told)} == flags
    own_line = re.search("^OWN_FLAGS = .*$", (ROOT / "install_and_run.py").read_text("utf-8"), re.MULTILINE)
    own = set(re.findall(r'"(--[a-z][a-z-]+)"', own_line[0])) if own_line else set()
    assert own and all(f"`{flag}`" in told for flag in own)


def test_the_page_of_the_api_has_every_endpoint() -> None:
    """One row per row of the web server's endpoint table; `{name}` stands for the rest of a path."""
    from kvserve.web.routes import ROUTES  # here, so that a defect there fails this test and not the others

    said = [re.sub(r"\{\w+\}", "*", cells[0]) for cells in rows(section("api.md", "Endpoints"))]
    assert sorted(said) == sorted(f"{route.method} {route.path}" for route in ROUTES)


def said_of_rules(text: str) -> list[tuple[str, str]]:
    """The canonical rules that a table lists, each with the policy of its row."""
    return sorted((rule, policy) for policy, _, names in rows(text) for rule in re.findall(r"\w+", names))


def test_the_page_of_the_cache_lists_every_canonical_rule_under_its_policy() -> None:
    """As the program has it, each once, `off` where nothing else can be set; one that is listed under another policy,
    twice or not at all is seen."""
    from kvserve.canonical.rules import RULES  # here, so that a defect there fails this test and not the others
    from kvserve.settings.rule_policies import SETTABLE

    table = [
        (rule.name, rule.policy if rule.policy in SETTABLE[rule.name] else "off")
        for rule in RULES
        if rule.name in SETTABLE
    ]
    said = section("cache.md", "What counts as the same conversation")
    assert said_of_rules(said) == sorted(table)
    for old, new in (("`cch`, ", ""), ("`cch`, ", "`cch`, `cch`, "), ("| `history` |", "| `always` |")):
        assert said.count(old) == 1 and said_of_rules(said.replace(old, new)) != sorted(table)


def test_the_page_of_scripts_names_every_script() -> None:
    """Programs that a user may start: scripts/ has a row each, the top level is named."""
    told = {cells[0].split()[0] for cells in rows(PAGES["scripts.md"])}
    assert told == {f"scripts/{path.name}" for path in ROOT.glob("scripts/*.py")}
    assert all(f"`{name}`" in PAGES["scripts.md"] for name in ("install_and_run.py", "start_llm.py"))


def test_what_is_to_be_pasted_is_well_formed() -> None:
    """JSON parses and points at port 4000, Python compiles."""
    pages = (README, PAGES["clients.md"])
    configs = [block for page in pages for block in blocks(page, "json")]
    assert len([json.loads(block) for block in configs]) == 7
    assert all('"baseurl": "http://127.0.0.1:4000' in block.lower() for block in configs)
    for block in blocks(PAGES["clients.md"], "python"):
        compile(block, "clients.md", "exec")


def test_the_readmes_table_of_clients_is_what_was_measured() -> None:
    """Each row is the last request of that client on port 8080 in the table that `make clients` writes."""
    measured = (ROOT / "benchmarks/results/clients.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in measured.splitlines()]
    last = {f"{cells[0]} {cells[1]}": (cells[5], cells[7]) for cells in lines if cells[2:3] == ["8080"]}
    said = re.findall(r"^\| ([\w -]+ [\d.]+) \| ([\d,]+) \| ([\d.]+) % \|$", README, re.MULTILINE)
    assert len(said) > 5
    assert {name: (num, f"{reuse}%") for name, num, reuse in said}.items() <= last.items()


MODEL_ROW = re.compile(
    r"^\| (\S+) \| ([\d.]+) billion \| (\d+) x (\d+) x (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \| (.+) \|$", re.MULTILINE
)


def test_what_fits_is_reckoned_as_the_page_says() -> None:
    """Weights, KV and tokens of each row follow from its parameters and layers, and from the share that the program
    gives to KV; the README's rows are some of them."""
    from kvserve.engine.memory import KV_SHARE  # here, so that a defect there fails this test and not the others

    of_macs = {16: 11, 32: 23, 64: 51, 128: 103}
    sizes = tuple(of_macs.values())
    row = r"^\| (\d+) GB \| (\d+) GB \| (\S+) \| ([\d.]+ GB) \| ([\d,]+) \|$"
    macs, readme = zip(*((int(mac), rest) for mac, *rest in re.findall(row, README, re.MULTILINE)), strict=True)
    assert [str(of_macs[mac]) for mac in macs] == [rest[0] for rest in readme]
    told = set()
    page = section("models.md", "Which model fits")
    said = MODEL_ROW.findall(page)
    assert len(said) > 4 and KV_SHARE == 5 / 8 and "`AUTO` gives 5/8 to" in page
    assert all(re.search(rf"\b{size} (?:GB )?of {mac}\b", page) for mac, size in of_macs.items())
    for name, billions, layers, heads, width, weights, kv, tokens in said:
        weight_gb = float(billions) * 4.5 / 8
        token_bytes = 2 * int(layers) * int(heads) * int(width) * 2
        fitting = [round(KV_SHARE * (size - weight_gb) * 1e9 / token_bytes, -3) for size in sizes]
        counts = ["-" if count <= 0 else f"{count:,.0f}" for count in fitting]
        assert (weights, kv, tokens) == (f"{weight_gb:.1f}", f"{token_bytes * 1e4 / 1e9:.1f}", "; ".join(counts)), name
        told |= {(str(size), name, f"{weights} GB", count) for size, count in zip(sizes, counts, strict=True)}
    assert set(map(tuple, readme)) <= told


def without_code(text: str) -> str:
    """A document without its fenced blocks and comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The places of a document that a link may name, as GitHub makes them of its headings: in small letters, without
    punctuation, blanks as hyphens, a second one of the same name with a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return frozenset(found)


def dead_links(text: str, folder: Path, own: frozenset[str] = frozenset()) -> list[str]:
    """The relative links of a text, pictures among them, that name no file of the repository or no heading of it."""
    targets = re.findall(r"\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"", without_code(text))
    relative = [found for target in targets if "://" not in (found := "".join(target))]
    return [target for target in relative if not leads_somewhere(target, folder, own)]


def leads_somewhere(target: str, folder: Path, own: frozenset[str]) -> bool:
    """Whether a relative link from this folder, in a document with its own anchors, leads to something."""
    name, _, anchor = target.partition("#")
    if not name:
        return anchor in own
    path = folder / name
    return path.exists() and (not anchor or anchor in anchors(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    """A relative link names a file of the repository and, behind a #, one of its headings."""
    assert dead_links(path.read_text(encoding="utf-8"), path.parent, anchors(path)) == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](docs/nowhere.md)",
        "![a](docs/nowhere.png)",
        '<img src="docs/nowhere.png">',
        "[a](docs/clients.md#nowhere)",
        "[a](#nowhere)",
        "[a](docs/settings.md#Settings)",
    ],
)
def test_a_link_that_leads_nowhere_is_seen(link: str) -> None:
    """The control: a page, a picture, a heading elsewhere or here that are not there, or another spelling of one."""
    good = "[a](docs/clients.md#mini-swe-agent) [b](docs/settings.md#access-and-limits) [c](#here) [d](https://a.b/c#d)"
    dead = re.sub(r'.*[("](.*?)[)"].*', r"\1", link)
    assert dead_links(f"{good} {link}", ROOT, frozenset({"here"})) == [dead]


def test_pages_that_the_program_names_are_there() -> None:
    """In messages, comments and settings; with the heading, where one is named."""
    named = r"(?<![\w/.-])((?:docs/[\w.-]+|README|ARCHITECTURE|CHANGELOG)\.md(?:#[\w-]+)?)"
    found = {(path.name, page) for path in PROGRAM for page in re.findall(named, path.read_text(encoding="utf-8"))}
    assert [each for each in sorted(found) if not leads_somewhere(each[1], ROOT, frozenset())] == []
    assert ("demo_answers.py", "docs/demo.md") in found


@pytest.mark.parametrize("name", ["GOALS.md", "TASKS.md", "LESSONS.md"])
def test_the_context_is_there(name: str) -> None:
    """Direction, open items and lessons each have their page."""
    assert (ROOT / ".context" / name).read_text(encoding="utf-8").startswith("# ")


def test_the_architecture_names_what_is_there() -> None:
    """ARCHITECTURE.md is one page that names each package, each file beside them, and no file that is not there."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "kvserve"
    named = set(re.findall(r"`([\w*/]+\.py)`", page))
    files = [*package.rglob("*.py"), *ROOT.glob("tests/*.py")]
    missing = [name for name in named if not any(path.match(name) for path in files)]
    flat = [path.name for path in package.glob("*.py") if f"`{path.stem}." not in page and path.stem != "__init__"]
    packages = [path.parent.name for path in package.glob("*/__init__.py") if f"| `{path.parent.name}/` |" not in page]
    assert (missing, flat, packages) == ([], [], [])
    assert page.count("\n") < 120


def test_the_lessons_begin_with_ten_rules_and_an_index() -> None:
    """Ten rules, then an index of every topic, each of which stands under its heading."""
    page = (ROOT / ".context/LESSONS.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    first, index, *topics = headings
    assert (first, index) == ("Ten rules", "Index")
    assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert re.findall(r"^\| \[(.+?)\]\(#", page, re.MULTILINE) == topics


def test_what_is_open_is_a_list_of_short_lines() -> None:
    """A task is one line of TASKS.md, of 160 characters at most."""
    lines = (ROOT / ".context/TASKS.md").read_text(encoding="utf-8").splitlines()
    tasks = [line for line in lines if line.startswith("- ")]
    assert len(tasks) > 20
    assert [line for line in lines if len(line) > 160 or line.startswith(" ")] == []
