"""Every phase of a step on two gloo ranks against the plan of two H100: not only the highest.

The ranks are those of a probe, run by the shim that `test_sharded_runs.py` trains with; all storages are counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.evidence.measured_ranks import RankRooms, ask_ranks, ranks_request
from launcher.planning import plan_inputs
from planner.job import Job
from planner.measured.probes import PHASES
from planner.memory.zero3_gathers import ZERO3_PERSISTENT_ELEMENTS, ZERO3_PREFETCH_ELEMENTS
from planner.planning import make_plan
from planner.units import GIB
from tests.launcher.warm_python import warm_python, warm_variables

pytestmark = pytest.mark.launch

CPU_RANKS = Path(__file__).with_name("cpu_ranks")
SEQ_LEN, LAYERS = 128, 8
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
"""6.4 million parameters, the head tied. Matrices of the MLP are above stage 3's 100,000, those of attention below."""
OUTSIDE = ("context", "slack")
"""Parts of a phase that no allocator counts."""


class Seen(NamedTuple):
    """Bytes by phase, and what was written for DeepSpeed."""

    predicted: dict[str, dict[str, int]]
    peaks: list[dict[str, int]]
    written: dict[str, Any]


def seen_by_two(place: Path, sharding: str, method: Any, *, tied: bool) -> Seen:
    (place / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    pins = {"gpus": "2", "sharding": sharding, "recompute": "none", "loss_path": "fused"}
    job = Job(model=str(place), seq_len=SEQ_LEN, global_batch=2, machine="2xH100-80GB", method=method, pins=pins)
    inputs = plan_inputs(job, {}, None, 1, trace=False)
    outcome = make_plan(inputs)
    assert outcome.best is not None
    choice, memory = outcome.best.choice, outcome.problem_of(outcome.best).judge.memory
    rooms = RankRooms(device="cpu", cards=(), memory_bytes=(4 * GIB, 4 * GIB), used_bytes=(0, 0), environment={})
    cells = [{"layers": LAYERS, "sequence": SEQ_LEN}]
    request = ranks_request(inputs, choice, rooms, cells, limit_s=300)
    shim = {"PYTHONPATH": str(CPU_RANKS), "TRLFIT_TEST_CPU_RANKS": str(place / "seen.json")}
    answer = ask_ranks(request, python=warm_python(), limit_s=300, environment={**warm_variables(), **shim})
    (cell,) = answer["cells"]
    predicted = {
        phase.name: {part: size for part, size in phase.parts.items() if part not in OUTSIDE}
        for phase in memory.frame(choice).phases(1, 1)
    }
    written = json.loads(request["files"].get("deepspeed.json", "{}")).get("zero_optimization", {})
    return Seen(predicted, [rank["peaks"] for rank in cell["ranks"]], written)


@pytest.mark.parametrize(
    ("sharding", "method", "tied"),
    [
        ("zero1", "full", True),
        ("zero2", "full", True),
        ("zero3", "full", True),
        ("zero3", "full", False),
        ("zero3", "lora", True),
        ("fsdp", "full", True),
        ("ddp", "full", True),
    ],
)
def test_every_phase_holds_what_was_predicted(
    sharding: str, method: Any, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = seen_by_two(tmp_path, sharding, method, tied=tied)
    for phase in PHASES:
        said = sum(seen.predicted[phase].values())
        for peaks in seen.peaks:
            assert peaks[phase] == pytest.approx(said, rel=0.02), phase
    if sharding == "zero3":
        assert seen.written["stage3_prefetch_bucket_size"] == ZERO3_PREFETCH_ELEMENTS
        assert seen.written["stage3_param_persistence_threshold"] == ZERO3_PERSISTENT_ELEMENTS
        # All matrices of the MLP are one prefetch, with a head of its own, in forward beside their copies.
        more = seen.predicted["forward"]["gather"] - seen.predicted["loss"]["gather"]
        assert more == 2 * (LAYERS * 3 * 256 * 768 + (0 if tied else 512 * 256))
