"""Every setting, its default and its meaning; the only file that reads the environment. `settings/kinds.py` has
what each may be.

Flags override the environment, which overrides `.env`. A value that cannot be used raises `SettingError` with key,
value and what was expected. The rooms never see this file: `app/wiring.py` hands each the values it needs.
"""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dotenv import dotenv_values
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kvserve.core.rank_place import RankPlace
from kvserve.errors import SettingError, StartupError
from kvserve.settings.env_file import read_text
from kvserve.settings.flags import SETTING_OF_FLAG, DemoKind, FlagError, misspelt, misspelt_words, parse_flags
from kvserve.settings.kinds import (
    DEFAULTS,
    KINDS,
    BlasSearch,
    DraftLimit,
    GroupSize,
    KvBits,
    ModelFamily,
    QuantScheme,
    shown,
)
from kvserve.settings.rank_env import off_over_ranks, rank_place, refuse_demo_of_ranks
from kvserve.settings.rank_variables import OFF_OVER_RANKS
from kvserve.settings.start_checks import (
    refuse_backends,
    refuse_equal_ports,
    refuse_misspelt,
    refuse_model_of_demo,
    refuse_shared_without_disk,
)

NameList = Annotated[tuple[str, ...], NoDecode]

DiskMode = Literal["on", "ephemeral", "off"]
"""KV on disk: across restarts, in a scratch file that vanishes with the process, or not at all."""


