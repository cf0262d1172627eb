"""The line of a plan that says what the whole run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import cli

PLAN = ("plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB")


def line(capsys: pytest.CaptureFixture[str], *words: str) -> str | None:
    assert cli.main([*PLAN, *words]) == 0
    whole = capsys.readouterr().out.replace("\n" + " " * 10, " ")
    return next((x for x in whole.splitlines() if x.startswith("  run ")), None)


def test_a_run_of_known_steps_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "a"}\n' * 1000, encoding="utf-8")
    found = line(capsys, "--dataset", str(data), "--price-per-hour", "2.5")
    assert found is not None
    # 1,000 rows in batches of 8, three epochs.
    assert found.startswith("  run     375 steps in ")
    assert [word in found for word in ("GPU-hours", "at most", "kWh", "cost")] == [True] * 4


def test_a_price_without_rows_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    found = line(capsys, "--price-per-hour", "2.5")
    assert found is not None
    assert "not known" in found and "max_steps" in found


def test_nobody_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert line(capsys) is None
