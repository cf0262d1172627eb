"""Runs of real processes: every way in which one can end, and that nothing of it lives on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.cli import main
from launcher.ending.history import history_rows, read_entries
from launcher.ending.outcomes import Outcome
from launcher.errors import EnvironmentLacks, TrainingFailed, UsageError
from launcher.running import processes, run_record, runs
from launcher.running.processes import Boot, alive
from launcher.running.run_record import RunRecord, claim, read_record, release, write_json
from launcher.running.runs import RunHandle, run_state, start_run, stop_run
from tests.launcher.fake_run import GIB, appends, left_over, make_run, rows, sweep, wait_for

SLEEPS = "echo started; sleep 60"
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for depth in range(2):  # a child and a grandchild, as deaf as their parent
    if os.fork():
        break
print("deaf", flush=True)
time.sleep(60)
"""
DETACHES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print("here", flush=True)
time.sleep(60)
"""
TWO_STEPS = rows((1, 2.0, 3.0, [49 * GIB, 51 * GIB]), (2, 1.5, 2.1, [49 * GIB, 51 * GIB]))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for runs, a history of its own, and nothing alive afterwards."""
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "data"))
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    sweep(folder)


def log_lines(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()


def start(folder: Path, until: str | None = None, lines: int = 1) -> RunHandle:
    """Start a run and wait until its log holds a word often enough."""
    handle = start_run(folder, detach=False)
    if until is not None:
        wait_for(lambda: log_lines(folder).count(until) >= lines)
    return handle


def finish(handle: RunHandle) -> Outcome:
    outcome = handle.wait(20).outcome
    assert outcome is not None
    wait_for(lambda: not alive(handle.record.supervisor_pid, handle.record.supervisor_start))
    return outcome


def kill_supervisor(record: RunRecord) -> None:
    os.kill(record.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not alive(record.supervisor_pid, record.supervisor_start))


# Ends


def test_a_run_to_its_end(root: Path) -> None:
    wait = "until [ -e go ]; do sleep 0.02; done"
    run = make_run(root / "a", bash=f"echo to stdout; echo to stderr >&2; {wait}; {appends(TWO_STEPS)}")
    handle = start_run(run, detach=False)
    time.sleep(0.1)
    assert handle.state().stage == "running"
    (run / "go").touch()
    outcome = finish(handle)
    assert (outcome.kind, outcome.exit_code, outcome.by) == ("done", 0, "supervisor")
    assert (outcome.memory_error, outcome.step_error) == (pytest.approx(0.02), pytest.approx(0.05))
    assert outcome.duration_s is not None and 0.1 <= outcome.duration_s < 10
    assert handle.state().stage == "finished"
    assert log_lines(run) == ["to stdout", "to stderr"]
    written = json.loads((run / "outcome.json").read_text())
    assert written["schema"] == "trlfit.outcome/1"
    assert written["seen"]["memory_bytes"] == 51 * GIB
    hidden = {path.name for path in run.iterdir() if path.name.startswith(".")}
    assert hidden == {".run.lock"}, "no half-written or reserved file is left"


def test_the_command_is_started_as_by_hand(root: Path) -> None:
    """In its folder, in a process group and session of its own, without a terminal, deaf to nothing."""
    run = make_run(
        root / "a b",
        bash='pwd; echo "$TRLFIT_RUN"; ps -o pgid= -p $$; echo $$; [ -t 0 ] || echo no terminal; trap | wc -l',
    )
    finish(start(run))
    folder, marker, group, pid, terminal, traps = (line.strip() for line in log_lines(run))
    assert (folder, marker, terminal, traps) == (str(run), str(run), "no terminal", "0")
    assert group == pid


def test_a_failing_command(root: Path) -> None:
    run = make_run(root / "a", python='raise RuntimeError("the loss is cross")')
    outcome = finish(start(run))
    assert (outcome.kind, outcome.exit_code) == ("configuration_error", 1)
    assert outcome.sentence == "configuration error: RuntimeError: the loss is cross (train.py:1)"


def test_a_command_that_ends_at_once_is_told_to_one_who_will_not_follow(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "INSTANT_S", 20.0)  # a busy machine's instant
    with pytest.raises(TrainingFailed, match=r"ended at once: configuration error: .*not found"):
        start_run(make_run(root / "a", bash="no_such_launcher"), detach=True)


def test_detached_does_not_wait_for_the_end(root: Path) -> None:
    began = time.monotonic()
    handle = start_run(make_run(root / "a", bash=SLEEPS), detach=True)
    assert time.monotonic() - began < 30
    assert handle.state().stage == "running"


def test_the_run_is_no_child_of_the_starter(root: Path) -> None:
    handle = start(make_run(root / "a", bash=SLEEPS))
    supervisor = psutil.Process(handle.record.supervisor_pid)
    assert os.getpid() not in {parent.pid for parent in supervisor.parents()}
    assert os.getsid(supervisor.pid) != os.getsid(0)


def test_a_killed_training_process(root: Path) -> None:
    run = make_run(root / "a", bash=f"{appends(rows((3, 1.0, 1.0, [GIB]), end=False))}; echo ready; exec sleep 60")
    handle = start(run, until="ready")
    assert handle.record.child_pid is not None
    os.kill(handle.record.child_pid, signal.SIGKILL)
    outcome = finish(handle)
    assert (outcome.kind, outcome.signal, outcome.exit_code) == ("killed", "SIGKILL", None)
    assert outcome.sentence.startswith("ended from outside by SIGKILL after step 3")


def test_a_killed_child_of_the_command(root: Path) -> None:
    """bash turns the signal into exit code 137."""
    run = make_run(root / "a", bash="python3 -c 'import os; os.kill(os.getpid(), 9)'; exit $?")
    outcome = finish(start(run))
    assert (outcome.kind, outcome.signal, outcome.exit_code) == ("killed", "SIGKILL", 137)


# Stopping


def test_stopping_ends_all_of_it(root: Path) -> None:
    run = make_run(root / "a", bash="sleep 60 & sleep 60 & echo started; wait")
    start(run, until="started")
    assert len(left_over(run)) == 3
    state = stop_run(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.kind) == ("finished", "stopped")
    assert state.outcome.sentence.startswith("stopped by ")
    assert left_over(run) == set()


def test_stopping_the_deaf_takes_the_grace_and_no_longer(root: Path) -> None:
    run = make_run(root / "a", python=DEAF)
    start(run, until="deaf", lines=3)
    began = time.monotonic()
    state = stop_run(run, grace_s=0.5)
    assert 0.5 <= time.monotonic() - began < 8, "the usual grace is 10 s"
    assert state.outcome is not None and state.outcome.kind == "stopped"
    assert left_over(run) == set()


def test_stopping_reaches_those_that_left_group_and_session(root: Path) -> None:
    run = make_run(root / "a", python=DETACHES)
    start(run, until="here", lines=2)
    sessions = {os.getsid(pid) for pid in left_over(run)}
    assert len(sessions) == 2
    stop_run(run, grace_s=0.2)
    assert left_over(run) == set()


def test_stopping_twice_kills_at_once(root: Path) -> None:
    run = make_run(root / "a", python=DEAF)
    handle = start(run, until="deaf", lines=3)
    os.kill(handle.record.supervisor_pid, signal.SIGTERM)
    time.sleep(0.3)
    assert len(left_over(run)) == 3
    os.kill(handle.record.supervisor_pid, signal.SIGTERM)
    began = time.monotonic()
    assert finish(handle).kind == "stopped"
    assert time.monotonic() - began < 8, "the grace of the first is 10 s"


def test_a_signal_to_the_supervisor_stops(root: Path) -> None:
    handle = start(make_run(root / "a", bash=SLEEPS), until="started")
    os.kill(handle.record.supervisor_pid, signal.SIGINT)
    assert finish(handle).sentence == "stopped by a signal to the supervisor"


def test_a_hang_up_does_not(root: Path) -> None:
    handle = start(make_run(root / "a", bash=SLEEPS), until="started")
    os.kill(handle.record.supervisor_pid, signal.SIGHUP)
    time.sleep(0.2)
    assert handle.state().stage == "running"


def test_stopping_what_is_over_changes_nothing(root: Path) -> None:
    run = make_run(root / "a", bash="true")
    before = finish(start(run))
    assert stop_run(run).outcome == before


def test_a_frozen_supervisor_is_stopped_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "UNANSWERED_S", 0.3)
    monkeypatch.setattr(processes, "REFUSES_S", 0.3)
    run = make_run(root / "a", bash=SLEEPS)
    handle = start(run, until="started")
    os.kill(handle.record.supervisor_pid, signal.SIGSTOP)
    state = stop_run(run, grace_s=0.0)
    assert state.outcome is not None and state.outcome.kind in ("killed", "stopped")
    assert left_over(run) == set()


