"""What counts as live on a CPU: tensors of the run, and nothing that gloo makes beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILDREN = Path(__file__).resolve().parents[2] / "launcher" / "children"
ALONE = """
import sys
import torch
from torch import distributed
from measure_meter import StorageGauge

distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
whole, share = torch.zeros(2**20), torch.zeros(2**20)
gauge, wait = StorageGauge(), distributed.Work.wait
gauge.start()
gauge.begin()
before = gauge.highest()
distributed.reduce_scatter_tensor(share, whole)
distributed.reduce_scatter_tensor(share, whole, async_op=True).wait()
reduced = gauge.highest()
more = torch.zeros(2**18)
print(reduced - before, gauge.highest() - before)
gauge.stop()
assert distributed.Work.wait is not None and distributed.Work.wait == wait
"""


def test_gloos_own_copy_of_a_reduce_scatter_does_not_count(tmp_path: Path) -> None:
    """It clones 4 MiB and hands the clone to ``split`` and ``copy_``, which the gauge sees; NCCL makes no copy."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path / "store")],
        cwd=CHILDREN, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", str(2**20)]
