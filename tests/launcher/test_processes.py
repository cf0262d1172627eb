"""Real processes: the dead, the deaf, the detached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.running.processes import (
    Boot,
    alive,
    create_time,
    kill_tree,
    members,
    oom_kills,
    this_boot,
    this_host,
)
from tests.launcher.fake_run import wait_for

PYTHON = [sys.executable, "-S", "-E", "-c"]
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@pytest.fixture
def marker() -> Iterator[str]:
    """A mark that no other test uses; whatever bears it dies with the test."""
    name = f"TRLFIT_TEST={os.getpid()}-{time.monotonic_ns()}"
    yield name
    kill_tree(marker=name, grace_s=0)


def start(*command: str, marker: str, **options: object) -> subprocess.Popen[str]:
    name, _, value = marker.partition("=")
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, env={**os.environ, name: value}, stdout=subprocess.PIPE, text=True, **options
    )


def pids(marker: str) -> set[int]:
    return {mark.pid for mark in members(marker=marker)}


def test_a_process_is_alive_only_with_its_own_start() -> None:
    started = create_time(os.getpid())
    assert started is not None
    assert alive(os.getpid(), started)
    assert not alive(os.getpid(), started - 1.5), "a reused pid is another process"


def test_the_start_does_not_depend_on_the_clock() -> None:
    """It is counted from boot: the same process started so long after the machine did."""
    started = create_time(os.getpid())
    assert started == pytest.approx(psutil.Process().create_time() - psutil.boot_time(), abs=1.1)


def test_no_process_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert create_time(child.pid) is None
    assert not alive(child.pid, 1.0)


def test_a_zombie_is_not_alive_and_no_member(marker: str) -> None:
    with start("true", marker=marker) as child:
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        started = create_time(child.pid)
        assert started is not None
        assert not alive(child.pid, started)
        assert child.pid not in {mark.pid for mark in members(root=os.getpid())}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_whose_first_thread_ended_is_alive(marker: str) -> None:
    """The state of a process is that of its first thread: a zombie, here, with another at work."""
    half_dead = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with start(*PYTHON, half_dead, marker=marker) as child:
        assert child.stdout is not None
        child.stdout.readline()
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert child.pid in {mark.pid for mark in members(root=os.getpid())}
        kill_tree(root=os.getpid(), grace_s=0.1)
        assert child.wait(5) < 0


def test_members_are_found_by_tree_group_and_mark(marker: str) -> None:
    with start("bash", "-c", "sleep 60 & wait", marker=marker, process_group=0) as leader:
        wait_for(lambda: len(pids(marker)) == 2)
        both = pids(marker)
        assert {mark.pid for mark in members(group=leader.pid)} == both
        assert {mark.pid for mark in members(root=leader.pid)} == both - {leader.pid}
        assert {mark.pid for mark in members(root=os.getpid(), exclude={leader.pid})} >= (both - {leader.pid})
        report = kill_tree(root=leader.pid, group=leader.pid, grace_s=5)
        assert (report.ended, report.left) == (2, ())


def test_a_deaf_process_is_killed_after_the_grace_and_not_before(marker: str) -> None:
    with start(*PYTHON, DEAF, marker=marker) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "deaf\n"
        began = time.monotonic()
        report = kill_tree(marker=marker, grace_s=0.4)
        assert time.monotonic() - began >= 0.4
        assert report.ended == 1
        assert child.wait() == -signal.SIGKILL


def test_a_polite_process_is_not_killed(marker: str) -> None:
    polite = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7));print('ready', flush=True); time.sleep(60)"
    )
    with start(*PYTHON, polite, marker=marker) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        began = time.monotonic()
        kill_tree(marker=marker, grace_s=60)
        assert time.monotonic() - began < 30, "the grace is not sat out once all are gone"
        assert child.wait() == 7


def test_hurry_cuts_the_grace_short(marker: str) -> None:
    with start(*PYTHON, DEAF, marker=marker) as child:
        assert child.stdout is not None
        child.stdout.readline()
        began = time.monotonic()
        kill_tree(marker=marker, grace_s=60, hurry=lambda: time.monotonic() - began > 0.2)
        assert time.monotonic() - began < 30
        assert child.wait() == -signal.SIGKILL


def test_one_that_left_session_and_parent_is_found_by_its_mark(marker: str) -> None:
    """setsid and a double fork: no longer in the tree, nor in the group."""
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.close(1); time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    with start(*PYTHON, daemon, marker=marker, process_group=0) as child:
        child.wait()
        assert len(pids(marker)) == 1
        assert members(group=child.pid) == set()
        assert kill_tree(group=child.pid, marker=marker, grace_s=2).ended == 1
        assert pids(marker) == set()


def test_one_that_forks_while_being_ended_is_ended_too(marker: str) -> None:
    """Its TERM handler starts another process, which nobody had seen when TERM was sent."""
    hydra = (
        "import os, signal, time\n"
        "def again(*_):\n"
        "    if os.fork(): os._exit(0)\n"
        "    signal.signal(15, signal.SIG_IGN); os.close(1); time.sleep(60)\n"
        "signal.signal(15, again); print('ready', flush=True); time.sleep(60)"
    )
    with start(*PYTHON, hydra, marker=marker) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert kill_tree(marker=marker, grace_s=0.3).left == ()
        assert pids(marker) == set()


def test_a_stopped_process_is_ended(marker: str) -> None:
    with start("sleep", "60", marker=marker) as child:
        os.kill(child.pid, signal.SIGSTOP)
        kill_tree(marker=marker, grace_s=0.2)
        assert child.wait() in (-signal.SIGKILL, -signal.SIGTERM)


def test_nothing_to_end_takes_no_time(marker: str) -> None:
    began = time.monotonic()
    report = kill_tree(marker=marker, grace_s=30)
    assert (report.ended, report.left) == (0, ())
    assert time.monotonic() - began < 15


def test_boots_are_told_apart_by_id_or_else_by_time() -> None:
    now = this_boot()
    assert now.same(this_host().boot)
    assert not now.same(Boot(id="another", time_s=now.time_s))
    assert Boot(id=None, time_s=1000.0).same(Boot(id="x", time_s=1003.0)), "the clock was stepped"
    assert not Boot(id=None, time_s=1000.0).same(Boot(id=None, time_s=90_000.0))


CGROUPS = {
    "version 2": ("0::/user/run\n", "sys/fs/cgroup/user/run/memory.events", "low 0\noom 3\noom_kill 2\n"),
    "version 1": (
        "5:cpu:/\n4:memory:/user/run\n0::/\n",
        "sys/fs/cgroup/memory/user/run/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    ),
    "container": ("0::/docker/abc\n", "sys/fs/cgroup/memory.events", "oom_kill 2\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", CGROUPS)
def test_the_kernels_counters_are_read(name: str, tmp_path: Path) -> None:
    groups, file, text = CGROUPS[name]
    for path, content in (("proc/self/cgroup", groups), (file, text), ("proc/vmstat", "oom_kill 5\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert oom_kills(tmp_path) == {"cgroup": 2, "machine": 5}


def test_counters_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == {}
