"""Evaluation: what a job may say, what is written for it, and one real run that evaluates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.run_text.run_spec import evaluation_job
from launcher.run_text.training_script import render_training_script
from planner.job import Job
from tests.launcher.run_specs import make_spec
from tests.launcher.test_launch_command import flags, read, trlfit


def held_out(**data: Any) -> tuple[str | None, str]:
    found = evaluation_job(Job.model_validate({"model": "m", "data": data}))
    assert found is not None
    return found.data.dataset, found.data.split


def test_which_data_is_meant() -> None:
    assert held_out(dataset="a/b", eval_split="validation") == ("a/b", "validation")
    assert held_out(dataset="a/b", eval_dataset="c/d") == ("c/d", "test")
    assert held_out(dataset="a.jsonl", eval_dataset="b.jsonl") == ("b.jsonl", "train")
    assert held_out(dataset="a.jsonl", split="train[:90%]", eval_split="train[90%:]") == ("a.jsonl", "train[90%:]")
    assert evaluation_job(Job.model_validate({"model": "m", "data": {"dataset": "a/b"}})) is None


def test_training_data_is_no_evaluation_data() -> None:
    with pytest.raises(UsageError, match=r"data\.eval_split train is what the run trains on"):
        held_out(dataset="a/b", eval_split="train")
    with pytest.raises(UsageError, match="is what the run trains on"):
        held_out(dataset="a.jsonl", eval_dataset="a.jsonl")


def script(trl: dict[str, Any], trainer: str = "sft") -> str:
    data = {"dataset": "/data/train.jsonl", "eval_dataset": "org/other", "eval_split": "validation"}
    return render_training_script(make_spec(job={"data": data, "trl": trl, "trainer": trainer}))


def test_the_script_evaluates_as_many_rows_as_it_trains_on() -> None:
    text = script({})
    assert 'EVAL_DATASET = "org/other"' in text
    assert 'eval_dataset = load_dataset(EVAL_DATASET, split="validation")' in text
    assert "eval_dataset=eval_dataset," in text
    assert 'eval_strategy="epoch",' in text
    rows = {line.strip() for line in text.splitlines() if "_batch_size=" in line}
    trained = next(row for row in rows if row.startswith("per_device_train"))
    assert trained.replace("train", "eval") in rows


def test_own_settings_win() -> None:
    text = script({"eval_steps": 50, "per_device_eval_batch_size": 64})
    assert 'eval_strategy="steps",' in text
    assert "eval_steps=50," in text
    assert "per_device_eval_batch_size=64," in text


def test_evaluation_by_generation_is_refused() -> None:
    with pytest.raises(UsageError, match="evaluation of grpo generates, which no plan counts"):
        script({"reward_funcs": ["distinct_words"]}, "grpo")


@pytest.mark.launch
def test_a_run_that_evaluates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ["--split", "train[:80%]", "--eval-split", "train[80%:]", "--trl", "eval_steps=2"]
    done = trlfit(tmp_path, "launch", *flags("qwen3", folder, steps=4), *more)
    assert done.returncode == 0, done.stderr
    assert "evaluation data: " in done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if row["event"] == "evaluation"]
    assert [row["step"] for row in evaluated] == [2, 4]
    assert 0 < evaluated[1]["loss"] < evaluated[0]["loss"]
    assert rows[-1]["peak_rss_bytes"] >= evaluated[-1]["peak_rss_bytes"]
    phases = [phase["name"] for phase in read(folder / "plan.json")["best"]["memory"]["phases"]]
    assert phases == ["load", "forward", "loss", "backward", "step", "evaluate", "save"]
    assert read(folder / "outcome.json")["seen"]["last_step"] == 4
