"""A recorded run in neutral terms, and in each peer's own: pure functions, nothing of a peer imported.

Read here and by peers_child.py, which runs in a peer's Python; so only the standard library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

ATTENTION, QUERY_VALUE = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "v_proj"}


class Case(TypedDict):
    """One recorded run in neutral terms."""

    id: str
    model: str
    """Hub id, or a made-up one for a traced model of reduced depth."""
    folder: str
    """Where its config.json lies."""
    config: dict[str, Any]
    params: int
    """Parameters of the class, shared ones once: what the hub reports of the weights' files."""
    trainer: str
    method: str
    """full, lora or qlora."""
    lora_r: int | None
    lora_targets: list[str] | str | None
    quantization: str | None
    batch: int
    """Sequences per GPU and micro step."""
    seq_len: int
    recompute: str
    offload: list[str]
    sharding: str
    gpus: int
    context_ranks: int
    """GPUs that share one sequence, by ring or Ulysses."""
    optimizer: str
    states: str
    """bf16: weights, gradients and moments in bf16. fp32: all in fp32. master: bf16 weights beside fp32 ones."""
    loss_path: str
    metric: str
    """max_allocated, max_reserved or unknown."""
    card: str
    card_bytes: int


class CannotError(Exception):
    """The peer has no words for the case; the message says for what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a peer can be told at all."""

    adapters: bool
    """LoRA and QLoRA."""
    sharding: bool
    """States divided over GPUs."""
    activations: bool
    """It counts activations, so how they are kept is part of the case."""
    experts: bool = True


REACH = {
    "accelerate": Reach(adapters=False, sharding=False, activations=False),
    "deepspeed": Reach(adapters=False, sharding=True, activations=False),
    "llm-analysis": Reach(adapters=False, sharding=True, activations=True),
    "fitcheck-llm": Reach(adapters=True, sharding=False, activations=True, experts=False),
    "canifinetune": Reach(adapters=True, sharding=False, activations=True),
    "ftuneai": Reach(adapters=True, sharding=True, activations=True),
    "hf-vram-calc": Reach(adapters=True, sharding=False, activations=False),
}


def check_reach(case: Case, reach: Reach) -> None:
    """Refuse what the peer has no words for.

    Raises:
        CannotError: with the first thing that it cannot be told.
    """
    if case["trainer"] != "sft":
        raise CannotError(f"no {case['trainer'].upper()}")
    if case["method"] != "full" and not reach.adapters:
        raise CannotError("no LoRA")
    if case["gpus"] > 1 and not reach.sharding:
        raise CannotError("one GPU only")
    if "num_experts" in case["config"] and not reach.experts:
        raise CannotError("no mixture of experts")
    if not reach.activations:
        return
    if case["context_ranks"] > 1:
        raise CannotError("no context parallelism")
    if case["offload"]:
        raise CannotError("no offload of activations")
    if case["recompute"] not in ("none", "full"):
        raise CannotError("recompute is on or off")


def lora_scope(case: Case, names: dict[str, str]) -> str:
    """The peer's name for the case's target modules.

    Args:
        case: a LoRA or QLoRA case.
        names: the peer's words for ``all-linear``, ``attention`` (q, k, v, o) and ``query_value``.
    """
    targets = case["lora_targets"]
    if targets == "all-linear":
        return names["all-linear"]
    if set(targets or ()) == ATTENTION:
        return names["attention"]
    if set(targets or ()) == QUERY_VALUE:
        return names["query_value"]
    raise CannotError(f"no LoRA on {targets}")


def state_accelerate(case: Case) -> dict[str, Any]:
    """Arguments of `accelerate estimate-memory`; of its rows the one with the case's bytes per parameter: 8 or 16."""
    return {"model_name": case["folder"], "dtypes": ["float16" if case["states"] == "bf16" else "float32"]}


def state_deepspeed(case: Case) -> dict[str, Any]:
    """Arguments of `estimate_zero3_model_states_mem_needs`; FSDP divides what ZeRO-3 does, one GPU holds it all."""
    return {"num_gpus_per_node": case["gpus"], "num_nodes": 1, "cpu_offload": False, "cpu_offload_params": False}


def state_llm_analysis(case: Case) -> dict[str, Any]:
    """Model, dtypes and training arguments.

    Its MLP has two matrices, so a gated one of width w is stated as 3/2 w, which gives the right number of parameters.
    Weights have at most 16 bits, so fp32 ones are its master weights. Gradients are as wide as master weights; without
    those, the master's share of the optimizer states and ``other_op_bytes`` are one bf16 moment each.
    """
    config = case["config"]
    experts = config.get("num_experts", 1)
    width = config["moe_intermediate_size"] if experts > 1 else config["intermediate_size"]
    master_bytes, other_bytes = (2, 2) if case["states"] == "bf16" else (4, 8)
    return {
        "model": {
            "name": case["model"],
            "num_layers": config["num_hidden_layers"],
            "n_head": config["num_attention_heads"],
            "hidden_dim": config["hidden_size"],
            "vocab_size": config["vocab_size"],
            "max_seq_len": max(case["seq_len"], config.get("max_position_embeddings", 0)),
            "num_key_value_heads": config["num_key_value_heads"],
            "ffn_embed_dim": width * 3 // 2,
            "expansion_ratio": width * 1.5 / config["hidden_size"],
            "moe_num_experts": experts,
            "moe_top_k": config.get("num_experts_per_tok", 1),
        },
        "dtype": "w16a16e16",
        "training": {
            # All three sizes, or it stops where the batch does not fit.
            "batch_size_per_gpu": case["batch"],
            "gradient_accumulation_steps": 1,
            "global_batch_size": case["batch"] * case["gpus"],
            "seq_len": case["seq_len"],
            "activation_recomputation": 2 if case["recompute"] == "full" else 0,
            "ds_zero": 3 if case["gpus"] > 1 else 0,
            "master_weights_dtype_bytes": master_bytes,
            "other_op_bytes": other_bytes,
            "flash_attn": True,
        },
        "dp_size": case["gpus"],
        "gpu": {"A100-80GB": "a100-sxm-80gb", "H100-80GB": "h100-sxm-80gb", "L40S": "a6000-48gb"}[case["card"]],
    }


