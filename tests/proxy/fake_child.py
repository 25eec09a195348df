"""Stands in for LiteLLM where only the process matters: answers the readiness URL, and can be told to misbehave.

python fake_child.py --config PATH --port N [--crash SECONDS] [--deaf] [--stubborn] [--mute]
"""

import argparse
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def follow_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def crash_after(seconds: float) -> None:
    time.sleep(seconds)
    print("ValueError: these are my last words", flush=True)
    os._exit(7)


parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--port", type=int)
parser.add_argument("--crash", type=float)
parser.add_argument("--deaf", action="store_true", help="does not notice that its parent is gone")
parser.add_argument("--stubborn", action="store_true", help="ignores SIGTERM")
parser.add_argument("--mute", action="store_true", help="never answers")
options = parser.parse_args()
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not options.deaf:
    threading.Thread(target=follow_parent, daemon=True).start()
if options.crash is not None:
    threading.Thread(target=crash_after, args=(options.crash,), daemon=True).start()
print("hello", flush=True)
if options.mute:
    time.sleep(600)
HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
