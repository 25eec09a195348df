"""The child process: LiteLLM's application inside our guard, served until the parent asks or is gone. LiteLLM reads its
own configuration from the environment that the parent composed; this file reads only its arguments.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import uvicorn

from kvserve.proxy.backend import Backend
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.wordless import WordlessLog

_DRAIN_SECONDS = 1
_LAST_RESORT_SECONDS = 4.0
_KEEP_ALIVE_SECONDS = 75


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM, or until standard input ends because the parent is gone, however it ended."""
    options = parse_arguments(arguments)
    Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    rules = GuardRules.from_json(json.loads(Path(options.guard).read_text(encoding="utf-8")))
    litellm_app = importlib.import_module("litellm.proxy.proxy_server").app
    uvicorn.run(
        WordlessLog(Guard(litellm_app, Backend(rules.backend_url), rules)),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """`--config` is only there to be seen: it tells whose process this is."""
    parser = argparse.ArgumentParser(prog="kvserve.proxy.entry")
    for name in ("--config", "--guard", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", required=True, type=int)
    return parser.parse_args(arguments)


def end_with_parent() -> None:
    """Waits for the end of standard input, whose other end only the parent holds, and then ends this process."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_RESORT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
