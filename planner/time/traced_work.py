"""Work of one token through all layers: traced where there is a trace, closed forms else, and what kernels change."""

from __future__ import annotations

from typing import Literal

from planner.architecture import Architecture, LayerKind
from planner.choice import Choice
from planner.memory.adapters import lora_modules
from planner.memory.coefficients import LayerWork, OperatorWork
from planner.memory.states import uses_autocast
from planner.time.fused_kernels import liger_saves, unpacked_bytes
from planner.time.linear_attention import LinearWork, kernel_work, operator_work
from planner.time.work import Work, closed_work, forward_work, mixed_work, recomputed_share

WorkEvidence = Literal["formula", "traced"]


def token_work(
    architecture: Architecture,
    choice: Choice,
    *,
    sequence: int,
    lora_r: int,
    lora_targets: str | tuple[str, ...],
    lora_dropout: bool = False,
    masked: bool,
    fp32_residual: bool,
    traced: tuple[LayerWork, ...] = (),
    linear_kernels: bool = False,
    liger: bool = False,
    quantization: str | None = None,
) -> tuple[Work, WorkEvidence]:
    """Work of one token on one rank, and what it rests on.

    Args:
        architecture: shapes.
        choice: the knobs.
        sequence: tokens that a query may look back on: the whole sequence, also under context parallelism.
        lora_r: adapter rank.
        lora_targets: adapted modules.
        lora_dropout: they have dropout before them.
        masked: a mask is materialised, so full-attention layers lose the causal kernel.
        fp32_residual: the residual stream is fp32.
        traced: what was counted of each kind under these options, empty where nothing was.
        linear_kernels: linear attention runs by a package's kernels, which no trace sees.
        liger: norms, rotary embedding and SwiGLU are liger-kernel's.
        quantization: how the frozen base is packed, None where it is not.
    """
    again = recomputed_share(choice.recompute, architecture.num_layers)
    adapters = lora_modules(architecture, lora_targets) if choice.method != "full" else None
    total, all_traced = Work(), bool(traced)
    for index, kind in enumerate(architecture.kinds):
        own = closed_work(
            architecture,
            index,
            choice,
            sequence=sequence,
            lora_r=lora_r,
            adapters=adapters[index] if adapters is not None else None,
            lora_dropout=lora_dropout,
            masked=masked,
            fp32_residual=fp32_residual,
            linear=_linear_work(kind, sequence, linear_kernels),
        )
        if traced and not (linear_kernels and kind.attention == "linear"):
            counted = _traced(traced[index], choice, sequence, again)
            # What is useful is a convention and no matter of evidence. A causal kernel's square is known exactly, and
            # where a trace made a line of it, behind a window or between two lengths, the line is not asked.
            causal = counted.attention_flops if traced[index].none.attention_flops.per_token_pair else None
            own = counted._replace(
                useful_flops=own.useful_flops, attention_flops=own.attention_flops if causal is None else causal
            )
        else:
            all_traced = False
        if liger:
            own = _with_liger(own, kind, architecture.hidden, again)
        if quantization is not None:
            more = unpacked_bytes(kind, quantization, 1.0 + again)
            own = own._replace(elementwise_bytes_per_batch=own.elementwise_bytes_per_batch + more)
        total = mixed_work(total, 1.0, own, architecture.order.count(index))
    return total, "traced" if all_traced else "formula"


def _linear_work(kind: LayerKind, sequence: int, kernels: bool) -> LinearWork | None:
    """What stands in attention's place in a layer of linear attention, None in any other."""
    if kind.attention != "linear":
        return None
    return kernel_work(kind) if kernels else operator_work(kind, sequence)


def forward_token_work(
    architecture: Architecture,
    choice: Choice,
    *,
    sequence: int,
    lora_r: int,
    lora_targets: str | tuple[str, ...],
    lora_dropout: bool,
    adapted: bool,
    masked: bool,
    fp32_residual: bool,
    linear_kernels: bool,
    liger: bool,
    quantization: str | None,
) -> Work:
    """Work of one token on one rank in a forward without gradient, by closed forms: a reference model, or a policy.

    Args are those of ``token_work``; ``adapted`` says that adapters are there and not disabled.
    """
    adapters = lora_modules(architecture, lora_targets) if adapted else None
    total = Work()
    for index, kind in enumerate(architecture.kinds):
        own = forward_work(
            architecture,
            index,
            choice,
            sequence=sequence,
            lora_r=lora_r,
            adapters=adapters[index] if adapters is not None else None,
            lora_dropout=lora_dropout,
            masked=masked,
            fp32_residual=fp32_residual,
            linear=_linear_work(kind, sequence, linear_kernels),
        )
        if liger:
            saved = liger_saves(kind, architecture.hidden)
            own = own._replace(
                elementwise_bytes=own.elementwise_bytes - saved.forward_bytes,
                launches_per_batch=own.launches_per_batch - saved.forward_launches,
            )
        if quantization is not None:
            own = own._replace(elementwise_bytes_per_batch=unpacked_bytes(kind, quantization, 0.0))
        total = mixed_work(total, 1.0, own, architecture.order.count(index))
    return total


def _with_liger(own: Work, kind: LayerKind, hidden: int, again: float) -> Work:
    saved = liger_saves(kind, hidden)
    launches = saved.forward_launches * (1.0 + again) + saved.backward_launches
    return own._replace(
        elementwise_bytes=own.elementwise_bytes - saved.forward_bytes * (1.0 + again) - saved.backward_bytes,
        recompute_bytes=own.recompute_bytes - again * saved.forward_bytes,
        launches_per_batch=own.launches_per_batch - launches,
    )


def _traced(layer: LayerWork, choice: Choice, sequence: int, again: float) -> Work:
    """One layer as counted, layers with and without recompute mixed as the choice recomputes them."""
    once = _counted(layer.none, choice, sequence)
    if not again:
        return once
    full = _counted(layer.selective if choice.recompute == "selective" else layer.full, choice, sequence)
    mixed = mixed_work(full, again, once, 1.0 - again)
    return mixed._replace(
        recompute_flops=mixed.matmul_flops - once.matmul_flops,
        recompute_expert_flops=mixed.expert_flops - once.expert_flops,
        recompute_bytes=mixed.elementwise_bytes - once.elementwise_bytes,
    )


def _counted(work: OperatorWork, choice: Choice, sequence: int) -> Work:
    """Lines of a trace as work of one token in sequences of ``sequence`` tokens."""
    cast = work.elementwise_bytes.constant
    if not uses_autocast(choice):
        # Sharded weights are cast where they rest, each rank its own.
        cast /= choice.shard_ranks
    return Work(
        matmul_flops=work.matmul_flops.per_token + work.matmul_flops.per_token_pair * sequence,
        expert_flops=work.expert_flops.per_token,
        attention_flops=work.attention_flops.per_token + work.attention_flops.per_token_pair * sequence,
        masked_attention_flops=work.masked_attention_flops.per_token_pair * sequence,
        elementwise_bytes=work.elementwise_bytes.per_token + work.elementwise_bytes.per_token_pair * sequence,
        launches=work.launches.per_token,
        launches_per_batch=work.launches.constant,
        matmul_flops_per_batch=work.matmul_flops.constant,
        elementwise_bytes_per_batch=cast,
    )
