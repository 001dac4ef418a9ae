"""A headless Chromium driven over WebDriver's HTTP interface, with the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WHY_NOT = "" if CHROMIUM and DRIVER else "no headless browser: install the Debian packages chromium and chromium-driver"


class Browser:
    """One browser with one tab; ``goto`` fails the test if the page logs an error to its console."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [f"--user-data-dir={folder}", "--window-size=1280,900", "--disable-background-networking"]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        deadline_s = time.monotonic() + 30
        while True:
            try:
                answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    self.close()
                    raise
                time.sleep(0.05)
        self._base += f"/session/{answer['sessionId']}"

    def close(self) -> None:
        try:
            if "/session/" in self._base:
                self._call("DELETE", "", None)
        finally:
            self._driver.send_signal(signal.SIGTERM)
            self._driver.wait(20)

    def goto(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self) -> str:
        """The text of the page with everything unfolded."""
        return str(
            self.run(
                "for (const d of document.querySelectorAll('details')) d.open = true; return document.body.innerText"
            )
        )

    def errors(self) -> list[str]:
        """What was logged to the console since the last call, but for notes."""
        return [row["message"] for row in self._call("POST", "/se/log", {"type": "browser"}) if row["level"] != "INFO"]

    def devtools(self, command: str, **arguments: object) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": arguments})

    def screenshot(self, path: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Write an image of the whole page at a width."""
        self.resize(width, height, dark=dark)
        whole = self.run("return document.documentElement.scrollHeight")
        self.resize(width, int(whole), dark=dark)
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot", None)))

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def _call(self, method: str, path: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from None
