from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from launcher.inputs.host import read_host

MIB = 1024**2


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_host_without_control_groups(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert host.total_bytes == psutil.virtual_memory().total
    assert 0 < host.available_bytes <= host.total_bytes
    assert host.cores == len(os.sched_getaffinity(0))


def test_this_machine() -> None:
    host = read_host()
    assert 0 < host.total_bytes <= psutil.virtual_memory().total
    assert 1 <= host.cores <= (psutil.cpu_count() or 1)


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job7\n",
            "sys/fs/cgroup/slurm/job7/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job7/memory.current": f"{10 * MIB}\n",
            "sys/fs/cgroup/slurm/job7/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/slurm/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/slurm/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/slurm/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
            "sys/fs/cgroup/slurm/cpu.max": "max 100000\n",
            "sys/fs/cgroup/memory.stat": "",
        },
    )
    host = read_host(root)
    assert host.total_bytes == 100 * MIB
    # 60 MiB are in use, of which the kernel gives up 20 when asked.
    assert host.available_bytes == 60 * MIB
    assert host.cores == 1
    assert any("100.0 MiB" in limit for limit in host.limits)
    assert any("0.5 of" in limit for limit in host.limits)


def test_version_1_as_a_container_sees_it(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            # The path is the host's; inside, the container's own group is mounted as the root.
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=x:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {88 * MIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    host = read_host(root)
    assert (host.total_bytes, host.available_bytes) == (512 * MIB, 100 * MIB)
    assert host.cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("limit", ["9223372036854771712", "max", "", "rubbish", "-1"])
def test_no_limit_is_no_limit(tmp_path: Path, limit: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        },
    )
    assert read_host(root).total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("cpuinfo", "known"),
    [
        ("model name\t: A\nflags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: avx512f avx512dq avx512bw avx512vl\n", True),
        ("flags\t\t: avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None),
        (None, None),
    ],
)
def test_whether_torch_has_bf16_products_here(cpuinfo: str | None, known: bool | None, tmp_path: Path) -> None:
    root = tree(tmp_path, {} if cpuinfo is None else {"proc/cpuinfo": cpuinfo})
    assert read_host(root).bf16 is known


@pytest.mark.stack
def test_torch_agrees_on_bf16_here() -> None:
    torch = pytest.importorskip("torch")
    known = read_host().bf16
    assert known is None or known == torch.ops.mkldnn._is_mkldnn_bf16_supported()
