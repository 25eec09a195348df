"""The settings of each room, from the settings of the process. It joins rooms and decides nothing."""

from collections.abc import Callable
from pathlib import Path

from kvserve.agents.agent_store import AgentStore
from kvserve.app.catalogue import Catalogue, CatalogueSettings, Disk, ModelSource, TemplateFile
from kvserve.canonical.rules import select
from kvserve.config import DiskMode, Launch, Settings
from kvserve.core import RequestDefaults, SamplingParams
from kvserve.engine.cache_records import CacheSettings
from kvserve.engine.draft_nouns import DEFAULT_DRAFTS, DraftSettings
from kvserve.engine.engine_settings import DiskSettings, EngineSettings
from kvserve.engine.memory import RECORDS_CAP
from kvserve.engine.model_files import cached_folder, is_model_folder
from kvserve.engine.quantised import KvSettings
from kvserve.engine.warming import WarmSettings
from kvserve.errors import SettingError
from kvserve.identity.recognise import IdentitySettings
from kvserve.observe.observability import ObservabilitySettings
from kvserve.prompt.compiled import fault_of
from kvserve.prompt.images_remote import RemoteLimits, RemotePictures
from kvserve.protocols.responses_store import ResponseStore
from kvserve.sessions.archive_file import FILE_NAME as RECORDS_FILE_NAME
from kvserve.sessions.stores import StoreLimits
from kvserve.settings.kinds import aliases_in
from kvserve.settings.rule_policies import policies_in
from kvserve.settings.start_checks import model_folders, template_text
from kvserve.web.settings import WebSettings

RESPONSES_FILE = "responses.sqlite3"
AGENTS_FILE = "agents.sqlite3"
HISTORY_FOLDER = "dashboard"
RECORDS_PREFIX = "records-"
"""How the folders of records in DISK_CACHE_DIR begin; a digest of the model follows."""


def request_defaults(settings: Settings) -> RequestDefaults:
    return RequestDefaults(
        sampling=SamplingParams(
            temperature=settings.default_temperature,
            top_p=settings.default_top_p,
            top_k=settings.default_top_k,
            min_p=settings.default_min_p,
            repetition_penalty=settings.default_repetition_penalty,
            repetition_context_size=settings.default_repetition_context_size,
        ),
        max_tokens=settings.default_max_tokens,
        thinking=settings.default_thinking,
        preserve_thinking=settings.preserve_thinking,
    )


def engine_settings(settings: Settings, disk_cache: DiskMode = "on") -> EngineSettings:
    return EngineSettings(
        max_kv_size=settings.max_kv_size,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_queued_requests=settings.max_queued_requests,
        max_batch_bytes=settings.max_batch_bytes,
        prefill_step_size=settings.prefill_step_size,
        watchdog_seconds=settings.generation_watchdog_seconds,
        stream_share=settings.stream_share,
        default_sampling=request_defaults(settings).sampling,
        cache=CacheSettings(
            max_bytes=settings.prompt_cache_max_bytes,
            block_size=settings.prompt_cache_block_size,
            use_index=settings.cache_use_block_index,
            max_entries=settings.prompt_cache_max_entries_global,
            max_entries_per_owner=settings.prompt_cache_max_entries_per_session,
            ttl_seconds=settings.prompt_cache_ttl_seconds,
            owner_idle_seconds=settings.prompt_cache_session_max_idle_seconds,
            keep_alive_seconds=settings.keepalive_interval_seconds,
            check_seconds=settings.eviction_interval_seconds,
        ),
        kv=KvSettings(
            bits=settings.kv_bits,
            scheme=settings.kv_quant_scheme,
            group_size=settings.kv_group_size,
            start=settings.quantized_kv_start,
        ),
        disk=_disk_settings(settings, disk_cache),
        image_feature_bytes=settings.image_feature_max_bytes,
        records_bytes=settings.session_records_max_bytes,
        wired_bytes=settings.wired_limit,
        drafts=_draft_settings(settings),
        warming=WarmSettings(max_tokens=settings.warm_max_tokens, time_share=settings.warm_max_time_share),
        idle_sweep_seconds=min(settings.eviction_interval_seconds, settings.keepalive_interval_seconds / 8),
    )


def _draft_settings(settings: Settings) -> DraftSettings:
    limit = settings.speculation
    return DraftSettings(
        is_on=limit != "off",
        max_num_tokens=limit if isinstance(limit, int) else DEFAULT_DRAFTS.max_num_tokens,
        is_exact=settings.speculation_exact,
    )


def _disk_settings(settings: Settings, mode: DiskMode) -> DiskSettings | None:
    if mode == "off":
        return None
    return DiskSettings(
        folder=settings.disk_cache_dir,
        max_bytes=settings.disk_cache_max_bytes,
        min_free_bytes=settings.disk_cache_min_free_bytes,
        ttl_hours=settings.disk_cache_ttl_hours,
        is_ephemeral=mode == "ephemeral",
        beside=(f"{RECORDS_PREFIX}*/{RECORDS_FILE_NAME}*",),
    )