def test_what_a_finished_command_leaves_behind_is_ended(root: Path) -> None:
    """Workers of a launcher that was killed hold their cards."""
    run = make_run(root / "a", bash="setsid sleep 60 & echo started; exec sleep 60")
    handle = start(run, until="started")
    wait_for(lambda: len(left_over(run)) == 2)
    assert handle.record.child_pid is not None
    os.kill(handle.record.child_pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(handle.record.child_pid or 0))
    os.kill(handle.record.supervisor_pid, signal.SIGTERM)  # do not sit out the time they are given
    outcome = finish(handle)
    assert (outcome.kind, outcome.ended_processes) == ("killed", 1)
    assert left_over(run) == set()


# The supervisor's own death


def test_a_killed_supervisor_leaves_no_orphan(root: Path) -> None:
    run = make_run(root / "a", python=DEAF.replace("60", "61"))
    handle = start_run(run, detach=False, grace_s=0.3)
    wait_for(lambda: log_lines(run).count("deaf") == 3)
    kill_supervisor(handle.record)
    wait_for(lambda: (run / "outcome.json").exists())
    assert left_over(run) == set(), "nobody asked: the guard did it"
    state = run_state(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.kind, state.outcome.by) == ("stale", "killed", "guard")
    assert state.outcome.sentence == "killed: its supervisor was killed"


