"""Faults injected into real processes: each ends in its class, in a sentence that says why, and with no orphan."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.ending.history import history_rows, read_entries
from launcher.ending.outcomes import Outcome
from launcher.running import runs
from launcher.running.processes import alive
from launcher.running.runs import RunHandle, run_state, start_run
from tests.launcher.command_line import ROOT
from tests.launcher.fake_run import GIB, appends, left_over, make_run, rows, sweep, wait_for
from tests.launcher.tiny_models import EXAMPLES

TWO_STEPS = rows((1, 2.0, 3.0, [49 * GIB, 51 * GIB]), (2, 1.5, 2.1, [49 * GIB, 51 * GIB]), end=False)
OUT_OF_MEMORY = """
import sys
import torch

WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
    " Of the allocated memory 74.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated."
)


def short(*args, **kwargs):
    raise torch.OutOfMemoryError(WORDS)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return short() if PHASE == "forward" else 2 * x

    @staticmethod
    def backward(context, gradient):
        return short() if PHASE == "backward" else 2 * gradient


def training_step(layer, rows):
    loss = Doubled.apply(layer(rows)).sum()
    loss.backward()
    return loss


layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
training_step(layer, torch.ones(2, 4))
if PHASE == "step":
    torch.zeros_like = short  # the moments, made in the first step
optimizer.step()
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for runs, a history and a cache of its own, and nothing alive afterwards."""
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    sweep(folder)


def finish(handle: RunHandle, seconds: float = 30) -> Outcome:
    """The outcome, once nothing of the run lives."""
    outcome = handle.wait(seconds).outcome
    assert outcome is not None
    wait_for(lambda: not alive(handle.record.supervisor_pid, handle.record.supervisor_start))
    assert left_over(handle.folder) == set()
    return outcome


def test_out_of_memory_in_each_phase_of_three_launches_at_once(root: Path) -> None:
    """Real tracebacks of torch; all three write the history together."""
    handles = {
        phase: start_run(
            make_run(root / phase, bash=appends(TWO_STEPS), python=f"PHASE = {phase!r}{OUT_OF_MEMORY}", bare=False),
            detach=False,
        )
        for phase in ("forward", "backward", "step")
    }
    for phase, handle in handles.items():
        outcome = finish(handle, 90)
        assert (outcome.kind, outcome.phase) == ("out_of_memory", phase), outcome.sentence
        assert outcome.shortage is not None
        assert (outcome.shortage.asked_bytes, outcome.shortage.allocated_bytes) == (2 * GIB, 74 * GIB)
        assert outcome.sentence.startswith(f"out of memory in {phase} at step 3: asked for 2.0 GiB with 1.2 GiB of")
        assert outcome.sentence.endswith("; the plan predicted 50.0 GiB at its peak in loss")
        assert outcome.seen.last_step == 2, "nothing of what was recorded is lost"
    entries, notes = read_entries()
    assert sorted(str(entry["event"]) for entry in entries) == ["ended"] * 3 + ["started"] * 3
    assert notes == []
    assert {row.state for row in history_rows()} == {"out_of_memory"}


def test_a_retry_that_cannot_be_planned_says_why(root: Path) -> None:
    """The plan here is a stub of one; what failed stands, with its own files in their place."""
    run = make_run(root / "a", bash=appends(TWO_STEPS), python="raise MemoryError('Unable to allocate 2.0 GiB for it')")
    outcome = finish(start_run(run, detach=False, retries=2))
    assert (outcome.kind, outcome.seen.last_step) == ("out_of_memory", 2)
    assert outcome.note is not None and outcome.note.startswith("no further attempt: plan '")
    assert not (run / "attempts").exists() and not (run / ".next").exists()


TWO_RANKS = f"""
import os, sys, time
if os.environ["RANK"] == "0":
    open("metrics.jsonl", "a").write({TWO_STEPS!r})
