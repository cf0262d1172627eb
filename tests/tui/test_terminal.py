from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.launcher.fake_run import make_run
from tests.launcher.tiny_models import EXAMPLES, tiny_model

ROOT = Path(__file__).resolve().parents[2]
START = [sys.executable, "-m", "tui"]


def environment() -> dict[str, str]:
    # Of several test processes each says COLUMNS, which would stand above the terminal's own size.
    mine = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**mine, "PYTHONPATH": str(ROOT)}


def test_without_a_terminal_it_prints_help_to_stderr() -> None:
    done = subprocess.run(START, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: trlfit")
    assert "plan" in done.stderr and "130 interrupted" in done.stderr


def test_a_terminal_that_cannot_draw_is_told_so() -> None:
    ours, theirs = os.openpty()
    done = subprocess.run(
        START, env={**environment(), "TERM": "dumb"}, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 4
    assert done.stderr.startswith("trlfit: error: TERM=dumb") and len(done.stderr.splitlines()) == 1


class Terminal:
    """A real one: tmux, of a size, in a folder."""

    def __init__(self, folder: Path, size: tuple[int, int], *words: str, **variables: str) -> None:
        # A server of its own: the one before may still be on its way out.
        self._tmux = ["tmux", "-L", f"trlfit-test-{uuid.uuid4().hex[:12]}", "-f", "/dev/null"]
        command = f"{shlex.join([*START, *words])}; echo exit code $?; sleep 600"
        start = ["new-session", "-d", "-s", "app", "-x", str(size[0]), "-y", str(size[1]), "-c", str(folder)]
        subprocess.run([*self._tmux, *start, "sh", "-c", command], env={**environment(), **variables}, check=True)

    def screen(self) -> str:
        """What a person sees."""
        shown = [*self._tmux, "capture-pane", "-p", "-t", "app"]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout

    def wait_for(self, *parts: str, seconds: float = 90) -> str:
        """Until all parts are on the screen."""
        until = time.monotonic() + seconds
        while not all(part in (text := self.screen()) for part in parts):
            assert time.monotonic() < until, f"no {parts} on the screen:\n{text}"
            time.sleep(0.1)
        return text

    def keys(self, *keys: str) -> None:
        """Press, by tmux's names."""
        subprocess.run([*self._tmux, "send-keys", "-t", "app", *keys], check=True)
        time.sleep(0.2)

    def type(self, text: str) -> None:
        """Type a text as it is."""
        subprocess.run([*self._tmux, "send-keys", "-t", "app", "-l", text], check=True)
        time.sleep(0.2)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@needs_tmux
def test_in_a_real_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\n")
    terminal = Terminal(tmp_path, (100, 30), TRLFIT_DATA=str(tmp_path / "history"))
    try:
        shown = terminal.wait_for("8xH100-80GB", "Launch", "fsdp")
        first = next(line for line in shown.splitlines()[1:] if line.strip("│ ").split()[:1] == ["1"])
        assert "fsdp" in first
        terminal.keys("q")
        # The alternate screen is gone and the shell goes on.
        assert "Launch" not in terminal.wait_for("exit code 0")
    finally:
        terminal.close()


@needs_tmux
def test_a_job_file_is_opened_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("model: google/gemma-3-1b-pt\nmethod: lora\nmachine: 1xRTX4090\n")
    terminal = Terminal(tmp_path, (80, 24), "mine.yml", TRLFIT_DATA=str(tmp_path / "history"), LC_ALL="C")
    try:
        shown = terminal.wait_for("gemma-3-1b-pt", "Launch", "Peak in")
        # No Unicode in that terminal: bars, frames and keys are drawn in ASCII.
        assert shown.isascii(), set(filter(lambda sign: not sign.isascii(), shown))
        terminal.keys("q")
        terminal.wait_for("exit code 0")
    finally:
        terminal.close()


@needs_tmux
@pytest.mark.launch
def test_a_journey(tmp_path: Path) -> None:
    """Pick a model, edit, choose, launch, watch it end, quit and come back, see it in the history."""
    job = {"model": "Qwen/Qwen3-0.6B", "method": "full", "machine": "cpu", "global_batch": 4, "seq_len": 64}
    job |= {"data": {"dataset": str(EXAMPLES / "train.jsonl")}, "pins": {"gpus": 1}}
    job |= {"trl": {"max_steps": 6, "learning_rate": 1e-3, "save_strategy": "no"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    variables = {"TRLFIT_DATA": str(tmp_path / "history"), "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "TRLFIT_CACHE": str(tmp_path / "cache")}
    terminal = Terminal(tmp_path, (120, 36), **variables)
    try:
        terminal.wait_for("[2 PLANS]", "Peak in")
        terminal.keys("1")
        terminal.wait_for("0.6B", "596.05 M parameters")
        terminal.keys("Enter", "C-u")
        terminal.type(str(tiny_model("qwen3")))
        terminal.keys("Enter")
        terminal.wait_for("(folder)", "the best plan takes", seconds=240)
        terminal.keys("P")
        terminal.wait_for("[2 PLANS]", "Peak in")
        terminal.keys("3")
        terminal.wait_for("[3 LEDGER]", "embedding")
        terminal.keys("p")
        terminal.wait_for(" pin ")
        terminal.type("recompute=none")
        terminal.keys("Enter")
        terminal.wait_for("Ledger of plan 1", "embedding")
        terminal.keys("L")
        asked = terminal.wait_for("write and launch", "command.sh")
        assert "runs/" in asked
        terminal.keys("L")
        terminal.wait_for("[5 RUN]", "checking the data")
        terminal.wait_for("/step", seconds=240)
        shown = terminal.wait_for("finished after 6 steps", "step 6/6", seconds=240)
        assert "predicted" in shown and "Log" in shown
        terminal.keys("6")
        terminal.wait_for("[6 HISTORY]", "done")
        terminal.keys("q")
        terminal.wait_for("exit code 0")
        (folder,) = (tmp_path / "runs").iterdir()
        outcome = json.loads((folder / "outcome.json").read_text())
        assert outcome["kind"] == "done"
        assert "recompute: none" in (folder / "job.yaml").read_text()
    finally:
        terminal.close()


@needs_tmux
@pytest.mark.launch
def test_quitting_leaves_a_run_and_coming_back_finds_it(tmp_path: Path) -> None:
    script = "import time\nfor n in range(3000):\n    print('line', n, flush=True)\n    time.sleep(0.1)\n"
    folder = make_run(tmp_path / "runs" / "long", python=script)
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\n")
    data = str(tmp_path / "history")
    started = [*START, "launch", str(folder), "--detach", "--no-check"]
    subprocess.run(started, env={**environment(), "TRLFIT_DATA": data}, check=True, capture_output=True)
    try:
        for _ in range(2):
            terminal = Terminal(tmp_path, (80, 24), TRLFIT_DATA=data)
            try:
                terminal.wait_for("Launch")
                terminal.keys("5")
                terminal.wait_for("long: running", "line ")
                terminal.keys("q")
                terminal.wait_for("It goes on without this screen")
                terminal.keys("d")
                terminal.wait_for("exit code 0")
            finally:
                terminal.close()
        terminal = Terminal(tmp_path, (80, 24), TRLFIT_DATA=data)
        try:
            terminal.keys("5")
            terminal.wait_for("long: running")
            terminal.keys("X")
            terminal.wait_for("all of its processes")
            terminal.keys("X")
            terminal.wait_for("stopped")
        finally:
            terminal.close()
        assert json.loads((folder / "outcome.json").read_text())["kind"] == "stopped"
    finally:
        subprocess.run([*START, "stop", str(folder)], env={**environment(), "TRLFIT_DATA": data}, capture_output=True)


def test_a_browser_is_no_terminal_and_is_served(tmp_path: Path) -> None:
    """`textual serve` names the driver that writes to pipes; its handshake comes first."""
    (tmp_path / "job.yaml").write_text("model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\n")
    variables = {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver", "TRLFIT_DATA": str(tmp_path / "history")}
    variables |= {"COLUMNS": "100", "ROWS": "30"}
    with subprocess.Popen(
        START, cwd=tmp_path, env={**environment(), **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as served:
        assert served.stdout is not None
        try:
            assert served.stdout.readline() == b"__GANGLION__\n"
        finally:
            served.kill()
