"""The arguments of TRL's config class that a choice means, in the order a reader looks for them.

What the plan decides is set here and nowhere else: a job's own ``trl:`` settings win over defaults,
but one that would contradict the plan is refused with the name of the knob to pin.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import cast

from launcher.errors import UsageError
from launcher.run_text.route_script import by_accelerate, padding_of
from launcher.run_text.run_spec import RunSpec
from launcher.running.checkpoints import KEPT
from planner.choice import FSDP2
from planner.rules.context import DEFAULT_GENERATIONS
from planner.stack import Stack
from planner.yaml_slips import mended
from profiles.releases import newest_known, trl_release

DTYPES: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_PLANNED: dict[str, str] = {
    "per_device_train_batch_size": "pin micro_batch instead",
    "gradient_accumulation_steps": "pin grad_accum instead",
    "auto_find_batch_size": "the plan finds the batch; pin micro_batch instead",
    "max_length": "set seq_len instead",
    "packing": "set data.packing instead",
    "padding_free": "it follows data.packing; set that instead",
    "activation_checkpointing": "pin recompute instead",
    "activation_checkpointing_kwargs": "pin recompute instead",
    "gradient_checkpointing": "pin recompute instead",
    "gradient_checkpointing_kwargs": "pin recompute instead",
    "activation_offloading": "pin offload=activations instead",
    "bf16": "pin mixed_precision instead",
    "fp16": "pin mixed_precision instead",
    "optim": "pin optimizer instead",
    "use_liger_kernel": "pin loss_path=liger instead",
    "fsdp": "pin sharding instead",
    "fsdp_config": "pin sharding instead",
    "deepspeed": "pin sharding instead",
    "parallelism_config": "pin cp, sp, dp_shard or dp_replicate instead",
    "accelerator_config": "pin sharding instead",
    "use_cpu": "set machine: cpu instead",
    "output_dir": "checkpoints stay inside the run folder; choose that folder with -o",
    "resume_from_checkpoint": "start the written run with RESUME=1 instead",
}
_PLANNED_MODEL: dict[str, str] = {
    "dtype": "pin weights instead",
    "torch_dtype": "pin weights instead",
    "attn_implementation": "pin attention instead",
    "quantization_config": "set method: qlora and quantization instead",
    "rope_parameters": "it follows seq_len",
    "rope_scaling": "it follows seq_len",
    "max_position_embeddings": "it follows seq_len",
    "device_map": "placement follows the plan",
}
_NOT_SETTINGS = frozenset({"reward_funcs", "num_generations", "max_completion_length"})
"""Keys of ``trl:`` that are read elsewhere, not copied as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Arguments that belong together, with one line on why they have their values."""

    reason: str
    values: dict[str, object]


def config_sections(spec: RunSpec) -> list[Section]:
    """Every argument of the config class, the job's own settings last.

    Raises:
        UsageError: a setting contradicts the plan, cannot be written, or misses for this trainer.
    """
    settings = user_settings(spec)
    sections = [
        _batch(spec),
        _length(spec),
        _memory(spec),
        Section(reason="the model as it is loaded", values={"model_init_kwargs": _model(spec)}),
        _processes(spec),
        _records(spec),
        _evaluation(spec),
    ]
    for section in sections:
        for name in section.values.keys() & settings.keys() - {"model_init_kwargs"}:
            section.values[name] = settings.pop(name)
    settings.pop("model_init_kwargs", None)
    sections.append(Section(reason="as the job says", values=settings))
    return [section for section in sections if section.values]


def user_settings(spec: RunSpec) -> dict[str, object]:
    """The job's ``trl:`` settings, checked against the plan and made ready to write.

    Raises:
        UsageError: a setting contradicts the plan or has no setting's name.
    """
    settings: dict[str, object] = {}
    for name, value in spec.job.trl.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"trl.{name!r} is not a setting's name")
        if name in _PLANNED:
            raise UsageError(f"trl.{name} is decided by the plan; {_PLANNED[name]}")
        if name not in _NOT_SETTINGS:
            settings[name] = mended(value, name)
    _refuse_loss_type(spec, settings)
    _refuse_evaluation(spec, settings)
    if "pad_to_multiple_of" in settings and _padding(spec) is not None:
        raise UsageError("trl.pad_to_multiple_of is decided by cp, sp and the precision route; leave it out")
    for name in _model_settings(spec):
        if name in _PLANNED_MODEL:
            raise UsageError(f"trl.model_init_kwargs.{name} is decided by the plan; {_PLANNED_MODEL[name]}")
    return settings


def _model_settings(spec: RunSpec) -> dict[str, object]:
    """The job's own keywords for loading the model."""
    given: object = spec.job.trl.get("model_init_kwargs") or {}
    value = mended(given, "model_init_kwargs")
    if not isinstance(value, dict):
        raise UsageError("trl.model_init_kwargs must be a mapping, such as {revision: main}")
    return cast("dict[str, object]", value)