def max_record_disk_bytes(settings: Settings) -> int:
    """Bytes of one model's records on disk: they count in the cap over all, so they take a part of it at most."""
    cap = settings.disk_cache_max_bytes
    wanted = settings.session_records_max_bytes or RECORDS_CAP
    return wanted if cap is None else min(wanted, cap // 8)


def identity_settings(settings: Settings) -> IdentitySettings:
    """Raises SettingError for a rule or a policy that does not exist."""
    return IdentitySettings(
        rules=select(
            policies_in(settings.cache_rule_policies),
            settings.cache_canonicalize_tool_context,
            tells_images_apart=settings.cache_vlm_image_identity,
        ),
        is_partitioned=settings.cache_session_partitioning,
        checks_shortening=settings.cache_norm_safety_check,
        digests_writes=settings.normalize_write_tool_content_for_prompt,
        limits=StoreLimits(
            max_bytes=settings.session_records_max_bytes or RECORDS_CAP,
            idle_seconds=settings.prompt_cache_session_max_idle_seconds,
            keep_seconds=settings.disk_cache_ttl_hours * 3_600,
        ),
    )


def catalogue_settings(settings: Settings, listed_model_id: str) -> CatalogueSettings:
    """Raises SettingError for a folder that is not there."""
    return CatalogueSettings(
        aliases=aliases_in(settings.model_aliases),
        folders=model_folders(settings.model_folders),
        default_names=(listed_model_id, listed_model_id.removeprefix("openai/")),
        is_strict=settings.model_strict,
    )


def catalogue(launch: Launch, default: ModelSource, listed_model_id: str) -> Catalogue:
    """What can be served; over several ranks one model, as another would have to be loaded on all of them. Raises
    SettingError for a folder that is not there."""
    found = Disk(cached_folder, is_model_folder) if launch.ranks is None else Disk(lambda _: None, lambda _: False)
    return Catalogue(default, catalogue_settings(launch.settings, listed_model_id), found)


def template_file(path: Path | None) -> TemplateFile | None:
    """The chat template in this file, None where none is named. Raises SettingError for a file that has none."""
    source = template_text(path)
    if path is None or source is None:
        return None
    if (fault := fault_of(source)) is not None:
        raise SettingError("CHAT_TEMPLATE", str(path), f"a chat template in Jinja; it is broken at {fault}")
    return TemplateFile(path, source)


def web_settings(settings: Settings) -> WebSettings:
    return WebSettings(
        host=settings.mlx_host,
        port=settings.mlx_port,
        api_key=settings.api_key,
        allowed_origins=settings.allowed_origins,
        allowed_hosts=settings.allowed_hosts,
        max_body_bytes=settings.max_request_body_bytes,
        max_header_bytes=settings.max_header_bytes,
        max_connections=settings.max_connections,
        header_timeout_seconds=settings.header_timeout_seconds,
        body_timeout_seconds=settings.body_timeout_seconds,
        idle_timeout_seconds=settings.idle_connection_seconds,
    )


def response_store(settings: Settings, disk_cache: DiskMode, report: Callable[[str], None]) -> ResponseStore:
    """In memory where KV is: who wants none on disk wants no words there."""
    path = settings.state_dir / RESPONSES_FILE if disk_cache == "on" else None
    return ResponseStore(path, report, keep_seconds=settings.responses_keep_days * 86_400)


def agent_store(settings: Settings, disk_cache: DiskMode) -> AgentStore:
    """The same for agents: none of them persists then."""
    return AgentStore(settings.state_dir / AGENTS_FILE if disk_cache == "on" else None)


def remote_pictures(settings: Settings) -> RemotePictures | None:
    """What fetches pictures of the hosts that are allowed; None where none is."""
    limits = RemoteLimits(settings.image_fetch_seconds, settings.image_fetch_max_bytes)
    return RemotePictures(settings.image_hosts, limits) if settings.image_hosts else None


def observability_settings(settings: Settings, disk_cache: DiskMode = "on") -> ObservabilitySettings:
    """A trace is a prompt on disk: without a disk cache there is none, and what the dashboard shows stays in RAM."""
    return ObservabilitySettings(
        log_root=settings.log_root,
        writes_traces=settings.enable_request_logging and disk_cache == "on",
        num_trace_days=settings.log_keep_days,
        num_explanations=settings.explanations_kept,
        shows_text=settings.dashboard_show_text,
        shows_image_cuts=settings.vlm_cache_debug,
        history_folder=settings.state_dir / HISTORY_FOLDER if disk_cache == "on" else None,
    )
