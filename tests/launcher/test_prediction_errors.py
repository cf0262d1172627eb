"""Our own error over a history of runs, by card and kind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.ending.history import append_end
from launcher.ending.outcomes import Outcome
from launcher.ending.prediction_errors import error_groups, error_table
from launcher.ending.run_metrics import Metrics, Predicted
from launcher.running.run_record import write_json
from tests.launcher.command_line import here
from tests.launcher.fake_run import GIB, PLAN, make_run
from tests.launcher.test_history import record

H100: dict[str, Any] = {
    **PLAN,
    "machine": {"spec": "local", "cards": [{"card_id": "H100-80GB", "name": "NVIDIA H100"}]},
}
CPU: dict[str, Any] = {**PLAN, "machine": {"spec": "cpu", "cards": [], "host": {"cores": 2}}}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "data"))


def ended(folder: Path, day: int, plan: dict[str, Any], **seen: Any) -> Path:
    """A run of ten steps whose plan said 50 GiB allocated, 55 reserved, 56 on the card, 2 s a step."""
    run = make_run(folder, plan=plan)
    metrics = Metrics(started=True, ended=True, last_step=10, rows=10, **seen)
    outcome = Outcome(kind="done", sentence="done", predicted=Predicted.from_plan(plan), seen=metrics)
    write_json(run / "run.json", record(run, name=folder.name, day=day).to_json())
    write_json(run / "outcome.json", outcome.to_json())
    append_end(record(run, name=folder.name, day=day), outcome)
    return run


def test_by_card_kind_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path / "a", 1, H100, allocated_bytes=51 * GIB, reserved_bytes=55 * GIB, step_s=2.2)
    ended(tmp_path / "b", 2, H100, allocated_bytes=48 * GIB, reserved_bytes=66 * GIB, step_s=1.0)
    ended(tmp_path / "c", 3, H100, allocated_bytes=50 * GIB, step_s=2.0)
    ended(tmp_path / "d", 4, CPU, rss_growth_bytes=75 * GIB)
    said = here(capsys, ["runs", "--errors", "--json"])
    groups = json.loads(said.out)["groups"]
    assert [(g["card"], g["kind"], g["quantity"], g["runs"]) for g in groups] == [
        ("H100-80GB", "sft full fsdp", "allocated", 3),
        ("H100-80GB", "sft full fsdp", "reserved", 2),
        ("H100-80GB", "sft full fsdp", "step", 3),
        ("cpu", "sft full fsdp", "resident", 1),
    ]
    allocated, reserved, step, resident = groups
    # +2 %, -4 %, 0 %
    assert (allocated["median"], allocated["worst"]) == pytest.approx((0.0, -0.04))
    assert allocated["median_size"] == pytest.approx(0.02)
    assert Path(allocated["worst_run"]).name == "b"
    assert (reserved["median"], step["worst"], resident["worst"]) == pytest.approx((0.1, -0.5, 0.5))
    table = here(capsys, ["runs", "--errors"]).out
    assert "tensors on the card" in table and "-4.0%" in table


def test_a_run_folder_copied_from_another_box_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its host, pids and path mean nothing here, and the history never heard of it."""
    run = ended(tmp_path / "there" / "a", 1, H100, allocated_bytes=51 * GIB, step_s=2.2)
    foreign = replace(record(Path("/home/them/a"), name="far"), host="node7", boot_id="another")
    write_json(run / "run.json", foreign.to_json())
    shutil.rmtree(tmp_path / "data")
    copied = shutil.copytree(tmp_path / "there", tmp_path / "copied")
    assert json.loads(here(capsys, ["runs", "--errors", "--json"]).out)["groups"] == []
    groups = json.loads(here(capsys, ["runs", str(copied), "--errors", "--json"]).out)["groups"]
    assert [(g["card"], g["quantity"], g["runs"]) for g in groups] == [
        ("H100-80GB", "allocated", 1),
        ("H100-80GB", "step", 1),
    ]
    watched = here(capsys, ["watch", str(copied / "a")])
    assert (watched.code, watched.out) == (0, "done\n")


def test_an_error_that_is_not_known_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path / "a", 1, {**H100, "best": None}, allocated_bytes=51 * GIB)
    assert error_groups([]) == []
    assert error_table([])[0][0] == "card"
    assert here(capsys, ["runs", "--errors"]).out == "no run yet with a prediction and two steps to hold against it\n"