def test_asking_while_the_guard_is_at_work_waits_for_it(root: Path) -> None:
    run = make_run(root / "a", python=DEAF)
    handle = start_run(run, detach=False, grace_s=0.5)
    wait_for(lambda: log_lines(run).count("deaf") == 3)
    kill_supervisor(handle.record)
    state = run_state(run)
    assert state.outcome is not None and state.outcome.by == "guard"
    assert len(read_entries()[0]) == 2, "one start, one end"


def test_supervisor_and_guard_killed_together(root: Path) -> None:
    """Then whoever asks next buries the run; meanwhile only those that left the group live."""
    run = make_run(root / "a", bash="setsid sleep 60 & echo started; exec sleep 60")
    handle = start(run, until="started")
    wait_for(lambda: len(left_over(run)) == 2)
    record = handle.record
    assert record.guard_pid is not None and record.child_pid is not None
    os.kill(record.guard_pid, signal.SIGKILL)
    kill_supervisor(record)
    wait_for(lambda: record.child_pid not in left_over(run))
    state = run_state(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.kind, state.outcome.by) == ("stale", "killed", "reader")
    assert state.outcome.ended_processes == 1
    assert left_over(run) == set()
    again = run_state(run)
    assert (again.stage, again.outcome) == ("stale", state.outcome)


def test_a_run_that_finished_before_its_supervisor_was_killed_is_done(root: Path) -> None:
    run = make_run(root / "a", bash=f"{appends(TWO_STEPS)}; echo written; exec sleep 60")
    handle = start(run, until="written")
    kill_supervisor(handle.record)
    outcome = run_state(run).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.sentence.rpartition(", ")[2]) == ("done", "its supervisor was killed")


# Other boots, other hosts


def forge(run: Path, **changes: object) -> RunRecord:
    """A run.json as another time or place would have left it."""
    finish(start(run))
    record = read_record(run)
    assert record is not None
    (run / "outcome.json").unlink()
    (run / run_record.RUN).unlink()
    forged = RunRecord.from_json({**record.to_json(), **changes, "id": "forged"})
    assert forged is not None
    write_json(run / run_record.RUN, forged.to_json())
    return forged


