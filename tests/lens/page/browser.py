"""A small client of Chromium's DevTools over a pair of pipes; messages end with NUL."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
_PATIENCE = 30.0  # seconds for an answer
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


class Browser:
    """One Chromium with one page. events: all that it reported since the page was opened."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        if PROGRAM is None:
            raise FileNotFoundError("chromium is not installed: the page cannot be opened")
        folder.mkdir(parents=True, exist_ok=True)
        names = [str(folder / name) for name in ("to", "from")]
        for name in names:
            os.mkfifo(name)
        # Chromium reads from descriptor 3 and writes to 4; a shell can number them so.
        start = ["sh", "-c", 'i=$0 o=$1; shift; exec "$@" 3<"$i" 4>"$o"', *names, PROGRAM]
        where = [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*start, *_FLAGS, *where, "about:blank"], stdin=quiet, stdout=quiet, stderr=quiet
        )
        self._to = os.open(names[0], os.O_WRONLY)
        self._from = os.open(names[1], os.O_RDONLY)
        self._rest, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(_PATIENCE)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read(time.monotonic() + _PATIENCE)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium did not answer within {_PATIENCE:g} s")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise ConnectionError("chromium ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, path: Path, address: str = "") -> None:
        """The file, anew: the page before it and its events are forgotten."""
        self.send("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri() + address)
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; what it throws is raised."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + _PATIENCE
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Two frames: what was asked to be drawn has been drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def centre(self, selector: str) -> tuple[float, float]:
        """Scrolled into sight; what scrolling starts has ended, or else a pointer may miss."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        self.settle()
        x, y = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
        )
        return x, y

    def hover(self, selector: str) -> None:
        x, y = self.centre(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
        self.settle()

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )
        self.settle()

    def media(self, **features: str) -> None:
        """prefers_color_scheme="dark" and the like."""
        named = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.settle()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors and warnings in the console, exceptions, and what the policy stopped."""
        self.settle()
        texts = [_complaint(event.get("method", ""), event["params"]) for event in self._news()]
        return [text for text in texts if text is not None]

    def requests(self) -> list[str]:
        wanted = "Network.requestWillBeSent"
        news = (event for event in self._news() if event["method"] == wanted)
        return [event["params"]["request"]["url"] for event in news]

    def _news(self) -> list[dict[str, Any]]:
        return [event for event in self.events if "method" in event]


_READERS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "Runtime.exceptionThrown": lambda p: json.dumps(p["exceptionDetails"]),
    "Runtime.consoleAPICalled": lambda p: json.dumps(p["args"]),
    "Log.entryAdded": lambda p: p["entry"]["text"],
}


def _complaint(method: str, params: dict[str, Any]) -> str | None:
    return _READERS[method](params) if method in _READERS else None