print("rank", os.environ["RANK"], "pid", os.getpid(), flush=True)
time.sleep(60)
"""


def test_kill_9_of_one_rank_of_two(root: Path) -> None:
    """Under torchrun, whose words name the rank; the other rank goes with it."""
    run = make_run(root / "a", bash=f"exec {sys.executable} -m torch.distributed.run --nproc-per-node 2 ranks.py")
    (run / "ranks.py").write_text(TWO_RANKS)
    handle = start_run(run, detach=False)
    pids: dict[str, str] = {}

    def both() -> bool:
        pids.update(re.findall(r"rank (\d) pid (\d+)", (run / "log.txt").read_text()))
        return len(pids) == 2

    wait_for(both, 60)
    os.kill(int(pids["1"]), signal.SIGKILL)
    outcome = finish(handle)
    assert (outcome.kind, outcome.signal, outcome.rank) == ("killed", "SIGKILL", 1)
    assert outcome.sentence == (
        "rank 1 was ended from outside by SIGKILL after step 2, with no out-of-memory kill on record"
    )
    assert not psutil.pid_exists(int(pids["0"]))


def test_term_to_the_training(root: Path) -> None:
    """A scheduler that ends the training and not its supervisor."""
    run = make_run(root / "a", bash=f"{appends(TWO_STEPS)}; echo ready; exec sleep 60")
    handle = start_run(run, detach=False)
    wait_for(lambda: "ready" in (run / "log.txt").read_text())
    assert handle.record.child_pid is not None
    os.kill(handle.record.child_pid, signal.SIGTERM)
    outcome = finish(handle)
    assert (outcome.kind, outcome.signal) == ("killed", "SIGTERM")
    assert outcome.sentence == "ended from outside by SIGTERM after step 2"


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("true", "hung before the first step: no step and no line in the log for "),
        (appends(TWO_STEPS), "hung after step 2: no step and no line in the log for "),
    ],
)
def test_a_hang(root: Path, before: str, sentence: str) -> None:
    """Deaf to TERM and with a child, as a rank in a collective is."""
    deaf = "trap '' TERM; sleep 60 & while true; do wait; done"
    handle = start_run(make_run(root / "a", bash=f"{before}; {deaf}"), detach=False, hang_after_s=0.5, grace_s=0.3)
    outcome = finish(handle)
    assert outcome.kind == "hung"
    assert outcome.sentence.startswith(sentence)
    assert outcome.sentence.endswith("; it was ended")
    assert outcome.ended_processes >= 2
    assert (outcome.exit_code, outcome.by) == (None, "supervisor")


def test_a_run_that_was_paused_waits(root: Path) -> None:
    """Somebody needs the card for an hour and stops the training for it."""
    run = make_run(root / "a", bash=f"{appends(TWO_STEPS)}; echo ready; exec sleep 60")
    handle = start_run(run, detach=False, hang_after_s=0.4)
    pid = handle.record.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: handle.state().note is not None)
    assert handle.state().note == f"process {pid} is stopped, not hung: `kill -CONT {pid}` continues it"
    time.sleep(1.0)
    assert (handle.state().stage, handle.state().note is None) == ("running", False), "for as long as it takes"
    os.kill(pid, signal.SIGCONT)
    assert finish(handle).kind == "hung", "it goes on, and says as little"


def test_slow_is_not_hung(root: Path) -> None:
    """Steps, each well within the limit, for longer than it."""
    row = json.dumps({"event": "step", "step": 1, "step_s": 0.2})
    steps = f"for n in 1 2 3 4 5 6 7 8; do sleep 0.2; {appends(row)}; echo >> metrics.jsonl; done"
    run = make_run(root / "a", bash=f"{appends(rows(end=False))}; {steps}; {appends(rows().splitlines()[-1])}")
    assert finish(start_run(run, detach=False, hang_after_s=1.2)).kind == "done"


def test_a_training_that_ends_and_does_not_exit_is_done(root: Path) -> None:
    run = make_run(root / "a", bash=f"{appends(TWO_STEPS + rows().splitlines()[-1])}; exec sleep 60")
    outcome = finish(start_run(run, detach=False, hang_after_s=0.5))
    assert outcome.kind == "done"
    assert outcome.sentence.endswith("it did not exit by itself and was ended")


def test_the_error_behind_a_hang_is_the_cause(root: Path) -> None:
    """One rank raises and the others wait for it."""
    run = make_run(
        root / "a", bash=appends(TWO_STEPS), python="import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('labels are not integers')\n",
    )  # fmt: skip
    outcome = finish(start_run(run, detach=False, hang_after_s=0.5))
    assert (outcome.kind, outcome.exception) == ("failed", "ValueError: labels are not integers")


SAVES = """
import os, shutil

def _save_checkpoint(number):
    folder = f"checkpoints/checkpoint-{number}"
    os.makedirs(folder)
    with open(f"{folder}/optimizer.pt", "wb", buffering=0) as file:
        for _ in range(30):
            if file.write(b"x" * 4096) < 4096:
                raise OSError(28, "No space left on device")
    open(f"{folder}/trainer_state.json", "w").write("{}")

