"""`uniquery explore` in a process of its own, and how tests wait for its page."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SOURCE = Path(__file__).parents[2] / "src"
WAIT = 20_000  # milliseconds; only ever waited in full by a test that fails


class Server:
    """`uniquery explore` in a process of its own."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "uniquery", "explore", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("Open "):
                self.address = line.split()[1]
                return
        raise AssertionError("".join(lines))

    def stop(self):
        self.process.terminate()
        self.process.wait(20)


def wait_until(page, expression, argument=None):
    """Waits until JavaScript gives true; playwright's own function needs eval, which the page's policy forbids."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression if "=>" in expression.split("(")[0] else f"() => {expression}", argument):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def drawn_tiles(page):
    page.wait_for_selector(".tile[data-drawn]")
    return page.locator(".tile")


def first_image(server, tab):
    return tab.request.get(server.address + "api/start").json()["images"]["id"][0]
