"""A headless Chromium for all tests of this folder, and a watch on its console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .training_site import TrainingSite, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """`SPARKDML_CHROMIUM` names one that isn't on the PATH or among Playwright's own."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    path = os.environ.get("SPARKDML_CHROMIUM") or shutil.which("chromium")
    with api.sync_playwright() as playwright:
        try:
            # In a container, root has no sandbox to offer; the pages are our own.
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(
                "needs a Chromium: `playwright install chromium`, or set SPARKDML_CHROMIUM to one "
                f"({error.message.splitlines()[0]})"
            )
        yield browser
        browser.close()


@pytest.fixture
def console() -> list[str]:
    """What the page said in its console; whatever is left at the end fails the test."""
    return []


@pytest.fixture
def page(chromium: Browser, console: list[str]) -> Iterator[Page]:
    window = chromium.new_page(viewport={"width": 1360, "height": 900})
    window.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
    window.on("pageerror", lambda error: console.append(f"uncaught: {error}"))
    window.on("dialog", lambda dialog: console.append(f"dialog: {dialog.message}"))
    yield window
    window.close()
    assert console == []


@pytest.fixture
def site() -> Iterator[TrainingSite]:
    with serve() as served:
        yield served
