"""Replaying cases from the command line, and what the accuracy page says of other estimators."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy_cases import BadCases, default_cases, read_cases
from benchmarks.accuracy_page import evaluation
from benchmarks.accuracy_peers import peer_lines, peers_table
from tests.planner.replay import DATA, replay, rows

ROOT = Path(__file__).resolve().parents[2]
RECORDED = "trl-6859-Qwen3-8B"


def accuracy(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/accuracy.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def recorded(**changes: Any) -> dict[str, Any]:
    """A measured row under another name, so that no reading is meant for it."""
    row = next(row for row in rows("measured") if row["id"] == RECORDED)
    return json.loads(json.dumps(row)) | {"id": "mine"} | changes


def written(folder: Path, *found: object) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in found))
    return path


def test_the_recorded_files_are_cases_like_any_other() -> None:
    given = read_cases(DATA / f"{name}.jsonl" for name in ("traced", "traced_fsdp", "traced_fsdp_more", "measured"))
    assert (len(given.traced), len(given.sharded), len(given.measured)) == (43, 130, 70)
    known = default_cases()
    for kind in ("traced", "sharded", "measured"):
        assert [row["id"] for row in getattr(given, kind)] == [row["id"] for row in getattr(known, kind)]


def test_cases_of_ones_own(tmp_path: Path) -> None:
    """Qwen3-8B, 2,048 tokens on one H100: 61.1 GiB were measured, 8 bytes for each of 8,190,735,360 parameters."""
    done = accuracy(str(written(tmp_path, recorded())))
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mine ")]
    size, unit, *errors = line.split()[1:]
    assert (size, unit, errors[1::2]) == ("65.61", "GB", ["%"] * 3)
    assert all(abs(float(error)) <= 0.3 for error in errors[::2])
    assert "whole models" not in done.stdout


def test_a_model_may_be_stated(tmp_path: Path) -> None:
    config = next(row for row in rows("traced") if row["id"].startswith("llama"))["config"]
    row = recorded(config=config)
    row["job"]["model"] = "a model of mine"
    (found,) = read_cases([written(tmp_path, row)]).measured
    assert replay(found).memory.allocated_bytes < 30e9  # 4 layers


def test_padding_makes_a_mask(tmp_path: Path) -> None:
    """Two rows of 8,192 tokens: at least a byte for each of 2 x 8,192 x 8,192 pairs."""
    row = recorded()
    row["job"] |= {"seq_len": 8192}
    row["job"]["pins"] |= {"micro_batch": 2, "recompute": "none"}
    plain, padded = (
        replay(read_cases([written(tmp_path, row | {"padded": said})]).measured[0]) for said in (False, True)
    )
    assert padded.memory.allocated_bytes - plain.memory.allocated_bytes >= 2 * 8192 * 8192


def test_hybrid_sharding_states_its_sizes(tmp_path: Path) -> None:
    row = recorded()
    row["job"]["machine"] = "8xH100-80GB"
    row["job"]["pins"] |= {"sharding": "hsdp", "dp_shard": 4, "dp_replicate": 2}
    (found,) = read_cases([written(tmp_path, row)]).measured
    assert (replay(found).choice.dp_shard, replay(found).choice.dp_replicate) == (4, 2)
    row["job"]["pins"]["dp_shard"] = 2
    with pytest.raises(BadCases, match="sizes multiply to 4 GPUs; the machine has 8"):
        read_cases([written(tmp_path, row)])


def job(**changes: Any) -> dict[str, Any]:
    return recorded()["job"] | changes


def pins(**changes: Any) -> dict[str, Any]:
    return job(pins=recorded()["job"]["pins"] | changes)


BAD = [
    ("{", "not JSON: "),
    ("[1]", "not a JSON object"),
    ("[" * 100_000, "not JSON: "),
    ({"job": job()}, "id is missing or no text"),
    ({"id": "mine"}, "job with its pins is missing"),
    (recorded(measured=None), "neither measured nor the config of a trace"),
    (recorded(measured={}), "measured holds none of oom, bytes, max_seq_len, step_s, tokens_per_s_per_gpu"),
    (recorded(measured={"bytes": -1, "metric": "max_allocated"}), "measured bytes is no positive number"),
    (recorded(measured={"bytes": float("nan"), "metric": "max_allocated"}), "measured bytes is no positive number"),
    (
        recorded(measured={"bytes": 1, "metric": "rss"}),
        "measured metric is none of max_allocated, max_reserved, unknown",
    ),
    (recorded(job=job(seq_len="long")), "job seq_len: "),
    (recorded(job=job(batch=8)), "job batch: "),
    (recorded(job=job(machine="local")), "job machine 'local' is no NxCARD such as 8xH100-80GB"),
    (recorded(job=job(machine="1xVAX")), "VAX"),
    (recorded(job=job(model="nobody/nothing")), "nobody/nothing is not bundled"),
    (recorded(job=job(stack={"trl": 1.16})), "job stack is no object of versions"),
    (recorded(job=pins(colour="red")), "pin colour is not a knob"),
    (recorded(job=pins(recompute="some")), "pin recompute=some is not a value of this knob"),
    (recorded(job=pins(weights=None)), "pins lack weights"),
    (recorded(job=job(machine="3xH100-80GB") | {"pins": pins(sharding="zero3", sp=2)["pins"]}), "GPUs"),
    (recorded(config={"model_type": "bert"}), "bert"),
    (recorded(config=3), "config is no object"),
]


@pytest.mark.parametrize(("row", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_a_bad_row_is_one_line_with_its_place(row: object, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, recorded(), row)
    with pytest.raises(BadCases) as caught:
        read_cases([path])
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("none.jsonl", None), ("empty.jsonl", b"\n"), ("binary.jsonl", b"\xff")])
def test_a_bad_file_ends_with_2(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    done = accuracy(str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"accuracy: {path}: ")


def test_the_page_is_of_the_recorded_cases(tmp_path: Path) -> None:
    done = accuracy("--markdown", str(written(tmp_path, recorded())))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_peers_are_compared_on_the_rows_that_they_can_be_told() -> None:
    """Two published rows said 10 % too high and 30 % too low; of two failures one is called fitting."""
    found = evaluation()
    first, second = found.with_bytes(metric="max_allocated")[:2]
    failed = [run for run in found.runs["best"] if run.row["measured"].get("oom")][:2]
    capacity = failed[0].memory.capacity_bytes or 0
    said: dict[str, Any] = {
        first.row["id"]: {"guess": {"bytes": int(first.row["measured"]["bytes"] * 1.1)}},
        second.row["id"]: {"guess": {"bytes": int(second.row["measured"]["bytes"] * 0.7)}},
        failed[0].row["id"]: {"guess": {"bytes": capacity - 1}},
        failed[1].row["id"]: {"guess": {"bytes": capacity + 1}},
        found.with_bytes()[5].row["id"]: {"guess": {"cannot": "no LoRA"}},
    }
    peers = {"taken": {}, "peers": [{"name": "guess", "version": "1", "command": "guess", "counts": "x"}], "rows": said}
    published, traced = peers_table(found, peers)[2:]
    assert published.startswith("| guess 1 | published | 2 of 49 | 20.0 % | 30.0 % | 30.0 % | ")
    assert published.endswith("| 1 of 2 |")
    assert traced == "| guess 1 | traced | 0 of 43 | | | | | | | |"
    assert peer_lines(peers) == ["- **guess** (`guess`) counts x. Cannot express: no LoRA (1)."]
