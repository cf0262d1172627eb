"""The history of runs: an append-only file of starts and ends, read as predicted against seen."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher import paths
from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import Predicted, as_integer, as_mapping, as_number, parse_row
from launcher.running.processes import this_host
from launcher.running.run_record import OUTCOME, PLAN, RunRecord, read_json, read_record
from planner.units import format_bytes, format_seconds

HISTORY_FILE = "history.jsonl"
LONGEST_LINE_BYTES = 1 << 20
"""Ours are a few KB; what is longer somebody else wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One run, whether its folder still exists or not."""

    id: str
    folder: Path
    exists: bool
    model: str | None
    trainer: str | None
    method: str | None
    machine: str | None
    plan: str | None
    """The choice in a few words: ``full fsdp 4``."""
    state: str
    """An outcome's kind, ``running``, or ``unknown`` for a run that never reported an end."""
    sentence: str | None
    started_at: str | None
    duration_s: float | None
    steps: int | None
    loss: float | None
    predicted_bytes: int | None
    seen_bytes: int | None
    memory_error: float | None
    predicted_step_s: float | None
    seen_step_s: float | None
    step_error: float | None
    card: str | None = None
    """What it ran on: an id of `trlfit cards`, NVML's name, or ``cpu``."""
    kind: str | None = None
    """Trainer, method and sharding: ``sft full fsdp``."""
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seen over predicted, less one: ``allocated``, ``reserved``, ``device``, ``resident``, ``step``."""

    def to_json(self) -> dict[str, Any]:
        """For ``trlfit runs --json``."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "folder": str(self.folder), "errors": dict(self.errors)}


def history_path() -> Path:
    """Where the history is kept."""
    return paths.data_dir() / HISTORY_FILE


def describe(folder: Path) -> dict[str, Any]:
    """What a plan.json says about a run, in the few words a table has room for."""
    plan = as_mapping(read_json(folder / PLAN))
    job, best = as_mapping(plan.get("job")), as_mapping(plan.get("best"))
    choice, machine = as_mapping(best.get("choice")), plan.get("machine")
    gpus = 1
    for knob in ("cp", "sp", "tp", "dp_shard", "dp_replicate"):
        gpus *= as_integer(choice.get(knob)) or 1
    words = [choice.get("method") or job.get("method"), choice.get("sharding"), gpus]
    label = " ".join(str(word) for word in words if word not in (None, "none"))
    return {
        "model": job.get("model"),
        "trainer": job.get("trainer"),
        "method": job.get("method"),
        "machine": as_mapping(machine).get("spec") or job.get("machine"),
        "plan": label if choice else None,
        "card": _card(as_mapping(machine)),
        "kind": " ".join(str(word) for word in (job.get("trainer"), *words[:2]) if word not in (None, "none")) or None,
    }


def _card(machine: Mapping[str, Any]) -> str | None:
    cards = machine.get("cards")
    if isinstance(cards, list) and cards:
        first = as_mapping(cards[0])  # pyright: ignore[reportUnknownArgumentType]
        return str(first.get("card_id") or first.get("name"))
    return "cpu" if machine.get("host") else None


def append_start(record: RunRecord) -> None:
    """Note that a run started.

    Raises:
        OSError: the history cannot be written.
    """
    folder = Path(record.folder)
    predicted = Predicted.from_plan(read_json(folder / PLAN))
    _append({
        **_head("started", record), **describe(folder),
        "predicted_bytes": predicted.allocated_bytes, "predicted_step_s": predicted.step_s,
    })  # fmt: skip


def append_end(record: RunRecord, outcome: Outcome) -> None:
    """Note how a run ended; complete in itself, should the start be missing.

    Raises:
        OSError: the history cannot be written.
    """
    _append({
        **_head("ended", record), **describe(Path(record.folder)), "outcome": outcome.to_json(),
    })  # fmt: skip


def find_end(run_id: str) -> Outcome | None:
    """The outcome of one run, for when its folder could not take it."""
    for entry in reversed(read_entries()[0]):
        if entry.get("event") == "ended" and entry.get("id") == run_id:
            return Outcome.from_json(as_mapping(entry.get("outcome")))
    return None


