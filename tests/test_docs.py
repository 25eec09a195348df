"""What the documents say of settings, flags, endpoints and scripts is what the program has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.config import Settings, parse_flags, setting_key

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", ".context/**/*.md", ".claude/**/*.md")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
KEYS = {setting_key(name) for name in Settings.model_fields}


def section(title: str) -> str:
    """The text of one section of the README, up to the next heading of the same level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match, f"README.md has no section {title!r}"
    return match[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row that starts with code, without the backticks around a cell."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip().removeprefix("`").removesuffix("`") for cell in line.strip("|").split(" | ")]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def settings_from(pairs: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that these lines of a `.env` make, without what the test's own environment says."""
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)
        monkeypatch.delenv(key.lower(), raising=False)
    file = folder / "settings.env"
    file.write_text("".join(f"{key}={value}\n" for key, value in pairs.items()), encoding="utf-8")
    return Settings(_env_file=file)  # type: ignore[call-arg]  # pydantic-settings reads it from kwargs


def readme_settings() -> dict[str, list[str]]:
    """Key -> [default, meaning] of the README's settings tables."""
    return {key: rest for key, *rest in rows(section("Settings"))}


def example_settings() -> dict[str, str]:
    """Key -> value of the lines of .env.example that are settings, commented out as they are."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := re.fullmatch(r"#([A-Z][A-Z0-9_]*)=(.*)", line))}


def test_the_readme_has_every_setting_and_no_other() -> None:
    """One row per setting of config.py."""
    assert sorted(key for key, *_ in rows(section("Settings"))) == sorted(KEYS)


def test_the_readme_has_the_defaults_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Default column, written into a .env, changes nothing."""
    pairs = {key: "" if default == "(none)" else default for key, (default, *_) in readme_settings().items()}
    assert settings_from(pairs, tmp_path, monkeypatch) == settings_from({}, tmp_path, monkeypatch)


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
    said = {key: "" if default == "(none)" else default for key, (default, *_) in readme_settings().items()}
    assert said == example_settings()


def test_the_readme_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of start_llm.py are the rows of the table, those of install_and_run.py stand in the section."""
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert {cells[0].split()[0] for cells in rows(section("Flags"))} == flags
    own_line = re.search("^OWN_FLAGS = .*$", (ROOT / "install_and_run.py").read_text("utf-8"), re.MULTILINE)
    own = set(re.findall(r'"(--[a-z][a-z-]+)"', own_line[0])) if own_line else set()
    assert own and all(f"`{flag}`" in section("Flags") for flag in own)


def test_the_readme_has_every_endpoint() -> None:
    """One row per row of the web server's endpoint table; `{name}` stands for the rest of a path."""
    from kvserve.web.routes import ROUTES  # here, so that a defect there fails this test and not the others

    said = {re.sub(r"\{\w+\}", "*", cells[0]) for cells in rows(section("Endpoints"))}
    assert said == {f"{route.method} {route.path}" for route in ROUTES}


def said_of_rules(text: str) -> list[tuple[str, str]]:
    """The canonical rules that a text lists, each with the policy that it is listed under; `off` for those of which
    nothing else can be set."""
    lists = re.findall(r"`(always|history|never|off)`,[^:`]*: (`\w+`(?:,\s+`\w+`)*)", text)
    return sorted((rule, policy) for policy, rules in lists for rule in re.findall(r"`(\w+)`", rules))


def test_the_readme_lists_every_canonical_rule_under_its_policy() -> None:
    """As the table has it, each once; one that is listed under another policy, twice or not at all is seen."""
    from kvserve.canonical.rules import RULES  # here, so that a defect there fails this test and not the others
    from kvserve.settings.rule_policies import SETTABLE

    table = [
        (rule.name, rule.policy if rule.policy in SETTABLE[rule.name] else "off")
        for rule in RULES
        if rule.name in SETTABLE
    ]
    said = section("Settings")
    assert said_of_rules(said) == sorted(table)
    for old, new in (("`cch`, ", ""), ("`cch`, ", "`cch`, `cch`, "), ("`history`, ", "`always`, ")):
        assert said.count(old) == 1 and said_of_rules(said.replace(old, new)) != sorted(table)


def test_the_readme_names_every_script() -> None:
    """Programs that a user may start: scripts/ and the top level."""
    scripts = [*sorted(ROOT.glob("scripts/*.py")), ROOT / "install_and_run.py", ROOT / "start_llm.py"]
    assert [path.name for path in scripts if path.name not in README] == []


def test_what_is_to_be_pasted_is_well_formed() -> None:
    """JSON parses and points at port 4000, Python compiles."""
    configs = [json.loads(block) for block in blocks("json")]
    assert len(configs) == 4
    assert all('"baseurl": "http://127.0.0.1:4000' in block.lower() for block in blocks("json"))
    for block in blocks("python"):
        compile(block, "README.md", "exec")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    """A relative link names a file of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []


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
