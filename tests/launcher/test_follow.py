"""Following: files that grow by halves, are cut or replaced, and an end that is never missed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.ending.outcomes import Outcome
from launcher.running.follow import (
    BadRow,
    Event,
    LogLine,
    MetricRow,
    Progress,
    StateChange,
    Tail,
    closing_lines,
    follow,
    narrate,
)
from launcher.running.runs import run_state, start_run, stop_run
from tests.launcher.fake_run import GIB, appends, make_run, rows, sweep, wait_for

ROWS = rows((1, 2.0, 3.0, [49 * GIB, 51 * GIB]), (2, 1.5, 2.0, [49 * GIB, 51 * GIB]))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "data"))
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    sweep(folder)


def texts(tail: Tail, flush: bool = False) -> list[str]:
    return [text for text, _ in tail.lines(flush=flush)]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_tail_gives_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = Tail(path)
    assert texts(tail) == []
    append(path, b"one\ntw")
    assert texts(tail) == ["one"]
    assert texts(tail) == []
    append(path, b"o\nthr\xc3")
    assert texts(tail) == ["two"]
    append(path, b"\xa9e")
    assert texts(tail, flush=True) == ["thr\N{LATIN SMALL LETTER E WITH ACUTE}e"]
    assert texts(tail, flush=True) == []


def test_a_tail_tells_redrawn_lines_from_others(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = Tail(path)
    append(path, b" 1%\r 2%\rloss\r\nend\n 3%\r")
    assert list(tail.lines()) == [(" 1%", True), (" 2%", True), ("loss", False), ("end", False)]
    append(path, b"\nlast")
    assert list(tail.lines(flush=True)) == [(" 3%", False), ("last", False)]


def test_a_tail_begins_again_when_the_file_is_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = Tail(path)
    append(path, b"one\ntwo\nhalf")
    assert texts(tail) == ["one", "two"]
    path.write_bytes(b"new\n")
    assert texts(tail) == ["new"]
    other = tmp_path / "other"
    other.write_bytes(b"replaced and longer than before\n")
    other.rename(path)
    assert texts(tail) == ["replaced and longer than before"]
    path.unlink()
    assert texts(tail) == []


def test_a_tail_of_a_long_file_begins_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)))
    tail = Tail(path, backlog_bytes=20)
    assert texts(tail) == ["line 998", "line 999"]
    append(path, b"more\n")
    assert texts(tail) == ["more"]


def test_garbage_bytes_are_still_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    append(path, b"\xff\xfe\x00\n")
    assert texts(Tail(path)) == ["\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\0"]


def test_following_from_start_to_end(root: Path) -> None:
    run = make_run(
        root / "a", bash=f"echo one; sleep 0.3; {appends(ROWS)}; {appends('torn {', 'metrics.jsonl')}; printf last"
    )
    start_run(run, detach=False)
    events = list(follow(run, poll_s=0.02))
    first, last = events[0], events[-1]
    assert isinstance(first, StateChange) and first.state.stage == "running"
    assert isinstance(last, StateChange) and last.state.outcome is not None
    assert [event.text for event in events if isinstance(event, LogLine)] == ["one", "last"]
    assert [event.row["event"] for event in events if isinstance(event, MetricRow)] == ["start", "step", "step", "end"]
    assert [event.text for event in events if isinstance(event, BadRow)] == ["torn {"]


def test_following_what_is_over_gives_it_all(root: Path) -> None:
    run = make_run(root / "a", bash=f"echo one; {appends(ROWS)}")
    start_run(run, detach=False).wait(10)
    kinds = [type(event) for event in follow(run)]
    assert kinds == [StateChange, LogLine, MetricRow, MetricRow, MetricRow, MetricRow, StateChange]


def test_following_what_was_never_started_ends(root: Path) -> None:
    [event] = follow(make_run(root / "a"))
    assert isinstance(event, StateChange) and event.state.stage == "written"


def test_a_follower_sees_the_supervisor_die(root: Path) -> None:
    run = make_run(root / "a", bash="echo one; sleep 60")
    handle = start_run(run, detach=False)
    states: list[str] = []
    for event in follow(run, poll_s=0.02):
        if isinstance(event, LogLine):
            os.kill(handle.record.supervisor_pid, signal.SIGKILL)
        if isinstance(event, StateChange):
            states.append(event.state.stage)
    assert states == ["running", "stale"]


def test_an_interrupted_follower_leaves_the_run_alone(root: Path) -> None:
    """Ctrl-C in a terminal: SIGINT to the follower's whole process group."""
    run = make_run(root / "a", bash="echo one; sleep 60")
    script = f"""
from pathlib import Path
from launcher.running.follow import narrate
from launcher.running.runs import start_run
run = Path({str(run)!r})
start_run(run, detach=False)
print("interrupted" if narrate(run, lambda line: print(line, flush=True), log=True) is None else "over")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, process_group=0
    ) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "one\n"
        os.killpg(follower.pid, signal.SIGINT)
        assert follower.stdout.read() == "interrupted\n"
        assert follower.wait() == 0
    assert run_state(run).stage == "running"
    assert stop_run(run).stage == "finished"


def feed(progress: Progress, *events: Event) -> list[str]:
    return [line for event in events if (line := progress.feed(event)) is not None]


def step_rows(text: str) -> list[Event]:
    return [MetricRow(row=json.loads(line)) for line in text.splitlines()]


def test_progress_says_what_was_predicted(root: Path) -> None:
    progress = Progress(make_run(root / "a"))
    assert feed(progress, *step_rows(ROWS)) == [
        "step 1  loss 2.0000  3.00 s/step (predicted 2.00 s)  2,731 tokens/s"
        "  peak 51.0 GiB (predicted 50.0 GiB, 49.0 GiB on rank 0)  reserved 52.0 GiB (predicted 55.0 GiB)",
        "step 2  loss 1.5000  2.00 s/step (predicted 2.00 s)  4,096 tokens/s"
        "  peak 51.0 GiB (predicted 50.0 GiB, 49.0 GiB on rank 0)  reserved 52.0 GiB (predicted 55.0 GiB)",
    ]
    assert progress.fraction is None


def test_the_length_is_taken_from_the_trainers_bar(root: Path) -> None:
    progress = Progress(make_run(root / "a", plan=None))
    data = LogLine(text="Tokenizing train dataset:  50%|█████     | 8/16 [00:00<00:00]", redrawn=True)
    bar = LogLine(text="  0%|          | 0/8 [00:00<?, ?it/s]", redrawn=True)
    lines = feed(progress, data, bar, *step_rows(ROWS))
    assert lines[-1] == (
        "step 2/8  loss 1.5000  2.00 s/step  4,096 tokens/s  peak 51.0 GiB (49.0 GiB on rank 0)"
        "  reserved 52.0 GiB  12.0 s left"
    )


@pytest.mark.parametrize(
    ("settings", "row", "left_s"),
    [
        ({"max_steps": 10}, {"step": 4, "step_s": 3.0}, 18.0),
        ({"num_train_epochs": 2}, {"step": 50, "epoch": 0.5, "step_s": 2.0}, 300.0),
        ({"max_steps": -1}, {"step": 4, "step_s": 3.0}, None),
        ({"max_steps": 10}, {"step": 4}, None),
        ({"max_steps": 4}, {"step": 4, "step_s": 3.0}, 0.0),
        ({}, {"step": "x", "loss": None, "step_s": []}, None),
    ],
)
def test_time_left(root: Path, settings: dict[str, object], row: dict[str, object], left_s: float | None) -> None:
    progress = Progress(make_run(root / "a", plan={"job": {"trl": settings}}))
    progress.feed(MetricRow(row={"event": "step", **row}))
    assert progress.left_s == (None if left_s is None else pytest.approx(left_s))


def test_on_the_cpu_the_peak_is_the_growth(root: Path) -> None:
    progress = Progress(make_run(root / "a", plan=None))
    start = {"event": "start", "rss_bytes": [GIB]}
    step = {"event": "step", "step": 1, "peak_rss_bytes": [3 * GIB], "loss": None}
    assert feed(progress, MetricRow(row=start), MetricRow(row=step)) == ["step 1  loss not a number  peak 2.0 GiB"]


def test_narration_tells_the_first_and_the_last_step(root: Path) -> None:
    many = rows(*((n, 1.0, 0.01, [GIB]) for n in range(1, 101)))
    run = make_run(root / "a", bash=appends(many), plan=None)
    start_run(run, detach=False).wait(10)
    lines: list[str] = []
    state = narrate(run, lines.append)
    assert state is not None and state.outcome is not None
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 100"]


@pytest.mark.parametrize("looks", [["running", "running", "done"], ["running", "done"]])
def test_a_retry_is_told_whenever_one_looks(looks: list[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's own note of it stands for a moment, and a short attempt may be over before the next look."""
    run = make_run(root / "a", plan=None)
    ended = start_run(run, detach=False).wait(10)
    assert ended.record is not None
    first = replace(ended, stage="running", outcome=None)
    second = replace(
        ended.record, id="second", attempt=2, after="out of memory in loss", resumed_from=None, change="micro-batch 1"
    )
    states = [first, *(replace(ended, stage=stage, record=second) for stage in looks[1:])]
    monkeypatch.setattr("launcher.running.follow.follow", lambda folder, poll_s: [StateChange(state=s) for s in states])
    lines: list[str] = []
    narrate(run, lines.append)
    assert lines == ["out of memory in loss", "attempt 2, from the beginning: micro-batch 1"]


def test_the_closing_words_show_where_it_failed(root: Path) -> None:
    run = make_run(root / "a", bash="for n in 1 2 3 4; do echo line $n; done; exit 5")
    state = start_run(run, detach=False).wait(10)
    assert state.outcome is not None
    assert closing_lines(state.outcome, run, num_log_lines=2) == [
        "failed with exit code 5: line 4",
        "  line 3",
        "  line 4",
        f"the whole log: {run / 'log.txt'}",
    ]
    assert closing_lines(Outcome(kind="done", sentence="finished"), run) == ["finished"]


def test_waiting_finds_what_is_written_later(root: Path) -> None:
    run = make_run(root / "a", bash="sleep 0.2; echo late")
    start_run(run, detach=False)
    wait_for(lambda: any(isinstance(e, LogLine) and e.text == "late" for e in follow(run, poll_s=0.02)))
