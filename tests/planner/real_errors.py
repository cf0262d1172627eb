"""Child of test_rules_real_errors: runs refused combinations in the installed libraries, prints what they say as JSON.

Everything is built in place: a four-layer Qwen3 with random weights and a word-level tokenizer, no network, no launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import warnings

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
warnings.simplefilter("ignore")

OUT = tempfile.mkdtemp()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i + 2 for i in range(60)} | {"<pad>": 0, "<eos>": 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>")


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def model(kind: str = "Qwen3", attention: str | None = None, **changes):
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    if attention is not None:
        config._attn_implementation = attention
    with torch.device("cpu"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


def rows(**columns):
    from datasets import Dataset

    return Dataset.from_dict(columns or {"text": ["w1 w2 w3 w4"] * 4})


def sft(config: dict, **arguments):
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(output_dir=OUT, use_cpu=True, bf16=False, report_to=[], save_strategy="no", **config)
    return SFTTrainer(model=model(), args=args, train_dataset=rows(), processing_class=tokenizer(), **arguments)


def lora(targets: list[str]):
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")


def dpo(config: dict, **arguments):
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir=OUT, use_cpu=True, bf16=False, report_to=[], save_strategy="no", **config)
    data = rows(prompt=["w1 w2"] * 4, chosen=["w3"] * 4, rejected=["w4"] * 4)
    return DPOTrainer(model=model(), args=args, train_dataset=data, processing_class=tokenizer(), **arguments)


def kto(config: dict, **arguments):
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(output_dir=OUT, use_cpu=True, bf16=False, report_to=[], save_strategy="no", **config)
    data = rows(prompt=["w1 w2"] * 4, completion=["w3"] * 4, label=[True, False] * 2)
    return KTOTrainer(model=model(), args=args, train_dataset=data, processing_class=tokenizer(), **arguments)


def online(name: str, **config):
    import trl

    return getattr(trl, f"{name}Config")(output_dir=OUT, use_cpu=True, bf16=False, **config)


def parallelism(**sizes):
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(**sizes)


def fsdp(**arguments):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(fsdp_version=2, **arguments)


def cp_hooks(kind: str, **changes):
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model(kind, **changes))


def sp_check(layers: list[str]):
    from accelerate.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism

    built = model()
    built.config.layer_types = layers
    _refuse_recurrent_layers_under_sequence_parallelism(built)


def sp_attention(name: str):
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)


def offloaded_step():
    import torch

    built = model()
    built.activation_checkpointing_enable(offload=True)
    built.train()
    ids = torch.ones(1, 8, dtype=torch.long)
    built(input_ids=ids, labels=ids).loss.backward()


EVERY_2 = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "max_steps": 2}


def dpo_steps(**config):
    return dpo(EVERY_2 | config, ref_model=model()).train().global_step


def kto_steps(**config):
    return kto(EVERY_2 | {"per_device_train_batch_size": 2} | config, ref_model=model()).train().global_step


def reward_steps():
    import transformers
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(output_dir=OUT, use_cpu=True, bf16=False, report_to=[], save_strategy="no", **EVERY_2)
    scorer = transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**SMALL, num_labels=1, pad_token_id=0)
    )
    data = rows(chosen=["w1 w3"] * 4, rejected=["w1 w4"] * 4)
    return RewardTrainer(model=scorer, args=args, train_dataset=data, processing_class=tokenizer()).train().global_step


def experts_step_on_cpu():
    """fp32 experts under bf16 autocast: the real CPU kernel runs where the traced one refuses."""
    import torch

    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    built = model("Qwen3Moe", **changes)
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = built(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"finite": bool(torch.isfinite(loss))}


def grouped_fp32_traced():
    import logging

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with FakeTensorMode():
        offsets = torch.empty(2, dtype=torch.int32)
        torch.nn.functional.grouped_mm(torch.empty(8, 16), torch.empty(2, 16, 32), offs=offsets)


def fp16_on_cpu():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    return {"autocast": accelerator.native_amp, "scaler": accelerator.scaler is not None}


def chunked_alias():
    from trl import SFTConfig

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        config = SFTConfig(output_dir=OUT, use_cpu=True, bf16=False, loss_type="chunked_nll")
    said = [str(w.message) for w in seen if "chunked_nll" in str(w.message)]
    return {"loss_type": config.loss_type, "warned": bool(said)}


def optimizers():
    from transformers.training_args import OptimizerNames

    return sorted(name.value for name in OptimizerNames)


def attention_classes():
    import transformers

    names = ("Gemma2", "GptOss", "Qwen3", "Llama", "Mistral", "DeepseekV3", "Llama4", "Bloom", "JetMoe")
    found = {}
    for name in names:
        cls = getattr(transformers, f"{name}ForCausalLM")
        model_type = "llama4_text" if name == "Llama4" else cls.config_class.model_type
        found[model_type] = {
            "sdpa": cls._supports_sdpa,
            "flash": cls._supports_flash_attn,
            "recomputes": cls.supports_gradient_checkpointing,
        }
    return found


def sft_defaults():
    from trl import SFTConfig

    config = SFTConfig(output_dir=OUT, use_cpu=True)
    return {"loss_type": config.loss_type, "gradient_checkpointing": config.gradient_checkpointing}


SCENARIOS = {
    "liger fused": lambda: sft({"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}),
    "unknown loss_type": lambda: sft({"loss_type": "focal"}),
    "chunked_nll alias": chunked_alias,
    "selective reentrant": lambda: sft({"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}}),
    "selective without recompute": lambda: sft(
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}}
    ),
    "selective": lambda: type(sft({"gradient_checkpointing_kwargs": {"selective": True}})).__name__,
    "lora on lm_head": lambda: sft({}, peft_config=lora(["q_proj", "lm_head"])),
    "lora": lambda: type(sft({}, peft_config=lora(["q_proj"]))).__name__,
    "dpo lora on lm_head": lambda: dpo({}, peft_config=lora(["q_proj", "lm_head"])),
    "padding_free": lambda: sft({"padding_free": True, "max_length": 32}),
    "packing without length": lambda: sft({"packing": True, "max_length": None}),
    "cp and sp": lambda: parallelism(cp_size=2, sp_size=2),
    "cp with replicas": lambda: parallelism(cp_size=2, dp_replicate_size=2),
    "cp": lambda: parallelism(cp_size=2).cp_size,
    "cp sliding": lambda: cp_hooks("Mistral", sliding_window=16),
    "cp full": lambda: cp_hooks("Qwen3"),
    "sp linear": lambda: sp_check(["linear_attention", "full_attention"]),
    "sp full": lambda: sp_check(["full_attention", "full_attention"]),
    "sp eager": lambda: sp_attention("eager"),
    "sp sdpa": lambda: sp_attention("sdpa"),
    "grpo cp": lambda: online("GRPO", parallelism_config=parallelism(cp_size=2)),
    "grpo auto batch": lambda: online("GRPO", auto_find_batch_size=True),
    "grpo one generation": lambda: online("GRPO", num_generations=1, per_device_train_batch_size=8),
    "grpo cut groups": lambda: online("GRPO", num_generations=8, per_device_train_batch_size=6),
    "kto one row": lambda: kto({"per_device_train_batch_size": 1}),
    "dpo sync precomputed": lambda: dpo({"sync_ref_model": True, "precompute_ref_log_probs": True}),
    "dpo sync adapter": lambda: dpo({"sync_ref_model": True}, peft_config=lora(["q_proj"])),
    "dpo every_n": dpo_steps,
    "dpo every_n precomputed": lambda: dpo_steps(precompute_ref_log_probs=True),
    "kto every_n": kto_steps,
    "kto every_n precomputed": lambda: kto_steps(precompute_ref_log_probs=True),
    "reward every_n": reward_steps,
    "experts fp32": experts_step_on_cpu,
    "fsdp2 forward_prefetch": lambda: fsdp(forward_prefetch=True),
    "fsdp2 offload without recompute": lambda: fsdp(activation_checkpointing_offload=True),
    "gemma2 sdpa": lambda: model("Gemma2", "sdpa"),
    "gemma2 eager": lambda: type(model("Gemma2", "eager")).__name__,
    "gpt_oss sdpa": lambda: model("GptOss", "sdpa", num_local_experts=4, num_experts_per_tok=2),
    "flash without package": lambda: model("Qwen3", "flash_attention_2"),
    "offload on cpu": offloaded_step,
    "experts fp32 traced": grouped_fp32_traced,
    "fp16 on cpu": fp16_on_cpu,
    "optimizers": optimizers,
    "attention classes": attention_classes,
    "sft defaults": sft_defaults,
}


def run(scenario) -> dict:
    begin = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            value = scenario()
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    else:
        plain = value if isinstance(value, str | int | dict | list | None) else type(value).__name__
        outcome = {"value": plain}
    return outcome | {"seconds": round(time.perf_counter() - begin, 2)}


if __name__ == "__main__":
    json.dump({name: run(scenario) for name, scenario in SCENARIOS.items()}, sys.stdout)
