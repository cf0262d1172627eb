"""RunSpecs for the tests: a job, a choice and a machine in a line each, real architectures."""

from __future__ import annotations

import ast
from typing import Any

from launcher.inputs.model_config import resolve_architecture
from launcher.run_text.run_spec import RunSpec
from planner.architecture import Architecture
from planner.choice import Choice
from planner.job import Job
from planner.machine import Card, Host, Machine
from planner.stack import Stack
from tests.launcher.tiny_models import EXAMPLES

GIB = 2**30
NEWEST = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
}
MODEL = "Qwen/Qwen3-8B"
"""Trained on 40,960 positions with a RoPE theta of 1,000,000, both in its config.json."""


def cpu(cores: int = 2) -> Machine:
    host = Host(total_bytes=16 * GIB, available_bytes=16 * GIB, cores=cores)
    return Machine(origin="cpu", spec="cpu", host=host)


def gpus(count: int, *, nodes: int = 1, origin: str = "named", **card: Any) -> Machine:
    cards = [Card(index=i, name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, **card) for i in range(count)]
    return Machine(origin=origin, spec=f"{count}xH100", cards=cards, nodes=nodes)  # type: ignore[arg-type]


def make_spec(
    job: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
    machine: Machine | None = None,
    *,
    architecture: Architecture | None = None,
    stack: dict[str, str] | None = None,
    python: str | None = None,
    base_dir: str | None = None,
) -> RunSpec:
    """SFT of all weights of Qwen3-8B on one GPU, but for what is given."""
    data = {"dataset": str(EXAMPLES / "train.jsonl")}
    fields = {"model": MODEL, "data": data, "seq_len": 4096, "global_batch": 8, **(job or {})}
    knobs: dict[str, Any] = {"method": "full", "loss_path": "fused", "recompute": "full"}
    return RunSpec(
        job=Job.model_validate(fields),
        choice=Choice(**{**knobs, **(choice or {})}),
        architecture=architecture or resolve_architecture(str(fields["model"])),
        stack=Stack(versions={**NEWEST, **(stack or {})}),
        machine=machine or gpus(1),
        plan_json='{"schema": "trlfit.plan/1"}\n',
        python=python,
        base_dir=base_dir,
    )


def assigned(script: str, name: str) -> dict[str, Any]:
    """Keyword arguments of ``NAME = something(...)`` in a script, as values."""
    for node in ast.parse(script).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                return {str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords}
    raise AssertionError(f"the script has no {name}")


def constant(script: str, name: str) -> Any:
    """The value of ``NAME = literal`` in a script."""
    for node in ast.parse(script).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                return ast.literal_eval(node.value)
    raise AssertionError(f"the script has no {name}")


LONG_JOB = {"seq_len": 1_048_576, "global_batch": 1}

VARIANTS: dict[str, RunSpec] = {
    "single": make_spec(choice={"micro_batch": 4, "grad_accum": 2}),
    "ddp": make_spec(choice={"sharding": "ddp", "dp_replicate": 2, "micro_batch": 4}, machine=gpus(2)),
    "fsdp": make_spec(choice={"sharding": "fsdp", "dp_shard": 4, "grad_accum": 2}, machine=gpus(4)),
    "fsdp_no_reshard": make_spec(choice={"sharding": "fsdp_no_reshard", "dp_shard": 8}, machine=gpus(8)),
    "fsdp_offload": make_spec(
        choice={
            "sharding": "fsdp",
            "dp_shard": 8,
            "offload": frozenset({"optimizer", "params"}),
        },
        machine=gpus(8),
    ),
    "hsdp": make_spec(choice={"sharding": "hsdp", "dp_shard": 4, "dp_replicate": 2}, machine=gpus(8)),
    "million": make_spec(
        LONG_JOB,
        {"sharding": "fsdp", "cp": 8, "offload": frozenset({"activations"})},
        gpus(8),
    ),
    "zero2": make_spec(choice={"sharding": "zero2", "dp_shard": 8}, machine=gpus(8)),
    "zero3": make_spec(
        choice={
            "sharding": "zero3",
            "dp_shard": 8,
            "offload": frozenset({"optimizer", "params"}),
        },
        machine=gpus(8),
    ),
    "zero3_sp": make_spec(
        {"seq_len": 131_072, "global_batch": 2},
        {"sharding": "zero3", "dp_shard": 2, "sp": 4, "attention": "sdpa"},
        gpus(8),
    ),
    "lora": make_spec(
        {"method": "lora"},
        {"method": "lora", "weights": "bf16", "micro_batch": 4, "grad_accum": 2},
    ),
    "qlora": make_spec(
        {"method": "qlora", "quantization": "nf4-double"},
        {"method": "qlora", "weights": "bf16", "sharding": "fsdp", "dp_shard": 2, "grad_accum": 4},
        gpus(2),
    ),
    "cpu": make_spec(choice={"micro_batch": 4, "grad_accum": 2}, machine=cpu()),
    "cpu_ddp": make_spec(choice={"sharding": "ddp", "dp_replicate": 2, "micro_batch": 4}, machine=cpu()),
    "two_nodes": make_spec(
        choice={"sharding": "fsdp", "dp_shard": 16, "micro_batch": 1},
        machine=gpus(8, nodes=2),
    ),
    "selective": make_spec(choice={"recompute": "selective", "micro_batch": 8}),
    "every_2": make_spec(choice={"recompute": "every_2", "micro_batch": 8}),
    "no_recompute": make_spec(choice={"recompute": "none", "micro_batch": 8}),
    "packed": make_spec(
        {"data": {"dataset": "trl-lib/Capybara", "packing": True}},
        {"packing": True, "micro_batch": 8, "attention": "flash_attention_2"},
    ),
    "dpo": make_spec({"trainer": "dpo", "trl": {"beta": 0.05}}, {"sharding": "fsdp", "dp_shard": 8}, gpus(8)),
    "kto": make_spec({"trainer": "kto"}, {"micro_batch": 8}),
    "reward": make_spec(
        {"trainer": "reward", "method": "lora"},
        {"method": "lora", "weights": "bf16", "micro_batch": 8},
    ),
    "grpo": make_spec(
        {"trainer": "grpo", "trl": {"reward_funcs": ["my_rewards.score", "think_format_reward"]}},
        {"micro_batch": 8},
    ),
    "rloo": make_spec(
        {"trainer": "rloo", "trl": {"reward_funcs": "distinct_words"}},
        {"sharding": "zero2", "dp_shard": 8},
        gpus(8),
    ),
}
"""Every kind of run that is written."""
