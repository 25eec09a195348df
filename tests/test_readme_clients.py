"""The lines for clients can be pasted: each block is whole, all of them name the port that is open, and the README has
some of them as the page of clients has them."""

import json
import re
import tomllib
from typing import Any

import pytest

from tests.e2e import pasted
from tests.e2e.installing import PACKAGES, PYTHON_PACKAGES

SECTIONS = {
    **{"claude": "Claude Code", "codex": "Codex", "opencode": "opencode", "pi": "PI", "openclaw": "OpenClaw"},
    **{"aider": "aider", "qwen": "qwen-code", "kilo": "Kilo", "continue": "Continue", "cline": "Cline", "llm": "llm"},
    "mini": "mini-swe-agent",
}
"""The sections of the page of clients, by where the client is installed."""
IN_README = ("Claude Code", "Codex", "opencode")
SDKS = ("The anthropic SDK", "The openai SDK")


def test_every_client_that_is_tried_has_a_section() -> None:
    """And every section with lines to paste is one that is tried."""
    assert set(SECTIONS) == {*PACKAGES, *PYTHON_PACKAGES} - {"node24"}
    page = pasted.PAGE.read_text("utf-8")
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == [*SECTIONS.values(), *SDKS]


def differences(readme: str) -> list[str]:
    """What the README tells a reader to paste for a client, type or edit and the page of clients has otherwise."""
    part = readme[readme.index("## Point your client at it") : readme.index("## See it work")]
    found = re.findall(r"^([\w ]+)([:,][^\n]*)\n\n```(\w+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    assert len(found) * 2 == part.count("\n```") and tuple(name for name, *_ in found) == IN_README
    pastes = [(name, f"```{language}\n{text}```") for name, _, language, text in found]
    typed = [(name, f"`{code}`") for name, line, *_ in found for code in re.findall(r"`([^`]+)`", line)]
    return [text for name, text in (*pastes, *typed) if text not in pasted.section(name)]


def test_the_readme_has_the_lines_of_the_page() -> None:
    """To the letter: those of the page are the ones that are tried. One that differs is seen."""
    readme = pasted.README.read_text("utf-8")
    assert differences(readme) == []
    for text in ("_AUTO_COMPACT_WINDOW=131072", "model_context_window", "opencode.json", '"interleaved"'):
        assert readme.count(text) == 1 and len(differences(readme.replace(text, "other"))) == 1


def test_the_readmes_calls_are_for_both_ports() -> None:
    """A question for LiteLLM's and one for the server's own; arguments as a shell makes them of the block."""
    asked, explain = pasted.readme_calls(1234, 5678)
    assert asked[:2] == ["curl", "http://127.0.0.1:1234/v1/chat/completions"]
    assert json.loads(asked[-1])["messages"][0]["content"] == "What is the capital of France?"
    assert explain == ["curl", "http://127.0.0.1:5678/v1/cache/explain"]


def test_every_client_is_told_of_the_context() -> None:
    """Each has a row of the table, and all but three the number in their lines to paste."""
    page = pasted.PAGE.read_text("utf-8")
    table = page[page.index("## The length of the context") :]
    named = {name for row in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE) for name in row.split(", ")}
    assert named == {"Client", *SECTIONS.values()}
    told = {name for name in SECTIONS.values() if "131072" in pasted.section(name)}
    assert told == {*SECTIONS.values()} - {"aider", "llm", "mini-swe-agent"}


def test_configurations_of_the_clients_of_the_page() -> None:
    """Each names the port that is asked for, and the command names what is configured."""
    kilo = pasted.configuration("Kilo", 1234, 7)["provider"]
    [(name, provider)] = kilo.items()
    assert ("--model", f"{name}/{next(iter(provider['models']))}") == pasted.command("Kilo")
    qwen = pasted.configuration("qwen-code", 1234, 7)
    assert qwen["security"]["auth"]["baseUrl"] == "http://127.0.0.1:1234/v1"
    assert pasted.command("qwen-code") == pasted.command("Continue") == ()
    cn, llm = (pasted.block(client, "yaml", 1234) for client in ("Continue", "llm"))
    assert "apiBase: http://127.0.0.1:1234/v1\n" in cn and "api_base: http://127.0.0.1:1234/v1\n" in llm
    assert pasted.arguments("Cline", 1234)[-1] == "http://127.0.0.1:1234/v1"
    assert pasted.line("Cline", "contextWindow") == {"contextWindow": 131072}
    assert pasted.command("llm") == ("-m", *re.findall(r"model_id: (.*)", llm))
    assert pasted.variables("mini-swe-agent", 1234)["OPENAI_API_BASE"] == "http://127.0.0.1:1234/v1"
    assert "4000" not in json.dumps([kilo, qwen, cn, llm])


@pytest.mark.parametrize("number", [0, 1])
def test_configurations_of_pi(number: int) -> None:
    """Over both APIs, under the names that the command has."""
    configured: dict[str, Any] = pasted.configuration("PI", 1234, 7, number)
    [(name, provider)] = configured["providers"].items()
    [model] = provider["models"]
    assert ("--provider", name, "--model", model["id"]) == pasted.command("PI")
    assert model["maxTokens"] == 7 and "127.0.0.1:1234" in provider["baseUrl"]


def test_configurations_of_the_others() -> None:
    """Their forms are right, and the commands name what is configured."""
    opencode = pasted.configuration("opencode", 1234, 7)["provider"]
    [(name, provider)] = opencode.items()
    assert ("--model", f"{name}/{next(iter(provider['models']))}") == pasted.command("opencode")
    assert provider["models"]["local"]["limit"]["output"] == 7
    assert {"@ai-sdk/openai", provider["npm"]} <= set(re.findall(r"@ai-sdk/[a-z-]+", pasted.section("opencode")))
    codex = tomllib.loads(pasted.block("Codex", "toml", 1234))
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == "http://127.0.0.1:1234/v1"
    openclaw = pasted.configuration("OpenClaw", 1234, 7)
    [(name, provider)] = openclaw["models"]["providers"].items()
    assert openclaw["agents"]["defaults"]["model"]["primary"] == f"{name}/{provider['models'][0]['id']}"
    assert pasted.variables("Claude Code", 1234)["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1234"
    assert pasted.arguments("Claude Code", 1234) == ()
    assert pasted.variables("aider", 1234)["OPENAI_API_BASE"] == "http://127.0.0.1:1234/v1"
    assert pasted.arguments("aider", 1234)[:2] == ("--model", "openai/local")
    assert "4000" not in json.dumps([opencode, codex, openclaw])


@pytest.mark.parametrize("sdk", SDKS)
def test_lines_for_sdks_are_python(sdk: str) -> None:
    """They compile; that they run is tried end to end."""
    compile(pasted.block(sdk, "python", 1234), sdk, "exec")


def test_the_length_stands_where_each_client_reads_it() -> None:
    """Under the name and at the place that it knows: the number anywhere else in its lines is read by nobody."""
    codex = tomllib.loads(pasted.block("Codex", "toml", 1234))
    assert codex["model_context_window"] == 131072, "in front of the first table, or it is the provider's"
    assert pasted.variables("Claude Code", 1234)["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    for name in ("opencode", "Kilo"):
        for provider in pasted.configuration(name, 1234, 7)["provider"].values():
            assert {model["limit"]["context"] for model in provider["models"].values()} == {131072}
    configured: list[dict[str, Any]] = [pasted.configuration("PI", 1234, 7, number) for number in (0, 1)]
    for each in (*configured, pasted.configuration("OpenClaw", 1234, 7)["models"]):
        for provider in each["providers"].values():
            assert {model["contextWindow"] for model in provider["models"]} == {131072}