class Settings(BaseSettings):
    """All settings with their defaults; frozen. Field names are the environment's names in lower case."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, env_file_encoding="utf-8", protected_namespaces=()
    )

    model_path: str = Field(
        DEFAULTS["model_path"],
        description="Folder in Hugging Face format or hub name.",
    )
    chat_template: Path | None = Field(
        None, description="A file in Jinja that stands for the chat template of MODEL_PATH's model; read at the start."
    )
    draft_model: Path | None = Field(
        None, description="Folder of a small model of the same tokenizer that drafts for the model (speculation)."
    )
    model_family: ModelFamily = Field("auto", description="Which tool-call and thinking form is tried first.")
    model_strict: bool = Field(False, description="Refuse a `model` that is no model here and no alias.")
    model_aliases: NameList = Field(
        (), description="Further names: name=model, by comma; a name may end with *, a model may be `default`."
    )
    model_folders: NameList = Field(
        DEFAULTS["model_folders"],
        description="Folders by comma whose sub-folders are models that a request may name; it loads one at a time.",
    )
    proxy_model_id: str = Field("openai/{MODEL_PATH}", description="The model name that port 4000 lists.")
    mlx_host: str = Field(DEFAULTS["mlx_host"], description="Address that kvserve listens on.")
    mlx_port: int = Field(DEFAULTS["mlx_port"], description="Port of kvserve itself; 0 takes a free one.")
    proxy_port: int = Field(DEFAULTS["proxy_port"], description="Port of the LiteLLM proxy.")
    proxy_host: str = Field(DEFAULTS["proxy_host"], description="Address that the LiteLLM proxy listens on.")
    proxy_startup_wait_seconds: float = Field(
        2.0, description="How long the banner waits for the proxy; readiness itself is polled."
    )
    max_kv_size: int = Field(196608, description="Context limit in tokens, prompt and answer together.")
    kv_group_size: GroupSize = Field(
        64, description="Numbers that share a scale in quantised KV of the uniform scheme; divides the head width."
    )
    kv_bits: KvBits | None = Field(None, description="Bits of quantised KV: OFF, 4 or 8.")
    kv_quant_scheme: QuantScheme = Field(
        "uniform", description="How KV is quantised; turboquant serves every attention, at more work per token."
    )
    quantized_kv_start: int = Field(
        5000, description="Tokens of a row that are computed in full precision before its KV is quantised."
    )
    prompt_cache_max_entries_global: int = Field(
        24, description="Sequence ends in RAM; those over it leave first where bytes are short, else they stay."
    )
    prompt_cache_max_entries_per_session: int = Field(2, description="The same for one branch of a session.")
    prompt_cache_ttl_seconds: float = Field(1800, description="Idle time after which KV leaves RAM; 0 = never.")
    prompt_cache_session_max_idle_seconds: float = Field(
        1800, description="Idle time after which a session's KV leaves RAM; 0 = never."
    )
    eviction_interval_seconds: float = Field(
        300, description="How often an idle engine looks for KV whose time is over."
    )
    keepalive_interval_seconds: float = Field(
        240,
        description="How often KV that was marked for 5 minutes counts as used again while its session is not idle.",
    )
    prompt_cache_block_size: int = Field(16, description="Tokens per hashed block.")
    prompt_cache_max_bytes: int | None = Field(
        None, description="RAM for the prefix cache; AUTO takes a share of the machine's memory."
    )
    session_records_max_bytes: int | None = Field(
        None,
        description="RAM for records of a model's conversations and prompts, and as much again on disk; AUTO is 512 "
        "MiB or, on small machines, a share.",
    )
    cache_use_block_index: bool = Field(
        True, description="Look prefixes up by block hash; false scans, with the same results."
    )
    cache_canonicalize_tool_context: bool = Field(
        True,
        description="Normalise volatile spans in the cache key; false uses the prompt as it is.",
    )
    cache_rule_policies: NameList = Field(
        DEFAULTS["cache_rule_policies"],
        description="Policies of canonical rules other than the table's: rule=always, history, never or off, by comma.",
    )
    cache_vlm_image_identity: bool = Field(
        True, description="Image markers in the canonical key; digests are verified all the same."
    )
    cache_session_partitioning: bool = Field(True, description="Separate turn records and per-session limits.")
    tenant_isolation: bool = Field(
        False,
        description="Keep KV apart per key and user: neither cached_tokens nor prefill time tells what others asked.",
    )
    cache_norm_safety_check: bool = Field(
        False,
        description="Fall back to the original prompt as key when the canonical one is over 10 % shorter.",
    )
    normalize_write_tool_content_for_prompt: bool = Field(
        False,
        description="Show the model a digest instead of the content of its past write calls.",
    )
    disk_cache_dir: Path = Field(
        DEFAULTS["disk_cache_dir"], description="Where KV and records are kept across restarts."
    )
    disk_cache_max_bytes: int | None = Field(
        None,
        description="Cap over all models, records included; AUTO = the smaller of 500 GB and 20 % of free space.",
    )
    disk_cache_min_free_bytes: int = Field(
        2 * 10**9, description="What stays free on the volume: below it nothing is written."
    )
    disk_cache_ttl_hours: float = Field(24, description="Idle hours after which KV and records leave the disk.")
    remote_cache_url: str | None = Field(
        None,
        description="A Redis server that several kvserve share: what one computed the others read. None: no word "
        "leaves this machine.",
    )
    warm_next_turn: bool = Field(
        True, description="While idle, compute what the next request of each session must begin with."
    )
    prewarm_prefixes: int = Field(
        4, description="System prompts with tools, the most used ones, that an idle server computes at its start."
    )
    warm_max_tokens: int = Field(
        32768, description="Most tokens that are computed for one prefix that no client asked for."
    )
    warm_max_time_share: float = Field(
        0.5, description="Share of the time that may go into what no client asked for; 0 = none of it."
    )
    default_temperature: float = Field(0.1, description="Temperature; 0 is greedy.")
    default_top_p: float = Field(0.9, description="Nucleus sampling; 1 = off.")
    default_top_k: int = Field(40, description="Draw from the k likeliest tokens; 0 = off.")
    default_min_p: float = Field(
        0.05, description="Drop tokens below this share of the likeliest one's probability; 0 = off."
    )
    default_repetition_penalty: float = Field(1.08, description="Divides the logits of recent tokens; 1 = off.")
    default_repetition_context_size: int = Field(256, description="How many recent tokens the repetition penalty sees.")
    default_max_tokens: int = Field(2048, description="Answer length when a request gives none.")
    default_thinking: bool = Field(
        True, description="Thinking on when a request says nothing; on /v1/messages it is off then."
    )
    preserve_thinking: bool = Field(True, description="Ask the template to keep old thinking where it can.")
    generation_watchdog_seconds: float = Field(
        600,
        description="Longest time a row may decode, or get nothing computed though it is its turn; 0 = no limit.",
    )
    stream_share: float = Field(
        0.5, description="Share of the time that running streams keep while prompts are read beside them."
    )
    max_concurrent_requests: int = Field(8, description="Rows that prefill or decode at the same time.")
    max_queued_requests: int = Field(64, description="Requests that may wait; beyond it: 429.")
    max_batch_bytes: int | None = Field(
        None,
        description="Memory for the KV of running rows at their peak, padding included; AUTO takes a share of the "
        "machine's memory.",
    )
    wired_limit: int | None = Field(
        0, description="Memory that macOS may not move: OFF, a size, or AUTO = weights, KV and buffers. Metal only."
    )
    prefill_step_size: int = Field(2048, description="Most tokens in one prefill chunk; measured time shortens it.")
    speculation: DraftLimit | int = Field(
        "auto",
        description="Draft next tokens from what was read and written: AUTO, at most so many a step, or OFF.",
    )
    speculation_exact: bool = Field(
        False, description="Keep passes so narrow that their logits are those of single steps, to the bit."
    )
    blas_library: BlasSearch | Path = Field(
        DEFAULTS["blas_library"],
        description="The BLAS for products in float32 on Linux: AUTO looks for one, OFF takes the wheel's, or a file.",
    )
    backends: NameList = Field(
        DEFAULTS["backends"],
        description="Servers behind `kvserve proxy`: [NAME=]http[s]://[KEY@]HOST[:PORT], by comma.",
    )
    backend_max_waiting: int = Field(
        8, description="Requests that may wait at one of BACKENDS before its sessions go elsewhere."
    )
    proxy_secret: str | None = Field(
        None, description="By it BACKENDS believe `kvserve proxy` whose request it is; the same for all of them."
    )
    api_key: str | None = Field(
        DEFAULTS["api_key"], description="Required as Bearer or x-api-key on both ports when set."
    )
    api_keys_file: Path | None = Field(
        DEFAULTS["api_keys_file"],
        description="A file in TOML of who else may use port 4000, with which limits; needs API_KEY, the operator's.",
    )
    allowed_origins: NameList = Field((), description="Further Origins that a browser may call from, by comma.")
    allowed_hosts: NameList = Field(
        (), description="Further Host names under which the server may be called, by comma."
    )
    max_request_body_bytes: int = Field(64 * 2**20, description="Largest request body.")
    max_connections: int = Field(256, description="Open connections; the oldest silent one makes room.")
    max_header_bytes: int = Field(65536, description="Largest header section of a request.")
    header_timeout_seconds: float = Field(10, description="Time for a request's headers to arrive.")
    body_timeout_seconds: float = Field(60, description="Time for a request's body to arrive.")
    idle_connection_seconds: float = Field(120, description="How long an idle connection is kept.")
    state_dir: Path = Field(
        DEFAULTS["state_dir"], description="Generated LiteLLM config, pid file and log; demo models."
    )
    responses_keep_days: float = Field(
        30, description="Days after its last use that a response of /v1/responses is kept."
    )
    enable_request_logging: bool = Field(True, description="Write a trace file per session under LOG_ROOT.")
    log_root: Path = Field(Path("logs"), description="Where trace files go.")
    log_keep_days: int = Field(14, description="Days whose trace files are kept, today among them; 0 = all.")
    explanations_kept: int = Field(1000, description="Requests that GET /v1/cache/explain can explain.")
    dashboard_show_text: bool = Field(
        False, description="Let the dashboard show the text around a difference, up to 80 characters of a prompt."
    )
    image_hosts: NameList = Field(
        (),
        description="Hosts whose https pictures are fetched, by comma, with :port where it is not 443; others never.",
    )
    image_fetch_seconds: float = Field(20, description="Time for all pictures that one request lets the server fetch.")
    image_fetch_max_bytes: int = Field(
        64 * 2**20, description="Most bytes of all pictures that one request lets the server fetch; of one, 32 MiB."
    )
    image_feature_max_bytes: int | None = Field(
        None,
        description="Memory for what a vision tower made of images; the newest stays whatever it takes. AUTO is 512 "
        "MiB or, on small machines, a share.",
    )
    vlm_cache_debug: bool = Field(False, description="Log the first 64 prompt ids and the image cuts.")

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> object:
        """Every value through the one table of what it may be."""
        return KINDS[str(info.field_name)].read(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then `.env`; no secrets folder."""
        return init_settings, env_settings, dotenv_settings

    @property
    def listed_model_id(self) -> str:
        """PROXY_MODEL_ID with MODEL_PATH filled in."""
        return self.proxy_model_id.replace("{MODEL_PATH}", self.model_path)


