"""A minute with the demo: asks, asks on, restarts the server, asks again, edits the history, and shows each time what
was reused, why not more, and about how many seconds that saved.

It starts a server of its own (`--demo`, without LiteLLM, with a folder for KV that is gone afterwards) and speaks HTTP
to it. What earlier starts found out of the model is taken along: on a slow BLAS that takes nearly a minute.
"""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from probing.report import run
from probing.wire import Json, ProbeError, Reply, Server

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.2
SEEN = "*-seen.json"
"""What a start finds out of a model once, beside the KV (`docs/cache.md`)."""

NOTES = (
    "You answer questions about these notes, in one short sentence.\n"
    "The Fox is a small boat. It left Lisbon on Monday with three sailors: Ana, Bruno and Clara. On Tuesday the wind "
    "came from the north, and they lost a sail. On Wednesday they reached Porto, where Bruno bought a new sail for "
    "forty euros and Ana found a cat. They called the cat Storm. On Friday the boat sailed on to Vigo."
)
FIRST, SECOND, THIRD = "What is the name of the boat?", "Who are the three sailors?", "What did they call the cat?"
EDITED = "Which people sailed?"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Show in about a minute what kvserve reuses of a conversation, also after a restart.",
        allow_abbrev=False,
        epilog="Exit code: 0, or 2 where the server could not be started or asked.",
    )
    parser.add_argument("--demo", choices=("smollm2", "tiny"), default="smollm2", help="which demo model (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="the server's port (%(default)s)")
    parser.add_argument("--no-wait", action="store_true", help="end the server after the tour instead of at Ctrl+C")
    return parser.parse_args()


def take_seen(earlier: Path, folder: Path) -> None:
    """Copy what earlier starts found out, if there were any, and no KV."""
    folder.mkdir(mode=0o700)
    for file in earlier.glob(SEEN):
        shutil.copy(file, folder)


class OwnServer:
    """The server of the tour, on one port and one folder; what it says is in a file and is shown while it starts."""

    def __init__(self, folder: Path, demo: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._screen = folder / "screen.txt"
        self._command = [
            *(sys.executable, str(ROOT / "start_llm.py"), "--demo", demo, "--no-proxy", f"--port={port}"),
            *("--disk-cache", str(folder / "kv")),
        ]
        self._environment = {**os.environ, "LOG_ROOT": str(folder / "logs")}
        self._process: subprocess.Popen[bytes] | None = None
        take_seen(Path(os.environ.get("DISK_CACHE_DIR") or "~/.cache/kvserve").expanduser(), folder / "kv")

    def start(self) -> None:
        """Start it and wait until it answers. Raises ProbeError where it ends instead."""
        with self._screen.open("ab") as screen:
            seen = screen.tell()
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=screen, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ProbeError(f"the server did not start:\n{self._said(seen)}")
            time.sleep(POLL_SECONDS)
            fresh = self._said(seen)
            whole = fresh[: fresh.rfind("\n") + 1]
            seen += len(whole.encode())
            for line in whole.splitlines():
                if "done after" in line or "could not be fetched" in line:
                    print(f"   {line}", flush=True)

    def stop(self) -> None:
        """End it as Ctrl+C does, and wait until what it keeps is on disk."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _said(self, seen: int) -> str:
        return self._screen.read_bytes()[seen:].decode(errors="replace")

    def _is_ready(self) -> bool:
        try:
            return Server(self.url, "none", 10.0).get("/health") is not None
        except ProbeError:  # nobody listens yet, or 503 while the model loads
            return False


@dataclass(slots=True)
class Tour:
    """One conversation with a server, and what its first, cold prompt cost per token."""

    server: Server
    messages: list[Json] = field(default_factory=lambda: [{"role": "system", "content": NOTES}])
    cold_seconds: float | None = None
    session: str = field(default_factory=lambda: f"tour-{secrets.token_hex(4)}")

    def ask(self, title: str, question: str) -> Reply:
        """Ask, show the answer and what was reused for it, and go on from there."""
        self.messages.append({"role": "user", "content": question})
        print(f"\n{title}\n   > {question}", flush=True)
        said = {"model": "local", "messages": self.messages, "session_id": self.session}
        reply = self.server.chat({**said, "temperature": 0, "max_tokens": 48})
        self.messages.append({"role": "assistant", "content": reply.content})
        print(f"   {reply.content.strip()}")
        print(f"   {self._in_numbers(reply)}")
        explained = self.server.explain(reply.request_id) or {}
        print(f"   why not more: {explained.get('summary') or explained.get('cause') or 'the server does not say'}")
        return reply

    def _in_numbers(self, reply: Reply) -> str:
        seconds = reply.ttft_seconds or 0.0
        if self.cold_seconds is None:
            self.cold_seconds = seconds / max(1, reply.num_prompt_tokens - reply.num_cached_tokens)
        said = f"{reply.num_prompt_tokens:,} tokens of prompt, {reply.num_cached_tokens:,} reused ({reply.reuse:.0%})"
        saved = reply.num_cached_tokens * self.cold_seconds
        return f"{said}, first token after {seconds:.2f} s; about {saved:.1f} s saved"


def lead(server: Server, restart: Callable[[], None]) -> list[Reply]:
    """The tour itself; `restart` ends the server and starts it again."""
    tour = Tour(server)
    replies = [
        tour.ask("1. A question about a few notes. Nothing is known yet.", FIRST),
        tour.ask("2. The conversation goes on: only the new question is computed.", SECOND),
    ]
    print("\n3. The server is stopped and started again.", flush=True)
    restart()
    replies.append(tour.ask("   It remembers the conversation, from disk.", THIRD))
    tour.messages = [*tour.messages[:3], {"role": "user", "content": EDITED}, tour.messages[4]]
    replies.append(
        tour.ask("4. The second question is edited in the history: what stands before it is reused, no more.", THIRD)
    )
    return replies


def main() -> int:
    """Run the tour; returns the exit code."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="kvserve-tour-") as folder:
        own = OwnServer(Path(folder), options.demo, options.port)

        def restart() -> None:
            own.stop()
            own.start()

        try:
            print("Starting a server with the demo model.", flush=True)
            own.start()
            lead(Server(own.url, "none", START_SECONDS), restart)
            print(f"\nThe dashboard has all of it: {own.url}/dashboard")
            if not options.no_wait:
                print("Ctrl+C ends the server.", flush=True)
                while True:
                    time.sleep(1.0)
        except KeyboardInterrupt:
            print()
        finally:
            own.stop()
    return 0


if __name__ == "__main__":
    run(main)