def test_a_run_whose_folder_was_removed_can_be_stopped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(root / "a", bash=SLEEPS)
    record = start_run(run, detach=False).record
    shutil.rmtree(run)
    assert main(["stop", str(run), "--grace", "0"]) == 0
    assert "the folder is gone; " in capsys.readouterr().out
    assert not left_over(run)
    wait_for(lambda: not processes.alive(record.supervisor_pid, record.supervisor_start), 30)
    assert main(["stop", str(run)]) == 2


def test_another_python_is_named_to_the_command(root: Path) -> None:
    run = make_run(root / "a", bash='echo "${PYTHON:-none}"')
    for python in ("/else/python", None):
        handle = start_run(run, detach=False, python=python)
        finish(handle)
        assert (run / "log.txt").read_text() == f"{python or os.environ.get('PYTHON', 'none')}\n"


def test_a_run_json_that_somebody_edited_is_no_record(root: Path) -> None:
    run = make_run(root / "a", bash="echo one")
    finish(start(run))
    record = read_record(run)
    assert record is not None
    for name, value in (("id", ["a"]), ("folder", 7), ("started_at", None), ("host", {}), ("oom_kills", 3)):
        assert RunRecord.from_json({**record.to_json(), name: value}) is None, name


def test_a_run_from_before_a_reboot(root: Path) -> None:
    """Its pids may be anyone's now: here, this very process's."""
    started = processes.create_time(os.getpid())
    run = make_run(root / "a", bash="echo one")
    forge(run, supervisor_pid=os.getpid(), supervisor_start=started, child_pid=os.getpid(), child_start=started)
    assert run_state(run).stage == "running"
    state = run_state(run, boot=Boot(id="the next one", time_s=time.time()))
    assert state.outcome is not None
    assert (state.stage, state.outcome.sentence) == ("stale", "killed: the machine was restarted")


def test_a_reused_pid_is_not_the_supervisor(root: Path) -> None:
    run = make_run(root / "a", bash="echo one")
    forge(run, supervisor_pid=os.getpid(), supervisor_start=1.0, child_pid=os.getpid(), child_start=1.0)
    state = run_state(run)
    assert state.outcome is not None and state.outcome.kind == "killed"


def test_a_run_on_another_host_is_left_alone(root: Path) -> None:
    run = make_run(root / "a", bash="echo one")
    forge(run, host="node7")
    state = run_state(run)
    assert (state.stage, state.note) == ("running", "on host node7")
    with pytest.raises(UsageError, match="on host node7: stop it there"):
        stop_run(run)
    with pytest.raises(UsageError, match="is live"):
        start_run(run, detach=False)


def test_a_host_that_fell_silent_is_lost(root: Path) -> None:
    run = make_run(root / "a", bash="echo one")
    forge(run, host="node7")
    for name in ("log.txt", "run.json"):
        os.utime(run / name, (0, time.time() - 3600))
    state = run_state(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.kind) == ("stale", "node_lost")
    assert "node7 has not reported for 60 min" in state.outcome.sentence
    assert not (run / "outcome.json").exists(), "it may only be cut off"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 3}', '{"supervisor_pid": "x"}'])
def test_a_damaged_record_is_no_record(root: Path, text: str) -> None:
    run = make_run(root / "a")
    (run / "run.json").write_text(text)
    assert run_state(run).stage == "written"


# Starting


def test_of_many_starts_at_once_one_wins(root: Path) -> None:
    run = make_run(root / "a", bash=SLEEPS)
    won: list[RunHandle] = []
    lost: list[str] = []

    def attempt() -> None:
        try:
            won.append(start_run(run, detach=False))
        except UsageError as refusal:
            lost.append(str(refusal))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3), lost
    assert all("is live" in text and "trlfit stop" in text for text in lost)
    assert len(left_over(run)) == 2, "one bash, one sleep"
    assert [entry["event"] for entry in read_entries()[0]] == ["started"]


def test_a_live_run_is_not_started_again(root: Path) -> None:
    run = make_run(root / "a", bash=SLEEPS)
    handle = start(run)
    with pytest.raises(UsageError, match=f"pid {handle.record.supervisor_pid}"):
        start_run(run, detach=False)