def state_fitcheck(case: Case) -> dict[str, Any]:
    """Arguments of its TrainingConfig; fp32 weights under autocast are what it calls bf16 with master weights."""
    stated: dict[str, Any] = {
        "precision": "bf16",
        "quantization": {None: "none", "nf4-double": "nf4"}[case["quantization"]],
        "double_quant": case["quantization"] == "nf4-double",
        "optimizer": "adamw",
        "optimizer_dtype": "bf16" if case["method"] == "full" and case["states"] == "bf16" else "fp32",
        "batch_size": case["batch"],
        "seq_len": case["seq_len"],
        "lora_rank": case["lora_r"],
        "grad_checkpoint": case["recompute"] == "full",
        "flash_attn": True,
    }
    if case["method"] != "full":
        names = {"all-linear": "FULL", "attention": "STANDARD", "query_value": "MINIMAL"}
        stated["lora_targets"] = f"LORA_TARGETS_{lora_scope(case, names)}"
    return stated


def state_canifinetune(case: Case) -> dict[str, Any]:
    """Arguments of its EstimateRequest; the override holds what the hub would tell, the exact count included."""
    config = case["config"]
    experts = config.get("num_experts", 1)
    stated: dict[str, Any] = {
        "model_id": case["model"],
        "method": case["method"],
        "seq_len": case["seq_len"],
        "micro_batch_size": case["batch"],
        "base_dtype": "fp32" if case["states"] == "fp32" else "bf16",
        "optimizer": case["optimizer"],
        "gradient_checkpointing": case["recompute"] == "full",
        "loss_backend": "liger" if case["loss_path"] == "liger" else "stock",
        "gpu_vram_gb": 48 if case["card"] == "L40S" else 80,
        "use_network": False,
        "override": {
            # Granite's projections are named as Llama's, and without a known family it takes no LoRA.
            "family": "llama" if config["model_type"] == "granite" else config["model_type"],
            "hidden_size": config["hidden_size"],
            "num_hidden_layers": config["num_hidden_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "num_key_value_heads": config["num_key_value_heads"],
            "intermediate_size": config["moe_intermediate_size"] if experts > 1 else config["intermediate_size"],
            "vocab_size": config["vocab_size"],
            "tie_word_embeddings": config["tie_word_embeddings"],
            "num_local_experts": experts,
            "num_experts_per_tok": config.get("num_experts_per_tok", 1),
            "total_params": case["params"],
        },
    }
    if case["method"] != "full":
        names = {"all-linear": "all_linear", "attention": "attention", "query_value": "conservative"}
        stated |= {"lora_rank": case["lora_r"], "lora_target_scope": lora_scope(case, names)}
    if case["method"] == "qlora":
        stated["quantization"] = {"nf4-double": "nf4_double_quant"}[case["quantization"] or ""]
    return stated


def state_ftuneai(case: Case) -> dict[str, Any]:
    """Arguments of its Estimator. The model comes from its own table, or from config.json by its own reading."""
    stated: dict[str, Any] = {
        "model": case["model"],
        "method": case["method"],
        "quantization": {None: "none", "nf4-double": "4bit"}[case["quantization"]],
        "batch_size": case["batch"],
        "seq_length": case["seq_len"],
        "gradient_checkpointing": case["recompute"] == "full",
        "optimizer": "adamw",
        "flash_attention": True,
        "sharding": {"none": "none", "zero3": "zero_3"}.get(case["sharding"], "fsdp"),
        "num_gpus": case["gpus"],
    }
    if case["method"] != "full":
        names = {"all-linear": "all_linear", "attention": "attention_all", "query_value": "attention"}
        stated |= {"lora_rank": case["lora_r"], "lora_target": lora_scope(case, names)}
    return stated


def state_hf_vram_calc(case: Case) -> dict[str, Any]:
    """dtype and rank of its memory result; its training column knows neither batch nor length, its dtypes no nf4."""
    if case["method"] == "qlora":
        dtype = {"nf4-double": "int4"}[case["quantization"] or ""]
    else:
        dtype = "fp32" if case["states"] == "fp32" else "bf16"
    stated = {"dtype": dtype, "batch_size": case["batch"], "sequence_length": case["seq_len"]}
    return stated | ({"lora_rank": case["lora_r"]} if case["method"] != "full" else {})
