"""The model against traces of one rank of FSDP2, as accelerate wraps the real classes.

20 traces of an earlier loop (tied Qwen), and those of benchmarks/whole_sharded.py: six further families, tied and not,
dense and mixed, over 2 to 64 ranks, with and without resharding, replicas of a shard group, and all at rest on hosts.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.planner.replay import (
    Row,
    Tier,
    choice_of,
    quantile,
    rows,
    traced_evidence,
    traced_model,
    traced_peak,
)
from tests.planner.replay_more import forward_bytes

ROOT = Path(__file__).resolve().parents[2]
EARLIER, MORE = rows("traced_fsdp"), rows("traced_fsdp_more")
EVERY = (*EARLIER, *MORE)
OLDER = [row for row in MORE if row["job"]["stack"]["accelerate"] == "1.12.0"]
LIVE = "llama-3.2-1b-l4/w8-bf16-full-none-fulllogits-sdpa-1x2048-noreshard"


def pin(row: Row, knob: str) -> Any:
    return row["job"]["pins"].get(knob)


def error(row: Row, tier: Tier = "best") -> float:
    seen: int = row["allocated_bytes"]
    return traced_peak(row, tier) / seen - 1


def report(found: list[Row]) -> str:
    return "\n".join(f"{error(row):+.2%} {row['id']}" for row in sorted(found, key=lambda row: -abs(error(row))))


def test_the_rows_cover_what_they_should() -> None:
    assert (len(EARLIER), len(MORE), len(OLDER)) == (20, 110, 10)
    assert {row["job"]["stack"]["accelerate"] for row in EVERY} == {"1.15.0", "1.12.0"}
    families = {row["config"]["model_type"] for row in MORE}
    assert len(families) == 6 and not families & {row["config"]["model_type"] for row in EARLIER}
    assert {row["config"]["num_hidden_layers"] for row in MORE if row["id"].startswith("llama")} == {4, 8}
    assert {pin(row, "dp_shard") for row in MORE} == {2, 4, 8, 64}
    assert {pin(row, "sharding") for row in MORE} == {"fsdp", "fsdp_no_reshard", "hsdp"}
    assert {(row["job"]["method"], pin(row, "weights")) for row in MORE} == {
        ("full", "bf16"),
        ("full", "fp32"),
        ("lora", "bf16"),
        ("lora", "fp32"),
    }
    assert {(pin(row, "recompute"), pin(row, "loss_path")) for row in MORE} == {
        ("none", "fused"),
        ("none", "full_logits"),
        ("full", "fused"),
    }
    assert sum(pin(row, "sharding") == "hsdp" for row in MORE) >= 10
    assert sum(pin(row, "offload") == ["optimizer", "params"] for row in MORE) == 10


@pytest.mark.parametrize("row", MORE, ids=lambda row: row["id"])
def test_parameters_are_exact(row: Row) -> None:
    blocks = traced_model(row).blocks(choice_of(row).method)
    assert (blocks.num_parameters, blocks.total.trainable) == (row["params"], row["trainable"])


def test_every_row_is_priced_by_traces() -> None:
    assert {traced_evidence(row, "best") for row in EVERY} == {"traced"}


@pytest.mark.parametrize("tier", ["best", "probed"])
def test_peaks(tier: Tier) -> None:
    errors = [abs(error(row, tier)) for row in MORE]
    assert median(errors) <= 0.0005, report(list(MORE))
    assert quantile(errors, 0.95) <= 0.005, report(list(MORE))
    assert max(errors) <= 0.01, report(list(MORE))
    assert max(abs(error(row, tier)) for row in EARLIER) <= 0.002, report(list(EARLIER))


@pytest.mark.parametrize(
    "group",
    [
        lambda row: pin(row, "sharding"),
        lambda row: (row["job"]["method"], pin(row, "weights")),
        lambda row: pin(row, "loss_path"),
        lambda row: pin(row, "dp_shard"),
        lambda row: row["config"].get("tie_word_embeddings"),
        lambda row: row["config"]["model_type"],
    ],
)
def test_no_regime_hides_behind_the_median(group: Any) -> None:
    groups: dict[Any, list[float]] = {}
    for row in MORE:
        groups.setdefault(group(row), []).append(abs(error(row)))
    assert {key: max(errors) for key, errors in groups.items() if median(errors) > 0.004} == {}


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row["id"])
def test_states_at_rest(row: Row) -> None:
    """One rank's shards: fp32 where they train, as loaded where they are frozen.

    A mebibyte is left for rows that do not divide: an adapter's 16 rows over 64 ranks are one whole row on rank 0.
    """
    model, choice = traced_model(row), choice_of(row)
    assert choice.dp_shard == pin(row, "dp_shard")
    parts = model.estimate(choice).phases[1].parts
    states = sum(parts[role] for role in ("weights", "master", "moment1", "moment2"))
    # A mixture's adapters have a row of rank for every expert.
    padded = 2**20 * (2 if row["config"].get("num_experts") else 1)
    assert parts["weights"] == pytest.approx(row["at_rest_params_bytes"], rel=0.003, abs=padded)
    assert states == pytest.approx(row["at_rest_bytes"], rel=0.005, abs=padded)


def test_the_moments_before_backward() -> None:
    """No error of the forward is hidden behind a higher backward."""
    # An older accelerate gathers its root again when backward begins, which is planned with the loss.
    now = [row for row in MORE if row not in OLDER]
    errors = {row["id"]: forward_bytes(traced_model(row, "best"), row) / row["forward_peak_bytes"] - 1 for row in now}
    sizes = [abs(error) for error in errors.values()]
    assert median(sizes) <= 0.0005, errors
    assert quantile(sizes, 0.95) <= 0.006, errors
    assert max(sizes) <= 0.011, errors


@pytest.mark.stack
def test_a_live_trace_is_the_stored_row(tmp_path: Path) -> None:
    if importlib.metadata.version("accelerate") != "1.15.0":
        pytest.skip("rows are of accelerate 1.15")
    script, out = ROOT / "benchmarks" / "whole_sharded.py", tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, str(script), "--only", LIVE, "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (now,) = map(json.loads, out.read_text().splitlines())
    then = next(row for row in MORE if row["id"] == LIVE)
    assert {name: now[name] for name in now if name != "job"} == {name: then[name] for name in then if name != "job"}