def at_least(stack: Stack, package: str, minimum: str) -> bool:
    """Whether the stack has the package at ``minimum`` or newer; one not stated is the newest."""
    return stack.version(package) is None or stack.has(package, minimum)


def loss_settings(spec: RunSpec) -> dict[str, object]:
    """What makes this TRL take the chosen loss path; empty where it is the default.

    Raises:
        UsageError: this TRL does not have the path.
    """
    release = trl_release(spec.stack.versions.get("trl", newest_known()["trl"]))
    path, trainer = spec.choice.loss_path, spec.job.trainer
    if path not in release.loss_paths_for(trainer):
        raise UsageError(
            f"trl {release.version} has no loss path {path} for {trainer}; "
            f"pin one of {', '.join(release.loss_paths_for(trainer))}"
        )
    liger = release.liger_argument(path, trainer)
    settings: dict[str, object] = {liger: True} if liger else {}
    loss_type = release.loss_type_argument(path) if trainer == "sft" else None
    if loss_type is not None:
        settings["loss_type"] = loss_type
    return settings


def fsdp_checkpoints(spec: RunSpec) -> bool:
    """FSDP2 recomputes and offloads the layers itself, in place of transformers.

    accelerate 1.15 brought both to FSDP2; before it, transformers' offload is the way. The two
    refuse each other.
    """
    return (
        spec.choice.sharding in FSDP2
        and spec.choice.recompute == "full"
        and "activations" in spec.choice.offload
        and at_least(spec.stack, "accelerate", "1.15")
    )


def _batch(spec: RunSpec) -> Section:
    choice = spec.choice
    ranks = choice.data_parallel
    return Section(
        reason=(
            f"{choice.global_batch} sequences per optimizer step: {choice.micro_batch} at a time "
            f"x {choice.grad_accum} accumulated x {ranks} data-parallel {'rank' if ranks == 1 else 'ranks'}"
        ),
        values={
            "per_device_train_batch_size": choice.micro_batch,
            "gradient_accumulation_steps": choice.grad_accum,
        },
    )


def _length(spec: RunSpec) -> Section:
    values: dict[str, object] = {}
    reason = "longest sequence in tokens"
    if spec.job.trainer in ("grpo", "rloo"):
        completion, generations = generation_sizes(spec)
        values["max_completion_length"] = completion
        values["num_generations"] = generations
        reason = f"prompt and completion together stay within {spec.job.seq_len} tokens"
    else:
        values["max_length"] = spec.job.seq_len
    if spec.job.trainer == "sft":
        values["packing"] = spec.choice.packing
        if spec.choice.packing and spec.choice.sp > 1:
            # Ulysses fails on the document boundaries that best-fit packing hands over.
            values["packing_strategy"] = "wrapped"
    padding = _padding(spec)
    if padding is not None:
        values["pad_to_multiple_of"] = padding
        reason += (
            f"; padded to divide over {spec.choice.cp} ranks, twice each for balance"
            if spec.choice.cp > 1
            else f"; all are padded to it, to divide over {spec.choice.sp} ranks"
            if spec.choice.sp > 1
            else f"; rows are padded so that groups of {padding} tokens are whole"
        )
    return Section(reason=reason, values=values)


