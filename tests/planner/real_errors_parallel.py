"""Child of test_rules_real_errors: what the libraries say to parallel runs, launchers and packages that are not there.

One process plays a rank of two: where the check itself is what matters, the world is torch's fake process group, or
the trainer is told which mesh accelerate has. The errors are the libraries' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.update(DS_ACCELERATOR="cpu", DS_LOG_LEVEL="error")

from real_errors import OUT, dpo, model, online, parallelism, run, sft


def validated(processes: int, fsdp2: bool = True, **sizes: int) -> None:
    """accelerate's check of a mesh against the processes that were started."""
    world = SimpleNamespace(multi_device=True, num_processes=processes, is_fsdp2=fsdp2, distributed_type="MULTI_GPU")
    parallelism(**sizes)._validate_accelerator(world)


def context_parallel_inputs(attention: str, **inputs: Any) -> None:
    """The trainer's preparation of one batch under context parallelism."""
    from transformers import Trainer

    mesh = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=mesh))
    Trainer._prepare_context_parallel_inputs(trainer, model("Qwen3", attention), inputs)


@contextlib.contextmanager
def mesh_of(**sizes: int):
    """Accelerators that answer with this mesh, as one does whose YAML asked for it."""
    from accelerate import Accelerator

    mesh, initialise = parallelism(**sizes), Accelerator.__init__

    def made(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        self.is_made = True

    def answer(self):
        return mesh if getattr(self, "is_made", False) else None

    with patch.object(Accelerator, "__init__", made), patch.object(Accelerator, "parallelism_config", property(answer)):
        yield


def sft_in_mesh(config: dict[str, Any], **sizes: int) -> None:
    with mesh_of(**sizes):
        sft(config)


def cp_without_fsdp() -> None:
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    backend = patch.object(PartialState, "_prepare_backend", lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29753"}
    device = {"ACCELERATE_TORCH_DEVICE": "cpu"}
    try:
        with backend, patch.dict(os.environ, rank | device):
            AcceleratorState(_from_accelerator=True, parallelism_config=parallelism(cp_size=2))
    finally:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def tp_without_plan() -> None:
    """accelerate is told of tensor parallelism, the model was loaded without."""
    from accelerate import Accelerator

    with mesh_of(tp_size=2), patch.object(Accelerator, "multi_device", property(lambda self: True)):
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = "MULTI_GPU"
        accelerator.prepare_model(model())


@contextlib.contextmanager
def two_ranks():
    """A world of two in which nobody answers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield dist
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def ulysses_of_two():
    """DeepSpeed's module of sequence parallelism, whose other rank answers with what this one sends."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    def all_gather(out, mine, group=None):
        for each in out:
            each.copy_(mine)

    talk = SimpleNamespace(get_world_size=lambda _: 2, get_rank=lambda _: 0, all_gather=all_gather)
    unregistered = patch.object(ulysses_sp, "register_all_to_all_group", lambda _: None)
    with patch.object(ulysses_sp, "dist", talk), unregistered:
        yield ulysses_sp


def ulysses(heads: int, kv_heads: int, width: int = 8) -> Any:
    with ulysses_of_two() as module:
        return module.UlyssesSPAttentionHF(
            attn=None, batch_size=1, attn_head_count=heads, attn_head_size=width, kv_head_count=kv_heads,
            num_hidden_layers=1, process_group=None, seq_length_is_variable=True,
        )  # fmt: skip


def ulysses_batch(length: int = 4, **more: Any) -> None:
    import torch

    ids = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": ids, "position_ids": ids, "labels": ids, **more}
    with ulysses_of_two() as module:
        next(module.UlyssesSPDataLoaderAdapter([batch], 0, None, 2, torch.device("cpu")))


def ulysses_packed() -> None:
    import torch

    ulysses_batch(cu_seq_lens_q=torch.tensor([0, 2, 4]))


def tied_in_two_groups() -> list[str]:
    """Embedding and head share a weight and are sharded apart, as accelerate 1.14 does."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with two_ranks():
        built = model(tie_word_embeddings=True)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(built.lm_head, mesh=mesh)
        fully_shard(built, mesh=mesh)
        ids = torch.ones(1, 4, dtype=torch.long)
        built(input_ids=ids)
    return []


def with_plugin(plugin: dict[str, Any], config: dict[str, Any]) -> None:
    """The trainer's own checks where accelerate has one of its plugins."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=OUT, use_cpu=True, report_to=[], **config)
    args.hf_deepspeed_config = SimpleNamespace()
    ((name, values),) = plugin.items()
    initialise, made = Accelerator.__init__, []

    def noted(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        made.append(self)

    answer = property(lambda self: SimpleNamespace(**values) if made else None)
    with patch.object(Accelerator, "__init__", noted), patch.object(AcceleratorState, name, answer, create=True):
        Trainer(model=model(), args=args, eval_dataset=[])


ZERO3 = {"deepspeed_plugin": {"zero_stage": 3, "enable_msamp": False}}
SAVES_BEST = {
    "save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps",
}  # fmt: skip


def several_gpus_in_one_process() -> None:
    from transformers import TrainingArguments

    with patch.object(TrainingArguments, "n_gpu", property(lambda self: 2)):
        sft({})


def fsdp_on_cpu() -> str:
    from accelerate import Accelerator

    with patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}):
        return str(Accelerator(cpu=True).distributed_type.value)


def no_deepspeed() -> None:
    import accelerate
    from accelerate import accelerator

    plugin = accelerate.DeepSpeedPlugin(zero_stage=2)
    with patch.object(accelerator, "is_deepspeed_available", lambda: False):
        accelerate.Accelerator(cpu=True, deepspeed_plugin=plugin)


def bf16_model_without_bf16() -> dict[str, Any]:
    """ZeRO-2 over a bf16 model where the configuration has neither fp16 nor bf16: what is kept of it, after a step."""
    import deepspeed
    import torch

    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29755"}
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    # The package's own name for it is torch itself. What is left out here takes minutes to compile.
    backend = sys.modules["deepspeed.comm.torch"]
    built = model().to(torch.bfloat16)
    with patch.dict(os.environ, rank), patch.object(backend, "build_shm_op", lambda: None):
        engine = deepspeed.initialize(model=built, optimizer=torch.optim.AdamW(built.parameters()), config=config)[0]
        ids = torch.ones(1, 4, dtype=torch.long)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        master = engine.optimizer.single_partition_of_fp32_groups
        torch.distributed.destroy_process_group()
    return {"weights": str(next(built.parameters()).dtype), "master": str(master[0].dtype)}


def quantised() -> None:
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True)).validate_environment()


