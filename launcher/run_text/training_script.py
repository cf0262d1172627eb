"""train.py: the script a TRL user would have written for this run, and nothing it does not need."""

from __future__ import annotations

import re

from launcher.errors import UsageError
from launcher.run_text.python_text import WIDTH, fill, literal, load_template
from launcher.run_text.route_script import (
    by_accelerate,
    converts_in_script,
    refuse_unwritten,
    script_code,
    script_imports,
)
from launcher.run_text.run_spec import RunSpec, dataset_builder, dataset_source, evaluation_job
from launcher.run_text.trl_arguments import DTYPES, at_least, config_sections, generation_sizes
from planner.choice import FSDP2, ZERO
from planner.job import Job

CLASSES: dict[str, str] = {
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
    "grpo": "GRPO",
    "rloo": "RLOO",
}
"""Trainer of a job -> what TRL's class names begin with."""

TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
OWN_REWARD = "distinct_words"
"""A reward that needs no answer key: enough to see a run work."""

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")


def render_training_script(spec: RunSpec) -> str:
    """The text of train.py.

    Raises:
        UsageError: the job or the choice asks for something that no TRL script does.
    """
    refuse_what_no_script_does(spec)
    rewards = _rewards(spec)
    generates = spec.job.trainer in ("grpo", "rloo")
    name = CLASSES[spec.job.trainer]
    held_out = evaluation_job(spec.job)
    conditions = {
        "cuda": not spec.on_cpu,
        "gloo": spec.on_cpu and spec.num_processes > 1,
        "zero": spec.choice.sharding in ZERO,
        "adapter": spec.choice.method != "full",
        "quantized": spec.choice.method == "qlora",
        "evaluates": held_out is not None,
        "generates": generates,
        # What a generating trainer embeds is no micro-batch, and a compiler would trace the hook.
        "counts_batches": not generates and not spec.job.trl.get("torch_compile"),
        "own_reward": OWN_REWARD in rewards,
        "reward_path": any("." in reward for reward in rewards),
        "fsdp_outputs": keeps_fsdp_outputs(spec),
        "route": converts_in_script(spec),
        "route_elsewhere": by_accelerate(spec),
    }
    texts = {
        "title": _title(spec),
        "imports": _imports(spec, rewards),
        "model": literal(spec.model_source, first=8),
        "dataset": literal(spec.dataset_source, first=10),
        "load_dataset": _load_dataset(spec.job, "DATASET"),
        "eval_dataset": literal(dataset_source(held_out, spec.base_dir), first=15) if held_out else "",
        "load_eval_dataset": _load_dataset(held_out, "EVAL_DATASET") if held_out else "",
        "config": _config(spec),
        "config_class": f"{name}Config",
        "trainer_class": f"{name}Trainer",
        "ruler": "-" * (WIDTH - 2),
        "adapter": _adapter(spec),
        "quantization": _quantization(spec),
        "max_prompt": str(spec.job.seq_len - generation_sizes(spec)[0]) if generates else "",
        "reward_funcs": f"[{', '.join(reward.rpartition('.')[2] for reward in rewards)}]",
        "trusted": ", trust_remote_code=True" if spec.job.trl.get("trust_remote_code") else "",
        "reward_path": literal(spec.absolute(".")),
        "reward_imports": _reward_imports(rewards),
        "route_code": script_code(spec),
        "route": spec.choice.precision,
    }
    return _one_blank_line(fill(load_template("train.py.tmpl"), conditions, texts))


def _title(spec: RunSpec) -> str:
    """One line of our own words and numbers: what the user wrote could end a docstring."""
    where = "the CPU" if spec.on_cpu else f"{spec.num_processes} GPU"
    if spec.num_processes > 1:
        where = f"{spec.num_processes} " + ("processes on the CPU" if spec.on_cpu else "GPUs")
    method = {"full": "all weights", "lora": "a LoRA adapter", "qlora": "a QLoRA adapter"}
    what = method[spec.choice.method]
    return f"Train {what} with TRL's {CLASSES[spec.job.trainer]}Trainer on {where}."