print("resumed", os.environ.get("RESUME"), flush=True)
_save_checkpoint(4 if os.environ.get("RESUME") else 2)
_save_checkpoint(5 if os.environ.get("RESUME") else 3)
"""


def test_a_disk_that_fills_while_a_checkpoint_is_written(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before is whole, and is what a resumed run takes; the torn one is out of its way."""
    monkeypatch.setattr(runs, "MIN_FREE_BYTES", 0)
    run = make_run(small_disk / "a", bash=appends(TWO_STEPS), python=SAVES)
    outcome = finish(start_run(run, detach=False))
    assert (outcome.kind, outcome.phase) == ("disk_full", "save")
    assert outcome.sentence.startswith("the disk is full: [Errno 28] No space left on device")
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    assert not (run / "checkpoints" / "checkpoint-3" / "trainer_state.json").exists()
    (run / "checkpoints" / "checkpoint-3" / "optimizer.pt").unlink()  # the user makes room
    handle = start_run(run, detach=False, resume=True)
    assert handle.record.resumed_from == "checkpoint-2"
    finish(handle)
    assert "resumed 1" in (run / "log.txt").read_text()
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names >= {"checkpoint-2", "incomplete-checkpoint-3", "checkpoint-4"}


def test_a_terminal_that_is_closed_takes_its_launch_with_it_and_not_the_run(root: Path) -> None:
    """The user's whole session gets SIGHUP, and what followed the run is killed besides."""
    run = make_run(root / "a", bash=f"until [ -e go ]; do sleep 0.05; done; {appends(TWO_STEPS + '{}')}; exit 0")
    front, back = pty.openpty()
    follower = subprocess.Popen(
        [sys.executable, "-m", "launcher", "launch", str(run), "--no-check"],
        cwd=ROOT, stdin=back, stdout=back, stderr=back, start_new_session=True,
    )  # fmt: skip
    os.close(back)
    wait_for(lambda: (run / "run.json").exists() and run_state(run).stage == "running", 30)
    os.close(front)
    follower.kill()
    follower.wait(10)
    time.sleep(0.2)
    state = run_state(run)
    assert (state.stage, len(left_over(run)) >= 1) == ("running", True)
    (run / "go").touch()
    assert state.record is not None
    outcome = finish(RunHandle(folder=run, record=state.record))
    assert (outcome.by, outcome.exit_code, outcome.seen.last_step) == ("supervisor", 0, 2)


def test_a_copy_of_a_live_run_is_not_the_run(root: Path) -> None:
    run = make_run(root / "a", bash=f"{appends(TWO_STEPS)}; echo ready; exec sleep 60")
    handle = start_run(run, detach=False)
    wait_for(lambda: "ready" in (run / "log.txt").read_text())
    copy = root / "copy"
    subprocess.run(["cp", "-r", str(run), str(copy)], check=True)
    state = runs.stop_run(copy)
    assert (state.stage, state.note) == ("stale", f"this is a copy of {run}, made before its end")
    assert handle.state().stage == "running", "stopping the copy ends nothing"
    assert not (copy / "outcome.json").exists()


WRITER = """
import sys
from pathlib import Path
from launcher.ending.history import append_end
from tests.launcher.test_history import outcome, record

number = 0
while True:
    append_end(record(Path("/runs/a"), name=f"{sys.argv[1]}-{number}"), outcome())
    print(f"{sys.argv[1]}-{number}", flush=True)
    number += 1
"""


def test_killed_writers_leave_a_history_that_is_whole(root: Path) -> None:
    """Two write as fast as they can and are killed with -9; whoever comes after them finds and loses nothing."""
    reported: set[str] = set()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        reported.add(writer.stdout.readline().strip())
    time.sleep(0.15)
    for writer in writers:
        writer.kill()
        reported |= set(writer.communicate()[0].split())
    finish(start_run(make_run(root / "after", bash="true"), detach=False))
    entries, notes = read_entries()
    assert reported <= {entry["id"] for entry in entries}
    assert notes == [], "a line is there or not"


def test_launches_at_once_without_a_name_take_two(tmp_path: Path) -> None:
    """Both choose runs/NAME-1; the second to write finds it taken."""
    command = [
        sys.executable, "-m", "launcher", "write", "Qwen/Qwen3-0.6B", "--machine", "1xH100-80GB", "--no-check",
        "--dataset", str(EXAMPLES / "train.jsonl"), "--json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    writers = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    written = [json.loads(writer.communicate()[0])["folder"] for writer in writers]
    assert sorted(Path(folder).name[-1] for folder in written) == ["1", "2", "3"]
    for folder in written:
        assert (tmp_path / folder / "command.sh").is_file()
    assert not list((tmp_path / "runs").glob(".*")), "nothing half-written"