def optimizer(name: str) -> None:
    from transformers import Trainer, TrainingArguments

    Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(output_dir=OUT, use_cpu=True, optim=name), model())


def low_rank(name: str, distributed: bool = False, **config: Any) -> None:
    """transformers' check of GaLore and APOLLO, before their package is asked for."""
    import torch
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _setup_low_rank_optimizer
    from transformers.training_args import ParallelMode

    args = TrainingArguments(output_dir=OUT, use_cpu=True, **config)
    mode = ParallelMode.DISTRIBUTED if distributed else ParallelMode.NOT_PARALLEL
    with patch.object(TrainingArguments, "parallel_mode", property(lambda self: mode)):
        _setup_low_rank_optimizer(args, model(), name, {name: torch.optim.AdamW}, {}, {})


def not_recomputed() -> None:
    import transformers

    config = transformers.CTRLConfig(vocab_size=64, n_positions=16, n_embd=16, dff=32, n_layer=1, n_head=2)
    transformers.CTRLLMHeadModel(config).gradient_checkpointing_enable()


def fp16_gradients() -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


def yarn(**rope: Any) -> None:
    import torch

    built = model()
    built.config.rope_parameters = {"rope_type": "yarn", **rope}
    type(built)(built.config)(input_ids=torch.ones(1, 4, dtype=torch.long))


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def no_peft() -> None:
    from trl.trainer import sft_trainer

    with patch.object(sft_trainer, "is_peft_available", lambda: False):
        sft({}, peft_config=SimpleNamespace())


