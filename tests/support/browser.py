"""A real Chromium without a window, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--force-color-profile=srgb", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# The browser reads from descriptor 3 and writes to 4; ours are moved out of the way first.
ENTER = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])"""
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Browser:
    """One page of one browser; keeps everything it asked the network for, and what it complained about."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.process, self.write, self.read = process, write, read
        self.buffer, self.number, self.session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its result; events that come meanwhile are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self, patience: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], patience)
            assert ready, "the browser does not answer"
            part = os.read(self.read, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads ``url`` in a window of that size."""
        self.window(width, height)
        self.prefer(dark=dark)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def window(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression, as JSON knows it."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, condition: str, patience: float = 60) -> None:
        """Until an expression is true."""
        end = time.monotonic() + patience
        while not self.js(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.1)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """The pointer over a place of an element, as shares of its width and height."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(
            f"(({{left, top, width, height}}) => [left, top, width, height])({where}.getBoundingClientRect())"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        """A key, as from a keyboard."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code={" ": "Space"}.get(key, key),
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def screenshot(self, target: Path, *, full: bool = False) -> None:
        """What is seen, or the whole page, as a PNG."""
        told = self.call(
            "Page.captureScreenshot", captureBeyondViewport=full, **(self._whole() if full else {})
        )
        target.write_bytes(base64.b64decode(told["data"]))

    def _whole(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self, target: Path) -> None:
        """The page on A4."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69}
        told = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True, **paper)
        target.write_bytes(base64.b64decode(told["data"]))

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile, ended with the block."""
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER, str(read_there), str(write_there), *command],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Browser(process, write_here, read_here)
    finally:
        os.close(write_here)  # it ends when nobody talks to it any more
        os.close(read_here)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
