"""A hub of models on this machine: what the hub's library asks for of names, their files and sizes. It knows HTTP."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


@contextmanager
def serving_hub(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Names and their files; yields the URL, and the list of what was downloaded so far."""
    downloaded: list[str] = []

    class FakeHub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            if listed := re.match(r"/api/models/(\w+/\w+)(/tree/)?", self.path):
                self._send(self._listed(listed[1], is_tree=listed[2] is not None))
            elif asked := re.match(r"/(\w+/\w+)/resolve/\w+/(.+)", self.path):
                if self.command == "GET":
                    downloaded.append(asked[2])
                self._send(models.get(asked[1], {}).get(asked[2]))
            else:
                self._send(None)

        def _listed(self, name: str, *, is_tree: bool) -> bytes | None:
            if name not in models:
                return None
            sizes = {file: len(content) for file, content in models[name].items()}
            if is_tree:
                rows = [{"type": "file", "path": file, "size": size, "oid": "0"} for file, size in sizes.items()]
                return json.dumps(rows).encode()
            files = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            return json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode()

        def _send(self, body: bytes | None) -> None:
            self.send_response(404 if body is None else 200)
            body = body or b""
            etag = hashlib.sha256(body).hexdigest()[:40]
            for header, value in (("Content-Length", len(body)), ("ETag", f'"{etag}"'), ("X-Repo-Commit", COMMIT)):
                self.send_header(header, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", downloaded
        server.shutdown()
