"""Headless Chromium for tests of pages, driven through ChromeDriver (the W3C's WebDriver) by the standard library."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Nothing of its own may look for a network; as root there is no sandbox.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--force-device-scale-factor=1",
)  # fmt: skip
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver: apt-get install chromium chromium-driver"
)


class Browser:
    """One window."""

    def __init__(self, address: str, flags: tuple[str, ...]):
        options = {"binary": CHROMIUM, "args": [*FLAGS, *flags]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._address = f"{address}/session"
        self._address += "/" + self._call("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, content, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, file: pathlib.Path) -> None:
        """Opens a file, and waits for what it loads."""
        self.go(file.resolve().as_uri())

    def go(self, address: str) -> None:
        """Opens an address, and waits for what it loads."""
        self._call("/url", {"url": address})

    def reload(self) -> None:
        """The same page again, as it is opened."""
        self._call("/refresh", {})

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns the result of a function body of JavaScript."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """A click of the mouse on the first such element: it must be there, in sight and not covered."""
        element = self._call("/element", {"using": "css selector", "value": selector})
        self._call(f"/element/{next(iter(element.values()))}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Keys pressed in such an element."""
        element = self._call("/element", {"using": "css selector", "value": selector})
        self._call(f"/element/{next(iter(element.values()))}/value", {"text": text})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of the DevTools protocol."""
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        """Returns messages of the page since the last call: errors, warnings, refusals by its content policy."""
        return [entry["message"] for entry in self._call("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("", method="DELETE")


@contextlib.contextmanager
def browser(profile: pathlib.Path, *flags: str) -> Iterator[Browser]:
    """A browser with an empty profile; it and its driver are gone afterwards."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    with subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as driver:
        try:
            for line in driver.stdout:
                port = re.search(r"started successfully on port (\d+)", line)
                if port:
                    break
            window = Browser(f"http://127.0.0.1:{port[1]}", (f"--user-data-dir={profile}", *flags))
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
