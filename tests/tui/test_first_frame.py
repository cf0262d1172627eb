"""What the app loads before anything is drawn: a second of waiting is made of such modules."""

from __future__ import annotations

import subprocess
import sys

from tests.tui.test_terminal import environment

LATER = {
    "psutil",
    "launcher.nvml.gpus",
    "launcher.ending.history",
    "launcher.running.follow",
    "launcher.running.runs",
    "launcher.text.plan",
}
LATER |= {
    "planner.search.search",
    "planner.machine",
    "launcher.planning",
    "launcher.writing.run_writing",
    "tui.run_view",
}


def test_the_first_frame_waits_for_no_planner_and_no_run() -> None:
    code = "import sys, tui.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"textual.app", "tui.app", "planner.job", "tui.screens.plans"} <= loaded
    assert not loaded & LATER