def _imports(spec: RunSpec, rewards: list[str]) -> str:
    """Import lines in three groups: standard library, torch and its family, nothing else."""
    standard = ["json", "math", "os", "time"]
    third = ["from accelerate.utils import gather_object", "from datasets import load_dataset"]
    transformers = ["TrainerCallback"]
    trl = [f"{CLASSES[spec.job.trainer]}Config", f"{CLASSES[spec.job.trainer]}Trainer"]
    if spec.on_cpu:
        standard += ["resource", "sys"]
        third.append("import psutil")
    else:
        third.append("import torch")
    if any("." in reward for reward in rewards) and "sys" not in standard:
        standard.append("sys")
    if spec.choice.method != "full":
        third.append("from peft import LoraConfig")
    if spec.choice.method == "qlora":
        transformers.append("BitsAndBytesConfig")
    if spec.job.trainer in ("grpo", "rloo"):
        transformers.append("AutoTokenizer")
    if keeps_fsdp_outputs(spec):
        third.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
    third.append(f"from transformers import {', '.join(sorted(transformers))}")
    third.append(f"from trl import {', '.join(trl)}")
    third += [line for line in script_imports(spec) if line not in third]
    builtin = [reward for reward in rewards if reward in TRL_REWARDS]
    if builtin:
        third.append(f"from trl.rewards import {', '.join(sorted(builtin))}")
    plain = sorted(line for line in third if line.startswith("import"))
    named = sorted(line for line in third if line.startswith("from"))
    return "\n".join([*(f"import {module}" for module in sorted(standard)), "", *plain, *named])


def _config(spec: RunSpec) -> str:
    lines: list[str] = []
    for section in config_sections(spec):
        lines += [f"    # {line}" for line in _wrapped(section.reason)]
        for name, value in section.values.items():
            text = literal(value, indent=4, first=4 + len(name) + 1)
            lines.append(f"    {name}={text},")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 7 > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _call(name: str, values: dict[str, object]) -> str:
    rows = "".join(f"    {key}={literal(value, indent=4, first=5 + len(key))},\n" for key, value in values.items())
    return f"{name}(\n{rows})"


def _adapter(spec: RunSpec) -> str:
    if spec.choice.method == "full":
        return ""
    return "LORA = " + _call("LoraConfig", adapter_settings(spec.job))


def adapter_settings(job: Job) -> dict[str, object]:
    """The arguments of PEFT's LoraConfig."""
    lora = job.lora
    return {
        "r": lora.r,
        "lora_alpha": lora.alpha if lora.alpha is not None else 2 * lora.r,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "task_type": "SEQ_CLS" if job.trainer == "reward" else "CAUSAL_LM",
    }


def _quantization(spec: RunSpec) -> str:
    if spec.choice.method != "qlora":
        return ""
    if spec.job.quantization == "int8":
        return "QUANTIZATION = " + _call("BitsAndBytesConfig", {"load_in_8bit": True})
    compute = "bfloat16" if spec.choice.mixed_precision != "fp16" else "float16"
    values: dict[str, object] = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": spec.job.quantization == "nf4-double",
        "bnb_4bit_compute_dtype": compute,
    }
    if spec.choice.sharding in FSDP2:
        # FSDP shards parameters of one dtype, so the packed weights are stored as the rest.
        values["bnb_4bit_quant_storage"] = DTYPES[spec.choice.weights]
    return "QUANTIZATION = " + _call("BitsAndBytesConfig", values)


def _load_dataset(job: Job, name: str) -> str:
    """The call that loads the job's data, whose source stands in the variable ``name``."""
    split, builder = job.data.split, dataset_builder(job)
    if builder is None:
        return f"load_dataset({name}, split={literal(split)})"
    if split != "train" and not split.startswith("train["):
        raise UsageError(
            f"data.split {split} does not exist in a local file, which is all train; "
            "leave it out or write a slice such as train[:90%]"
        )
    return f'load_dataset("{builder}", data_files={name}, split={literal(split)})'


def _rewards(spec: RunSpec) -> list[str]:
    """Names of the reward functions: TRL's, ours, or dotted import paths."""
    given = spec.job.trl.get("reward_funcs")
    if spec.job.trainer not in ("grpo", "rloo"):
        if given is not None:
            raise UsageError(f"trl.reward_funcs belongs to grpo and rloo, not to {spec.job.trainer}")
        return []
    known = ", ".join((OWN_REWARD, *TRL_REWARDS))
    if not given:
        raise UsageError(
            f"{spec.job.trainer} needs a reward; add trl: {{reward_funcs: [my_rewards.score]}} "
            f"with an import path, or one of {known}"
        )
    names: list[object] = list(given) if isinstance(given, list) else [given]  # pyright: ignore[reportUnknownArgumentType]
    rewards: list[str] = []
    for name in names:
        if isinstance(name, str) and (name == OWN_REWARD or name in TRL_REWARDS):
            rewards.append(name)
        elif isinstance(name, str) and _IMPORT_PATH.fullmatch(name):
            rewards.append(name.replace(":", "."))
        else:
            raise UsageError(
                f"trl.reward_funcs {name!r} is neither an import path such as my_rewards.score nor one of {known}"
            )
    return rewards