def read_entries() -> tuple[list[Mapping[str, Any]], list[str]]:
    """All entries in the order written, and a note when lines had to be skipped."""
    path = history_path()
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], []
    except OSError as problem:
        return [], [f"the history cannot be read: {path}: {problem.strerror}"]
    rows = [(line, parse_row(line)) for line in lines if line.strip()]
    entries = [row for _, row in rows if row is not None and isinstance(row.get("id"), str)]
    bad = len(rows) - len(entries)
    note = f"skipped {bad} unreadable line{'s' if bad > 1 else ''} of {path}"
    return entries, [note] if bad else []


def history_rows(root: Path | None = None, notes: list[str] | None = None) -> list[HistoryRow]:
    """Every run on record, newest first.

    Args:
        root: Only runs in or under this folder, with those of it that the history does not know.
        notes: Receives sentences about what could not be read.
    """
    entries, problems = read_entries()
    if notes is not None:
        notes += problems
    starts: dict[str, Mapping[str, Any]] = {}
    ends: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        (ends if entry.get("event") == "ended" else starts)[str(entry["id"])] = entry
    rows = [_row(ends.get(key) or starts[key], key in ends) for key in {**starts, **ends}]
    if root is not None:
        inside = root.resolve()
        rows = [row for row in rows if row.folder.is_relative_to(inside)]
        rows += _unknown_to_history(inside, {row.id for row in rows})
    return sorted(rows, key=lambda row: (row.started_at or "", row.id), reverse=True)


def table_rows(rows: Sequence[HistoryRow]) -> list[tuple[str, ...]]:
    """Cells for people, the header first: GiB and seconds, predicted, seen and the error."""
    header = (
        "run", "model", "plan", "state", "predicted", "seen", "memory err", "pred s", "seen s", "step err", "took",
        "loss",
    )  # fmt: skip
    return [header, *(_cells(row) for row in rows)]


def error_summary(rows: Sequence[HistoryRow]) -> str | None:
    """``peak memory median +1.2 %, worst +2.3 %; ...`` over the runs that have both numbers."""
    parts: list[str] = []
    for name, errors in (
        ("peak memory", _known(row.errors.get("allocated") for row in rows)),
        ("growth of resident memory", _known(row.errors.get("resident") for row in rows)),
        ("step time", _known(row.step_error for row in rows)),
    ):
        if errors:
            worst = max(errors, key=abs)
            middle = statistics.median(errors)
            count = f"{len(errors)} run{'s' if len(errors) > 1 else ''}"
            parts.append(f"{name} median {_percent(middle)}, worst {_percent(worst)} over {count}")
    return "; ".join(parts) or None


def _known(errors: Iterable[float | None]) -> list[float]:
    return [error for error in errors if error is not None]


def _head(event: str, record: RunRecord) -> dict[str, Any]:
    return {
        "event": event, "id": record.id, "folder": record.folder, "host": record.host,
        "started_at": record.started_at,
    }  # fmt: skip


