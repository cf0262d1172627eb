from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import EnvironmentLacks, UsageError
from launcher.writing.data import DataReport, check_data
from planner.job import Job
from tests.launcher.tiny_models import EXAMPLES, templateless_model, tiny_model
from tests.launcher.warm_python import warm_python, warm_variables


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in warm_variables().items():
        monkeypatch.setenv(name, value)


USER = {"role": "user", "content": "What is a quill?"}
GOOD = {"role": "assistant", "content": "A feather."}
BAD = {"role": "assistant", "content": "A stone."}


def check(
    dataset: Path | str,
    trainer: str = "sft",
    *,
    model: Path | str = "nowhere",
    limit_rows: int = 200,
    python: str | None = "",
    **fields: Any,
) -> DataReport:
    """The check in a Python that need not import the libraries; None is the one that there is."""
    data = {"dataset": str(dataset)}
    job = Job.model_validate({"model": "any", "trainer": trainer, "data": data, **fields})
    started = warm_python() if python == "" else python
    return check_data(job, python=started, model_source=str(model), limit_rows=limit_rows)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- what is wrong, before any tokenizer is loaded ----


def gibberish(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 100)


def latin(path: Path) -> None:
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')


def huge_line(path: Path) -> None:
    path.write_bytes(b'{"text": "' + b"x" * (64 * 2**20) + b'"}\n')


WRONG: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("missing", "a.jsonl", lambda p: None, "does not exist"),
    ("empty", "a.jsonl", lambda p: p.write_text(""), "is empty"),
    ("blank", "a.jsonl", lambda p: p.write_text("\n  \n"), "holds no rows"),
    ("folder", "a.jsonl", lambda p: p.mkdir(), "is a folder; name one"),
    ("binary", "a.jsonl", gibberish, "is binary, not JSON"),
    ("latin-1", "a.jsonl", latin, "line 2 is not UTF-8 text"),
    ("long line", "a.jsonl", huge_line, "line 1 is longer than 64 MiB"),
    (
        "not JSON",
        "a.jsonl",
        lambda p: p.write_text('{"text": "a"}\n\n{"text": oops}\n'),
        "is not JSON at line 3, column 10",
    ),
    ("list on a line", "a.jsonl", lambda p: p.write_text('{"text": "a"}\n3\n'), "line 2 is of type int"),
    ("bad list", "a.json", lambda p: p.write_text('[\n{"text": "a"},\n]'), "not JSON at line"),
    ("list of lists", "a.json", lambda p: p.write_text("[[1]]"), "item 1 is of type list"),
    ("no list", "a.json", lambda p: p.write_text("[]"), "holds no rows"),
    (
        "nested",
        "a.jsonl",
        lambda p: p.write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "nested too deeply",
    ),
    ("other columns", "a.jsonl", lambda p: write(p, {"txt": "a"}), "columns `txt`; sft needs `text`"),
    ("prompt alone", "a.jsonl", lambda p: write(p, {"prompt": "a", "text": "b"}), "sft needs"),
    (
        "number",
        "a.jsonl",
        lambda p: write(p, {"text": "a"}, {"text": 3}),
        "row 2: column `text` is of type int, where text is needed",
    ),
    ("null", "a.jsonl", lambda p: write(p, {"text": "a"}, {}), "row 2: column `text` is missing"),
    (
        "broken turn",
        "a.jsonl",
        lambda p: write(p, {"messages": [USER]}, {"messages": [{"who": "me"}]}),
        "row 2: column `messages` is of type list, where a list of",
    ),
    ("not parquet", "a.parquet", lambda p: p.write_text("hello"), "is not Parquet"),
]


@pytest.mark.parametrize(("name", "make", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_data_is_one_line(name: str, make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(UsageError) as error:
        check(path)
    text = str(error.value)
    assert message in text and str(path) in text and "\n" not in text and len(text) < 400


@pytest.mark.parametrize(
    ("trainer", "row", "message"),
    [
        ("dpo", {"text": "a"}, "dpo needs `chosen` and `rejected`"),
        ("reward", {"chosen": "a"}, "reward needs `chosen` and `rejected`"),
        ("kto", {"prompt": "a", "completion": "b"}, "kto needs `prompt`, `completion` and `label`"),
        ("grpo", {"messages": [USER]}, "grpo needs `prompt`"),
        (
            "kto",
            {"prompt": "a", "completion": "b", "label": "yes"},
            "column `label` must be true or false",
        ),
    ],
)
def test_data_of_another_trainer(trainer: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        check(write(tmp_path / "a.jsonl", row), trainer)


def test_a_bad_line_far_behind_the_sample_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"text": "x"}] * 500)
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UsageError, match="not JSON at line 501"):
        check(path, limit_rows=10)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a"})
    path.chmod(0)
    with pytest.raises(EnvironmentLacks, match="no permission"):
        check(path)


def test_unknown_python(tmp_path: Path) -> None:
    job = Job.model_validate({"model": "m", "data": {"dataset": str(tmp_path / "a.jsonl")}})
    with pytest.raises(EnvironmentLacks, match="cannot start the training Python"):
        check_data(job, python=str(tmp_path / "no python"), model_source="m")