def _reward_imports(rewards: list[str]) -> str:
    lines = (reward.rpartition(".") for reward in rewards if "." in reward)
    return "\n".join(f"from {module} import {name}  # noqa: E402" for module, _, name in lines)


def keeps_fsdp_outputs(spec: RunSpec) -> bool:
    """Only SFT builds its model after the policy can still be changed and before it is wrapped."""
    return spec.choice.sharding in FSDP2 and spec.choice.mixed_precision == "bf16" and spec.job.trainer == "sft"


def _one_blank_line(text: str) -> str:
    """Dropped blocks leave blank lines behind; two are enough anywhere."""
    return re.sub(r"\n{4,}", "\n\n\n", text)


def refuse_what_no_script_does(spec: RunSpec) -> None:
    """Raise for a choice that is estimated and never written.

    Raises:
        UsageError: what to pin instead.
    """
    choice, trainer = spec.choice, spec.job.trainer
    if choice.tp > 1:
        raise UsageError("tp is not offered: such a run cannot resume (docs/rules.md); pin tp=1")
    refuse_unwritten(spec)
    if choice.sharding == "fsdp1":
        raise UsageError("fsdp1 is only estimated, not written; pin sharding=fsdp")
    if spec.on_cpu and choice.sharding not in ("none", "ddp"):
        raise UsageError(f"sharding {choice.sharding} needs GPUs; pin sharding=ddp on the CPU")
    if spec.on_cpu and (choice.offload or choice.method == "qlora"):
        raise UsageError("offload and quantised weights need a GPU; choose others for the CPU")
    if trainer != "sft" and (choice.cp > 1 or choice.sp > 1):
        raise UsageError(f"{trainer} does not split sequences over GPUs; pin cp=1 and sp=1")
    if choice.cp > 1 and choice.sharding not in FSDP2:
        raise UsageError("context parallelism needs FSDP2; pin sharding=fsdp")
    if choice.cp > 1 and choice.packing:
        raise UsageError("packed documents would read each other under cp; set data.packing: false")
    if choice.sp > 1 and choice.sharding not in ZERO:
        raise UsageError("sequence parallelism needs DeepSpeed; pin sharding=zero3")
    if choice.method == "qlora" and not at_least(spec.stack, "trl", "1.13"):
        raise UsageError("quantised weights are handed to trainers since TRL 1.13; upgrade trl")
    _refuse_recompute(spec)
    targets = spec.job.lora.target_modules
    if choice.method != "full" and isinstance(targets, list) and "lm_head" in targets:
        raise UsageError("lora.target_modules lm_head is refused by TRL's fused loss; leave it out")
    if spec.architecture.remote_code and not spec.job.trl.get("trust_remote_code"):
        raise UsageError("the model runs code of its own; read it, then add trl: {trust_remote_code: true}")


def _refuse_recompute(spec: RunSpec) -> None:
    choice, trainer = spec.choice, spec.job.trainer
    if choice.recompute == "selective":
        if trainer != "sft":
            raise UsageError(f"selective recompute is only SFT's; pin recompute=full for {trainer}")
        if not at_least(spec.stack, "trl", "1.15"):
            raise UsageError("selective recompute needs TRL 1.15; pin recompute=full")
        if "activations" in choice.offload:
            raise UsageError("what selective recompute keeps is not offloaded; pin recompute=full")
        if choice.method != "full" and choice.sharding == "zero3":
            raise UsageError("adapters under ZeRO-3 recompute whole layers; pin recompute=full")
    if choice.recompute.startswith("every_"):
        if trainer in ("kto", "grpo", "rloo") or (
            trainer == "dpo" and not spec.job.trl.get("precompute_ref_log_probs")
        ):
            raise UsageError(f"{trainer} fails on recompute {choice.recompute}; pin recompute=full")
        if not at_least(spec.stack, "transformers", "5.16"):
            raise UsageError(f"recompute {choice.recompute} needs transformers 5.16")
    if "activations" in choice.offload and trainer in ("grpo", "rloo"):
        raise UsageError(f"{trainer} has no activation offload; pin offload without activations")