def test_a_lock_by_name_where_the_disk_knows_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = claim(root, wait_s=0)
    assert lock is not None
    assert claim(root, wait_s=0.05) is None
    release(root, lock)
    again = claim(root, wait_s=0)
    assert again is not None
    os.close(again)
    assert claim(root, wait_s=0) is None
    os.utime(root / f"{run_record.LOCK}.name", (0, time.time() - 3600))
    stale = claim(root, wait_s=0)
    assert stale is not None, "its holder died an hour ago"
    release(root, stale)


def test_a_second_attempt_sets_the_first_aside(root: Path) -> None:
    run = make_run(root / "a", bash=f"echo attempt; {appends(TWO_STEPS)}")
    first = finish(start(run))
    second = finish(start(run))
    assert first.run_id != second.run_id
    assert log_lines(run) == ["attempt"]
    assert (run / "metrics.jsonl").read_text() == TWO_STEPS
    kept = run / "attempts" / "1"
    assert {path.name for path in kept.iterdir()} == {"log.txt", "metrics.jsonl", "outcome.json", "run.json"}
    assert json.loads((kept / "outcome.json").read_text())["run_id"] == first.run_id
    finish(start(run))
    assert (run / "attempts" / "2").is_dir()


def test_what_an_earlier_attempt_saved_is_kept_unless_the_next_goes_on_from_it(root: Path) -> None:
    """A trainer that starts anew would rotate old checkpoints away, and a later resume take them for its own."""
    saves = "c=checkpoints/checkpoint-$((${RESUME:-0} + 4)); mkdir -p $c model; touch $c/trainer_state.json"
    run = make_run(root / "a", bash=saves)
    for resume, kept, now in (
        (False, set[str](), {"checkpoint-4"}),
        (False, {"checkpoint-4"}, {"checkpoint-4"}),
        (True, {"checkpoint-4"}, {"checkpoint-4", "checkpoint-5"}),
    ):
        finish(start_run(run, detach=False, resume=resume))
        assert {path.name for path in (run / "checkpoints").iterdir()} == now
        assert {path.name for path in (run / "attempts" / "1").glob("checkpoints/*")} == kept
    assert (run / "attempts" / "1" / "model").is_dir()


def test_no_run_folder(root: Path) -> None:
    for call in (lambda: start_run(root, detach=False), lambda: run_state(root), lambda: stop_run(root)):
        with pytest.raises(UsageError, match=r"command\.sh"):
            call()


def test_a_full_disk_is_said_before_the_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(EnvironmentLacks, match=r"only .* GiB free on the disk of .*: free some space"):
        start_run(make_run(root / "a", bash="true"), detach=False)


def test_a_run_in_a_run_is_another_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRLFIT_RUN", str(root / "outer"))
    run = make_run(root / "a", bash=SLEEPS)
    handle = start(run, until="started")
    environment = psutil.Process(handle.record.child_pid).environ()
    assert environment["TRLFIT_RUN"] == str(run)
    monkeypatch.delenv("TRLFIT_RUN")
    stop_run(run)


def test_a_folder_whose_name_is_awkward(root: Path) -> None:
    run = make_run(root / "--grace a'b\"c\nd é", bash="echo ok")
    assert finish(start(run)).kind == "done"
    assert log_lines(run) == ["ok"]


def test_by_hand_without_us(root: Path) -> None:
    run = make_run(root / "a", bash=appends(TWO_STEPS))
    assert run_state(run).stage == "written"
    subprocess.run(["bash", "command.sh"], cwd=run, check=True)
    state = run_state(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.kind, state.record) == ("finished", "done", None)


def test_in_the_foreground_for_a_scheduler(root: Path) -> None:
    """``python -m launcher.running.supervisor FOLDER`` waits, and its exit code tells."""
    for bash, code in (("true", 0), ("false", 6)):
        run = make_run(root / f"exit{code}", bash=bash)
        command = [sys.executable, "-m", "launcher.running.supervisor", str(run)]
        assert subprocess.run(command, capture_output=True, timeout=20).returncode == code


# Disks


FILLS = "dd if=/dev/zero of=checkpoint bs=4k"


