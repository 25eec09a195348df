"""What LiteLLM writes down of the requests that pass through it: nothing that anybody said."""

import time
from pathlib import Path
from typing import Any

from tests.proxy.stubs import STREAM, Backend, Client, Running, Script, chunk

WORD = "MARZIPAN"
SAID = [{"role": "user", "content": f"{WORD} is what I like."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": SAID},
    "/v1/completions": {"model": "m", "prompt": SAID[0]["content"]},
    "/v1/messages": {"model": "m", "messages": SAID},
    "/v1/responses": {"model": "m", "input": SAID[0]["content"]},
}
REFUSAL = {"error": {"message": f'messages[0].role: expected a role, got "{WORD}".', "type": "invalid_request_error"}}
SCRIPTS = {
    "answered": Script(events=[STREAM[0], chunk({"content": WORD}), STREAM[3]]),
    "refused": Script(status=400, error=REFUSAL),
    "failed": Script(status=500, error=REFUSAL),
    "broke off": Script(events=[STREAM[0], chunk({"content": WORD}), "not an object"]),
    "failed late": Script(events=[STREAM[0], chunk({"content": WORD}), REFUSAL]),
}


def test_litellm_writes_down_no_word_of_a_request(client: Client, backend: Backend, open_proxy: Running) -> None:
    """Neither in its log nor in any other file, however a request ends, quoted in an error too."""
    for script in SCRIPTS.values():
        for path, body in BODIES.items():
            for stream in (False, True):
                backend.follow(script)
                client.post(path, {**body, "stream": stream})
    backend.follow(Script(events=[chunk({"content": WORD})] * 1000, pause_seconds=0.05))
    connection = client.open({**BODIES["/v1/chat/completions"], "stream": True})
    while not backend.received:
        time.sleep(0.01)
    connection.close()
    assert backend.wait_until_left(60) is not None
    backend.follow(Script())
    assert client.chat({"model": "m", "messages": []}).status == 200
    time.sleep(0.5)  # the watcher copies what LiteLLM wrote
    files = [path for path in folder_of(open_proxy).rglob("*") if path.is_file()]
    assert [path for path in files if WORD.encode() in path.read_bytes()] == []


def folder_of(running: Running) -> Path:
    """Where LiteLLM has its configuration and log, and is started."""
    return running.proxy._settings.files.folder
