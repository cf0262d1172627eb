"""Run folders whose command is a small script: real processes, no torch, done in milliseconds."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from launcher.running.processes import kill_tree, members
from launcher.running.run_record import MARKER, marker_of

GIB = 1 << 30

PLAN: Mapping[str, object] = {
    "schema": "trlfit.plan/1",
    "job": {"model": "Qwen/Qwen3-8B", "trainer": "sft", "method": "full", "machine": "2xH100-80GB"},
    "machine": {"spec": "2xH100-80GB"},
    "best": {
        "choice": {"method": "full", "sharding": "fsdp", "dp_shard": 2},
        "memory": {
            "allocated_bytes": 50 * GIB, "reserved_bytes": 55 * GIB, "device_bytes": 56 * GIB,
            "low_bytes": 48 * GIB, "high_bytes": 53 * GIB, "peak_phase": "loss",
        },
        "time": {"step_s": 2.0, "low_s": 1.8, "high_s": 2.3},
    },
}  # fmt: skip


def make_run(
    folder: Path, *, bash: str = "", python: str = "", plan: Mapping[str, object] | None = PLAN, bare: bool = True
) -> Path:
    """A run folder whose command.sh holds ``bash`` and then executes ``python``, if any.

    Unless ``bare``, with installed packages, torch among them.
    """
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(python)
    last = f"exec {shlex.quote(sys.executable)} {'-S -E ' if bare else ''}train.py\n" if python else ""
    (folder / "command.sh").write_text(f"{bash}\n{last}")
    (folder / "accelerate.yaml").write_text("num_processes: 1\n")
    (folder / "job.yaml").write_text("model: Qwen/Qwen3-8B\n")
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def rows(*steps: tuple[int, float, float, list[int]], end: bool = True) -> str:
    """metrics.jsonl of a run on cards: (step, loss, seconds, allocated bytes per rank)."""
    lines: list[Mapping[str, object]] = [{"event": "start"}]
    for step, loss, step_s, allocated in steps:
        reserved = [size + GIB for size in allocated]
        lines.append({
            "event": "step", "step": step, "loss": loss, "step_s": step_s, "tokens": 8192,
            "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved,
        })  # fmt: skip
    if end:
        lines.append({"event": "end"})
    return "".join(json.dumps(line) + "\n" for line in lines)


def appends(text: str, file: str = "metrics.jsonl") -> str:
    """Shell that appends text to a file of the run folder."""
    return f"printf %s {shlex.quote(text)} >> {file}"


def left_over(folder: Path) -> set[int]:
    """Pids of the run's processes that still live."""
    return {mark.pid for mark in members(marker=marker_of(folder))}


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Until a condition holds; fails the test when it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def sweep(root: Path) -> None:
    """End whatever a failed test left: runs, supervisors and guards of folders under root."""
    for folder in root.iterdir():
        if (folder / "command.sh").is_file():
            kill_tree(marker=marker_of(folder), grace_s=0)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "launcher.running.supervisor" in words and any(word.startswith(str(root)) for word in words):
            os.kill(process.pid, signal.SIGKILL)
    assert MARKER not in os.environ
