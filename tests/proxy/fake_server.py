"""Stands in for the server: starts a proxy whose child is the given command, says its pid, and waits to be killed.

python fake_server.py STATE_DIR PORT [COMMAND ...]; without a command the child is the real LiteLLM.
"""

import os
import sys
import time
from pathlib import Path

from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import ProxySettings
from kvserve.proxy.litellm import LitellmProxy

folder, port, *command = sys.argv[1:]
settings = ProxySettings(
    port=int(port),
    backends=(BackendAddress("kvserve", "http://127.0.0.1:9"),),
    listed_model_id="openai/m",
    backend_model_id="m",
    state_dir=Path(folder),
)
proxy = LitellmProxy(settings, dict(os.environ), lambda text: None, command or None)
proxy.start()
print(proxy.state.pid, flush=True)
time.sleep(600)
