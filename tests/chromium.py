"""A real Chromium, driven through chromedriver's plain HTTP: nothing to install from PyPI.

Debian has both: `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
START_SECONDS = 30.0


class Browser:
    """One window. Use as a context; everything that was started ends with it."""

    def __enter__(self) -> Self:
        programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
        missing = [name for name, path in programs.items() if path is None]
        if missing:
            raise FileNotFoundError(f"no {' and no '.join(missing)}; apt-get install chromium chromium-driver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._profile = tempfile.TemporaryDirectory(prefix="penstock-chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [str(programs["chromedriver"]), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._address = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        options = {
            "binary": programs["chromium"],
            "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._await_driver()
            self._session = f"/session/{self._call('/session', capabilities={'alwaysMatch': wanted})['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._session, method="DELETE")
        finally:
            self._stop()

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()

    def _await_driver(self) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                if self._call("/status", method="GET")["ready"]:
                    return
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)

    def _call(self, path: str, method: str = "POST", **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with self._open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    # -- what a test does

    def devtools(self, command: str, **params: Any) -> Any:
        """One command of the DevTools protocol."""
        return self._call(f"{self._session}/goog/cdp/execute", cmd=command, params=params)

    def size(self, width: int, height: int, ratio: float = 1.0, mobile: bool = False) -> None:
        """The size of the window's inside."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=mobile
        )

    def dark(self, wanted: bool) -> None:
        """Prefer dark colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Load a file."""
        self.log()
        self._call(f"{self._session}/url", url=path.resolve().as_uri())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self._call(f"{self._session}/execute/sync", script=f"return ({script});", args=[])

    def log(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [entry["message"] for entry in self._call(f"{self._session}/se/log", type="browser")]

    def press(self, *keys: str) -> None:
        """Keys, one after the other, to whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": actions})

    def point(self, x: float, y: float, *then: dict[str, Any]) -> None:
        """Move the mouse to a point of the window, and then do more with it."""
        move = {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move, *then]})

    def wheel(self, x: float, y: float, amount: int) -> None:
        """Turn the wheel with Ctrl held, as pinching a touchpad does."""
        self.devtools("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=amount, modifiers=2)

    def _act(self, *sources: dict[str, Any]) -> None:
        self._call(f"{self._session}/actions", actions=list(sources))

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What is to be seen, as a PNG; `whole`: the page down to its end."""
        taken = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