def test_python_without_the_libraries(tmp_path: Path) -> None:
    """A bare interpreter (-S leaves out site-packages) lacks datasets, and says which one it is."""
    python = tmp_path / "bare"
    python.write_text('#!/bin/sh\nexec /usr/bin/env python3 -S -E "$@"\n')
    python.chmod(0o755)
    path = write(tmp_path / "a.csv", {"text": "a"})
    job = Job.model_validate({"model": "m", "data": {"dataset": str(path)}})
    with pytest.raises(EnvironmentLacks, match="has no datasets; install it there"):
        check_data(job, python=str(python), model_source="m")


@pytest.mark.stack
def test_hub_data_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentLacks, match="not in the cache and HF_HUB_OFFLINE is set"):
        check("nobody/nothing")


# ---- what is right ----


@pytest.mark.stack
def test_example_text() -> None:
    report = check(EXAMPLES / "train.jsonl", model=tiny_model(), seq_len=512, python=None)
    assert report.format == "text" and not report.conversational
    assert report.columns == ("text",)
    assert report.num_rows == 353 and report.sampled_rows == 200 == report.num_sequences
    assert report.sample_text.startswith("Chapter 1\n\nSir Walter Elliot")
    assert report.vocab == 512
    assert 0 < report.tokens_p50 <= report.tokens_p99 <= report.tokens_max
    assert 0 < report.over_seq_len < 200
    assert "are longer than seq_len" in report.notes[0]
    assert json.loads(json.dumps(report.to_json()))["num_rows"] == 353


@pytest.mark.stack
def test_token_counts_by_hand(tmp_path: Path) -> None:
    """Bytes 0x01 are one token each in a byte-level vocabulary: nothing was merged with them."""
    rows = [{"text": "\x01" * length} for length in range(1, 101)]
    report = check(write(tmp_path / "a.jsonl", *rows), model=tiny_model(), seq_len=96)
    # Each sequence ends with the end-of-text token that TRL adds.
    assert report.lengths == tuple(range(2, 102))
    assert (report.tokens_p50, report.tokens_p95, report.tokens_p99, report.tokens_max) == (51, 96, 100, 101)
    assert report.over_seq_len == 5
    assert report.notes == (
        "5 of 100 sampled sequences (5%) are longer than seq_len and will be cut; the longest has 101 tokens",
    )


@pytest.mark.stack
def test_chat() -> None:
    report = check(EXAMPLES / "chat.jsonl", model=tiny_model())
    assert report.format == "messages" and report.conversational and report.has_chat_template
    assert report.sample_text.startswith("<|im_start|>user\nWhat does the noun")
    assert report.notes == ()


@pytest.mark.stack
def test_chat_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template; train on text, or add trl"):
        check(EXAMPLES / "chat.jsonl", model=templateless_model())
    template = tiny_model() / "chat_template.jinja"
    given = check(
        EXAMPLES / "chat.jsonl",
        model=templateless_model(),
        trl={"chat_template_path": str(template)},
    )
    assert given.has_chat_template


FORMATS = [
    ("sft", {"prompt": "a", "completion": "b"}, "prompt-completion", False, 1),
    ("sft", {"prompt": [USER], "completion": [GOOD]}, "prompt-completion", True, 1),
    ("sft", {"conversations": [{"from": "human", "value": "a"}]}, "conversations", True, 1),
    ("sft", {"input_ids": [1, 2, 3]}, "tokenised", False, 1),
    ("dpo", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "preference", True, 2),
    ("dpo", {"chosen": "ab", "rejected": "ac"}, "implicit-prompt preference", False, 2),
    ("reward", {"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False, 2),
    ("kto", {"prompt": "a", "completion": "b", "label": True}, "unpaired preference", False, 1),
    ("grpo", {"prompt": [USER], "answer": "x"}, "prompt-only", True, 1),
]


@pytest.mark.stack
@pytest.mark.parametrize(("trainer", "row", "kind", "chat", "sequences"), FORMATS)
def test_formats(trainer: str, row: dict[str, Any], kind: str, chat: bool, sequences: int, tmp_path: Path) -> None:
    report = check(write(tmp_path / "a.jsonl", row), trainer, model=tiny_model())
    assert (report.format, report.conversational) == (kind, chat)
    assert report.num_sequences == sequences
    if kind == "tokenised":
        assert report.tokens_max == 3
    if trainer == "grpo":
        assert report.sample_text.endswith("<|im_start|>assistant\n")


@pytest.mark.stack
def test_other_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"story": "one"}, {"story": "two"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("story\none\ntwo\n")
    for name, count in (("a.parquet", 2), ("a.json", 2), ("a.csv", None)):
        report = check(tmp_path / name, model=tiny_model(), trl={"dataset_text_field": "story"})
        assert (report.num_rows, report.sampled_rows) == (count, 2)
        assert report.sample_text == "one<|im_end|>"


@pytest.mark.stack
def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match=r"tokenizer of .* cannot be loaded"):
        check(EXAMPLES / "train.jsonl", model=tmp_path)


@pytest.mark.stack
def test_a_template_that_fails(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('turns must alternate') }}")
    with pytest.raises(UsageError, match="row 1: the chat template fails: turns must alternate"):
        check(
            EXAMPLES / "chat.jsonl",
            model=templateless_model(),
            trl={"chat_template_path": str(tmp_path / "t.jinja")},
        )


def test_examples_say_where_they_are_from() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.jsonl"):
        count = len(path.read_text().splitlines())
        assert f"`{path.name}` | {count} |" in text
        assert 10_000 < path.stat().st_size < 1_000_000
    assert "public domain" in text