@dataclass(frozen=True, slots=True)
class Launch:
    """What `start_llm.py` was asked for: the settings, the flags that are no settings, and what the person who started
    it should know of them."""

    settings: Settings
    demo: DemoKind | None
    with_proxy: bool
    disk_cache: DiskMode
    environment: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    removes_demo: bool = False
    ranks: RankPlace | None = None


def setting_key(name: str) -> str:
    """The name that users know: the field's name in upper case."""
    return name.upper()


def load_launch(argv: Sequence[str], *, env_file: Path | None = Path(".env")) -> Launch:
    """Read flags, environment and `.env`. Raises SettingError for the first value that cannot be used, StartupError for
    a flag or a name in `.env` that is misspelt."""
    try:
        flags = parse_flags(argv)
    except FlagError as error:
        raise StartupError(str(error)) from None
    given = {name: value for name in SETTING_OF_FLAG if (value := getattr(flags, name)) is not None}
    _check_names_in(env_file)
    refuse_model_of_demo(flags.demo, given)
    try:
        settings = Settings(_env_file=env_file, **given)  # type: ignore[call-arg]  # pydantic-settings reads it from kwargs
    except ValidationError as error:
        raise _as_setting_error(error, given) from None
    refuse_shared_without_disk(settings.remote_cache_url, flags.no_disk_cache or flags.ephemeral_cache)
    if not flags.no_proxy:
        refuse_equal_ports(settings.mlx_port, settings.proxy_port)
        refuse_backends(settings.backends)
    disk_cache: DiskMode = "ephemeral" if flags.ephemeral_cache else "off" if flags.no_disk_cache else "on"
    warnings, ranks = _misspelt_in_environment(), rank_place(os.environ)
    if ranks is not None:
        refuse_demo_of_ranks(flags.demo, ranks)
        settings, warnings = settings.model_copy(update=OFF_OVER_RANKS), (*warnings, off_over_ranks(ranks))
    with_proxy = not flags.no_proxy and (ranks is None or ranks.leads)
    return Launch(settings, flags.demo, with_proxy, disk_cache, dict(os.environ), warnings, flags.demo_remove, ranks)


def _check_names_in(env_file: Path | None) -> None:
    """Raises StartupError for one that is misspelt. A pipe is not looked at: what is read here would be gone for the
    settings."""
    if env_file is not None and (text := read_text(env_file)):
        refuse_misspelt(dotenv_values(stream=io.StringIO(text), interpolate=False), env_file)


def _misspelt_in_environment() -> tuple[str, ...]:
    """The environment is everybody's: what is nearly a setting there is told, and no more."""
    found = misspelt(os.environ, _KEYS)
    return (misspelt_words(found, "The environment"),) if found else ()


_KEYS = tuple(setting_key(name) for name in Settings.model_fields)


def _as_setting_error(error: ValidationError, given: Mapping[str, object]) -> SettingError:
    """The first error, under the name that its value was given: a flag's or a setting's."""
    first = error.errors()[0]
    name = str(first["loc"][0]).lower()
    key = SETTING_OF_FLAG[name] if name in given else setting_key(name)
    return SettingError(key, shown(name, first["input"]), KINDS[name].expected)