def _append(entry: Mapping[str, Any]) -> None:
    """One line, whole or not at all, though several runs may end at once."""
    path = history_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(entry, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        locked = False
        with contextlib.suppress(OSError):  # no locks on some network disks; O_APPEND remains
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            whole = _end_of_whole_lines(descriptor, size) if locked else size
            if whole < size:
                os.ftruncate(descriptor, whole)
                size = whole
            else:
                data = b"\n" + data
        try:
            written = os.write(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        if written < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _end_of_whole_lines(descriptor: int, size: int) -> int:
    """Where a line begins that its writer was killed within; ``size`` where the last line is whole but for its end."""
    start = max(0, size - LONGEST_LINE_BYTES)
    tail = os.pread(descriptor, size - start, start)
    begins = tail.rfind(b"\n") + 1
    if start and not begins:
        return size  # nothing that we write is so long
    try:
        json.loads(tail[begins:])
    except RecursionError:
        return size
    except ValueError:
        return start + begins
    return size


def _row(entry: Mapping[str, Any], ended: bool) -> HistoryRow:
    folder = Path(str(entry.get("folder", "")))
    outcome = Outcome.from_json(as_mapping(entry.get("outcome"))) if ended else None
    row = HistoryRow(
        id=str(entry["id"]), folder=folder, exists=folder.is_dir(),
        model=_text(entry, "model"), trainer=_text(entry, "trainer"), method=_text(entry, "method"),
        machine=_text(entry, "machine"), plan=_text(entry, "plan"), state="unknown", sentence=None,
        started_at=_text(entry, "started_at"), duration_s=None, steps=None, loss=None,
        predicted_bytes=as_integer(entry.get("predicted_bytes")), seen_bytes=None, memory_error=None,
        predicted_step_s=as_number(entry.get("predicted_step_s")), seen_step_s=None, step_error=None,
        card=_text(entry, "card"), kind=_text(entry, "kind"),
    )  # fmt: skip
    if outcome is not None:
        return _with_outcome(row, outcome)
    record = read_record(folder) if row.exists else None
    return _unfinished(row, folder, record)


def _text(entry: Mapping[str, Any], name: str) -> str | None:
    """A text as it can be shown; the file may have been edited, and other hosts may write to it."""
    value = entry.get(name)
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else None


def _unfinished(row: HistoryRow, folder: Path, record: RunRecord | None) -> HistoryRow:
    """A run whose end the history does not hold: ask its folder."""
    if record is None or record.id != row.id:
        return replace(row, sentence="its folder is gone and no end was recorded")
    if outcome := Outcome.from_json(read_json(folder / OUTCOME)):
        return _with_outcome(row, outcome)
    host = this_host()
    if not record.is_here(host):
        return replace(row, state="running", sentence=f"on host {record.host}")
    if record.is_supervised(host):
        return replace(row, state="running", duration_s=_since(record.started_at))
    return replace(row, sentence="it ended unseen: trlfit watch tells how")


def _with_outcome(row: HistoryRow, outcome: Outcome) -> HistoryRow:
    seen, predicted = outcome.seen, outcome.predicted
    return replace(
        row, state=outcome.kind, sentence=outcome.sentence, duration_s=outcome.duration_s,
        steps=seen.last_step, loss=seen.loss,
        predicted_bytes=predicted.allocated_bytes, seen_bytes=seen.memory_bytes,
        memory_error=outcome.memory_error, predicted_step_s=predicted.step_s,
        seen_step_s=seen.step_s, step_error=outcome.step_error, errors=outcome.errors,
    )  # fmt: skip


def _unknown_to_history(root: Path, known: set[str]) -> list[HistoryRow]:
    """Runs in folders under root that were recorded elsewhere, or whose history was lost."""
    rows: list[HistoryRow] = []
    try:
        folders = [root, *(path for path in sorted(root.iterdir()) if path.is_dir())]
    except OSError:
        return rows
    for folder in folders:
        record = read_record(folder)
        if record is not None and record.id not in known:
            entry = {**_head("started", record), "folder": str(folder), **describe(folder)}
            rows.append(_row(entry, ended=False))
    return rows


def _since(started_at: str) -> float | None:
    try:
        start = datetime.fromisoformat(started_at)
        return max(0.0, (datetime.now(start.tzinfo) - start).total_seconds())
    except ValueError:
        return None


def _cells(row: HistoryRow) -> tuple[str, ...]:
    def size(value: int | None) -> str:
        return "-" if value is None else format_bytes(value)

    def seconds(value: float | None) -> str:
        # Small models take milliseconds for a step: two decimals would show none.
        return "-" if value is None else f"{value:,.2f}" if value >= 0.0995 else f"{value:.2g}"

    return (
        row.folder.name + ("" if row.exists else " (gone)"),
        (row.model or "-").rsplit("/", 1)[-1],
        row.plan or "-",
        row.state.replace("_", " "),
        size(row.predicted_bytes),
        size(row.seen_bytes),
        # A process's growth holds more than tensors: it is no error of what was predicted of those.
        _percent(row.memory_error) + (" resident" if "resident" in row.errors else ""),
        seconds(row.predicted_step_s),
        seconds(row.seen_step_s),
        _percent(row.step_error),
        "-" if row.duration_s is None else format_seconds(row.duration_s),
        "-" if row.loss is None else f"{row.loss:.3f}",
    )


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
