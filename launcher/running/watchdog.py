"""What a supervisor watches while its run goes on: silence, which is a hang, and room on the disk for checkpoints."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.ending.run_metrics import Predicted, as_number, parse_row
from launcher.running.checkpoints import DiskNeed, disk_need, largest_checkpoint_bytes, newest_save_bytes
from launcher.running.run_record import LOG, METRICS
from planner.units import format_bytes, format_seconds

START_SILENT_S = 3600.0
"""Before the first step: a model from a slow disk, a compiler, data prepared by a quiet program."""
LEAST_SILENT_S = 900.0
"""After it, however short the steps: longer than NCCL waits for a rank (10 min), whose own words say more, and long
enough for a large checkpoint."""
STEPS_SILENT = 10
"""After it, in steps: an evaluation or a checkpoint takes the time of some."""
TAIL_BYTES = 64 << 10
"""Of the metrics, which hold the last rows: one is below 2 KiB with 16 ranks."""
RECENT_ROWS = 20
"""Enough for the longest usual pause among them, an evaluation or a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A run that has said and saved nothing for too long."""

    quiet_s: float
    step_s: float | None
    """What a step was to take; None before anything is known."""

    @property
    def sentence(self) -> str:
        """``no step and no line in the log for 15 min, where a step takes 2.1 s``."""
        expected = f", where a step takes {format_seconds(self.step_s)}" if self.step_s else ""
        return f"no step and no line in the log for {format_seconds(self.quiet_s)}{expected}"


class HangWatch:
    """Tells when neither log nor metrics nor a checkpoint have grown for longer than any step should take.

    Time is the caller's, so that a suspended machine's clock can be one that stands still with it.
    """

    def __init__(self, folder: Path, predicted: Predicted, limit_s: float | None) -> None:
        """Nothing is read yet.

        Args:
            folder: The run folder.
            predicted: What the plan said of a step.
            limit_s: Seconds of silence that end a run; None is the default, which follows the steps.
        """
        self._folder = folder
        self._metrics = folder / METRICS
        self._predicted_s = predicted.step_s
        self._limit_s = limit_s
        self._sizes: tuple[int, ...] = ()
        self._grown_at: float | None = None
        self._step_s: float | None = None
        self._row_s: float | None = None

    def look(self, now: float) -> Silence | None:
        """A silence that is too long at ``now``, in seconds of a monotonic clock; call it often."""
        sizes = (_size(self._folder / LOG), _size(self._metrics), newest_save_bytes(self._folder))
        if self._grown_at is None or sizes != self._sizes:
            if self._sizes and sizes[1] != self._sizes[1]:
                self._step_s, self._row_s = _pace(self._metrics)
            self._sizes, self._grown_at = sizes, now
            return None
        quiet_s = now - self._grown_at
        return Silence(quiet_s=quiet_s, step_s=self._step_s) if quiet_s >= self.limit_s else None

    def forgive(self, now: float) -> None:
        """Count silence anew from ``now``: there is a reason for what there was."""
        self._grown_at = now

    @property
    def limit_s(self) -> float:
        """Seconds of silence that count as a hang at present."""
        if self._limit_s is not None:
            return self._limit_s
        if self._step_s is None:
            return max(START_SILENT_S, STEPS_SILENT * (self._predicted_s or 0.0))
        return max(LEAST_SILENT_S, STEPS_SILENT * max(self._step_s, self._row_s or 0.0, self._predicted_s or 0.0))


class DiskWatch:
    """Tells when the disk has less room than the next checkpoint takes."""

    def __init__(self, folder: Path, plan: Mapping[str, Any] | None) -> None:
        """Read what a checkpoint takes.

        Args:
            folder: The run folder.
            plan: Its plan.json.
        """
        self._folder = folder
        self._need = disk_need(plan)

    def look(self) -> str | None:
        """One sentence while there is too little room, else None."""
        need = self._need
        if need is not None and not need.checkpoint_bytes:
            what, size = "the trained model", need.model_bytes
        else:
            what = "the next checkpoint"
            size = largest_checkpoint_bytes(self._folder) or (need.checkpoint_bytes if need else 0)
        free = free_bytes(self._folder)
        if free is None or free >= size:
            return None
        return (
            f"the disk has {format_bytes(free)} free and {what} takes {format_bytes(size)}:"
            " free some space, or the run ends when it is saved"
        )


def room_problem(folder: Path, need: DiskNeed | None) -> tuple[str | None, str | None]:
    """What is wrong with the disk before a run starts: (why it cannot run, what should be known), None where nothing.

    Args:
        folder: The run folder.
        need: What the run writes, None where the plan does not say.
    """
    free = free_bytes(folder)
    if need is None or free is None:
        return None, None
    first = need.checkpoint_bytes or need.model_bytes
    what = "one checkpoint" if need.checkpoint_bytes else "the trained model"
    if free < first:
        return f"{format_bytes(free)} free on the disk of {folder}, and {what} takes {format_bytes(first)}", None
    whole = need.whole_bytes - (largest_checkpoint_bytes(folder) or 0)
    if free < whole:
        parts = f"{need.num_kept + 1} checkpoints, the one being written among them, and the model"
        return None, f"{format_bytes(free)} free on the disk of {folder}; {parts} take {format_bytes(need.whole_bytes)}"
    return None, None


def free_bytes(folder: Path) -> int | None:
    """Left on the disk of a folder for this user, or None when the disk does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _pace(metrics: Path) -> tuple[float | None, float | None]:
    """(seconds of a step, seconds between two rows) by the last rows of metrics.jsonl."""
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None, None
    rows = [row for line in lines[-RECENT_ROWS:] if (row := parse_row(line)) and row.get("event") == "step"]
    steps = [s for row in rows if (s := as_number(row.get("step_s"))) is not None]
    times = [t for row in rows if (t := as_number(row.get("time"))) is not None]
    gaps = [after - before for before, after in pairwise(times)]
    if not rows:
        return None, None
    return (statistics.median(steps) if steps else 0.0), max(gaps, default=None)
