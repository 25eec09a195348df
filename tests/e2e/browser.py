"""A headless Chromium, driven over its debugging pipe: open a page, look at it, type. No driver, no client library."""

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next((path for name in NAMES if (path := shutil.which(name))), None)
SECONDS = 60
AT_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""The browser reads commands from descriptor 3 and writes answers to 4."""


class Page:
    """One page. `complaints` are its console errors, uncaught exceptions and failed loads."""

    def __init__(self, process: "subprocess.Popen[bytes]", read_fd: int, write_fd: int) -> None:
        self.complaints: list[str] = []
        self._process = process
        self._write_fd = write_fd
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._number = 0
        self._session: str | None = None
        threading.Thread(target=self._listen, args=(read_fd,), daemon=True).start()

    def open(self, url: str) -> None:
        """A fresh tab with this page."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=url)
        assert self.eventually("location.href !== 'about:blank' && document.readyState === 'complete'")

    def look_like(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size, and the reader's wish for light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def eventually(self, expression: str, seconds: float = SECONDS) -> bool:
        """Whether the expression becomes true; one that cannot be asked yet is not."""
        end = time.monotonic() + seconds
        while not self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str) -> None:
        """One key, pressed and released."""
        codes = {"Tab": 9, "Enter": 13}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = extra if kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self._call("Input.insertText", text=text)

    def point(self, selector: str, across: float, down: float, *, clicks: bool = False) -> None:
        """Move the pointer to a place of an element, in parts of its width and height, and click there if so wished."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"(({{ x, y, width, height }}) => [x, y, width, height])({found}.getBoundingClientRect())")
        place = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if clicks else ():
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def allow_clipboard(self) -> None:
        """What a person is asked once."""
        self._call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """The whole page as a picture, or its first lines of pixels."""
        width = self.value("document.documentElement.clientWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height is not None else {}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        answer = self._answers.get(timeout=SECONDS)
        assert answer["id"] == self._number, answer
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _listen(self, read_fd: int) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while received := os.read(read_fd, 1 << 16):
                *messages, rest = (rest + received).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.put(message)
                    else:
                        self._note(message["method"], message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own below `folder`. Fails where none is installed: a test that is left out shows
    nothing."""
    assert EXECUTABLE is not None, "no Chromium: apt-get install chromium (macOS: a link `chromium` to one, in PATH)"
    read_there, write_here = os.pipe()
    read_here, write_there = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [sys.executable, "-c", AT_3_AND_4, str(read_there), str(write_there), EXECUTABLE, *options]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(read_there, write_there),
            stdout=log,
            stderr=log,
        )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(process, read_here, write_here)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(write_here)
        os.close(read_here)
