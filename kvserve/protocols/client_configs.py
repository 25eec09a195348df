"""How each client is told of a server: the configuration that the README has to be pasted, as files of a folder of
ours, variables and arguments. It knows the clients' own names and formats, and starts nothing.

A client is pointed at such a folder by its own variable or flag, so what a person has set up for it is neither read nor
changed where these replace it, and not changed where they are added to it. Where a client lets a person's own files win
over variables, it is told in a form that wins over these files: no word of a conversation may go to another server.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvserve.core import JsonObject

ANSWER_TOKENS = 8192
"""What an answer may have at the most; a quarter of a context that is short."""

NO_KEY = "none"
"""Clients want one, also where the server asks for none."""

SHOWN_FOLDER = Path("FOLDER")
"""What stands for a client's folder where nothing is written."""

MODEL = "local"
PROVIDER = "kvserve"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server as clients see it: a URL without a path, a key, and how many tokens prompt and answer may have."""

    url: str
    api_key: str
    context_tokens: int

    @property
    def answer_tokens(self) -> int:
        return min(ANSWER_TOKENS, self.context_tokens // 4)

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class ClientSetUp:
    """How a client is started: its program with what goes before a person's own arguments, variables, the files of its
    folder by their names there, and variables that it must not inherit."""

    program: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownClient:
    """One row of the table: its program, how it is installed, and how it is set up for a server, with a folder for its
    files."""

    program: str
    install: str
    set_up: Callable[[Endpoint, Path], ClientSetUp]


CLAUDE_ELSEWHERE = (
    *("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_UNIX_SOCKET"),
    *("CLAUDE_CODE_API_BASE_URL", "CLAUDE_CODE_OAUTH_TOKEN"),
    *("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
    *("CLAUDE_CODE_USE_MANTLE", "CLAUDE_CODE_USE_ANTHROPIC_AWS"),
)
"""What leads Claude Code to another server, or says to this one who the person is elsewhere."""


def _claude(server: Endpoint, folder: Path) -> ClientSetUp:
    """By a file of settings on its command line too: from 2.0.1 on the `env` of a person's or a project's settings wins
    over variables (anthropics/claude-code, issue 8500), and only an organisation's wins over that file. Files are
    merged name by name, so what must not be set is empty there."""
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": server.api_key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context_tokens),
    }
    return ClientSetUp(
        "claude",
        ("--settings", str(folder / "settings.json")),
        variables,
        {"settings.json": _json({"env": variables | dict.fromkeys(CLAUDE_ELSEWHERE, "")})},
        CLAUDE_ELSEWHERE,
    )


def _codex(server: Endpoint, _: Path) -> ClientSetUp:
    """By settings on its command line, each a line of TOML: logins and conversations stay where they are."""
    provider = {"name": PROVIDER, "base_url": server.openai_url, "wire_api": "responses"}
    variables = {}
    if server.api_key != NO_KEY:
        provider["env_key"] = "KVSERVE_API_KEY"
        variables["KVSERVE_API_KEY"] = server.api_key
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    lines = (
        f"model = {json.dumps(MODEL)}",
        f"model_provider = {json.dumps(PROVIDER)}",
        f"model_context_window = {server.context_tokens}",
        f"model_providers.{PROVIDER} = {{ {table} }}",
    )
    return ClientSetUp("codex", tuple(word for line in lines for word in ("-c", line)), variables)


def _opencode(server: Endpoint, _: Path) -> ClientSetUp:
    """By a variable that is merged over the person's own files and over a project's, which may name another model."""
    model = {
        "name": PROVIDER,
        "reasoning": True,
        "tool_call": True,
        "interleaved": {"field": "reasoning_content"},
        "limit": {"context": server.context_tokens, "output": server.answer_tokens},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": server.openai_url, "apiKey": server.api_key},
        "models": {MODEL: model},
    }
    return ClientSetUp(
        "opencode",
        variables={
            "OPENCODE_CONFIG_CONTENT": json.dumps({"model": f"{PROVIDER}/{MODEL}", "provider": {PROVIDER: provider}})
        },
    )


def _pi(server: Endpoint, folder: Path) -> ClientSetUp:
    model = {
        "id": MODEL,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": server.context_tokens,
        "maxTokens": server.answer_tokens,
        "compat": {
            "supportsDeveloperRole": False,
            "supportsReasoningEffort": False,
            "thinkingFormat": "qwen-chat-template",
            "maxTokensField": "max_tokens",
        },
    }
    return ClientSetUp(
        "pi",
        ("--provider", PROVIDER, "--model", MODEL),
        {"PI_CODING_AGENT_DIR": str(folder)},
        {"models.json": _json({"providers": {PROVIDER: _openai_provider(server, model)}})},
    )


def _openclaw(server: Endpoint, folder: Path) -> ClientSetUp:
    """With a state of its own: it writes what it is configured with into the state, too."""
    model = {
        "id": MODEL,
        "name": PROVIDER,
        "reasoning": True,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": server.context_tokens,
        "maxTokens": server.answer_tokens,
        "compat": {"thinkingFormat": "qwen-chat-template", "supportsPromptCacheKey": True},
    }
    named = f"{PROVIDER}/{MODEL}"
    defaults = {
        "model": {"primary": named},
        "models": {named: {"alias": PROVIDER}},
        "workspace": str(folder / "workspace"),
    }
    configuration = {
        "agents": {"defaults": defaults},
        "models": {"mode": "merge", "providers": {PROVIDER: _openai_provider(server, model)}},
    }
    return ClientSetUp(
        "openclaw",
        ("agent", "--local", "--agent", "main"),
        {"OPENCLAW_STATE_DIR": str(folder), "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json")},
        {"openclaw.json": _json(configuration)},
    )


def _aider(server: Endpoint, folder: Path) -> ClientSetUp:
    """By a file of variables too: aider reads `.env` of the home, the repository and the folder over what it inherits,
    and the file that is named on its command line over these. LiteLLM in it asks for OPENAI_BASE_URL first. Its own
    files (`.aider.conf.yml`) may name a server, variables and further models: AIDER_ variables and flags win over
    them."""
    model = f"openai/{MODEL}"
    flags = ("--model", model, "--no-show-model-warnings")
    further = ("--weak-model", model, "--editor-model", model)
    variables = {"OPENAI_API_BASE": server.openai_url, "OPENAI_API_KEY": server.api_key}
    settings = {
        **variables,
        "OPENAI_BASE_URL": server.openai_url,
        **{f"AIDER_{name}": value for name, value in variables.items()},
        "AIDER_SET_ENV": f"OPENAI_API_BASE={server.openai_url}",
        "AIDER_API_KEY": f"openai={server.api_key}",
    }
    files = {
        "metadata.json": _json({model: {"max_input_tokens": server.context_tokens}}),
        "aider.env": "".join(f"{name}={_dotenv_quoted(value)}\n" for name, value in settings.items()),
    }
    told = ("--model-metadata-file", str(folder / "metadata.json"), "--env-file", str(folder / "aider.env"))
    return ClientSetUp("aider", (*flags, *further, *told), variables, files)


def _dotenv_quoted(value: str) -> str:
    """As python-dotenv reads it back."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _openai_provider(server: Endpoint, model: Mapping[str, object]) -> dict[str, object]:
    """As PI and OpenClaw name one."""
    return {
        "baseUrl": server.openai_url,
        "api": "openai-completions",
        "apiKey": server.api_key,
        "models": [model],
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


CLIENTS: Mapping[str, KnownClient] = {
    "claude": KnownClient("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": KnownClient("codex", "npm install -g @openai/codex", _codex),
    "opencode": KnownClient("opencode", "npm install -g opencode-ai", _opencode),
    "pi": KnownClient("pi", "npm install -g @earendil-works/pi-coding-agent", _pi),
    "openclaw": KnownClient("openclaw", "npm install -g openclaw", _openclaw),
    "aider": KnownClient("aider", "pip install aider-chat", _aider),
}


def shell_text(found: ClientSetUp, folder: Path, arguments: Sequence[str] = ()) -> str:
    """What a person would write themselves: files, then one line for a shell, with their own arguments behind it."""
    files = [f"# {folder / name}\n{text}" for name, text in found.files.items()]
    without = ["env", *(word for name in found.removed for word in ("-u", name))] if found.removed else []
    assigned = [f"{name}={shlex.quote(value)}" for name, value in found.variables.items()]
    command = shlex.join([found.program, *found.arguments, *arguments])
    return "\n".join([*files, " ".join([*without, *assigned, command])])


def snippets(server: Endpoint) -> list[JsonObject]:
    """All clients of the table: the command that starts one, how it is installed, and what to write by hand."""
    return [
        {
            "name": name,
            "launch": f"kvserve launch {name} --server-url {server.url}",
            "install": client.install,
            "text": shell_text(client.set_up(server, SHOWN_FOLDER), SHOWN_FOLDER),
        }
        for name, client in CLIENTS.items()
    ]
