"""What tensor parallelism under TRL is today, in two processes on this CPU: why `tp` is a knob that is not offered.

It trains, and as one process does. Its optimizer cannot be checkpointed. That accelerate's `tp_size` alone raises is in
tests/planner/real_errors_parallel.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.tiny_models import EXAMPLES, tiny_model
from tests.launcher.warm_python import warm_environment, warm_python

pytestmark = pytest.mark.launch

HERE = Path(__file__).parent


def trained(folder: Path, tp_size: int) -> dict[str, Any]:
    out = folder / f"tp{tp_size}.json"
    start = [warm_python(), "-m", "torch.distributed.run", "--nproc_per_node", str(tp_size), "--master_port", "29781"]
    words = [HERE / "tensor_parallel_rank.py", tiny_model(), folder / "rows.jsonl", out, str(tp_size)]
    environment = {
        **warm_environment(), "PYTHONPATH": str(HERE / "cpu_ranks"),
        "TRLFIT_TEST_CPU_RANKS": str(folder / "seen.json"), "TRLFIT_TEST_RESIDENT": str(folder / "resident.json"),
    }  # fmt: skip
    run = subprocess.run([*start, *map(str, words)], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-4000:]
    told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return told


def test_tensor_parallel_training_is_that_of_one_process_and_cannot_be_resumed(tmp_path: Path) -> None:
    words = (EXAMPLES / "train.jsonl").read_text(encoding="utf-8").split()
    rows = [{"text": " ".join(words[start : start + 60])} for start in range(0, 320, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    alone, two = trained(tmp_path, 1), trained(tmp_path, 2)
    assert two["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    # Norms stay whole on both ranks.
    assert alone["parameters"] / 2 < two["parameters"] < 0.51 * alone["parameters"]
    assert "Resuming is not supported for models sharded at load time" in two["checkpoint"]