def generation_sizes(spec: RunSpec) -> tuple[int, int]:
    """(completion tokens, completions per prompt) for grpo and rloo.

    Raises:
        UsageError: they do not agree with seq_len or global_batch.
    """
    completion = spec.job.trl.get("max_completion_length", spec.job.seq_len // 2)
    if not isinstance(completion, int) or not 0 < completion < spec.job.seq_len:
        raise UsageError(
            f"trl.max_completion_length {completion!r} leaves no room for a prompt within seq_len "
            f"{spec.job.seq_len}; make it smaller or seq_len larger"
        )
    batch = spec.choice.global_batch
    generations = spec.job.trl.get("num_generations", DEFAULT_GENERATIONS[spec.job.trainer])
    if not isinstance(generations, int) or generations < 2 or batch % generations:
        raise UsageError(
            f"{spec.job.trainer} compares completions of one prompt, so global_batch {batch} must "
            f"be a multiple of trl.num_generations {generations!r}, 2 or more; change one of them"
        )
    return completion, generations


def _padding(spec: RunSpec) -> int | None:
    """Tokens that every row is padded to a multiple of, None where rows may have any length."""
    choice = spec.choice
    if choice.cp > 1:
        return 2 * choice.cp
    if choice.sp > 1:
        # The rows of a group are exchanged whole and must have one length: the longest, rounded up.
        return -(-spec.job.seq_len // choice.sp) * choice.sp
    return padding_of(spec)


def _memory(spec: RunSpec) -> Section:
    choice = spec.choice
    name = "activation_checkpointing" if at_least(spec.stack, "transformers", "5.23") else "gradient_checkpointing"
    by_fsdp = fsdp_checkpoints(spec)
    values: dict[str, object] = {name: choice.recompute != "none" and not by_fsdp}
    details = {} if by_fsdp else _checkpoint_details(spec)
    if details:
        values[f"{name}_kwargs"] = details
    if "activations" in choice.offload and not by_fsdp and "offload" not in details:
        values["activation_offloading"] = True
    values.update(loss_settings(spec))
    values["optim"] = choice.optimizer
    # Where accelerate converts, bf16=True would take its place (training_args.py: mixed_precision).
    values["bf16"] = choice.mixed_precision == "bf16" and not by_accelerate(spec)
    if choice.mixed_precision == "fp16":
        values["fp16"] = True
    reason = f"recompute {choice.recompute}"
    if choice.offload:
        reason += f", offload {' and '.join(sorted(choice.offload))}"
    if by_fsdp:
        reason += ": FSDP2 does both to the layers, see accelerate.yaml"
    return Section(reason=reason, values=values)


def _checkpoint_details(spec: RunSpec) -> dict[str, object]:
    """Keyword arguments of the checkpointing that transformers and TRL do."""
    choice = spec.choice
    details: dict[str, object] = {}
    if choice.recompute == "selective":
        details["selective"] = True
    elif choice.recompute.startswith("every_"):
        details["every_n_layers"] = int(choice.recompute.removeprefix("every_"))
    if choice.recompute == "none":
        return {}
    if choice.method != "full" and choice.sharding == "zero3":
        # Non-reentrant recompute compares shapes, and finds ZeRO-3's parameters given back.
        details["use_reentrant"] = True
    elif not at_least(spec.stack, "transformers", "5"):
        details["use_reentrant"] = False
    # The other trainers switch checkpointing off and on again, and then hand torch every key.
    keeps = spec.job.trainer in ("sft", "reward")
    if "activations" in choice.offload and keeps and at_least(spec.stack, "transformers", "5.17"):
        details["offload"] = True
    return details


def _model(spec: RunSpec) -> dict[str, object]:
    kwargs: dict[str, object] = {
        "dtype": DTYPES[spec.choice.weights],
        "attn_implementation": spec.choice.attention,
    }
    rope = yarn(spec)
    if rope is not None:
        kwargs["rope_parameters"] = rope
        kwargs["max_position_embeddings"] = spec.job.seq_len
    return {**kwargs, **_model_settings(spec)}


def yarn(spec: RunSpec) -> dict[str, object] | None:
    """RoPE rescaled by YaRN when the sequences are longer than the model was trained on, else None.

    All four keys are given: transformers takes the dictionary in place of the model's own and fills
    nothing in. What else the model has there (a partial rotary factor) is kept.
    """
    shape = spec.architecture
    if not 0 < shape.max_positions < spec.job.seq_len:
        return None
    if shape.nested_rope or shape.rope_type != "default" or shape.rope_theta is None:
        return None
    if shape.is_composite:
        return None  # the text model's config is inside; keywords reach only the outer one
    own = shape.config.get("rope_parameters")
    kept = dict(own) if isinstance(own, dict) else {}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    factor = shape.config.get("partial_rotary_factor")
    if factor is not None:
        kept["partial_rotary_factor"] = factor
    return {
        **kept,
        "rope_type": "yarn",
        "rope_theta": shape.rope_theta,
        "factor": spec.job.seq_len / shape.max_positions,
        "original_max_position_embeddings": shape.max_positions,
    }


def _processes(spec: RunSpec) -> Section:
    values: dict[str, object] = {}
    reason = "processes"
    if spec.on_cpu:
        values["use_cpu"] = True
        values["dataloader_pin_memory"] = False
        reason = "no accelerator: nothing to pin host memory for"
    if spec.choice.sharding in FSDP2 and spec.choice.grad_accum > 1:
        values["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        reason = "reduce gradients every micro-batch: accumulated unsharded they fill each GPU"
    if spec.choice.sharding == "ddp" and not spec.architecture.is_composite:
        values["ddp_find_unused_parameters"] = False
        reason += "; every parameter takes part in every step" if values.get("use_cpu") else ""
        reason = reason if reason != "processes" else "every parameter takes part in every step"
    return Section(reason=reason, values=values)


def _records(spec: RunSpec) -> Section:
    return Section(
        reason="what is kept: every step's figures, the last two checkpoints, no outside service",
        values={
            "output_dir": "checkpoints",
            # save_steps means nothing under "epoch"; whoever gives it wants it to count.
            "save_strategy": "steps" if "save_steps" in spec.job.trl else "epoch",
            "save_total_limit": KEPT,
            "logging_steps": 1,
            "report_to": "none",
            "seed": 42,
        },
    )


def _refuse_loss_type(spec: RunSpec, settings: dict[str, object]) -> None:
    if spec.job.trainer != "sft" or "loss_type" not in settings:
        return
    if settings["loss_type"] == "dft" and spec.choice.loss_path in ("fused", "full_logits"):
        return
    raise UsageError("trl.loss_type is decided by the plan; pin loss_path instead")


def _evaluation(spec: RunSpec) -> Section:
    if not spec.job.data.evaluates:
        return Section(reason="", values={})
    return Section(
        reason="held-out loss; no more rows at once than in training, so that it takes no more memory",
        values={
            "eval_strategy": "steps" if "eval_steps" in spec.job.trl else "epoch",
            "per_device_eval_batch_size": spec.choice.micro_batch,
        },
    )


def _refuse_evaluation(spec: RunSpec, settings: dict[str, object]) -> None:
    evaluates = spec.job.data.evaluates
    if not evaluates and (settings.get("eval_strategy", "no") != "no" or settings.get("do_eval")):
        raise UsageError("trl.eval_strategy needs evaluation data; set data.eval_dataset or data.eval_split")
    if evaluates and spec.job.trainer in ("grpo", "rloo"):
        raise UsageError(
            f"data.eval_dataset: evaluation of {spec.job.trainer} generates, which no plan counts; leave it out"
        )
