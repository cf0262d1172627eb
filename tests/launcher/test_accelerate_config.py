from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import UsageError
from launcher.run_text.accelerate_config import accelerate_config, deepspeed_config, render_accelerate_yaml
from launcher.run_text.run_files import render_run
from launcher.writing.run_folder import write_run
from tests.launcher.run_specs import VARIANTS, gpus, make_spec
from tests.launcher.tiny_models import CHILDREN

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

# One process of the training Python judges all variants, with the functions that validation runs,
# and says what accelerate and TRL made of the files.
JUDGE = """
import contextlib, json, os, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import validate_run
report = {}
with contextlib.redirect_stdout(sys.stderr):
    for folder in sys.argv[3:]:
        name = os.path.basename(folder)
        found = {"problems": validate_run.validate(validate_run.Path(folder), False)}
        config, env = validate_run.launch_environment([])
        found["distributed_type"] = config.distributed_type.value
        with validate_run.environment(env):
            if env.get("ACCELERATE_USE_FSDP") == "true":
                from accelerate.utils import FullyShardedDataParallelPlugin
                plugin = FullyShardedDataParallelPlugin()
                found["fsdp"] = {
                    "version": plugin.fsdp_version,
                    "reshard": plugin.reshard_after_forward,
                    "offload": type(plugin.cpu_offload).__name__,
                    "state_dict": str(plugin.state_dict_type).rpartition(".")[2],
                    "lean_loading": plugin.cpu_ram_efficient_loading,
                    "recompute": plugin.activation_checkpointing,
                    "recompute_offload": plugin.activation_checkpointing_offload,
                }
            if env.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
                from accelerate import ParallelismConfig
                mesh = ParallelismConfig()
                found["mesh"] = {
                    "replicate": mesh.dp_replicate_size, "shard": mesh.dp_shard_size,
                    "cp": mesh.cp_size, "sp": mesh.sp_size, "total": mesh.total_size,
                }
        script = sys.modules.get("train")
        if script is not None and hasattr(script, "CONFIG"):
            cls = validate_run.config_class(script)
            args = cls(**validate_run.arguments_here(script, config))
            found["class"] = cls.__name__
            found["arguments"] = {
                key: getattr(args, key, None)
                for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length",
                            "packing", "pad_to_multiple_of", "activation_checkpointing",
                            "activation_checkpointing_kwargs", "bf16", "output_dir")
            }
            found["arguments"]["optim"] = str(args.optim)
            found["arguments"]["model_init_kwargs"] = args.model_init_kwargs
        report[name] = found
print(json.dumps(report))
"""


@functools.cache
def judged() -> dict[str, Any]:
    """What the real libraries say about every variant."""
    with tempfile.TemporaryDirectory() as temporary:
        folders: list[str] = []
        for name, spec in VARIANTS.items():
            folder = Path(temporary) / name
            write_run(folder, render_run(spec))
            folders.append(str(folder))
        (Path(temporary) / "my_rewards.py").write_text("def score(completions, **_):\n    return []\n")
        command = [sys.executable, "-c", JUDGE, str(CHILDREN), temporary, *folders]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.stack
@pytest.mark.parametrize("name", VARIANTS)
def test_real_classes_take_every_variant(name: str) -> None:
    problems = judged()[name]["problems"]
    if name.startswith("zero") or name == "rloo":
        problems = [p for p in problems if HAS_DEEPSPEED or "has no deepspeed" not in p]
    if name == "qlora" and not HAS_BITSANDBYTES:
        # bitsandbytes is asked for its version when the settings are made.
        assert len(problems) == 1 and "bitsandbytes" in problems[0]
        return
    if name == "packed":
        problems = [p for p in problems if "attention flash_attention_2" not in p]
    assert problems == []


@pytest.mark.stack
def test_arguments_as_the_config_class_has_them() -> None:
    million = judged()["million"]["arguments"]
    assert million["max_length"] == 1_048_576 and million["pad_to_multiple_of"] == 16
    assert million["packing"] is False and million["activation_checkpointing"] is False
    assert million["model_init_kwargs"]["rope_parameters"]["factor"] == 25.6
    single = judged()["single"]["arguments"]
    assert single["per_device_train_batch_size"] == 4
    assert single["gradient_accumulation_steps"] == 2
    assert single["bf16"] is True and single["output_dir"] == "checkpoints"
    assert single["optim"] == "OptimizerNames.ADAMW_TORCH_FUSED"
    selective = judged()["selective"]["arguments"]
    assert selective["activation_checkpointing_kwargs"] == {"selective": True}
    classes = {judged()[name]["class"] for name in ("dpo", "kto", "reward", "grpo", "rloo")}
    assert classes == {"DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig"}


