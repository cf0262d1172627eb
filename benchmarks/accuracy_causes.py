"""Causes: which rows of docs/accuracy.md miss, and why, with the numbers that say so."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy_tables import HEADLINE, Evaluation, percent
from planner.memory.device import CONTEXT_BYTES
from planner.units import GIB
from profiles.cards import find_card
from tests.planner.replay import Replay, Row, choice_of, measured_problem

WHOLE_STEPS = Path(__file__).with_name("results") / "whole_steps.json"
"""Written by benchmarks/whole_steps.py."""


def span(values: Iterable[float]) -> str:
    """``-17.6 % to -18.4 %``."""
    ordered = sorted(values, key=abs)
    return f"{percent(ordered[0], signed=True)} to {percent(ordered[-1], signed=True)}"


def _errors(runs: Iterable[Replay]) -> str:
    return span(run.error or 0.0 for run in runs)


def _allocated(found: Evaluation, *parts: str) -> list[Replay]:
    """Allocated rows whose id holds all of ``parts``."""
    return [r for r in found.with_bytes(metric="max_allocated") if all(part in r.row["id"] for part in parts)]


def _tokens(row: Row) -> int:
    """Tokens of one micro-batch on one rank."""
    choice = choice_of(row)
    return int(row["job"]["seq_len"]) * choice.micro_batch // (choice.cp * choice.sp)


def _surplus_kb(runs: Iterable[Replay]) -> str:
    """``16 to 33``: kilobytes per token that are predicted beyond what was seen."""
    found = [(r.predicted_bytes - r.row["measured"]["bytes"]) / _tokens(r.row) / 1000 for r in runs]
    return f"{min(found):.0f} to {max(found):.0f}"


def _missing_states(row: Row, error: float) -> float:
    """How many hidden states in the dtype of the weights an error is short by."""
    width = 4 if row["job"]["pins"]["weights"] == "fp32" and row["job"]["pins"]["sharding"] == "none" else 2
    return float(-error * row["allocated_bytes"] / (_tokens(row) * row["config"]["hidden_size"] * width))


def _between(values: Iterable[float]) -> str:
    """``1.8 to 2.0``."""
    found = [f"{value:.1f}" for value in sorted(values)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def traced_causes(found: Evaluation) -> list[str]:
    """Why traces of whole models and what is composed from traces of layers differ."""
    short = [(row, error) for row, error in found.traced["probed"] if error < -0.004]
    off = [(row, error) for row, error in found.sharded[HEADLINE] if abs(error) > 0.001]
    adapters, rotary = (
        [error for row, error in off if (row["job"]["method"] == "lora" and choice_of(row).dp_shard > 16) == padded]
        for padded in (True, False)
    )
    return [
        f"- **{len(short)} traces on one card are above what is composed** ({span(error for _, error in short)} after "
        f"a probe), by {_between(_missing_states(row, error) for row, error in short)} hidden states: the traces' loop "
        "still refers to the hidden states before and after the loss mask while backward runs. A trainer's function "
        "has returned by then, so they are not counted.",
        f"- **FSDP2**: {len(found.sharded[HEADLINE]) - len(off)} of {len(found.sharded[HEADLINE])} traces agree within "
        f"0.1 %. Adapters over 64 ranks ({span(adapters)}) are padded: 16 rows make 64, gathered and at rest. Of the "
        f"others ({span(rotary)}) most are OLMo-2, which hands every layer rotary tables in fp32; FSDP2 casts what "
        "enters a layer, and the layer keeps the copies, 512 bytes a token.",
    ]


def fms_causes(found: Evaluation) -> list[str]:
    """Which rows of foundation-model-stack miss, and why."""
    fused = [
        run
        for run in _allocated(found, "fms-liger")
        if run.memory.peak_phase == "backward" and _tokens(run.row) >= 8 * 4096
    ]
    one, several = (
        [r for r in _allocated(found, "fms-liger") if r.choice.method != "full" and r.single_gpu == single]
        for single in (True, False)
    )
    baseline = _allocated(found, "baseline-peft-bnb")
    return [
        f"- **Llama-3-8B, peak in backward** ({_errors(fused)} from 8 rows on): fused RMSNorm and RoPE kernels "
        "(foak-fast-kernels) keep less than the eager layers that are counted; predicted are "
        f"{_surplus_kb(fused)} kB a token too much, where one fp32 copy of the hidden state is 16.",
        f"- **LoRA and QLoRA under FSDP1** ({_errors(several)}, on one card {_errors(one)}): the same kernels. What "
        "FSDP1 adds is counted as torch runs it (`planner/memory/sharding.py`): the root stays whole, and a frozen "
        "layer that is recomputed keeps its input and the gradient of it until backward ends. The published runs grow "
        "by just that, 30 of 32 hidden states a token (`tests/planner/test_fsdp1.py`).",
        f"- **QLoRA `baseline-peft-bnb`** ({_errors(baseline)}): agrees once its source is read to the end; see the "
        "readings above.",
    ]


def other_causes(found: Evaluation) -> list[str]:
    """Which other rows miss, or were read in another way, and why."""
    blog, million, polled = (
        found.run(name) for name in ("hfblog-ulysses-32768-sp4", "trl-long-qwen8b-1m-8xh100", "acc-fsdp2-fixed")
    )
    reserved = found.with_bytes(metric="max_reserved")
    single = found.run("hfblog-ulysses-8192-sp1")
    sharing = found.run("trl-long-qwen4b-cp4-1m")

    def without(run: Replay) -> str:
        memory = measured_problem(run.row).judge.memory
        other = memory.estimate(replace(choice_of(run.row), mixed_precision="no")).allocated_bytes
        return percent(other / run.row["measured"]["bytes"] - 1, signed=True)

    return [
        f"- **`peft-mm` rows** ({_errors(reserved)}): reserved memory, predicted with the slack of runs without "
        "expandable segments, which written runs switch on.",
        f"- **`hfblog` rows** ({percent(single.error or 0, signed=True)}, {percent(blog.error or 0, signed=True)}): "
        "the source says neither which metric nor where the optimizer was. Both hold 8,192 tokens a card; with the "
        f"states that 16 bytes a parameter make, {_beyond_states(single)} GB are left of the one and "
        f"{_beyond_states(blog)} GB of the other, so no one account of activations fits both.",
        f"- **{million.row['id']}** ({percent(million.error or 0, signed=True)}): the example's own configuration is "
        "mixed precision bf16 under FSDP2, so trainable shards are fp32, 16 bytes per parameter. Pure bf16, as the row "
        f"assumes, would be {without(million)}. The source says neither unit nor metric: its 56.2 GB read as decimal "
        f"are {percent(million.predicted_bytes / 56.2e9 - 1, signed=True)} off in allocated and "
        f"{percent(million.memory.device_bytes / 56.2e9 - 1, signed=True)} in what the card shows. The other figure of "
        f"that guide without a unit, {sharing.row['id']}, fits as GiB ({percent(sharing.error or 0, signed=True)}).",
        f"- **{polled.row['id']}** ({percent(polled.error or 0, signed=True)}): read off a plot that was polled every "
        "10 ms. The peak is the sum of a tied embedding's two gradients, when backward ends; without that one kernel's "
        f"result, which a poll does not see, it is {percent(_without_sum(polled), signed=True)} off. The row names no "
        f"precision; the benchmark's script says bf16, and without it the error would be {without(polled)}.",
    ]


def _without_sum(run: Replay) -> float:
    """The error of a run whose peak has three gradients of a tied embedding, with two of them."""
    architecture = measured_problem(run.row).inputs.architecture
    table = 2 * architecture.vocab * architecture.hidden
    return float((run.predicted_bytes - table) / run.row["measured"]["bytes"] - 1)


def _beyond_states(run: Replay) -> str:
    """GB that were seen beyond 16 bytes a parameter over the ranks."""
    parameters = measured_problem(run.row).inputs.architecture.num_parameters
    return f"{(run.row['measured']['bytes'] - 16 * parameters / run.choice.num_gpus) / 1e9:.1f}"


def limit_causes(found: Evaluation) -> list[str]:
    """What the longest lengths say, with the numbers that say so."""
    rows = {row["id"]: row for row in found.limits}
    long = [rows[f"trl-long-qwen4b-limit-{name}"] for name in ("nll", "chunked", "chunked-off")]
    fused, full, dpo = (
        rows[f"trl-115-{name}"] for name in ("SFT-nll-limit-1.15.0", "SFT-nll-limit-1.14.2", "DPO-limit-1.15.0")
    )
    played = {(row["model"], row["path"], row["seq"]): row for row in json.loads(WHOLE_STEPS.read_text("utf-8"))}
    ran, next_length = (
        f"{played['google/gemma-3-1b-pt', 'full_logits', length]['segments_needed_bytes'] / GIB:.1f} GiB at {length:,}"
        for length in (20_480, 21_504)
    )
    card = find_card("H100-80GB")
    offered = (card.nvml_bytes - card.driver_bytes - CONTEXT_BYTES) / GIB

    def off(row: Row) -> str:
        return percent(found.limit_error(row), signed=True)

    return [
        f"- **Qwen3-4B** ({', '.join(map(off, long))}): lengths of a coarse grid, read as a first step (see the "
        "readings above). Of the last the guide says that one card stops just above 256k, and not which length was "
        "tried next.",
        f"- **Gemma-3-1B, full logits** ({off(full)}): one step of the grid too long. A tensor of fp32 logits is "
        f"{20_480 * 262_144 * 4 / GIB:.0f} GiB there, and without expandable segments the allocator needs it in one "
        f"piece: whole steps played on PyTorch's allocator (`benchmarks/whole_steps.py`) need {ran} and {next_length}, "
        f"where CUDA offers {offered:.1f} beside its context.",
        f"- **Gemma-3-1B, fused loss** ({off(fused)}): traces count a second copy of the bias that SDPA makes of its "
        "mask. No operator shows it; the peak at 8,192 tokens has it, this length says that it is gone before the "
        "MLP's backward.",
        f"- **Gemma-3-1B, DPO** ({off(dpo)}): padded, with a mask for windowed layers and one for full ones.",
    ]
