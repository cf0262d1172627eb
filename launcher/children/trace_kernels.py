"""Stand-ins for what a GPU would run: attention, dropout and autocast with the tensors that they really keep.

A fake CPU tensor would take CPU kernels. Attention goes to the operators that CUDA takes (flash without a mask, memory
efficient with one, the mask turned into a bias), whose shapes torch knows without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as functional
from trace_autocast import cuda_autocast
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ATEN = torch.ops.aten
LARGEST_FLASH_HEAD = 256
"""Widest head that the flash kernels take."""


def _lowered(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What autocast does to the operands of attention."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(t.to(dtype) for t in tensors)


def _flash(query, key, value, scale):
    out = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)
    return out[0]


class _SecondBias(torch.autograd.Function):
    """A second copy of the bias from attention's forward to its backward.

    No operator shows it, two records of Gemma-3-1B on one H100 do: its longest length (107,520 tokens) and its peak at
    8,192 tokens, TRL 1.15 on torch 2.11.
    """

    @staticmethod
    def forward(ctx, out, bias):
        ctx.save_for_backward(torch.empty_like(bias))
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def cuda_sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # the signature of torch.nn.functional.scaled_dot_product_attention
    """``scaled_dot_product_attention`` as CUDA dispatches it for training in half precision."""
    query, key, value = _lowered(query, key, value)
    same = query.shape[-1] == value.shape[-1] <= LARGEST_FLASH_HEAD
    if attn_mask is None and same and query.dtype != torch.float32:
        return _flash(query, key, value, scale)
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    efficient = _ATEN._scaled_dot_product_efficient_attention
    if attn_mask is None:
        return efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]
    bias = attn_mask
    if bias.dtype == torch.bool:
        lowest = torch.full((), float("-inf"), dtype=query.dtype)
        bias = torch.where(bias, 0.0, lowest)
    expanded = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out = efficient(query, key, value, expanded, True, 0.0, is_causal, scale=scale)[0]
    return _SecondBias.apply(out, bias)


def flash_attention_2(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, **kwargs
):
    """The attention function of the flash-attn package: keeps queries, keys, values, output and log-sum-exp."""
    if query.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        query, key, value = _lowered(query, key, value)
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = functional.pad(value, [0, query.shape[-1] - width])
    # It keeps the same within a window and computes less, which no operator of torch's says.
    query.store.window = sliding_window or 0
    return _flash(query, key, value, scaling)[..., :width].transpose(1, 2), None


def _fused_dropout(input, p=0.5, training=True, inplace=False):
    return torch.native_dropout(input, p, training)[0] if training and p else input


@contextlib.contextmanager
def gpu_kernels(*, cpu_attention: bool) -> Iterator[None]:
    """Inside, transformers and PEFT meet the stand-ins.

    Args:
        cpu_attention: leave SDPA and autocast as they are on a CPU, for a plan of a run without a GPU.
    """
    sdpa, dropout = functional.scaled_dot_product_attention, functional.dropout
    packed = masking_utils.find_packed_sequence_indices
    # A fake tensor cannot be read to see that the batch is not packed, which would make the mask.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash_attention_2
    functional.dropout = _fused_dropout
    try:
        if cpu_attention:
            yield
            return
        functional.scaled_dot_product_attention = cuda_sdpa
        with cuda_autocast():
            yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = sdpa, dropout
        masking_utils.find_packed_sequence_indices = packed
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
