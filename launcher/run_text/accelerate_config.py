"""accelerate.yaml and deepspeed.json: how processes start, what they shard, who shares a sequence.

accelerate does not check the keys inside `fsdp_config`, `deepspeed_config` and
`parallelism_config`: a misspelt one is dropped without a word. So each is written here once, and
validation compares what was written with what accelerate knows.
"""

from __future__ import annotations

import yaml

from launcher.errors import UsageError
from launcher.run_text.route_script import accelerate_keys, loads_everywhere
from launcher.run_text.run_spec import RunSpec
from launcher.run_text.trl_arguments import fsdp_checkpoints
from planner.choice import FSDP2, ZERO
from planner.memory.blocks import parameter_blocks
from planner.memory.sharding import ZERO3_LIVE_ELEMENTS, ZERO_BUCKET_ELEMENTS
from planner.memory.zero3_gathers import ZERO3_PERSISTENT_ELEMENTS, ZERO3_PREFETCH_ELEMENTS

ACCELERATE_FILE = "accelerate.yaml"
DEEPSPEED_FILE = "deepspeed.json"
DTYPE_OF_SEQUENCES = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}


def accelerate_config(spec: RunSpec) -> dict[str, object]:
    """The values of accelerate.yaml, in the order in which they are written.

    Raises:
        UsageError: accelerate has no launch for the chosen sharding.
    """
    choice = spec.choice
    config: dict[str, object] = {"compute_environment": "LOCAL_MACHINE"}
    if choice.sharding in FSDP2:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = _fsdp(spec)
    elif choice.sharding in ZERO:
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = _deepspeed(spec)
    elif choice.sharding == "ddp":
        # On the CPU too: accelerate starts several processes for no other type without MPI, and
        # use_cpu in train.py makes gloo of it.
        config["distributed_type"] = "MULTI_GPU"
    elif choice.sharding == "none" and spec.num_processes == 1:
        config["distributed_type"] = "NO"
    else:
        raise UsageError(
            f"sharding {choice.sharding} does not run on {spec.num_processes} processes; "
            "pin sharding=ddp, fsdp or zero3"
        )
    parallelism = _parallelism(spec)
    if parallelism:
        config["parallelism_config"] = parallelism
    if choice.sharding not in ZERO:
        # Under DeepSpeed it stands in deepspeed.json, and accelerate refuses to read it twice.
        config["mixed_precision"] = choice.mixed_precision
        config |= accelerate_keys(spec)
    config["num_machines"] = spec.num_nodes
    config["num_processes"] = spec.num_processes
    config["machine_rank"] = 0
    config["main_training_function"] = "main"
    config["rdzv_backend"] = "static"
    config["same_network"] = True
    if spec.num_nodes == 1:
        config["main_process_port"] = 0  # any free one
    config["use_cpu"] = spec.on_cpu
    return config


def render_accelerate_yaml(spec: RunSpec) -> str:
    """The text of accelerate.yaml."""
    body: str = yaml.safe_dump(accelerate_config(spec), sort_keys=False, allow_unicode=True)
    return "# accelerate launch --config_file accelerate.yaml train.py\n" + body


def deepspeed_config(spec: RunSpec) -> dict[str, object]:
    """The values of deepspeed.json: stage, offload, precision, and buffers as they were planned.

    Buffer sizes are DeepSpeed's own defaults, in elements, written out so that what is allocated
    can be read there. It allocates the whole bucket however little there is to reduce, so a bucket
    is no larger than all trainable parameters.

    Raises:
        UsageError: parameters are to be offloaded in a stage that keeps them whole.
    """
    choice = spec.choice
    stage = int(choice.sharding.removeprefix("zero"))
    zero: dict[str, object] = {
        "stage": stage,
        "reduce_bucket_size": _bucket_elements(spec),
        "contiguous_gradients": True,
        "overlap_comm": stage == 3,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = ZERO3_PREFETCH_ELEMENTS
        zero["stage3_param_persistence_threshold"] = ZERO3_PERSISTENT_ELEMENTS
        zero["stage3_max_live_parameters"] = ZERO3_LIVE_ELEMENTS
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero["allgather_bucket_size"] = _bucket_elements(spec)
    if "optimizer" in choice.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "params" in choice.offload:
        if stage != 3:
            raise UsageError("DeepSpeed offloads parameters only in stage 3; pin sharding=zero3")
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": choice.grad_accum,
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": choice.micro_batch,
    }
    if choice.mixed_precision != "no":
        config[choice.mixed_precision] = {"enabled": True}
    if choice.sp > 1:
        config["seq_parallel_communication_data_type"] = DTYPE_OF_SEQUENCES[choice.mixed_precision]
    return config


def _bucket_elements(spec: RunSpec) -> int:
    job = spec.job
    targets = job.lora.target_modules
    named = targets if isinstance(targets, str) else tuple(targets)
    trainable = parameter_blocks(spec.architecture, spec.choice.method, job.lora.r, named).total.trainable
    # DeepSpeed takes no odd size (stage_1_and_2.py: nccl_start_alignment_factor).
    return min(ZERO_BUCKET_ELEMENTS, trainable + trainable % 2)


def _fsdp(spec: RunSpec) -> dict[str, object]:
    choice = spec.choice
    if "optimizer" in choice.offload and "params" not in choice.offload:
        raise UsageError("FSDP2 moves parameters and optimizer to the host together; pin offload=optimizer,params")
    config: dict[str, object] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": choice.sharding != "fsdp_no_reshard",
        "fsdp_offload_params": "params" in choice.offload,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        # The first process hands its weights out. transformers 4 has the others read none; 5 reads
        # them everywhere all the same (issue 43749), which the plan counts.
        "fsdp_cpu_ram_efficient_loading": not loads_everywhere(spec),
    }
    if fsdp_checkpoints(spec):
        config["fsdp_activation_checkpointing"] = True
        config["fsdp_activation_checkpointing_offload"] = True
    return config


def _deepspeed(spec: RunSpec) -> dict[str, object]:
    config: dict[str, object] = {
        "deepspeed_config_file": DEEPSPEED_FILE,
        "zero3_init_flag": spec.choice.sharding == "zero3",
    }
    if spec.num_nodes > 1:
        config["deepspeed_multinode_launcher"] = "standard"
    return config


def _parallelism(spec: RunSpec) -> dict[str, object]:
    """Sizes of the mesh, only where more than sharding over all processes is asked for."""
    choice = spec.choice
    prefix = "parallelism_config_"
    if choice.cp > 1 or choice.sharding == "hsdp":
        sizes: dict[str, object] = {
            "dp_replicate_size": choice.dp_replicate,
            "dp_shard_size": choice.dp_shard,
            "tp_size": 1,
            "cp_size": choice.cp,
        }
        if choice.cp > 1:
            sizes["cp_comm_strategy"] = "allgather"
    elif choice.sp > 1:
        sizes = {
            "dp_replicate_size": choice.dp_replicate,
            "dp_shard_size": choice.dp_shard,
            "tp_size": 1,
            "cp_size": 1,
            "sp_size": choice.sp,
            "sp_backend": "deepspeed",
            "sp_seq_length_is_variable": True,
            "sp_attn_implementation": choice.attention,
        }
    else:
        return {}
    return {prefix + name: value for name, value in sizes.items()}
