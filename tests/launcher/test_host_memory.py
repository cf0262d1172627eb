"""Host memory of runs that were written for two H100, against the resident memory of two processes on this CPU.

There the card's memory is the host's, so what a rank holds is both; and no block is pinned, so tensors are compared.
What is measured is anonymous memory (psutil: resident less shared), which the system cannot drop. A model of 135
million parameters, stored in bf16; libraries that are imported after the first look come to 45 MB a rank, 80 under
DeepSpeed, of 0.85 to 1.7 GB that are held.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.inputs.model_config import resolve_architecture
from planner.choice import Choice
from planner.memory.blocks import parameter_blocks
from planner.memory.host import HostPart, Node, host_parts, largest_parameter_bytes
from planner.memory.phases import held_bytes
from planner.memory.states import role_table
from tests.launcher.tiny_models import EXAMPLES, ROOT, build

pytestmark = pytest.mark.launch

CPU_RANKS = Path(__file__).with_name("cpu_ranks")
SIZES = ("--hidden", "1024", "--intermediate", "4096", "--layers", "8", "--heads", "8", "--kv-heads", "8")
LATE_BYTES = 90e6
"""Imports of a rank after it first looked at its memory."""


@functools.cache
def workplace() -> Path:
    """A model in bf16 that TRL loads in fp32, and some rows."""
    folder = Path(tempfile.mkdtemp(prefix="resident-"))
    build(folder / "model", *SIZES, "--vocab", "512", "--dtype", "bfloat16")
    words = (EXAMPLES / "train.jsonl").read_text(encoding="utf-8").split()
    rows = [{"text": " ".join(words[start : start + 200])} for start in range(0, 40 * 16, 40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Any:
    yield
    shutil.rmtree(workplace(), ignore_errors=True)


class Rank(NamedTuple):
    """Anonymous bytes of one rank, above what it held before it loaded anything."""

    rest: int
    """When the second step begins: states are there, nothing is at work."""
    load: int
    save: int


class Run(NamedTuple):
    """What was predicted of each rank, and what was seen."""

    card_bytes: float
    """States that rest on the card."""
    host: tuple[HostPart, ...]
    """Of both ranks."""
    ranks: list[Rank]

    def of(self, when: str) -> list[int]:
        """Tensors of the host's parts of one time, both ranks together."""
        return [part.tensor_bytes for part in self.host if part.when == when]


@functools.cache
def trained(sharding: str, *offload: str) -> Run:
    """Two steps and a checkpoint of a run that was written for two H100."""
    place = workplace()
    folder = Path(tempfile.mkdtemp(dir=place)) / "run"
    seen = folder.with_name("seen.json")
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "TRLFIT_CACHE": str(place / "cache"), "HF_DATASETS_CACHE": str(place / "datasets"),
        # glibc gives every tensor back to the system when it is freed.
        "MALLOC_MMAP_THRESHOLD_": "131072",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "tui", "write", "model", "--dataset", "rows.jsonl", "--machine", "2xH100-80GB",
        "--seq-len", "8", "--global-batch", "2", "--trl", "max_steps=2", "--trl", "save_steps=2", "--no-check",
        "--no-trace", "-o", str(folder), "--pin", "gpus=2", "--pin", "recompute=full", "--pin", f"sharding={sharding}",
        "--pin", f"offload={','.join(offload)}", "--pin", "weights=fp32", "--pin", "micro_batch=1",
    ]  # fmt: skip
    written = subprocess.run(
        command, cwd=place, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert written.returncode == 0, written.stderr
    environment |= {
        "PYTHONPATH": str(CPU_RANKS), "TRLFIT_TEST_CPU_RANKS": str(seen), "TRLFIT_TEST_RESIDENT": str(seen),
    }  # fmt: skip
    run = subprocess.run(["bash", "command.sh"], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    ranks: list[Rank] = []
    for rank in range(2):
        told = json.loads(Path(f"{seen}.{rank}").read_text(encoding="utf-8"))
        ranks.append(Rank(told["rest"][1], told["highest"]["load"], told["highest"]["save"]))
    choice = Choice.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8"))["best"]["choice"])
    shutil.rmtree(folder)
    architecture = resolve_architecture(str(place / "model"))
    blocks, roles = parameter_blocks(architecture, "full", 16, "all-linear"), role_table(choice, "nf4")
    held = held_bytes(blocks.total, roles)
    on_card = 0.0 if "params" in choice.offload else held.weights
    if "optimizer" not in choice.offload:
        on_card += held.master + held.moment1 + held.moment2
    on_card += largest_parameter_bytes(choice, architecture)
    if sharding == "zero3":
        on_card += 2 * blocks.total.trainable  # the bucket, which stays
    return Run(on_card, host_parts(choice, Node(ranks=2), architecture, blocks, held), ranks)


@pytest.mark.parametrize(
    ("sharding", "offload"),
    [("fsdp", ()), ("zero2", ("optimizer",)), ("zero3", ("optimizer", "params"))],
    ids=["fsdp", "zero2, optimizer", "zero3, optimizer and weights"],
)
def test_what_rests_between_steps(sharding: str, offload: tuple[str, ...]) -> None:
    run = trained(sharding, *offload)
    for rank in run.ranks:
        predicted = run.card_bytes + sum(run.of("train")) / 2
        assert predicted < rank.rest < predicted + LATE_BYTES


def test_every_rank_of_fsdp_loads_all_weights() -> None:
    """accelerate.yaml asks for loading on the first rank alone, and transformers 5 reads them on every rank."""
    run = trained("fsdp")
    (weights,) = run.of("load")
    assert weights == 2 * 4 * resolve_architecture(str(workplace() / "model")).num_parameters
    shard = weights / 4  # fp32, over two ranks, made from the whole while that is still there
    for rank in run.ranks:
        assert weights / 2 + shard < rank.load < weights / 2 + shard + LATE_BYTES


def test_the_first_rank_gathers_what_fsdp_saves() -> None:
    run = trained("fsdp")
    first, second = (rank.save - rank.rest for rank in run.ranks)
    assert first == pytest.approx(max(run.of("save")), rel=0.05)
    assert second < LATE_BYTES


def test_every_rank_of_zero2_copies_the_model_to_save_it() -> None:
    run = trained("zero2", "optimizer")
    (copies,) = run.of("save")
    for rank in run.ranks:
        # A copy goes when Python collects it: that of the last checkpoint may be there when the model is saved.
        assert 0.95 * copies / 2 < rank.save - rank.rest < 2.05 * copies / 2


def test_the_first_rank_of_zero3_gathers_16_bit_weights() -> None:
    run = trained("zero3", "optimizer", "params")
    (gathered,) = run.of("save")
    first, second = (rank.save - rank.rest for rank in run.ranks)
    assert first == pytest.approx(gathered, rel=0.1)
    assert second < LATE_BYTES
