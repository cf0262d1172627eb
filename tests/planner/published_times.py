"""Step times that TRL published, as jobs and choices of the planner.

Stated by the sources: models, method, cards, tokens per step; the long-context rows also cp and offload. Assumed, as
the constants' own fit did: 4 rows of 4,096 tokens per GPU and step, bf16 weights, full recompute, LoRA r 16 on q_proj
and v_proj. The guide that gives 131,072 tokens on 2, 4 and 8 cards names no model there: the fit took Qwen3-8B, the
sentences before it speak of Qwen3-4B, which ``measured.jsonl`` holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.choice import Choice, LossPath, Method
from planner.problem import layer_work_of
from planner.time.step import TimeEstimate, TimeModel
from tests.planner.replay import bundled_coefficients, problem_of

QUERY_VALUE = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run."""

    model: str
    method: Method = "full"
    lora_targets: tuple[str, ...] = ()
    gpus: int
    seq_len: int = 4096
    micro_batch: int = 4
    cp: int = 1
    offload: bool = False
    linear_kernels: bool = False

    def time_model(self, *, traced: bool = True) -> TimeModel:
        """The planner's model of time for rows of one length, by bundled traces where there are any."""
        job: dict[str, object] = {
            "model": self.model,
            "method": self.method,
            "seq_len": self.seq_len,
            "machine": f"{self.gpus}xH100-80GB",
        }
        if self.lora_targets:
            job["lora"] = {"r": 16, "target_modules": list(self.lora_targets)}
        judge = problem_of(job, stack={"trl": "1.13.0"}).judge
        memory = judge.memory
        memory.job = replace(memory.job, padded=False)
        if traced:
            memory.source = bundled_coefficients
        return replace(
            judge.time,
            job=memory.job,
            layer_work=layer_work_of(memory),
            linear_kernels=self.linear_kernels,
        )

    def estimate(self, loss_path: LossPath = "chunked", *, traced: bool = True) -> TimeEstimate:
        """The planner's time."""
        found = self.time_model(traced=traced).estimate(self.choice(loss_path))
        assert found is not None
        return found

    def choice(self, loss_path: LossPath) -> Choice:
        """Its knobs."""
        return Choice(
            method=self.method,
            loss_path=loss_path,
            recompute="full",
            offload=frozenset({"activations"}) if self.offload else frozenset(),
            sharding="fsdp" if self.gpus > 1 else "none",
            cp=self.cp,
            dp_shard=self.gpus // self.cp,
            micro_batch=self.micro_batch,
            weights="bf16",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The same run under TRL 1.12 and 1.13, in tokens per second and GPU (TRL PR 6863)."""

    run: Run
    before: float
    after: float

    def seen_s(self, loss_path: LossPath) -> float:
        """Seconds per step of 16,384 tokens per GPU."""
        return 4 * 4096 / (self.before if loss_path == "chunked_fp32" else self.after)


UPGRADES = (
    Upgrade(run=Run(model="google/gemma-3-270m", gpus=1), before=24_036, after=31_609),
    Upgrade(run=Run(model="Qwen/Qwen3-0.6B", gpus=1), before=21_276, after=26_641),
    Upgrade(run=Run(model="Qwen/Qwen3-8B", gpus=2), before=3_554, after=6_009),
    Upgrade(run=Run(model="Qwen/Qwen3-8B", gpus=2, method="lora", lora_targets=QUERY_VALUE), before=4_531, after=7_125),
    Upgrade(
        run=Run(model="Qwen/Qwen3-30B-A3B", gpus=2, method="lora", lora_targets=ATTENTION), before=4_251, after=5_101
    ),
)

MILLION = 1_048_576
LONG: tuple[tuple[Run, float], ...] = (
    *(
        (Run(model="Qwen/Qwen3-8B", gpus=n, cp=n, seq_len=131_072, micro_batch=1), seconds)
        for n, seconds in ((2, 34.6), (4, 17.8), (8, 9.5))
    ),
    *(
        (Run(model=model, gpus=8, cp=8, seq_len=MILLION, micro_batch=1, offload=True), seconds)
        for model, seconds in (
            ("Qwen/Qwen3-0.6B", 137.0),
            ("Qwen/Qwen3-8B", 380.0),
            ("Qwen/Qwen3-30B-A3B", 483.0),
            ("Qwen/Qwen3-32B", 1295.0),
        )
    ),
)
"""Run and seconds per step (TRL's long-context guide and example; PR 6846 for the other models at a million tokens)."""

PROFILED = (Run(model="Qwen/Qwen3.6-35B-A3B", method="lora", gpus=8, linear_kernels=True), 4.57)
"""The profiled step of TRL PR 6863, under TRL 1.12: seconds of all kernels, collectives included. That linear attention
ran by flash-linear-attention's kernels is assumed: by torch operators it alone would take twice as long."""

CHUNK_MS = {"chunked_fp32": 23.37, "chunked": 3.86}
"""One chunk of 256 tokens over a vocabulary of 248,320 and a width of 2,048, forward and backward (TRL PR 6863)."""
FP32_KERNELS = (192, 0.985)
"""Launches and seconds of the fp32 product in that profile."""
