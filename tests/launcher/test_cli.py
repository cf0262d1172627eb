"""The command line itself: help, version, exit codes, streams that are closed or full, Ctrl-C, the textbook sheet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.cli import COMMANDS, main
from launcher.running.runs import run_state, stop_run
from tests.launcher.command_line import (
    H100,
    MODEL,
    TINY_CONFIG,
    assert_refused,
    child,
    command_environment,
    here,
    listing,
    shell,
    write_files,
)
from tests.launcher.fake_run import left_over, make_run, wait_for
from tests.launcher.tiny_models import EXAMPLES

GIB = 2**30
TINY_FOLDER = {"tiny/config.json": json.dumps(TINY_CONFIG)}
PLAN = f"$TRLFIT plan {MODEL} --machine 8xH100-80GB"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return command_environment(tmp_path / "home")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> Path:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# Help


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS)], ids=lambda words: words[0] if words else "top"
)
def test_help_goes_to_stdout(command: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, (*command, "--help"))
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("usage: trlfit " + " ".join(command))
    if command:
        assert ("--json" in said.out) == COMMANDS[command[0]].json
    else:
        assert set(COMMANDS) <= set(said.out.split())


def test_no_command_is_help_on_stderr_and_a_usage_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ())
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("usage: trlfit")


def test_version(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ("--version",))
    assert said.code == 0
    assert said.out.split()[0] == "trlfit"
    assert len(said.out.splitlines()) == 1


def test_a_bug_is_one_line_that_says_how_to_see_more(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr("launcher.commands.info.load_cards", fail)
    said = here(capsys, ("cards",))
    assert said.code == 1
    assert said.err.splitlines() == [
        "trlfit: error: bug in trlfit: TypeError: test_a_bug_is_one_line_that_says_how_to_see_more.<locals>.fail()"
        " missing 1 required positional argument: '_'; set TRLFIT_TRACEBACK=1 to see where"
    ]
    monkeypatch.setenv("TRLFIT_TRACEBACK", "1")
    assert "Traceback" in here(capsys, ("cards",)).err


@pytest.mark.parametrize("command", ["gpus", "models", "cards", "runs", "stacks"])
def test_lists_are_one_json_document(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, (command, "--json"))
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) is not None
    table = here(capsys, (command,))
    assert (table.code, table.err) == (0, "")
    assert table.out.endswith("\n")
    assert not table.out.endswith("\n\n")


# Streams


def test_a_reader_that_goes_away_is_no_error(place: Path, env: dict[str, str]) -> None:
    for command in (f"{PLAN} --json", PLAN, "$TRLFIT models", "$TRLFIT plan --help"):
        said = shell(f'{command} | head -1; echo "${{PIPESTATUS[0]}}"', cwd=place, env=env)
        assert said.err == "", command
        assert said.out.splitlines()[-1] == "0", command


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", "stdout is closed"), ("> /dev/full", "No space left on device")]
)
@pytest.mark.parametrize("command", [PLAN, f"{PLAN} --json", "$TRLFIT --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_said(
    command: str, redirection: str, reason: str, unbuffered: str, place: Path, env: dict[str, str]
) -> None:
    said = shell(f"{command} {redirection}", cwd=place, env={**env, "PYTHONUNBUFFERED": unbuffered})
    assert_refused(said, 4, f"the system refused: {reason}")


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_errors_that_cannot_be_written_do_not_go_to_stdout(redirection: str, place: Path, env: dict[str, str]) -> None:
    said = shell(f"$TRLFIT plan nobody/nothing {redirection}", cwd=place, env=env)
    assert (said.code, said.out, said.err) == (4, "", "")


@pytest.mark.parametrize("redirection", ["< /dev/null", "<&-"])
def test_without_a_terminal_no_command_is_help(redirection: str, place: Path, env: dict[str, str]) -> None:
    said = shell(f"$TRLFIT {redirection}", cwd=place, env=env)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("usage: trlfit")


# Terminals and locales


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=str,
)
def test_any_terminal_can_show_any_model(locale: dict[str, str], place: Path, env: dict[str, str]) -> None:
    write_files(place, {"m\u00f6del-\u6a21\u578b/config.json": json.dumps(TINY_CONFIG)})
    words = ["plan", "m\u00f6del-\u6a21\u578b", "--no-trace", *H100]
    shown = child(words, cwd=place, env={**env, **locale})
    assert (shown.code, shown.err) == (0, "")
    # What the terminal cannot show is escaped: the numbers are all there.
    assert "k parameters, 2 layers (folder)" in shown.out
    document = child([*words, "--json"], cwd=place, env={**env, **locale})
    assert json.loads(document.out)["job"]["model"] == "m\u00f6del-\u6a21\u578b"
    missing = child(["plan", "m\u00f6del-\u6a21", *H100], cwd=place, env={**env, **locale})
    assert missing.code == 4
    assert missing.err.startswith("trlfit: error: model ")


def test_a_locale_that_cannot_name_the_file_is_said(place: Path, env: dict[str, str]) -> None:
    write_files(place, {"m\u00f6del/config.json": json.dumps(TINY_CONFIG)})
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = child(["plan", "m\u00f6del", *H100], cwd=place, env={**env, **plain})
    assert_refused(said, 2, "MODEL: is no UTF-8; rename it, or set a locale such as LC_ALL=C.UTF-8")


def test_output_does_not_depend_on_the_terminal(place: Path, env: dict[str, str]) -> None:
    words = ["plan", MODEL, *H100]
    plain = child(words, cwd=place, env=env)
    for change in ({"COLUMNS": "1"}, {"COLUMNS": "400"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": "1"}):
        assert child(words, cwd=place, env={**env, **change}) == plain, change
    assert "\x1b" not in plain.out


def test_help_fits_a_very_narrow_terminal(place: Path, env: dict[str, str]) -> None:
    said = child(["plan", "--help"], cwd=place, env={**env, "COLUMNS": "1"})
    assert (said.code, said.err) == (0, "")
    assert "--global-batch" in said.out


# Ctrl-C


@contextmanager
def started(words: list[str], cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, as a shell starts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tui", *words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def test_ctrl_c_while_another_python_is_asked(place: Path, env: dict[str, str]) -> None:
    """The slow thing that a plan does: it leaves at once, and takes the child with it."""
    write_files(place, {"python": f"#!/bin/sh\necho $$ > {place}/pid\nexec sleep 60\n"})
    (place / "python").chmod(0o755)
    with started(["plan", MODEL, *H100, "--python", "./python"], place, env) as process:
        wait_for(lambda: (place / "pid").exists() and (place / "pid").read_text().strip(), 30)
        asked = int((place / "pid").read_text())
        time.sleep(1)  # until the parent has its child in hand, and waits
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (130, "", "")
    wait_for(lambda: not psutil.pid_exists(asked) or psutil.Process(asked).status() == psutil.STATUS_ZOMBIE)


def test_ctrl_c_while_a_job_file_is_a_pipe_that_nobody_fills(place: Path, env: dict[str, str]) -> None:
    os.mkfifo(place / "job.yaml")
    with started(["plan", "--job", "job.yaml"], place, env) as process:
        with (place / "job.yaml").open("w"):  # returns once the other side is open
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (130, "", "")


def test_a_job_file_may_be_a_pipe(place: Path, env: dict[str, str]) -> None:
    said = shell(f"$TRLFIT plan --job <(echo 'model: {MODEL}') --machine 8xH100-80GB | head -1", cwd=place, env=env)
    assert said.out.startswith(f"{MODEL}: 8.19 B parameters")


def test_ctrl_c_while_following_leaves_the_run_going(place: Path, env: dict[str, str]) -> None:
    run = make_run(place / "run", bash="echo first line; sleep 60")
    with started(["launch", "run", "--no-check"], place, env) as process:
        assert process.stderr is not None
        assert "started; Ctrl-C leaves it running" in process.stderr.readline()
        wait_for(lambda: run_state(run).stage == "running" and "first" in (run / "log.txt").read_text())
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (130, "")
        assert err.splitlines()[-1] == "trlfit: left running; `trlfit watch run` follows it, `trlfit stop run` ends it"
    assert run_state(run).stage == "running"
    assert left_over(run)
    assert stop_run(run).stage == "finished"
    assert not left_over(run)


# Disks


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 KiB, which a run folder does not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems can be mounted by root only; a limit on files stands for it")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


WRITE = (
    "write",
    "tiny",
    "--no-trace",
    "--machine",
    "cpu",
    "--seq-len",
    "64",
    "--no-check",
    "--dataset",
    str(EXAMPLES / "train.jsonl"),
)


def test_a_full_disk_leaves_nothing_half_written(
    full_disk: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(place, TINY_FOLDER)
    said = here(capsys, (*WRITE, "-o", str(full_disk / "run")))
    assert_refused(said, 4, "cannot write the run folder", "the disk is full; choose another place with -o")
    assert list(full_disk.iterdir()) == []


def test_a_limit_on_the_size_of_files_leaves_nothing_half_written(place: Path, env: dict[str, str]) -> None:
    write_files(place, TINY_FOLDER)
    line = f"ulimit -f 1; $TRLFIT {' '.join(WRITE)} -o run"
    assert_refused(shell(line, cwd=place, env=env), 4, "cannot write the run folder run: ", "choose another place")
    assert listing(place) == {"tiny", "tiny/config.json"}


def test_a_read_only_disk(tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("root without the right to mount cannot be kept from writing")
    else:
        disk.chmod(0o555)
    try:
        write_files(place, TINY_FOLDER)
        said = here(capsys, (*WRITE, "-o", str(disk / "run")))
        assert_refused(said, 4, str(disk / "run"), "choose another place")
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(disk)], check=True)


# The textbook sheet: facts that people know by heart, through the command line


OPENING = (
    "--params",
    "8e9",
    "--hidden",
    "4096",
    "--layers",
    "32",
    "--batch",
    "1",
    "--seq-len",
    "4096",
    "--card-gib",
    "80",
)


def sheet(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    said = here(capsys, ("ledger", "--textbook", *OPENING, *flags, "--json"))
    assert (said.code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out)
    return found


def gib(size: int) -> float:
    return round(size / GIB, 1)


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ((), 16),
        (("--bytes", "gradient=4"), 18),
        (("--bytes", "gradient=4,weights=4"), 20),
        (("--no-mixed-precision",), 12),
        (("--optimizer", "momentum"), 12),
        (("--optimizer", "sgd"), 8),
    ],
)
def test_bytes_per_parameter(flags: tuple[str, ...], width: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, *flags)
    assert found["bytes_per_parameter"] == width
    assert found["states_bytes"] == width * 8_000_000_000
    assert sum(role["bytes_per_parameter"] for role in found["roles"].values()) == width


def test_the_opening_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys)
    roles = {name: gib(role["total_bytes"]) for name, role in found["roles"].items()}
    assert roles == {"weights": 14.9, "gradient": 14.9, "master": 29.8, "moment1": 29.8, "moment2": 29.8}
    assert gib(found["states_bytes"]) == 119.2
    assert gib(found["optimizer_only_bytes"]) == 89.4
    assert found["optimizer_only_share"] == 0.75
    assert found["activations_bytes"] == 18_253_611_008
    assert gib(found["activations_bytes"]) == 17.0
    assert found["activation_bytes_per_token_per_layer"] == 136 * 1024
    assert gib(found["total_bytes"]) == 136.2
    assert not found["fits"]
    assert gib(found["short_bytes"]) == 56.2
    assert gib(found["inference_bytes"]) == 14.9
    assert round(found["times_inference"], 1) == 9.1
    assert {stage: found["fewest_devices"][stage] for stage in "13"} == {"1": 3, "3": 2}


def test_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, "--recompute")
    assert gib(found["activations_bytes"]) == 1.0
    assert gib(found["saved_by_recompute_bytes"]) == 16.0
    assert round(found["extra_matmul_passes"], 3) == 0.333
    assert gib(found["total_bytes"]) == 120.2
    assert not found["fits"]


def test_plain_sgd_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, "--optimizer", "sgd")
    assert gib(found["total_bytes"]) == 76.6
    assert found["fits"]
    assert found["short_bytes"] == 0


@pytest.mark.parametrize(("stage", "total"), [("0", 136.2), ("1", 58.0), ("2", 44.9), ("3", 31.9)])
def test_eight_devices_by_stage(stage: str, total: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, "--devices", "8", "--stage", stage)
    assert gib(found["total_bytes"]) == total
    assert gib(found["by_stage_bytes"][stage]) == total
    assert found["fits"] == (total <= 80)


def test_eight_devices_and_recompute_fit_a_small_card(capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, "--devices", "8", "--stage", "3", "--recompute", "--card-gib", "24")
    assert gib(found["total_bytes"]) == 15.9
    assert found["fits"]


def test_seventy_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--params", "70e9", "--layers", "80", "--hidden", "8192")
    assert gib(sheet(capsys, *sizes)["activations_bytes"]) == 85.0
    spread = sheet(capsys, *sizes, "--devices", "1024", "--stage", "3")
    assert gib(spread["total_bytes"]) == 86.0
    assert not spread["fits"]
    assert gib(sheet(capsys, *sizes, "--devices", "1024", "--stage", "3", "--recompute")["total_bytes"]) == 6.0


def test_a_small_model_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = sheet(capsys, "--params", "1.5e9", "--layers", "24", "--hidden", "2048")
    assert gib(found["total_bytes"]) == 28.7
    assert found["fits"]


def test_a_job_file_may_stand_where_the_model_does(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "job.yaml").write_text("model: Qwen/Qwen3-0.6B\nmachine: 1xRTX4090\n", encoding="utf-8")
    said: list[str] = []
    for words in (["job.yaml"], ["--job", "job.yaml"]):
        assert main(["plan", *words, "--seq-len", "512", "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_the_sheet_as_a_table_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ("ledger", "--textbook", *OPENING, "--devices", "8"))
    assert said.code == 0
    assert "stage 0 / 1 / 2 / 3: 136.2 / 58.0 / 44.9 / 31.9 GiB" in said.out
    assert "does not fit, short 56.2 GiB" in said.out
