"""Rows of local data are counted where a line is a row, and not guessed elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.inputs import data_rows
from launcher.inputs.data_rows import count_rows


def test_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b\\n"}\r\n  {"text": "c"}', encoding="utf-8")
    assert count_rows(str(path)) == 3
    path.rename(tmp_path / "train.json")
    assert count_rows(str(tmp_path / "train.json")) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", '[{"text": "a"},\n {"text": "b"}]'),
        ("pretty.json", '{\n "text": "a"\n}'),
        ("table.csv", "text\na\n"),
        ("empty.jsonl", "\n"),
    ],
)
def test_anything_else_is_not_known(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert count_rows(str(tmp_path / name)) is None


@pytest.mark.parametrize("dataset", [None, "trl-lib/Capybara", "missing.jsonl", "~nobody-of-that-name/x.jsonl"])
def test_what_is_no_file_here(dataset: str | None) -> None:
    assert count_rows(dataset) is None


def test_large_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    monkeypatch.setattr(data_rows, "LARGEST_BYTES", 3)
    assert count_rows(str(path)) is None
