"""A plan of another method than the job's, on the screens: its ledger, its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.tui.test_app import session

JOB = (
    "model: deepseek-ai/DeepSeek-V2-Lite\nmachine: 1xH100-80GB\nallow: [numerics, method]\n"
    'data: {dataset: d.jsonl}\nstack: {bitsandbytes: "0.50.0"}\n'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data, and a history of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "history"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


async def test_every_plan_is_shown_by_its_own_method() -> None:
    async with session(job=JOB) as (app, _):
        known = app.known
        assert known.candidates[0]["alters"] == "method"
        methods: set[str] = set()
        for place, candidate in enumerate(known.candidates):
            known.chosen = place
            method = candidate["choice"]["method"]
            methods.add(method)
            ledger = known.ledger()
            assert ledger is not None
            assert ledger["choice"] == candidate["choice"]
            assert ledger["job"]["method"] == method
            assert ledger["memory"] == candidate["memory"]
            files, problem = known.files()
            if not candidate["fits"]:
                assert problem == "the chosen plan does not fit"
                continue
            assert yaml.safe_load(files["job.yaml"])["method"] == method
            assert ("LoraConfig" in files["train.py"]) == (method != "full")
        assert {"full"} < methods
