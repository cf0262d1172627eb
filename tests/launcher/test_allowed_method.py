"""`--allow method` through the command line: planned, written and held against as the method that was chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.ending.history import describe
from tests.launcher.command_line import Said, here, write_files

MODEL = "deepseek-ai/DeepSeek-V2-Lite"
"""15.7 B parameters: 29.3 GiB in bf16, 88 GiB of weights, gradients and moments in bf16 throughout."""
ASKED = (MODEL, "--machine", "1xH100-80GB", "--stack", "bitsandbytes=0.50.0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "history"))
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"d.jsonl": '{"text": "a b c"}\n'})
    return tmp_path


def written(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(job.yaml, plan.json, train.py) of a run that `write` makes."""
    said = here(capsys, ("write", *words, "-o", str(folder), "--no-check"))
    assert (said.code, said.err) == (0, "")
    job = yaml.safe_load((folder / "job.yaml").read_text())
    return job, json.loads((folder / "plan.json").read_text()), (folder / "train.py").read_text()


def kept(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> list[dict[str, Any]]:
    """Candidates of a long plan that may alter the method, which is kept in a file."""
    asked = ("plan", *words, "--allow", "method", "--top", "400", "--dataset", "d.jsonl", "--json")
    path.write_text(here(capsys, asked).out)
    candidates: list[dict[str, Any]] = json.loads(path.read_text())["candidates"]
    return candidates


def test_planned_where_the_method_may_be_altered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: Said = here(capsys, ("plan", *ASKED, "--allow", "numerics"))
    assert said.code == 3
    assert "--method lora" in said.out
    said = here(capsys, ("plan", *ASKED, "--allow", "numerics,method"))
    assert said.code == 0
    assert "lora instead of full, sft)" in said.out.splitlines()[0]
    assert "--method" not in said.out


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_written_as_the_method_that_was_chosen(method: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranked = kept(capsys, home / "kept.json", *ASKED)
    place = next(i for i, c in enumerate(ranked, 1) if c["choice"]["method"] == method)
    job, plan, script = written(capsys, home / "run", "kept.json", "--candidate", str(place))
    assert job["method"] == method
    assert "LORA = LoraConfig(" in script
    assert ("BitsAndBytesConfig" in script) == (method == "qlora")
    assert (plan["job"]["method"], plan["job"]["origin"]["method"]) == (method, "planner")
    assert (plan["best"]["choice"], plan["best"]["alters"]) == (ranked[place - 1]["choice"], "method")
    assert plan["best"]["memory"]["device_bytes"] == ranked[place - 1]["memory"]["device_bytes"]
    assert plan["architecture"]["parameters"]["trainable"] == 358_994_944
    assert describe(home / "run")["method"] == method
    # The run's own plan holds, and writes the same run again.
    assert here(capsys, ("plan", "--against", "run/plan.json")).code == 0
    again = written(capsys, home / "again", "run/plan.json")
    assert (again[0], again[1]["best"], again[2]) == (job, plan["best"], script)


def test_a_plan_that_was_kept_is_written_as_its_method(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranked = kept(capsys, home / "kept.json", *ASKED)
    assert json.loads((home / "kept.json").read_text())["job"]["method"] == "full"
    job, plan, script = written(capsys, home / "run", "kept.json")
    direct = written(capsys, home / "direct", *ASKED, "--allow", "method", "--dataset", "d.jsonl")
    assert job["method"] == plan["best"]["choice"]["method"] == ranked[0]["choice"]["method"]
    assert (job, script) == (direct[0], direct[2])
    assert (plan["job"]["method"], plan["best"]["choice"]) == (job["method"], direct[1]["best"]["choice"])


def test_full_training_that_fits_is_written_as_that(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranked = kept(capsys, home / "kept.json", "Qwen/Qwen3-0.6B", *ASKED[1:])
    words = ("Qwen/Qwen3-0.6B", *ASKED[1:], "--allow", "method", "--dataset", "d.jsonl")
    job, plan, script = written(capsys, home / "full", *words)
    assert job["method"] == plan["job"]["method"] == "full"
    assert plan["architecture"]["parameters"]["trainable"] == plan["architecture"]["parameters"]["total"]
    assert "LoraConfig" not in script
    place = next(i for i, c in enumerate(ranked, 1) if c["choice"]["method"] == "lora")
    job, plan, script = written(capsys, home / "lora", "kept.json", "--candidate", str(place))
    assert job["method"] == plan["job"]["method"] == "lora"
    assert plan["architecture"]["parameters"]["trainable"] < plan["architecture"]["parameters"]["total"] / 50
    assert "LORA = LoraConfig(" in script


def test_ranked_cards_say_the_method(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ("plan", MODEL, "--cards", "H100-80GB", "--count", "1", "--allow", "method"))
    assert said.code == 0
    assert "lora; recompute every_4" in said.out


def test_the_ledger_stays_with_the_method_that_is_given(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, ("ledger", *ASKED, "--allow", "method", "--json"))
    assert json.loads(said.out)["choice"]["method"] == "full"
    assert said.code == 3
