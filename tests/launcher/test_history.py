"""The history: what survives damage, vanished folders and several writers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.ending.history import (
    HistoryRow,
    append_end,
    append_start,
    error_summary,
    find_end,
    history_path,
    history_rows,
    read_entries,
    table_rows,
)
from launcher.ending.outcomes import Outcome, classify
from launcher.ending.run_metrics import Metrics, Predicted, parse_row
from launcher.running.processes import create_time, this_host
from launcher.running.run_record import RunRecord, read_json, write_json
from tests.launcher.fake_run import GIB, PLAN, make_run


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def record(folder: Path, name: str = "one", day: int = 1, **changes: object) -> RunRecord:
    host = this_host()
    whole = RunRecord(
        id=name,
        folder=str(folder),
        command=("bash", "command.sh"),
        started_at=f"2026-07-{day:02d}T10:00:00.000+00:00",
        host=host.name,
        boot_id=host.boot.id,
        boot_time_s=host.boot.time_s,
        pid_namespace=host.pid_namespace,
        supervisor_pid=1,
        supervisor_start=-1.0,
        oom_kills={},
        grace_s=10.0,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def outcome(seen_gib: float = 51, step_s: float = 2.1) -> Outcome:
    seen = Metrics(
        started=True, ended=True, last_step=9, rows=9, loss=1.25, allocated_bytes=round(seen_gib * GIB), step_s=step_s
    )
    return replace(classify(0, None, "", seen, Predicted.from_plan(PLAN)), duration_s=75.0)


def row(**changes: object) -> HistoryRow:
    [only] = history_rows()
    return replace(only, **changes)  # type: ignore[arg-type]


def test_no_history_is_no_runs() -> None:
    assert history_rows() == []
    assert read_entries() == ([], [])
    assert find_end("one") is None
    assert error_summary([]) is None


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    append_start(record(run))
    append_end(record(run), outcome())
    found = row()
    assert (found.model, found.trainer, found.method, found.machine, found.plan) == (
        "Qwen/Qwen3-8B", "sft", "full", "2xH100-80GB", "full fsdp 2",
    )  # fmt: skip
    assert (found.predicted_bytes, found.seen_bytes) == (50 * GIB, 51 * GIB)
    assert found.memory_error == pytest.approx(0.02)
    assert found.step_error == pytest.approx(0.05)
    assert (found.state, found.steps, found.loss, found.duration_s) == ("done", 9, 1.25, 75.0)
    assert json.loads(json.dumps(found.to_json()))["folder"] == str(run)


def test_a_vanished_folder_keeps_its_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    append_end(record(run), outcome())
    before = row()
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    assert row() == replace(before, exists=False)
    assert table_rows([row()])[1][0] == "a (gone)"


def test_newest_first_and_only_under_a_root(tmp_path: Path) -> None:
    for day, place in ((2, "x/b"), (3, "y/c"), (1, "x/a")):
        append_end(record(tmp_path / place, name=place, day=day), outcome())
    assert [found.id for found in history_rows()] == ["y/c", "x/b", "x/a"]
    assert [found.id for found in history_rows(tmp_path / "x")] == ["x/b", "x/a"]


def test_a_running_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    started = create_time(1)
    assert started is not None
    live = record(run, supervisor_pid=1, supervisor_start=started)
    write_json(run / "run.json", live.to_json())
    append_start(live)
    found = row()
    assert (found.state, found.predicted_bytes, found.seen_bytes) == ("running", 50 * GIB, None)
    assert found.duration_s is not None and found.duration_s > 0


def test_an_end_that_the_history_missed_is_read_from_the_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_json(run / "run.json", record(run).to_json())
    append_start(record(run))
    assert row().state == "unknown", "the supervisor is dead and said nothing"
    write_json(run / "outcome.json", outcome().to_json())
    assert (row().state, row().seen_bytes) == ("done", 51 * GIB)


def test_a_start_whose_folder_is_gone_is_unknown(tmp_path: Path) -> None:
    append_start(record(tmp_path / "gone"))
    assert (row().state, row().sentence) == ("unknown", "its folder is gone and no end was recorded")


def test_runs_recorded_elsewhere_are_found_in_their_folders(tmp_path: Path) -> None:
    """Another user's, or from before the history was deleted."""
    run = make_run(tmp_path / "runs" / "a")
    write_json(run / "run.json", record(Path("/somewhere/else")).to_json())
    write_json(run / "outcome.json", outcome().to_json())
    [found] = history_rows(tmp_path / "runs")
    assert (found.folder, found.state, found.model) == (run, "done", "Qwen/Qwen3-8B")
    assert history_rows() == []


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    append_end(record(tmp_path / "a", name="a"), outcome())
    with history_path().open("ab") as file:
        file.write(b'{"event": "ended", "id": "torn", "out\nnot json\n[]\n{"no": "id"}\n\xff\xfe\n\n')
    append_end(record(tmp_path / "b", name="b", day=2), outcome())
    notes: list[str] = []
    assert [found.id for found in history_rows(notes=notes)] == ["b", "a"]
    assert notes == [f"skipped 5 unreadable lines of {history_path()}"]


def test_entries_of_the_wrong_shape_do_no_harm(data: Path) -> None:
    data.mkdir()
    history_path().write_text('{"id": "x", "event": "ended", "outcome": 7}\n{"id": "y"}\n')
    assert {found.state for found in history_rows()} == {"unknown"}


