"""What the banner says of a server that is ready, gathered from what knows it. `observe/terminal.py` says it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve import __version__
from kvserve.app.blas import Blas
from kvserve.app.demo_model import DemoModel
from kvserve.app.proxy_wiring import access_warnings
from kvserve.config import Settings
from kvserve.engine.device import DeviceFacts, device_facts
from kvserve.observe.reports import disk_line
from kvserve.observe.terminal import BannerFacts, size_text
from kvserve.protocols.model_cards import ModelCard
from kvserve.requests.served_model import ServedModel

MAX_NAMED_MODELS = 3
"""More of those that may be asked for are counted."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the server knows beside its model. URLs are without a path; `proxy_url` None: no proxy runs.

    `models` can be served, `chat_template` is the file that stands for the model's own.
    """

    server_url: str
    proxy_url: str | None
    is_proxy_ready: bool
    models: Sequence[ModelCard]
    demo: DemoModel | None = None
    blas: Blas | None = None
    chat_template: str | None = None


def banner_facts(
    settings: Settings, start_warnings: Sequence[str], served: ServedModel, around: Surroundings
) -> BannerFacts:
    """The banner of a server whose model has just been loaded."""
    demo, blas = around.demo, around.blas
    warnings = [*start_warnings, *access_warnings(settings, has_proxy=around.proxy_url is not None)]
    if demo is not None and demo.warning is not None:
        warnings.append(demo.warning)
    if settings.normalize_write_tool_content_for_prompt:
        warnings.append("The model does not see the contents of its past write calls, only their digests.")
    if (support := served.engine.status.cache_support) is not None:
        warnings += support.notes
    if around.proxy_url is None and settings.api_keys_file is not None:
        warnings.append("API_KEYS_FILE is of PROXY_PORT, which --no-proxy leaves out: only API_KEY opens MLX_PORT.")
    if around.proxy_url is not None and not around.is_proxy_ready:
        warnings.append("LiteLLM is still starting (10 to 20 s); until then use the second URL.")
    return BannerFacts(
        version=__version__,
        model_name=served.name,
        context_limit=served.context_limit,
        server_url=around.server_url,
        proxy_url=around.proxy_url,
        demo=demo.kind if demo is not None else None,
        needs_api_key=settings.api_key is not None,
        warnings=tuple(warnings),
        disk=disk_line(served.engine.cache_report().disk, served.engine.digest.status),
        chat_template=around.chat_template,
        blas=f"{blas.name} ({blas.path})" if blas is not None else None,
        device=device_line(device_facts()),
        models=models_line(served.name, around.models),
    )


def device_line(device: DeviceFacts) -> str:
    """What MLX computes on, and what it may use of the machine's memory."""
    kind = "GPU, Metal" if device.kind == "gpu" and device.has_metal else device.kind.upper()
    name = f"{device.name} ({kind})" if device.name else kind
    return f"{name}, {size_text(device.memory_bytes)} of memory"


def models_line(served: str, models: Sequence[ModelCard]) -> str | None:
    """The other models that may be asked for by name, None where there are none."""
    own = {served, *(card.name for card in models if card.alias_of is None)}
    others = [card for card in models if card.name != served]
    names = [card.name for card in others if card.alias_of is None or card.alias_of not in own]
    if not names:
        return None
    more = len(names) - MAX_NAMED_MODELS
    return ", ".join(names[:MAX_NAMED_MODELS]) + (f" and {more} more" if more > 0 else "") + " on demand"
