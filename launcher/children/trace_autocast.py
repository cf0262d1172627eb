"""What CUDA's autocast widens and a CPU's does not: some operators run in fp32 whatever they are given.

Under bf16 weights it decides what a LayerNorm keeps: its input in fp32, and an fp32 output that every projection casts
down for itself. Lists are those of torch's ATen/autocast_mode.h, of which those operators count that the installed
torch widens on CUDA; losses and image operators, which no decoder layer calls, are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "cosine_similarity", "logsumexp",
)  # fmt: skip
"""Inputs are cast to fp32."""
_FP32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""The result is asked for in fp32, unless the caller asks for a dtype."""
_LOW = (torch.bfloat16, torch.float16)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW else value
    return [_widened(item) for item in value] if isinstance(value, (list, tuple)) else value


def _in_fp32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})

    return run


def _to_fp32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(names)

    def run(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get("dtype")
        if asked is None and args[0].dtype in _LOW:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    return run


def _below_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return run(*args, **kwargs)

    return kernel


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, autocast on a CPU widens what it widens on CUDA."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for names, wrap in ((_FP32, _in_fp32), (_FP32_RESULT, _to_fp32)):
            for name in names:
                op = _overload(name)
                if op is not None and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCUDA"):
                    library.impl(name, _below_autocast(wrap(op)), "AutocastCPU")
        yield
    finally:
        library._destroy()