def test_a_run_that_fills_the_disk_still_says_so(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MIN_FREE_BYTES", 0)
    run = make_run(small_disk / "a", bash=f"{FILLS} || exit 1")
    outcome = finish(start(run))
    assert outcome.kind == "disk_full", "though dd's message found no room either"
    assert json.loads((run / "outcome.json").read_text())["kind"] == "disk_full"


def test_an_outcome_that_found_no_room_is_in_the_history(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MIN_FREE_BYTES", 0)
    run = make_run(small_disk / "a", bash=f"rm -f .outcome.reserve; {FILLS} 2>/dev/null; exit 3")
    outcome = finish(start(run))
    assert (outcome.kind, outcome.exit_code, outcome.by) == ("disk_full", 3, "supervisor")
    assert not (run / "outcome.json").exists()
    assert not list(run.glob(".outcome*")), "nothing half-written"
    assert run_state(run).stage == "finished"
    assert [row.state for row in history_rows()] == ["disk_full"]


def test_half_a_file_is_never_left(root: Path) -> None:
    """Where nothing can be mounted: a limit on the size of files stands for the full disk."""
    script = f"""
import resource, sys
from pathlib import Path
from launcher.running.run_record import write_json
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
try:
    write_json(Path({str(root)!r}) / "outcome.json", {{"kind": "done", "sentence": "x" * 500}})
except OSError as problem:
    sys.exit(problem.errno)
"""
    finished = subprocess.run([sys.executable, "-c", script], check=False)
    assert finished.returncode == 27, "EFBIG"
    assert list(root.iterdir()) == []


@pytest.fixture
def read_only(root: Path) -> Iterator[contextlib.ExitStack]:
    """Closing the stack makes runs writable again; see ``freeze``."""
    with contextlib.ExitStack() as stack:
        yield stack


def freeze(folder: Path, stack: contextlib.ExitStack) -> None:
    """Make a folder read-only until the stack closes."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        stack.callback(folder.chmod, 0o755)
        return
    try:  # root writes wherever the disk lets it
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root without the right to mount cannot be kept from writing")
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True, capture_output=True)


def test_a_read_only_folder_is_not_started(root: Path, read_only: contextlib.ExitStack) -> None:
    run = make_run(root / "a", bash="true")
    freeze(run, read_only)
    with pytest.raises(EnvironmentLacks, match=r"cannot start the run in .*: .*; write the run elsewhere"):
        start_run(run, detach=False)
    assert run_state(run).stage == "written"


def test_a_dead_run_in_a_read_only_folder_is_still_told(root: Path, read_only: contextlib.ExitStack) -> None:
    run = make_run(root / "a", bash="echo one")
    forge(run, boot_id="an earlier one")
    freeze(run, read_only)
    state = run_state(run)
    assert state.outcome is not None
    assert (state.stage, state.outcome.sentence) == ("stale", "killed: the machine was restarted")
    assert not (run / "outcome.json").exists()


# Memory of the host


def test_the_kernels_kill_is_told_from_another(root: Path) -> None:
    """A real control group with 64 MiB, where one can be made."""
    place = own_memory_group()
    if place is None:
        pytest.skip("no memory control group can be made here")
    try:
        hog = "echo start; exec python3 -c 'x = bytearray(200 << 20)'"
        run = make_run(root / "a", bash=f"{appends(rows(end=False))}; {hog}")
        enter = f"echo $$ > {place}/cgroup.procs; exec {sys.executable} -m launcher.running.supervisor {run}"
        subprocess.run(["bash", "-c", enter], check=False, capture_output=True, timeout=30)
        outcome = run_state(run).outcome
        assert outcome is not None
        assert (outcome.kind, outcome.signal) == ("out_of_memory", "SIGKILL")
        assert "the host ran out of memory" in outcome.sentence
    finally:
        place.rmdir()


def own_memory_group() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if "memory" not in names:
            continue
        place = Path("/sys/fs/cgroup/memory") / path.strip("/") / f"trlfit-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            place.mkdir()
            (place / "memory.limit_in_bytes").write_text(str(64 << 20))
            return place
    return None


def test_the_supervisor_is_light() -> None:
    """It stays for days beside the training: no document models, no screens."""
    script = "import sys, launcher.running.supervisor; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert not modules & {"pydantic", "yaml", "textual", "rich", "torch", "asyncio", "pynvml"}
