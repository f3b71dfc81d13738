"""Whether another driver is still at work."""

import os
import signal
import subprocess
import sys

import psutil

from sparkdml.checkpoint.driver_lock import _process_lives
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
