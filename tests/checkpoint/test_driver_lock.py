"""Whether another driver is still at work."""

import os
import signal
import subprocess
import sys

import psutil

from sparkdml.checkpoint.driver_lock import _process_lives, this_driver
from sparkdml.testing.waiting import wait_until


def test_a_killed_driver_is_dead_even_as_a_zombie():
    driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began = f"{psutil.Process(driver.pid).create_time():.2f}"
    assert _process_lives(driver.pid, began)
    assert not _process_lives(driver.pid, "0.00"), "another process of the same number"
    os.kill(driver.pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(driver.pid).status() == psutil.STATUS_ZOMBIE, seconds=10)
    assert not _process_lives(driver.pid, began)
    driver.wait()
    assert not _process_lives(driver.pid, began)


def test_a_step_of_the_clock_does_not_end_a_living_driver(monkeypatch):
    _, pid, began = this_driver().split("/")
    by_the_clock = f"{psutil.Process().create_time():.2f}"  # as earlier versions wrote
    original = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: original(process) + 1)
    assert this_driver().split("/")[2] == began
    assert _process_lives(int(pid), began)
    assert _process_lives(int(pid), by_the_clock)
    assert not _process_lives(int(pid), f"{float(by_the_clock) - 60:.2f}")
    if sys.platform == "linux":
        boot, _, ticks = began.partition(":")
        assert not _process_lives(int(pid), f"{boot}:{int(ticks) - 1}")
        assert not _process_lives(int(pid), f"{'0' * 8}:{ticks}"), "before the machine was booted"
