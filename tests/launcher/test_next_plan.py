"""`trlfit launch RUN --next`: what follows an out-of-memory end, as files in the run's own folder."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.ending.log_evidence import Shortage
from launcher.ending.outcomes import Outcome
from launcher.errors import UsageError
from launcher.running.next_plan import next_run
from launcher.running.run_record import claim, release, set_aside, stage_next
from launcher.running.runs import RunState
from launcher.writing.run_target import NothingFits
from tests.launcher.command_line import H100, MODEL, assert_refused, here
from tests.launcher.tiny_models import EXAMPLES

GIB = 2**30
OUT = Outcome(kind="out_of_memory", sentence="out of memory in loss", phase="loss")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two cards, written from a folder in which its data have a relative name."""
    folder = tmp_path_factory.mktemp("written")
    shutil.copy(EXAMPLES / "train.jsonl", folder / "mine.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        from launcher.cli import main

        flags = ["--machine", "2xH100-80GB", "--dataset", "mine.jsonl", "--no-check", "--stack", "trl=1.16.0"]
        assert main(["write", MODEL, *flags, "-o", "run"]) == 0
    return folder / "run"


@pytest.fixture
def run(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, asked about from somewhere else."""
    monkeypatch.setenv("TRLFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written, tmp_path / "run"))


def planned(folder: Path) -> dict[str, Any]:
    best: dict[str, Any] = json.loads((folder / "plan.json").read_text())["best"]
    return best


def short(folder: Path, factor: float) -> Outcome:
    """An end that needed ``factor`` times what was predicted."""
    need = int(factor * planned(folder)["memory"]["allocated_bytes"])
    shortage = Shortage(where="gpu", asked_bytes=GIB, allocated_bytes=need - GIB, unallocated_bytes=0)
    return replace(OUT, shortage=shortage, phase=planned(folder)["memory"]["peak_phase"])


def checkpoint(folder: Path) -> None:
    path = folder / "checkpoints" / "checkpoint-40"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")


def test_the_files_are_those_of_a_smaller_plan(run: Path) -> None:
    checkpoint(run)
    found = next_run(run, short(run, 1.07))
    after = json.loads(found.files["plan.json"])
    assert after["best"]["memory"]["device_bytes"] < planned(run)["memory"]["device_bytes"] / 1.06
    job = yaml.safe_load(found.files["job.yaml"])
    assert job["reserve"] == after["job"]["reserve"] > 0.05, "job.yaml plans the same again"
    data = next(line for line in (run / "train.py").read_text().splitlines() if line.startswith("DATASET"))
    assert data in found.files["train.py"]
    assert Path(job["data"]["dataset"]).is_absolute(), "its relative name meant something only where it was written"
    assert (found.resumed_from, found.from_start) == ("checkpoint-40", None)
    assert "GiB of tensors" in found.sentence
    assert found.remarks == ()


def test_a_script_that_was_edited_is_not_passed_over_in_silence(run: Path) -> None:
    with (run / "train.py").open("a") as file:
        file.write("# mine\n")
    [remark] = next_run(run, short(run, 1.07)).remarks
    assert "train.py was changed" in remark


def test_staged_files_take_their_place_at_the_next_start_and_the_old_ones_are_kept(run: Path) -> None:
    before = {path.name: path.read_text() for path in run.iterdir() if path.is_file()}
    (run / ".next.99999").mkdir()  # a writer that was killed
    stage_next(run, next_run(run, short(run, 1.07)).files)
    assert [path.name for path in run.glob(".next*")] == [".next"]
    assert (run / "train.py").read_text() == before["train.py"], "nothing changes before the start"
    (run / "log.txt").write_text("what happened\n")
    set_aside(run)
    assert (run / "train.py").read_text() != before["train.py"]
    kept = run / "attempts" / "1"
    assert (kept / "log.txt").read_text() == "what happened\n"
    assert {name: (kept / name).read_text() for name in before} == before
    assert not (run / ".next").exists()
    assert (run / "command.sh").stat().st_mode & 0o111


def test_a_second_attempt_is_followed_by_a_third(run: Path) -> None:
    sizes = [planned(run)["memory"]["device_bytes"]]
    for _ in range(2):
        stage_next(run, next_run(run, short(run, 1.07)).files)
        set_aside(run)
        sizes.append(planned(run)["memory"]["device_bytes"])
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert (run / "attempts" / "2" / "plan.json").is_file()


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Outcome(kind="done", sentence="finished after 6 steps"), "did not run out of memory"),
        (replace(OUT, shortage=Shortage(where="shared_memory")), "/dev/shm was too small"),
    ],
)
def test_ends_that_no_plan_helps(run: Path, outcome: Outcome, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        next_run(run, outcome)


def test_where_nothing_smaller_fits_it_says_what_would(run: Path) -> None:
    with pytest.raises(
        NothingFits, match=r"GiB of tensors, .* GiB were predicted; nothing fits as asked; what would: --"
    ):
        next_run(run, short(run, 40.0))


def test_whoever_sees_it_end_is_told_the_next_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "outcome.json").write_text(json.dumps(short(run, 1.07).to_json()))
    said = here(capsys, ["watch", str(run)])
    command, plan = said.out.splitlines()[-2:]
    assert (said.code, command.startswith("`trlfit launch ")) == (6, True)
    assert plan == f"next plan: {next_run(run, short(run, 1.07)).sentence}"
    assert (run / "plan.json").exists() and not (run / ".next").exists(), "only said"


def test_a_written_run_is_checked_and_started_in_the_python_it_names(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    command = (run / "command.sh").read_text()
    (run / "command.sh").write_text(command.replace(sys.executable, "/gone/python"))
    said = here(capsys, ["launch", str(run), "--dry-run"])
    assert_refused(said, 4, "cannot start the training Python /gone/python: No such file or directory; name another")
    monkeypatch.setenv("PYTHON", "/other/python")
    assert_refused(here(capsys, ["launch", str(run), "--dry-run"]), 4, "cannot start the training Python /other/python")
    monkeypatch.delenv("PYTHON")
    asked: list[str | None] = []
    monkeypatch.setattr("launcher.commands.run.start_run", lambda folder, **terms: asked.append(terms["python"]))
    monkeypatch.setattr("launcher.commands.run._follow", lambda folder, json: 0)
    for words in (["--python", sys.executable], []):
        assert here(capsys, ["launch", str(run), "--no-check", *words]).code == 0
    assert asked == [sys.executable, None]


def test_next_is_for_runs_that_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ["launch", str(run), "--next"])
    assert (said.code, "was never launched" in said.err) == (2, True)
    said = here(capsys, ["launch", MODEL, *H100, "--dataset", str(EXAMPLES / "train.jsonl"), "--next"])
    assert (said.code, "--next needs a run folder that was launched" in said.err) == (2, True)
    (run / "outcome.json").write_text(json.dumps(short(run, 1.07).to_json()))
    lock = claim(run, wait_s=0)
    assert lock is not None
    said = here(capsys, ["launch", str(run), "--next"])
    assert (said.code, "was started meanwhile" in said.err) == (2, True)
    release(run, lock)
    assert not (run / ".next").exists()
    said = here(capsys, ["launch", str(run), "--no-check", "--resume"])
    assert (said.code, "holds no whole checkpoint" in said.err) == (2, True)


@pytest.mark.parametrize("flag", ["--next", "--resume", "--dry-run", "--detach"])
def test_a_run_that_is_still_going_is_told_from_one_to_launch(
    flag: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.commands.run.run_state", lambda folder: RunState(folder=folder, stage="running"))
    assert_refused(here(capsys, ["launch", str(run), "--no-check", flag]), 2, "is still going; `trlfit watch` follows")
