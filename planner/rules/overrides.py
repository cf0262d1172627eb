"""What a job's ``trl`` section sets by hand, as far as a rule reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from planner.yaml_slips import mended

FULL_LOGITS_ARGUMENTS = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")
"""Trainer arguments for which SFT runs one more forward pass with full logits."""
LAUNCHER_ARGUMENTS = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config")
"""Arguments that would fight with the accelerate file that a run is written with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Typed view of ``Job.trl``; what is not set has the trainer's own default."""

    given: Mapping[str, Any] = field(hash=False, compare=False)
    loss_type: str | None
    label_smoothing: float
    full_logits: tuple[str, ...]
    """Arguments among ``FULL_LOGITS_ARGUMENTS`` that are set."""
    use_liger: bool | None
    liger_fused_loss: bool
    """``liger_kernel_config`` asks for its fused linear cross entropy."""
    packing_strategy: str
    eval_packing: bool
    eval_rows: int | None
    """``per_device_eval_batch_size``."""
    padding_free: bool
    keeps_max_length: bool
    """False when ``max_length: null`` lifts the limit that a plan writes."""
    pad_to_multiple_of: int
    use_reentrant: bool
    activation_offloading: bool
    precompute_ref_log_probs: bool
    sync_ref_model: bool
    kl_batch: bool
    """KTO estimates a KL term over the batch (every ``loss_type`` but ``apo_zero_unpaired``)."""
    num_generations: int | None
    generation_batch: bool
    """``generation_batch_size`` or ``steps_per_generation`` is set."""
    auto_find_batch_size: bool
    save_only_model: bool
    saves_optimizer: bool
    """Checkpoints are written, with the optimizer's states in them."""
    load_best_model_at_end: bool
    optim_target_modules: bool
    vllm_share: float
    """Share of each card that vLLM takes beside the trainer; 0 where it runs elsewhere or not at all."""
    rope: bool
    """Positions are rescaled by hand in ``model_init_kwargs``."""
    rope_keys: tuple[str, ...]
    """Keys of a ``rope_parameters`` there that asks for YaRN; none where there is no such dict."""
    launcher: tuple[str, ...]
    """Arguments among ``LAUNCHER_ARGUMENTS`` that are set."""
    max_steps: float
    num_train_epochs: float
    """Zero where they are not set."""


def read_overrides(given: Mapping[str, Any]) -> Overrides:
    """Read a ``trl`` section; values of another type than the trainer takes count as not set."""
    given = _mapping(mended(dict(given), "trl"))
    liger_config = _mapping(given.get("liger_kernel_config"))
    model_kwargs = _mapping(given.get("model_init_kwargs"))
    return Overrides(
        given=given,
        loss_type=_text(given.get("loss_type")),
        label_smoothing=_number(given.get("label_smoothing_factor")),
        full_logits=tuple(name for name in FULL_LOGITS_ARGUMENTS if given.get(name)),
        use_liger=_liger(given),
        liger_fused_loss=bool(liger_config.get("fused_linear_cross_entropy")),
        packing_strategy=_text(given.get("packing_strategy")) or "bfd",
        eval_packing=bool(given.get("eval_packing")),
        eval_rows=int(_number(given.get("per_device_eval_batch_size"))) or None,
        padding_free=bool(given.get("padding_free")),
        keeps_max_length=given.get("max_length", 1) is not None,
        pad_to_multiple_of=int(_number(given.get("pad_to_multiple_of"))),
        use_reentrant=_reentrant(given),
        activation_offloading=bool(given.get("activation_offloading")),
        precompute_ref_log_probs=bool(given.get("precompute_ref_log_probs")),
        sync_ref_model=bool(given.get("sync_ref_model")),
        kl_batch=given.get("loss_type") != "apo_zero_unpaired",
        num_generations=int(_number(given.get("num_generations"))) or None,
        generation_batch="generation_batch_size" in given or "steps_per_generation" in given,
        auto_find_batch_size=bool(given.get("auto_find_batch_size")),
        save_only_model=bool(given.get("save_only_model")),
        saves_optimizer=not given.get("save_only_model") and given.get("save_strategy") not in ("no", False),
        load_best_model_at_end=bool(given.get("load_best_model_at_end")),
        optim_target_modules=bool(given.get("optim_target_modules")),
        vllm_share=_vllm_share(given),
        rope="rope_parameters" in model_kwargs or "rope_scaling" in model_kwargs,
        rope_keys=_yarn_keys(_mapping(model_kwargs.get("rope_parameters"))),
        launcher=tuple(name for name in LAUNCHER_ARGUMENTS if given.get(name)),
        max_steps=_number(given.get("max_steps")),
        num_train_epochs=_number(given.get("num_train_epochs")),
    )


def _vllm_share(given: Mapping[str, Any]) -> float:
    # grpo_config.py:594-660 @1.16.0: on the trainer's own cards unless vllm_mode says server, 0.3 of each.
    if not given.get("use_vllm") or given.get("vllm_mode", "colocate") != "colocate":
        return 0.0
    return _number(given.get("vllm_gpu_memory_utilization")) or 0.3


def _yarn_keys(rope: Mapping[str, Any]) -> tuple[str, ...]:
    # YaRN's factor alone says that it is meant where the type is left out.
    return tuple(rope) if rope.get("rope_type", "yarn") == "yarn" and ("rope_type" in rope or "factor" in rope) else ()


def _liger(given: Mapping[str, Any]) -> bool | None:
    value = given.get("use_liger_kernel", given.get("use_liger_loss"))
    return None if value is None else bool(value)


def _reentrant(given: Mapping[str, Any]) -> bool:
    # The two names of one argument: transformers 5.23 renamed it.
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if _mapping(given.get(name)).get("use_reentrant"):
            return True
    return False


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
