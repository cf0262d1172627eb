"""Real trainings that fail at step 3: one tries again by a smaller plan, one meets a row that no model takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.fake_run import left_over
from tests.launcher.tiny_models import EXAMPLES, ROOT, tiny_model

pytestmark = pytest.mark.launch

SHORT = """
import torch

loss_of_the_trainer = SFTTrainer.compute_loss


def out_of_memory(self, *args, **kwargs):
    if self.state.global_step == 2:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. Of the allocated memory 7.00 MiB is allocated by PyTorch,"
            " and 0 bytes is reserved by PyTorch but unallocated."
        )
    return loss_of_the_trainer(self, *args, **kwargs)


SFTTrainer.compute_loss = out_of_memory

"""


def trlfit(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRLFIT_DATA": str(tmp_path / "history"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        },
        capture_output=True,
        text=True,
    )


def flags(data: Path) -> list[str]:
    return [
        str(tiny_model()), "--dataset", str(data), "--machine", "cpu", "--seq-len", "512", "--no-trace", "--no-check",
        "--global-batch", "4", "--pin", "gpus=1", "--trl", "max_steps=4", "--trl", "save_steps=2",
    ]  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def steps(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["event"] == "step"]


def test_an_automatic_retry_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = trlfit(tmp_path, "write", *flags(EXAMPLES / "train.jsonl"), "-o", str(folder))
    assert made.returncode == 0, made.stderr
    script = folder / "train.py"
    script.write_text(script.read_text().replace('\nif __name__ == "__main__"', f'{SHORT}\nif __name__ == "__main__"'))
    done = trlfit(tmp_path, "launch", str(folder), "--no-check", "--auto-retry", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"]["kind"] == "done"
    assert "attempt 2, from checkpoint-2: " in done.stderr
    assert "out of memory in forward at step 3" in done.stderr

    first = folder / "attempts" / "1"
    failed = read(first / "outcome.json")
    assert (failed["kind"], failed["seen"]["last_step"]) == ("out_of_memory", 2)
    assert "out_of_memory" in (first / "train.py").read_text(), "what was edited by hand is kept"
    before, after = read(first / "plan.json")["best"], read(folder / "plan.json")["best"]
    assert after["memory"]["device_bytes"] < before["memory"]["device_bytes"]
    record = read(folder / "run.json")
    assert (record["attempt"], record["retries_left"], record["resumed_from"]) == (2, 1, "checkpoint-2")
    assert (steps(first), steps(folder)) == ([1, 2], [3, 4])
    listed = json.loads(trlfit(tmp_path, "runs", "--json").stdout)
    assert [row["state"] for row in listed] == ["done", "out_of_memory"]
    assert left_over(folder) == set()


def test_a_corrupt_row_at_step_3(tmp_path: Path) -> None:
    """Rows that are token ids already, one of them beyond the vocabulary; nothing before the forward pass can tell."""
    data = tmp_path / "ids.jsonl"
    rows = [{"input_ids": [n % 50 + 5] * 32} for n in range(16)]
    rows[10]["input_ids"][7] = 1_000_000
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "run"
    asked = [*flags(data), "--trl", "train_sampling_strategy=sequential", "--pin", "micro_batch=1"]
    done = trlfit(tmp_path, "launch", *asked, "-o", str(folder), "--auto-retry", "1")
    assert done.returncode == 6
    outcome = read(folder / "outcome.json")
    assert (outcome["kind"], outcome["phase"], outcome["seen"]["last_step"]) == ("data_error", "forward", 2)
    assert outcome["sentence"].startswith("data error after step 2: a row holds a token id beyond the vocabulary")
    assert not (folder / "attempts").exists(), "no plan helps"
    assert left_over(folder) == set()
