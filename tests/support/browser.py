"""A real Chromium without a window, spoken to by its DevTools protocol over two pipes.

Playwright and Selenium do the same and more; they bring a browser of their own, which is not to be
had everywhere, or a driver that has to fit the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"
LONGEST_S = 120


def program() -> str | None:
    """Where a Chromium is; ``None`` where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests."""
    found = program()
    if found is None:
        pytest.skip(f"no Chromium here: apt-get install --no-install-recommends {PACKAGE}")
    started = Browser(found, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


class Browser:
    """A Chromium that runs."""

    def __init__(self, path: str, directory: Path) -> None:
        (its_read, our_write), (our_read, its_write) = os.pipe(), os.pipe()
        # not 3 or 4, which are what Chromium reads and writes
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (its_read, its_write)]
        words = [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", f"--user-data-dir={directory}"]
        words += ["--remote-debugging-pipe", "about:blank"]
        script = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._log = (directory / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", script, *words], pass_fds=theirs, stdout=self._log, stderr=self._log
        )
        for fd in (its_read, its_write, *theirs):
            os.close(fd)
        self._write, self._read, self._left, self._count = our_write, our_read, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Have something done, and return what it says."""
        self._count += 1
        said = {"id": self._count, "method": method, "params": parameters}
        said |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(said).encode() + b"\0")
        deadline = time.monotonic() + LONGEST_S
        while True:
            message = self._next(deadline)
            if message.get("id") == self._count:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            found = os.read(self._read, 2**20)
            assert found, f"Chromium has ended: {Path(self._log.name).read_text()[-1000:]}"
            self._left += found
        message, _, self._left = self._left.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, url: str, width: int, *, dark: bool = False) -> Page:
        """Load a page as a screen of this width shows it, a telephone below 600 pixels."""
        return Page(self, url, width, dark)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


class Page:
    """A page that is loaded."""

    def __init__(self, browser: Browser, url: str, width: int, dark: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str = attached["sessionId"]
        self._target = target
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        is_phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844 if is_phone else 900,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        browser.events.clear()
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        said = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + LONGEST_S
        while not (found := self.evaluate(condition)):
            text = self.evaluate("document.body ? document.body.innerText.slice(0, 2000) : ''")
            assert time.monotonic() < deadline, f"not so: {condition}\n{text}"
            time.sleep(0.2)
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen, or the whole page, as PNG."""
        said = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            said = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(said["data"]))

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def errors(self) -> list[str]:
        """What went wrong in the page: exceptions, and errors in its log."""
        self.evaluate("1")  # what was said before is here then
        found = []
        for event in self._browser.events:
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(str(parameters["entry"]["text"]))
        return found

    def close(self) -> None:
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)
