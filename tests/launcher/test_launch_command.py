"""`trlfit launch` on this CPU, for real: tiny models, one and two processes, stopped and killed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launcher.tiny_models import EXAMPLES, ROOT, tiny_model

pytestmark = pytest.mark.launch

RELOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("It is a truth", return_tensors="pt")
    print(float(model(**tokens, labels=tokens["input_ids"]).loss))
"""


def trlfit(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tui", *arguments],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRLFIT_DATA": str(tmp_path / "history"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
    }


def flags(family: str, folder: Path, *, steps: int, processes: int = 1) -> list[str]:
    return [
        str(tiny_model(family)), "--dataset", str(EXAMPLES / "train.jsonl"), "--machine", "cpu", "--seq-len", "64",
        "--no-trace",
        "--global-batch", "4", "--pin", f"gpus={processes}", "--trl", f"max_steps={steps}",
        "--trl", "save_strategy=steps", "--trl", f"save_steps={max(1, steps // 2)}",
        "--trl", "learning_rate=1e-3", "-o", str(folder),
    ]  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def marked_processes(folder: Path) -> list[int]:
    """Processes that carry the run's marker in their environment."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRLFIT_RUN") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("family", "processes"), [("qwen3", 1), ("llama", 2)])
def test_a_run_trains_saves_and_is_remembered(tmp_path: Path, family: str, processes: int) -> None:
    folder = tmp_path / "run"
    done = trlfit(tmp_path, "launch", *flags(family, folder, steps=4, processes=processes), "--json")
    assert done.returncode == 0, done.stderr
    outcome = read(folder / "outcome.json")
    assert json.loads(done.stdout)["outcome"]["kind"] == outcome["kind"] == "done"
    assert outcome["predicted"]["allocated_bytes"] > 0
    assert outcome["seen"]["memory_bytes"] > 0
    assert outcome["seen"]["last_step"] == 4

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(len(row["peak_rss_bytes"]) == processes and row["loss"] > 0 for row in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]

    saved = sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-4"]
    models = [str(folder / "checkpoints" / "checkpoint-4"), str(folder / "model")]
    reloaded = subprocess.run([sys.executable, "-c", RELOAD, *models], capture_output=True, text=True, check=True)
    losses = [float(line) for line in reloaded.stdout.splitlines()]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)

    listed = json.loads(trlfit(tmp_path, "runs", "--json").stdout)
    assert [(row["state"], row["steps"]) for row in listed] == [("done", 4)]
    assert listed[0]["predicted_bytes"] == outcome["predicted"]["allocated_bytes"]


def test_the_folder_runs_without_us(tmp_path: Path) -> None:
    """`bash command.sh` in a copy elsewhere, with no trlfit on the path."""
    written = tmp_path / "written"
    made = trlfit(tmp_path, "write", *flags("qwen3", written, steps=2))
    assert made.returncode == 0, made.stderr
    elsewhere = tmp_path / "elsewhere"
    written.rename(elsewhere)
    clean = {k: v for k, v in environment(tmp_path).items() if k not in ("PYTHONPATH", "TRLFIT_DATA")}
    done = subprocess.run(["bash", "command.sh"], cwd=elsewhere, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "model" / "model.safetensors").is_file()
    assert "import tui" not in (elsewhere / "train.py").read_text()


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A detached run of many steps that has done its first."""
    folder = tmp_path / "long"
    started = trlfit(tmp_path, "launch", *flags("qwen3", folder, steps=100_000), "--detach")
    assert started.returncode == 0, started.stderr
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        metrics = folder / "metrics.jsonl"
        if metrics.is_file() and '"event": "step"' in metrics.read_text():
            return folder
        time.sleep(0.2)
    pytest.fail((folder / "log.txt").read_text())


def test_stop_leaves_no_process_behind(tmp_path: Path, running: Path) -> None:
    assert marked_processes(running)
    stopped = trlfit(tmp_path, "stop", str(running))
    assert stopped.returncode == 0, stopped.stderr
    assert read(running / "outcome.json")["kind"] == "stopped"
    assert marked_processes(running) == []
    again = trlfit(tmp_path, "stop", str(running))
    assert (again.returncode, "already over" in again.stdout) == (0, True)


def test_kill_9_of_the_training_is_reported_as_killed(tmp_path: Path, running: Path) -> None:
    def is_trainer(pid: int) -> bool:
        return "train.py" in " ".join(psutil.Process(pid).cmdline()[-1:])

    for pid in filter(is_trainer, marked_processes(running)):
        os.kill(pid, signal.SIGKILL)
    watched = trlfit(tmp_path, "watch", str(running))
    assert watched.returncode == 6
    outcome = read(running / "outcome.json")
    assert (outcome["kind"], outcome["signal"]) == ("killed", "SIGKILL")
    assert "kill" in watched.stdout
    assert marked_processes(running) == []


def test_a_failing_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    refused = trlfit(tmp_path, "launch", *flags("qwen3", folder, steps=2), "--trl", "learnig_rate=1e-3")
    assert refused.returncode == 2
    assert "learnig_rate" in refused.stderr
    assert not folder.exists()
