"""Whom the kernel killed, by lines of its log as two kernels wrote them, and what follows for a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.ending import settling
from launcher.ending.kernel_log import KernelKill, kills_since
from launcher.ending.outcomes import classify
from launcher.ending.run_metrics import Metrics, Predicted
from tests.launcher.test_history import record

LOG = """\
6,1201,2352811531,-;[  20239]     0 20239     5738     3900     3047      853         0    86016        0 0 python3
3,1203,2352811551,-;Memory cgroup out of memory: Killed process 20238 (python3) total-vm:217328kB, anon-rss:50304kB, \
file-rss:5840kB, shmem-rss:0kB, UID:0 pgtables:164kB oom_score_adj:0
3,1290,2360000000,c;Out of memory: Killed process 77 (pt_data worker) total-vm:90000000kB, anon-rss:61000000kB, \
file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:120000kB oom_score_adj:0
"""


def test_kills_and_when(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    first = KernelKill(pid=20238, name="python3", resident_bytes=50304 * 1024)
    second = KernelKill(pid=77, name="pt_data worker", resident_bytes=61_000_000 * 1024)
    assert kills_since(2352.0, log) == [first, second]
    assert kills_since(2355.0, log) == [second]
    assert kills_since(2361.0, log) == []
    assert kills_since(0.0, tmp_path / "none") is None


def test_the_log_tells_our_kill_from_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's counter rose either way; a process of this run is named in one case only."""
    kills = [KernelKill(pid=77, name="python", resident_bytes=58 << 30)]

    def found(_: float) -> list[KernelKill]:
        return kills

    monkeypatch.setattr(settling, "kills_since", found)
    monkeypatch.setattr(settling.processes, "oom_kills", lambda: {"machine": 3})
    here = replace(record(tmp_path), oom_kills={"machine": 2}, pid_namespace=settling.INITIAL_NAMESPACE)
    seen = Metrics(started=True, last_step=4, rows=4)

    ours = classify(None, 9, "", seen, Predicted(), settling.kernel_kills_since(here, {76, 77}))
    assert (ours.kind, ours.sentence) == (
        "out_of_memory",
        "the kernel killed the training after step 4: the host ran out of memory"
        " (the kernel's log: python held 58.0 GiB)",
    )
    theirs = classify(None, 9, "", seen, Predicted(), settling.kernel_kills_since(here, {76}))
    assert theirs.kind == "killed"
    # In a container the log's pids are not ours: then the counter decides.
    inside = replace(here, pid_namespace="pid:[4026532000]")
    assert classify(None, 9, "", seen, Predicted(), settling.kernel_kills_since(inside, {76})).kind == "out_of_memory"
