"""A real browser, and Node.js, for the tests of pages. As a program (`make browser`) it installs a browser.

A test file takes the fixtures in with `pytest_plugins = ["browser"]`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright import sync_api

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# DejaVu has Arabic and Hebrew, Droid the wide scripts: 13 MB together, where Noto's would be 78.
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-droid-fallback", "fonts-noto-color-emoji")
QUIET = (
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--renderer-process-limit=1",
)
NODE = 20  # the oldest Node.js whose own test runner will do


def found() -> str | None:
    """The path of a browser, of the system's or of playwright's own."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as driver:
        own = driver.chromium.executable_path
    return own if Path(own).exists() else None


def install() -> str | None:
    """Put a browser where there is none; says what it did, or nothing."""
    if found():
        return None
    root = [] if os.geteuid() == 0 else ["sudo"]
    if shutil.which("apt-get") and (not root or shutil.which("sudo")):
        apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet"]
        wanted = [*apt, "install", "--yes", "--no-install-recommends", *PACKAGES]
        # A list that is old or not there is the usual reason to fail.
        for commands in ([wanted], [[*apt, "update"], wanted]):
            if all(_done(command) for command in commands):
                return f"installed {' '.join(PACKAGES)}"
        print("apt-get has no chromium to give; taking playwright's own")
    command = [sys.executable, "-m", "playwright", "install", "chromium"]
    subprocess.run(command, check=True)
    return "installed playwright's chromium"


def _done(command: list[str]) -> bool:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        print(" ".join(command), "failed:\n" + run.stdout[-2000:])
    return run.returncode == 0


# Of a module, not of a session: while playwright runs, nothing else in its thread can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    """A browser, one for each worker and module."""
    path = found()
    if path is None:
        pytest.skip("no browser: `make browser` installs one")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: `make browser` installs it")
    alone = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=[*QUIET, *alone])
        yield started
        started.close()


@dataclass
class Watch:
    """What went wrong in a page: errors, dialogs, and requests for anything but the page itself."""

    files: set[str]
    faults: list[str] = field(default_factory=list)

    def over(self, page: sync_api.Page) -> None:
        """Begin to watch."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("crash", lambda _: self.faults.append("the page crashed"))
        page.on("request", self._asked)
        page.on("dialog", self._dialog)
        page.on("popup", lambda other: self.faults.append(f"popup: {other.url}"))

    def _said(self, message: sync_api.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, request: sync_api.Request) -> None:
        url = request.url.split("#")[0]
        if not url.startswith(("data:", "blob:", "about:")) and url not in self.files:
            self.faults.append(f"request: {url}")

    def _dialog(self, dialog: sync_api.Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


Opener = Callable[..., Any]


@pytest.fixture
def opened(browser: sync_api.Browser, tmp_path: Path) -> Iterator[Opener]:
    """`opened(html, link, …)` shows a page from a file, and waits until it is drawn.

    The test fails on any error, dialog or request; `faults=pattern` names those that must come instead.
    """
    shown: list[tuple[sync_api.BrowserContext, Watch, str | None]] = []

    def open_page(
        html: str | Path,
        link: str = "",
        *,
        width: int = 1280,
        height: int = 800,
        faults: str | None = None,
        files: tuple[Path, ...] = (),
        ready: str = "overt",
        **settings: Any,
    ) -> sync_api.Page:
        path = html if isinstance(html, Path) else tmp_path / f"page{len(shown)}.html"
        if isinstance(html, str):
            path.write_text(html, encoding="utf-8")
        size: Any = {"width": width, "height": height}
        context = browser.new_context(viewport=size, offline=True, **settings)
        watch = Watch({path.as_uri(), *(one.as_uri() for one in files)})
        shown.append((context, watch, faults))
        page = context.new_page()
        watch.over(page)
        page.goto(path.as_uri() + (f"#{link}" if link else ""))
        if ready:
            page.wait_for_function(f"globalThis.{ready}")
            page.evaluate(f"{ready}.settled()")
        return page

    yield open_page
    for context, watch, pattern in shown:
        context.close()
        others = [one for one in watch.faults if pattern is None or not re.search(pattern, one)]
        assert others == []
        assert pattern is None or watch.faults, f"nothing went wrong, where {pattern!r} should have"


@pytest.fixture(scope="session")
def node() -> str:
    """The path of a Node.js that is new enough: the system's, else playwright's."""
    path = shutil.which("node")
    if path:
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if (match := re.match(r"v(\d+)\.", said)) and int(match[1]) >= NODE:
            return path
    try:
        import playwright
    except ImportError:
        own = None
    else:
        folder = Path(playwright.__file__).parent / "driver"
        own = shutil.which("node", path=str(folder))
    if own is None:
        pytest.skip(f"no Node.js of {NODE} or later: `make browser` brings playwright, which has one")
    return own


if __name__ == "__main__":
    done = install()
    if done:
        print(done)
