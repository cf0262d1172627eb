"""The stand-in for a Python starts what a Python would: same words, folder, environment, streams and end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launcher.warm_python import warm_environment, warm_python

pytestmark = pytest.mark.stack

TELL = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("MARK"), sys.stdin.read(), "trl" in sys.modules, __name__]))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def start(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**warm_environment(), **more}
    return subprocess.run([warm_python(), *words], env=environment, input="typed", capture_output=True, text=True)


def test_a_start_is_told_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    monkeypatch.chdir(tmp_path)
    for words, first in ((["-c", TELL], "-c"), (["-u", "tell.py"], "tell.py"), ([str(script)], str(script))):
        done = start(*words, "a", "b c", MARK="here")
        assert json.loads(done.stdout) == [[first, "a", "b c"], str(tmp_path), "here", "typed", True, "__main__"]
        assert (done.returncode, done.stderr) == (3, "to stderr\n")


def test_variables_that_libraries_read_once_start_an_ordinary_python() -> None:
    assert json.loads(start("-c", TELL, OMP_NUM_THREADS="2").stdout)[4] is False


def test_ends_of_every_kind_are_passed_on() -> None:
    assert start("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL
    failed = start("-c", "import atexit; atexit.register(print, 'at the end'); raise ValueError('why')")
    assert (failed.returncode, failed.stdout) == (1, "at the end\n")
    assert failed.stderr.endswith("ValueError: why\n")


def test_a_fork_ends_with_its_stand_in() -> None:
    command = [warm_python(), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with subprocess.Popen(command, env=warm_environment(), stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        fork = psutil.Process(int(stand_in.stdout.readline()))
        stand_in.kill()
    psutil.wait_procs([fork], timeout=10)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE
