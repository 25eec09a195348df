"""What the person at the terminal reads: banner, progress, one line per request. It knows facts handed to it and how
to say them, not where they come from.

Text that came over the network is made printable first, so that nobody can move the cursor or forge a line. A terminal
that went away (a closed pipe) ends the output, never a request.
"""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.console import Console
from rich.text import Text

from kvserve.core import Awaiting, RequestId, TellBytes
from kvserve.observe.bars import Bars
from kvserve.requests.request_facts import RequestFacts

LONG_PREFILL_SECONDS = 2.0
LONG_PREFILL_TOKENS = 2048
SHORT_ID_CHARACTERS = 12
MIN_SAVED_SECONDS = 0.1
"""Less is not worth a person's eye."""


@dataclass(frozen=True, slots=True)
class BannerFacts:
    """What is served and where. `proxy_url` None: no proxy runs. URLs without a path, as `http://127.0.0.1:4000`.

    `disk` says what KV is on disk, in words. `chat_template` is the file that stands for the model's own, if one does.
    `blas` names the one that was preloaded and its file, `device` what MLX computes on, `models` others that can be
    asked for.
    """

    version: str
    model_name: str
    context_limit: int
    server_url: str
    proxy_url: str | None
    demo: Literal["smollm2", "tiny"] | None = None
    needs_api_key: bool = False
    warnings: tuple[str, ...] = ()
    disk: str | None = None
    chat_template: str | None = None
    blas: str | None = None
    device: str | None = None
    models: str | None = None


_DEMO_LINES = {
    "smollm2": "! This is the demo: SmolLM2-135M-Instruct (Apache-2.0), a very small model that is often wrong.",
    "tiny": "! This is the demo model: its weights are random and its answers noise. It shows that the server works.",
}