@pytest.mark.parametrize(
    ("tail", "kept", "left"),
    [
        (b'{"event": "ended", "id": "torn"', [], 0),
        (b'{"event": "ended", "id": "caf\xc3', [], 0),
        (b'{"event": "started", "id": "whole", "folder": "/x"}', ["whole"], 0),
        (b"[" * 100_000, [], 1),
        (b"x" * (2 << 20), [], 1),
    ],
)
def test_a_last_line_without_its_end(tail: bytes, kept: list[str], left: int, tmp_path: Path) -> None:
    """One that its writer was killed within is taken away by the next writer; what is somebody else's stays."""
    append_end(record(tmp_path / "a", name="a"), outcome())
    with history_path().open("ab") as file:
        file.write(tail)
    append_end(record(tmp_path / "b", name="b", day=2), outcome())
    entries, notes = read_entries()
    assert [entry["id"] for entry in entries] == ["a", *kept, "b"]
    assert notes == [f"skipped {left} unreadable line of {history_path()}"] * left


def test_without_locks_a_torn_line_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another writer's that goes on with it."""

    def refuses(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    append_end(record(tmp_path / "a", name="a"), outcome())
    with history_path().open("ab") as file:
        file.write(b'{"event": "ended", "id": "torn"')
    monkeypatch.setattr("launcher.ending.history.fcntl.flock", refuses)
    append_end(record(tmp_path / "b", name="b", day=2), outcome())
    entries, notes = read_entries()
    assert ([entry["id"] for entry in entries], len(notes)) == (["a", "b"], 1)


def test_several_writers_at_once(tmp_path: Path) -> None:
    script = """
import sys
sys.path.insert(0, "tests/launcher")
from pathlib import Path
from tests.launcher.test_history import outcome, record
from launcher.ending.history import append_end
for n in range(40):
    append_end(record(Path("/runs/a"), name=f"{sys.argv[1]}-{n}"), outcome())
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, str(n)]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    entries, notes = read_entries()
    assert (len({entry["id"] for entry in entries}), notes) == (120, [])


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    append_end(record(tmp_path / "a", name="a"), outcome())
    script = """
import resource, sys
from pathlib import Path
from tests.launcher.test_history import outcome, record
from launcher.ending.history import append_end, history_path
size = history_path().stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
try:
    append_end(record(Path("/runs/b"), name="b"), outcome())
except OSError:
    sys.exit(9)
"""
    before = history_path().read_bytes()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert history_path().read_bytes() == before


def test_a_history_that_cannot_be_read_is_a_note(data: Path) -> None:
    history_path().mkdir(parents=True)
    notes: list[str] = []
    assert history_rows(notes=notes) == []
    assert notes == [f"the history cannot be read: {history_path()}: Is a directory"]


def test_the_table(tmp_path: Path) -> None:
    append_end(record(make_run(tmp_path / "b"), name="b", day=2), outcome())
    append_start(record(tmp_path / "a", name="a"))
    assert table_rows(history_rows()) == [
        (
            "run", "model", "plan", "state", "predicted", "seen", "memory err", "pred s", "seen s", "step err", "took",
            "loss",
        ),
        ("b", "Qwen3-8B", "full fsdp 2", "done", "50.0 GiB", "51.0 GiB", "+2.0%", "2.00", "2.10", "+5.0%", "75.0 s",
         "1.250"),
        ("a (gone)", "-", "-", "unknown", "-", "-", "-", "-", "-", "-", "-", "-"),
    ]  # fmt: skip


def test_steps_of_milliseconds_are_not_shown_as_none(tmp_path: Path) -> None:
    append_end(record(make_run(tmp_path / "b"), name="b"), outcome(step_s=0.0042))
    assert table_rows(history_rows())[1][8] == "0.0042"


def test_what_a_process_grows_by_is_no_error_of_tensors(tmp_path: Path) -> None:
    append_end(record(make_run(tmp_path / "b"), name="b"), outcome())
    grown = row(memory_error=3.47, errors={"resident": 3.47, "step": 0.05})
    assert table_rows([grown])[1][6] == "+347.0% resident"
    said = error_summary([grown])
    assert said is not None and said.startswith("growth of resident memory median +347.0%")


def test_the_summary_of_errors(tmp_path: Path) -> None:
    for day, (seen, step_s) in enumerate(((51.5, 2.1), (49.0, 2.0), (50.5, 1.8)), 1):
        append_end(record(tmp_path / "a", name=str(day), day=day), outcome(seen, step_s))
    assert error_summary(history_rows()) == (
        "peak memory median +1.0%, worst +3.0% over 3 runs; step time median +0.0%, worst -10.0% over 3 runs"
    )


def test_what_is_no_record_of_ours_hides_no_run(tmp_path: Path) -> None:
    append_end(record(make_run(tmp_path / "b"), name="b", day=2), outcome())
    odd = [
        {"event": "started", "id": "n", "folder": 5, "started_at": 7, "model": ["x"], "predicted_bytes": "many"},
        {"event": "ended", "id": "o", "folder": "\0", "outcome": [1], "started_at": None, "plan": "\x1b[31mred"},
        {"event": "ended", "id": "p", "outcome": {"kind": 3, "seen": [], "predicted": "?"}, "predicted_step_s": True},
    ]
    with history_path().open("ab") as file:
        file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in odd) + b"\xff\n[]\n")
    notes: list[str] = []
    cells = table_rows(history_rows(notes=notes))
    assert len(cells) == 5 and cells[1][:4] == ("b", "Qwen3-8B", "full fsdp 2", "done")
    assert all(text.isprintable() for row in cells for text in row[1:])
    assert notes == [f"skipped 2 unreadable lines of {history_path()}"]


def test_records_that_nest_without_end_or_are_pipes_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.json")
    assert read_json(tmp_path / "deep.json") is None
    assert read_json(tmp_path / "pipe.json") is None
    assert parse_row("[" * 100_000) is None
