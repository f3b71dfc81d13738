"""The Training tab of a real Spark: during a run, after it, and in the History Server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from sparkdml.observe.spark_ui import jar_path

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def start_driver(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("live_driver.py")), str(folder)]
    log = (folder / "driver.txt").open("w")
    with log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )


def read_line(stream: IO[str] | None, folder: Path) -> str:
    assert stream is not None
    line = stream.readline().strip()
    assert line, f"the driver ended early:\n{(folder / 'driver.txt').read_text()[-3000:]}"
    return line


def say_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@contextmanager
def history_server(folder: Path) -> Iterator[str]:
    """Spark's own, with our jar on its class path; yields its address."""
    import pyspark

    home = Path(pyspark.__file__).parent
    options = f"-Dspark.history.fs.logDirectory={(folder / 'log').as_uri()} "
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options += f"-Dspark.history.ui.port={port} -Dspark.history.fs.update.interval=1s"
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_HISTORY_OPTS": options,
        "SPARK_DAEMON_CLASSPATH": str(jar_path()),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    log = folder / "history.txt"
    command = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy.history.HistoryServer"]
    with (
        log.open("w") as output,
        ended(subprocess.Popen(command, env=environment, stderr=output, text=True)) as process,
    ):
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None, f"the History Server ended:\n{log.read_text()[-3000:]}"


def wait_for_json(page: Page, address: str, what: str) -> Any:
    """What is at an address, once it is there and holds something."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # No server yet, or no such page: then Spark sends a page of its own.
        with suppress(playwright_error(), ValueError):
            if told := page.request.get(address).json():
                return told
        time.sleep(0.2)
    pytest.fail(f"no {what} at {address}")


def playwright_error() -> type[Exception]:
    from playwright.sync_api import Error

    return Error


def take_picture(page: Page, name: str) -> None:
    """For docs/images, where `SPARKDML_PICTURES` names a folder: in both of Spark's themes."""
    folder = os.environ.get("SPARKDML_PICTURES")
    for theme in ("light", "dark") if folder else ():
        # As Spark's own switch for the theme does.
        if page.locator("html").get_attribute("data-bs-theme") != theme:
            page.click("#theme-toggle")
        path = f"{folder}/{name}-{theme}.png"
        page.screenshot(path=path, full_page=True, animations="disabled")


def check_finished_run(page: Page) -> None:
    page.wait_for_selector(".badge:text-is('Finished')", timeout=30000)
    text = page.inner_text(".training-page")
    for part in ("accuracy", "Ranks (2", "1 restart)", "Failures (1)", "Rank 1 on", "Plan"):
        assert part in text
    page.locator("summary", has_text="Traceback").click()
    assert "Injected" in page.locator(".training-failure pre").inner_text()
    page.locator("summary", has_text="Traceback").click()
    assert page.locator(".training-strip .checkpoint").count() >= 4
    assert page.locator(".training-plot").first.locator("path.line").count() >= 3
    assert page.locator(".training-shares .training-share-compute").count() == 2


def test_the_tab_of_a_real_run_and_of_the_history_server(page: Page, tmp_path: Path) -> None:
    with ended(start_driver(tmp_path)) as driver:
        address = read_line(driver.stdout, tmp_path)
        say_go(driver)
        # The tab comes with the first run: until then Spark sends its visitors to the jobs.
        wait_for_json(page, f"{address}/training/json/", "Training tab")
        page.goto(f"{address}/training/")
        page.click("tbody a", timeout=30000)
        page.wait_for_selector(".training-plot path.line", timeout=120000)
        drawn = page.locator(".training-plot").first.locator("path.line").last
        before = drawn.get_attribute("d")
        page.wait_for_function(
            "before => document.querySelector('.training-plot path.line').getAttribute('d') "
            "!== before",
            arg=before,
        )
        assert page.locator(".badge").first.inner_text() in ("Running", "Restarting")
        assert read_line(driver.stdout, tmp_path) == "trained"
        check_finished_run(page)
        take_picture(page, "training-run")
        page.goto(f"{address}/training/")
        page.wait_for_selector("tbody a")
        take_picture(page, "training-list")
        page.goto("about:blank")  # the list asks for news, and its server is about to end
        say_go(driver)
        assert driver.wait(timeout=60) == 0
    with history_server(tmp_path) as address:
        apps = wait_for_json(page, f"{address}/api/v1/applications", "application")
        page.goto(f"{address}/history/{apps[0]['id']}/training/")
        page.click("tbody a")
        check_finished_run(page)