class Terminal:
    """Writes to one console from any thread.

    It waits for a terminal that is slow or stopped: what the engine thread calls for each token or chunk is not here.

    `wall_clock` gives seconds since the epoch for the lines, `monotonic` seconds for durations; `began_at` is what that
    said when the process was started, None: now. `on_banner` is told what the banner says, for who reads no banners.
    """

    def __init__(
        self,
        console: Console,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        began_at: float | None = None,
        on_banner: Callable[[BannerFacts], None] | None = None,
    ) -> None:
        self._console = console
        self._on_banner = on_banner
        self._wall_clock = wall_clock
        self._monotonic = monotonic
        self._began_at = monotonic() if began_at is None else began_at
        self._bars = Bars(console, monotonic, self._write)
        self._model_name: str | None = None
        self._told_ready: set[str] = set()

    def banner(self, facts: BannerFacts) -> None:
        """Say what is served, where, and how to try it. Remembers the model: request lines name only another one."""
        self._model_name = facts.model_name
        for line in banner_lines(facts):
            self._write(line, "bold" if line.startswith("kvserve ") else "yellow" if line.startswith("!") else "")
        if self._on_banner is not None:
            self._on_banner(facts)

    def ready(self, name: str, url: str) -> None:
        """Say that this answers now, and how long after the start; one that answers again was started meanwhile."""
        is_first = name not in self._told_ready
        self._told_ready.add(name)
        when = f", {self._monotonic() - self._began_at:.1f} s after the start" if is_first else ""
        self.note(f"{name} is ready: {url}{when}")

    def loading(self, model_name: str) -> AbstractContextManager[TellBytes]:
        """Show that a model loads, for the length of the block."""
        return self.working(f"loading {model_name}")

    @contextmanager
    def working(self, key: str) -> Iterator[TellBytes]:
        """Show that this is done, for the length of the block; until it is told of bytes the bar only moves."""
        started = self._monotonic()
        outcome = "failed"
        self._guard(lambda: self._bars.start(key, printable(key), "bytes"))
        self._guard(lambda: self._bars.update(key, 0, None))
        try:
            yield partial(self._bars.update, key)
            outcome = "done"
        finally:
            self._guard(lambda: self._bars.finish(key))
            self._write(f"{key}: {outcome} after {self._monotonic() - started:.1f} s")

    @contextmanager
    def flushing(self) -> Iterator[TellBytes]:
        """Show what is written to disk for the length of the block, from the first bytes that it is told of on."""
        key = "writing KV to disk"
        self._guard(lambda: self._bars.start(key, key, "bytes"))
        try:
            yield partial(self._bars.update, key)
        finally:
            self._guard(lambda: self._bars.finish(key))

    def stopping(self, num_requests: int) -> None:
        """Say that the server stops, and how many requests it ends."""
        ended = f": {_counted(num_requests, 'request')} ended" if num_requests else ""
        self.note(f"Stopping{ended}. Another Ctrl+C ends it at once.")

    def stopped(self, num_unwritten_bytes: int) -> None:
        """Say that it has, and what the disk did not take in time."""
        lost = f"; {size_text(num_unwritten_bytes)} of KV did not reach the disk and will be computed again"
        self.note(f"Stopped{lost if num_unwritten_bytes else ''}.")

    def prefill(self, request_id: RequestId, num_done: int, num_total: int, seconds_left: float | None = None) -> None:
        """Note how many prompt tokens of a request are in the KV cache, and in how long its first token comes; shown
        once that takes long.

        The first call says what was there without computing. The last token but one ends it (the last belongs to the
        first decode step), and so does `request_line` or `prefill_done`.
        """
        self._guard(lambda: self._prefill(request_id, num_done, num_total, seconds_left))

    def awaits(self, request_id: RequestId, awaited: Awaiting) -> None:
        """Say for whom a request waits, where that takes long."""
        seconds = awaited.seconds
        if seconds is None and awaited.num_left_tokens <= LONG_PREFILL_TOKENS:
            return
        if seconds is None or seconds >= LONG_PREFILL_SECONDS:
            about = "" if seconds is None else f", about {seconds:.0f} s"
            other = f"{_short(awaited.request_id)} (prefilling the same {awaited.num_tokens:,} tokens)"
            self.note(f"{_short(request_id)} waits for {other}{about}")

    def prefill_done(self, request_id: RequestId) -> None:
        """Take the progress of this request away; harmless where none is shown."""
        self._guard(lambda: self._bars.finish(request_id))

    def request_line(self, facts: RequestFacts) -> None:
        """Write the one line of a request that is over, and take its progress away."""
        self.prefill_done(facts.request_id)
        is_error = facts.error_status is not None
        self._write(f"{self._time()} {request_text(facts, self._model_name)}", "red" if is_error else "")

    def warm(self, facts: RequestFacts, num_turn: int) -> None:
        """Say once in a conversation what its first warm turn was spared."""
        saved = f", about {_seconds(facts.seconds_saved)} saved" if facts.seconds_saved is not None else ""
        reused = f"{facts.num_cached_tokens:,} of {facts.num_prompt_tokens:,} tokens reused"
        self.note(f"turn {num_turn}: {reused}{saved}")

    def error(self, text: str) -> None:
        """Write something that went wrong and needs a person."""
        self._write(f"{self._time()} error: {text}", "bold red")

    def note(self, text: str) -> None:
        """Write something worth knowing."""
        self._write(f"{self._time()} {text}")

    def _prefill(self, request_id: RequestId, num_done: int, num_total: int, seconds_left: float | None) -> None:
        if num_done >= num_total - 1:
            self._bars.finish(request_id)
            return
        waited = self._bars.started_seconds_ago(request_id)
        if waited is None:
            title = f"prefill {_short(request_id)}"
            self._bars.start(request_id, title, "tokens", num_done)
        is_long = num_total - num_done > LONG_PREFILL_TOKENS or (waited or 0.0) > LONG_PREFILL_SECONDS
        if is_long or self._bars.is_shown(request_id):
            self._bars.update(request_id, num_done, num_total, seconds_left)

    def _time(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._wall_clock()))

    def _write(self, text: str, style: str = "") -> None:
        encoding = self._console.encoding
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        # soft_wrap: a line stays a line, whatever the width; Text: brackets in it are no markup.
        self._guard(lambda: self._console.print(Text(shown, style=style), soft_wrap=True))

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, SystemExit):  # the reader is gone: rich turns a broken pipe into SystemExit
            self._console.quiet = True
        except ValueError:
            if not self._console.file.closed:
                raise
            self._console.quiet = True