def bloom(attention: str) -> None:
    model("Bloom", attention)


SCENARIOS = {
    "mesh of another size": lambda: validated(8, dp_shard_size=2, cp_size=2),
    "nothing to shard": lambda: validated(2, dp_replicate_size=2),
    "mesh": lambda: validated(4, dp_shard_size=2, cp_size=2),
    "cp without fsdp": cp_without_fsdp,
    "cp eager": lambda: context_parallel_inputs("eager"),
    "cp mask": lambda: context_parallel_inputs("sdpa", **whole_mask()),
    "cp packing": lambda: sft_in_mesh({"packing": True}, cp_size=2),
    "cp eval_packing": lambda: sft_in_mesh({"eval_packing": True}, cp_size=2),
    "sp other backend": lambda: parallelism(sp_size=2, sp_backend="torch"),
    "sp dft": lambda: sft_in_mesh({"loss_type": "dft"}, sp_size=2),
    "sp heads": lambda: ulysses(3, 3),
    "sp kv heads": lambda: ulysses(6, 3),
    "sp heads that divide": lambda: ulysses(4, 2),
    "sp packed": ulysses_packed,
    "sp odd length": lambda: ulysses_batch(5),
    "sp batch": ulysses_batch,
    "tied in two groups": tied_in_two_groups,
    "tp without plan": tp_without_plan,
    "n_gpu": several_gpus_in_one_process,
    "fsdp on cpu": fsdp_on_cpu,
    "no deepspeed": no_deepspeed,
    "save best": lambda: with_plugin(ZERO3, SAVES_BEST),
    "zero3 auto batch": lambda: with_plugin(ZERO3, {"auto_find_batch_size": True}),
    "fsdp checkpoints twice": lambda: with_plugin(
        {"fsdp_plugin": {"activation_checkpointing": True}}, {"gradient_checkpointing": True}
    ),
    "qlora without package": quantised,
    "bnb without package": lambda: optimizer("adamw_bnb_8bit"),
    "unknown optimizer": lambda: optimizer("adamw_magic"),
    "galore targets": lambda: low_rank("galore_adamw"),
    "layerwise ddp": lambda: low_rank("galore_adamw_layerwise", True, optim_target_modules="all-linear"),
    "layerwise accumulation": lambda: low_rank(
        "galore_adamw_layerwise", optim_target_modules="all-linear", gradient_accumulation_steps=2
    ),
    "no recompute": not_recomputed,
    "dpo selective": lambda: (
        dpo({"gradient_checkpointing_kwargs": {"selective": True}, "max_steps": 2}, ref_model=model())
        .train()
        .global_step
    ),
    "dpo packing": lambda: dpo({"packing": True}),
    "grpo activation_offloading": lambda: online("GRPO", activation_offloading=True),
    "activation_offloading on cpu": lambda: sft({"activation_offloading": True, "max_steps": 1}).train().global_step,
    "fp16 gradients": fp16_gradients,
    "yarn without theta": lambda: yarn(**YARN),
    "yarn without factor": lambda: yarn(rope_theta=1e6, original_max_position_embeddings=64),
    "yarn": lambda: yarn(rope_theta=1e6, **YARN),
    "no peft": no_peft,
    "bloom flash": lambda: bloom("flash_attention_2"),
    "bloom sdpa": lambda: bloom("sdpa"),
    "gpt_oss flash": lambda: model("GptOss", "flash_attention_2", num_local_experts=4, num_experts_per_tok=2),
    "bf16 model without bf16": bf16_model_without_bf16,
}


def whole_mask() -> dict[str, Any]:
    import torch

    ids = torch.zeros(1, 4, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones(1, 1, 4, 4)}


def run_alone(scenario) -> dict[str, Any]:
    """Run it with nothing left of the scenarios before: neither environment nor accelerate's state."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch.dict(os.environ):
        return run(scenario)


if __name__ == "__main__":
    json.dump({name: run_alone(scenario) for name, scenario in SCENARIOS.items()}, sys.stdout)
