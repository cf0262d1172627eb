from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = [sys.executable, "-m", "tui"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_without_a_terminal_it_prints_help_to_stderr() -> None:
    done = subprocess.run(START, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: trlfit")
    assert "plan" in done.stderr and "130 interrupted" in done.stderr


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_a_real_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\n")
    tmux = ["tmux", "-L", f"trlfit-test-{os.getpid()}", "-f", "/dev/null"]
    command = f"{' '.join(START)}; echo exit code $?; sleep 60"

    def screen() -> str:
        shown = subprocess.run([*tmux, "capture-pane", "-p", "-t", "app"], capture_output=True, text=True, check=True)
        return shown.stdout

    def wait_for(*parts: str) -> str:
        until = time.monotonic() + 60
        while not all(part in (text := screen()) for part in parts):
            assert time.monotonic() < until, text
            time.sleep(0.1)
        return text

    size = ["-x", "100", "-y", "30"]
    start = [*tmux, "new-session", "-d", "-s", "app", *size, "-c", str(tmp_path), "sh", "-c", command]
    subprocess.run(start, env=environment(), check=True)
    try:
        shown = wait_for("8 x H100-80GB", "Plan again", "fsdp")
        first = next(line for line in shown.splitlines() if line.split()[:1] == ["1"])
        assert "fsdp" in first
        subprocess.run([*tmux, "send-keys", "-t", "app", "q"], check=True)
        # The alternate screen is gone and the shell goes on.
        assert "Plan again" not in wait_for("exit code 0")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