def banner_lines(facts: BannerFacts) -> list[str]:
    """The banner, line by line."""
    rows = [("LiteLLM", facts.proxy_url), ("kvserve", facts.server_url)]
    lines = [f"kvserve {facts.version} serves {facts.model_name} (context {facts.context_limit:,} tokens)"]
    lines += [f"  {name}  {url}/v1" for name, url in rows if url is not None]
    lines.append(f"  watch   {facts.server_url}/dashboard")
    lines += [f"  models  {printable(facts.models)}"] if facts.models is not None else []
    lines += [f"  disk    {facts.disk}"] if facts.disk is not None else []
    lines += [f"  device  {printable(facts.device)}"] if facts.device is not None else []
    lines += [f"  blas    {printable(facts.blas)}"] if facts.blas is not None else []
    lines += [f"  prompts by {printable(facts.chat_template)}"] if facts.chat_template is not None else []
    lines += [f"  try     {curl_line(facts)}"]
    if facts.demo is not None:
        lines += [
            _DEMO_LINES[facts.demo],
            "! For a real model set MODEL_PATH, in .env or the environment, to a model folder in Hugging Face format",
            "! or a hub name, and start without --demo.",
        ]
    return lines + [f"! {warning}" for warning in facts.warnings]


def curl_line(facts: BannerFacts) -> str:
    """A command that asks the server something, to be pasted into a shell where API_KEY is set if one is needed."""
    asked = "What is the capital of France?" if facts.demo == "smollm2" else "Hello"
    body: dict[str, object] = {"model": facts.model_name, "messages": [{"role": "user", "content": asked}]}
    if facts.demo == "smollm2":
        body["temperature"] = 0  # so small a model knows several words to begin with, and goes on from each
    if facts.demo == "tiny":
        body["max_tokens"] = 64  # noise has no end
    key = ' -H "Authorization: Bearer $API_KEY"' if facts.needs_api_key else ""
    url = f"{facts.proxy_url or facts.server_url}/v1/chat/completions"
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def request_text(facts: RequestFacts, usual_model: str | None = None) -> str:
    """One request in one line, without the time. The model is named where it is not `usual_model`."""
    head = [facts.request_id[:SHORT_ID_CHARACTERS], facts.protocol]
    if facts.session:
        head.append(f"[{facts.session[:SHORT_ID_CHARACTERS]}]")
    if usual_model is not None and facts.model != usual_model:
        head.append(f"({facts.model})")
    counts = f"{facts.num_prompt_tokens:,} in{_reused(facts)} {facts.num_completion_tokens:,} out"
    parts = [" ".join([*head, counts])]
    if facts.ttft_seconds is not None:
        parts.append(f"first token {_seconds(facts.ttft_seconds)}")
    if facts.tokens_per_second is not None:
        parts.append(f"{facts.tokens_per_second:.1f} tok/s")
    if facts.tokens_per_step is not None:
        parts.append(_drafted(facts))
    if facts.finish_reason is not None:
        parts.append(f"{facts.finish_reason} ({facts.cut_by})" if facts.cut_by else facts.finish_reason)
    if facts.error_status is not None:
        parts.append(f"error {facts.error_status}")
    parts += facts.notes
    if facts.cause is not None:
        parts.append(f"why: {facts.cause}")
    return ", ".join(parts)


def printable(text: str) -> str:
    """The text with every character that a terminal would act on written as its escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size_text(num_bytes: int) -> str:
    """Bytes for a person."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what} is" if number == 1 else f"{number:,} {what}s are"


def _short(request_id: RequestId) -> str:
    return printable(request_id)[:SHORT_ID_CHARACTERS]


def _reused(facts: RequestFacts) -> str:
    if not facts.num_cached_tokens or not facts.num_prompt_tokens:
        return ","
    percent = round(100 * facts.num_cached_tokens / facts.num_prompt_tokens)
    if facts.num_cached_tokens < facts.num_prompt_tokens:
        percent = min(percent, 99)  # "100 %" would hide the tokens that were computed
    seconds = facts.seconds_saved or 0.0
    saved = f", about {_seconds(seconds)} saved" if seconds >= MIN_SAVED_SECONDS else ""
    return f" ({facts.num_cached_tokens:,} reused, {percent} %{saved})"


def _drafted(facts: RequestFacts) -> str:
    """What drafts did, and where they came from."""
    drafting = facts.drafting
    sources = [f"{each.num_accepted:,} from {source}" for source, each in sorted(drafting.by_source.items())]
    named = ", ".join(sources if len(sources) > 1 else drafting.by_source)
    right = f"drafts: {drafting.num_accepted_tokens:,} of {drafting.num_drafted_tokens:,} right ({named})"
    saved = f"{_seconds(abs(drafting.seconds_saved))} {'saved' if drafting.seconds_saved >= 0 else 'lost'}"
    return f"{right}, {facts.tokens_per_step:.1f} tokens a step, {saved}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