FSDP = {
    "version": 2,
    "reshard": True,
    "offload": "OffloadPolicy",
    "state_dict": "FULL_STATE_DICT",
    "lean_loading": True,
    "recompute": False,
    "recompute_offload": False,
}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fsdp", {}),
        ("fsdp_no_reshard", {"reshard": False}),
        ("fsdp_offload", {"offload": "CPUOffloadPolicy"}),
        ("million", {"recompute": True, "recompute_offload": True}),
        ("qlora", {}),
        ("two_nodes", {}),
    ],
)
def test_fsdp_as_accelerate_reads_it(name: str, changes: dict[str, Any]) -> None:
    assert judged()[name]["distributed_type"] == "FSDP"
    assert judged()[name]["fsdp"] == {**FSDP, **changes}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("million", {"replicate": 1, "shard": 1, "cp": 8, "sp": 1, "total": 8}),
        ("hsdp", {"replicate": 2, "shard": 4, "cp": 1, "sp": 1, "total": 8}),
        ("zero3_sp", {"replicate": 1, "shard": 2, "cp": 1, "sp": 4, "total": 8}),
    ],
)
def test_mesh_as_accelerate_reads_it(name: str, sizes: dict[str, int]) -> None:
    assert judged()[name]["mesh"] == sizes


@pytest.mark.stack
def test_no_mesh_where_sharding_is_all() -> None:
    assert [name for name in VARIANTS if "mesh" in judged()[name]] == ["hsdp", "million", "zero3_sp"]


@pytest.mark.parametrize(
    ("name", "kind", "processes", "on_cpu"),
    [
        ("single", "NO", 1, False),
        ("cpu", "NO", 1, True),
        ("ddp", "MULTI_GPU", 2, False),
        # accelerate starts several CPU processes without MPI only so.
        ("cpu_ddp", "MULTI_GPU", 2, True),
        ("fsdp", "FSDP", 4, False),
        ("zero2", "DEEPSPEED", 8, False),
        ("two_nodes", "FSDP", 16, False),
    ],
)
def test_processes(name: str, kind: str, processes: int, on_cpu: bool) -> None:
    config = yaml.safe_load(render_accelerate_yaml(VARIANTS[name]))
    assert config["distributed_type"] == kind
    assert config["num_processes"] == processes
    assert config["use_cpu"] is on_cpu
    assert config["num_machines"] == (2 if name == "two_nodes" else 1)
    # A free port is found on one node; several must agree on one, which command.sh passes.
    assert config.get("main_process_port") == (None if name == "two_nodes" else 0)


def test_precision_is_said_once() -> None:
    assert accelerate_config(VARIANTS["fsdp"])["mixed_precision"] == "bf16"
    full = make_spec(choice={"mixed_precision": "no"})
    assert "mixed_precision: 'no'" in render_accelerate_yaml(full)
    assert "mixed_precision" not in accelerate_config(VARIANTS["zero3"])
    assert deepspeed_config(VARIANTS["zero3"])["bf16"] == {"enabled": True}


def test_deepspeed_file() -> None:
    two = deepspeed_config(VARIANTS["zero2"])
    assert two["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 500_000_000,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "allgather_bucket_size": 500_000_000,
    }
    assert two["gradient_accumulation_steps"] == 1 and two["train_micro_batch_size_per_gpu"] == 1
    three = deepspeed_config(VARIANTS["zero3"])["zero_optimization"]
    assert isinstance(three, dict)
    assert three["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert three["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert three["stage3_gather_16bit_weights_on_model_save"] is True
    assert deepspeed_config(VARIANTS["zero3_sp"])["seq_parallel_communication_data_type"] == "bf16"


def test_buckets_are_as_large_as_what_trains_and_even() -> None:
    """SmolLM2-135M has 134,515,008 parameters; DeepSpeed asserts a size of whole pairs."""
    small = make_spec(job={"model": "HuggingFaceTB/SmolLM2-135M"}, choice={"sharding": "zero2", "dp_shard": 8})
    odd = replace(small, architecture=replace(small.architecture, other_parameters=1))
    for spec, elements in ((small, 134_515_008), (odd, 134_515_010)):
        zero = deepspeed_config(spec)["zero_optimization"]
        assert isinstance(zero, dict)
        assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (elements, elements)


def test_deepspeed_on_several_nodes_starts_by_torchrun() -> None:
    spec = make_spec(choice={"sharding": "zero3", "dp_shard": 16}, machine=gpus(8, nodes=2))
    block = accelerate_config(spec)["deepspeed_config"]
    assert isinstance(block, dict)
    assert block["deepspeed_multinode_launcher"] == "standard"
    assert block["zero3_init_flag"] is True


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"sharding": "none", "dp_replicate": 2}, "does not run on 2 processes"),
        (
            {"sharding": "fsdp", "dp_shard": 2, "offload": frozenset({"optimizer"})},
            "pin offload=optimizer,params",
        ),
        (
            {"sharding": "zero2", "dp_shard": 2, "offload": frozenset({"params"})},
            "only in stage 3",
        ),
    ],
)
def test_refusals(choice: dict[str, Any], message: str) -> None:
    spec = make_spec(choice=choice, machine=gpus(2))
    with pytest.raises(UsageError, match=message):
        render_run(spec)
