"""Whole real models traced on fake tensors: the exact peak of one training step, to hold composed coefficients against.

    python benchmarks/whole_models.py [--only PART] [--holders N] [-o FILE]

An independent witness: it shares no counting with launcher/children and never cuts a model into layers. The class that
TRL would load is built on the meta device at its published sizes, its parameters become fake tensors, and one step of
warming up and one counted step run as a card would run them: the loss of the installed TRL, or transformers' own over
full logits; gradient clipping and fused AdamW; CUDA's lists of what autocast widens; CUDA's choice of attention kernel
where no mask is read. With a mask it is the CPU's kernel, which reads booleans: what a card makes of it is not here.

Runs in the Python that has torch, transformers, TRL and PEFT; cases are in benchmarks/whole_cases.py. Rows have the
format of tests/planner/data/traced.jsonl; --holders shows who held what at the peak.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as functional
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.kernels import chunked_logprob
from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing
from trl.trainer import utils as trl_utils

from benchmarks.whole_cases import CASES, Case
from benchmarks.whole_rows import record
from tests.launcher.live_storages import LiveStorages

ATEN = torch.ops.aten
DATA = Path(__file__).resolve().parents[1] / "tests" / "planner" / "data" / "traced_more.jsonl"
WIDENED = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity nll_loss l1_loss
    smooth_l1_loss mse_loss kl_div binary_cross_entropy_with_logits logsumexp
"""
"""AT_FORALL_FP32 of torch's ATen/autocast_mode.h, less losses and image operators that no decoder calls."""
SUMMED_WIDE = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
"""AT_FORALL_FP32_SET_OPT_DTYPE: no copy of the input, an fp32 result unless a dtype is asked for."""
LARGEST_FLASH_HEAD = 256


# What a card's autocast does beyond a CPU's


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _widening(name: str) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(ATEN, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: value.float() if _narrow(value) else value, (args, kwargs))
        return op(*args, **kwargs)

    return run


def _summing(name: str) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(ATEN, packet), overload or "default")
    place = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get("dtype")
        if _narrow(args[0]) and asked is None:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    return run


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, CPU autocast widens the operators that CUDA's widens."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def outside(run: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(below):
                return run(*args, **kwargs)

        return kernel

    library = torch.library.Library("aten", "IMPL")
    try:
        for names, make in ((WIDENED, _widening), (SUMMED_WIDE, _summing)):
            for name in names.split():
                library.impl(name, outside(make(name)), "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


# What a card's kernels keep


def _as_computed(*tensors: Any) -> tuple[Any, ...]:
    """Operands as autocast hands them to a kernel."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors)


def _sdpa(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    """Causal attention: flash, or the memory efficient kernel where heads are too wide or of two widths."""
    assert attn_mask is None, "cases with masks take the CPU's kernel"
    query, key, value = _as_computed(query, key, value)
    if query.shape[-1] == value.shape[-1] <= LARGEST_FLASH_HEAD:
        return ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    times = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(times, 1) if times > 1 else t for t in (key, value))
    return ATEN._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)[0]


def _flash_attention(_module: Any, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
    """The flash-attn package without padding, as transformers calls it."""
    if query.dtype == torch.float32:
        query, key, value = _as_computed(query, key, value)
    return ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0].transpose(1, 2), None


def _dropout(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """One kernel, which keeps a mask of one byte an element."""
    return torch.native_dropout(value, p, training)[0] if p and training else value


class _NoAllocation:
    """A Triton kernel: writes into what it is given."""

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def card(kernels: str) -> Iterator[None]:
    """Inside, transformers and TRL take the ways that they take on a card, attention and autocast if ``cuda``."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name, None))
            setattr(owner, name, value)

        if kernels == "cuda":
            put(functional, "scaled_dot_product_attention", _sdpa)
            stack.enter_context(cuda_autocast())
        put(functional, "dropout", _dropout)
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = _flash_attention
        stack.callback(ALL_ATTENTION_FUNCTIONS.pop, "flash_attention_2")
        # A fake batch cannot be read, and is then taken for a packed one, whose mask is made.
        put(masking_utils, "find_packed_sequence_indices", lambda _positions: None)
        # TRL's fused head: scored tokens are picked out, tiles are folded by Triton, products are added in place.
        for owner in (trl_utils, chunked_logprob):
            put(owner, "_use_triton", lambda _device: True)
        put(chunked_logprob, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
        put(chunked_logprob, "_forward_kernel", _NoAllocation())
        put(chunked_logprob, "_backward_kernel", _NoAllocation())
        put(chunked_logprob, "_addmm_fp32", lambda *_: None)
        yield


# Counting


class Meter(LiveStorages, TorchDispatchMode):
    """Bytes of every live storage, the highest of each phase, and on request who holds them then."""

    def __init__(self, *, names: bool = False) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.phase = ""
        self._made: dict[int, str] | None = {} if names else None
        self.holders: Counter[str] = Counter()

    def begin(self, phase: str) -> None:
        """From here on what is highest belongs to ``phase``."""
        self.phase, self.peaks[phase] = phase, self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _all_are_scored(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see_of(leaf, func)
        return out

    def see_of(self, tensor: Any, func: Any) -> None:
        """Count the storage under what ``func`` returned."""
        key = tensor.untyped_storage()._cdata
        before = self.sizes.get(key)
        self.see(tensor)
        if self._made is not None and self.sizes[key] != before:
            self._made[key] = f"{self.phase} {func} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        if self.live > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.live
            if self._made is not None and self.live >= max(self.peaks.values()):
                self._snapshot = [(made, self.sizes[made_key]) for made_key, made in self._made.items()]

    def drop(self, key: int) -> None:
        super().drop(key)
        if self._made is not None:
            del self._made[key]

    def held(self) -> Counter[str]:
        """Bytes at the highest moment by what made them."""
        found: Counter[str] = Counter()
        for made, size in self._snapshot:
            found[made] += size
        return found


def _all_are_scored(func: Any, args: Any) -> Any:
    """Boolean indices of fake tensors, all taken for true: every token is scored."""
    if func is ATEN.index.Tensor and len(args[1]) == 1 and _is_mask(args[1][0]):
        source, mask = args[0], args[1][0]
        return source.new_empty(mask.numel(), *source.shape[mask.dim() :])
    if func is ATEN.masked_select.default:
        return args[0].new_empty(args[1].numel())
    return None


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


# The model and its step


def build(case: Case) -> Any:
    """The class that TRL would train, on the meta device, wrapped and switched as TRL does."""
    values = case.full_config()
    # Quantised checkpoints are unpacked by the loader; the class is the same.
    values.pop("quantization_config", None)
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    dtype = torch.float32 if case.weights == "fp32" else torch.bfloat16
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
        model.tie_weights()
        model.config._attn_implementation = case.attention
        model.train()
        if case.loss == "fused":
            trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        switch_recompute(model, case.recompute)
        if case.lora_r:
            wanted = LoraConfig(r=case.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, wanted)
            if case.recompute != "none":
                model.enable_input_require_grads()
    return model


def switch_recompute(model: Any, recompute: str) -> None:
    """As the Trainer does with TRL's settings."""
    details = {"use_reentrant": False}
    if recompute == "selective":
        enable_selective_activation_checkpointing(model)
        model.gradient_checkpointing_enable(details)
    elif recompute != "none":
        every = int(recompute.removeprefix("every_")) if recompute.startswith("every_") else 1
        model.activation_checkpointing_enable(details, every_n_layers=every)


def materialise(model: Any) -> None:
    """Fake tensors for meta ones, where they are; tied ones stay tied."""
    twins: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in twins:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    twins[id(old)] = (
                        torch.nn.Parameter(new, requires_grad=old.requires_grad)
                        if isinstance(old, torch.nn.Parameter)
                        else new
                    )
                tensors[name] = twins[id(old)]


def loss_of(model: Any, case: Case) -> Any:
    """Forward of one micro-batch and its loss; nothing else of it lives on."""
    ids = torch.zeros(case.rows, case.seq_len, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if case.padded:
        inputs["attention_mask"] = torch.ones_like(ids)
    more = {"fused_lm_head": True} if case.loss == "fused" else {"use_cache": False}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        outputs = model(**inputs, **more)
    if case.loss == "full_logits":
        return outputs.loss
    return (-outputs.log_probs).sum() / torch.as_tensor(case.rows * case.seq_len)


def layers_of(model: Any) -> dict[str, Any]:
    """Distinct kinds of decoder layers by type and shapes, their order, and the parameters around them."""
    config = model.config
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next(found for found in lists if len(found) == config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    kinds: dict[Any, int] = {}
    order: list[int] = []
    for name, layer in zip(types, layers, strict=True):
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in layer.named_parameters())
        order.append(kinds.setdefault((name, shapes), len(kinds)))
    embedding = model.get_input_embeddings().weight
    return {
        "kinds": [{"type": name, "params": sum(map(math.prod, dict(shapes).values()))} for name, shapes in kinds],
        "order": order,
        "tied": model.get_output_embeddings().weight is embedding,
        "embedding_params": embedding.numel(),
    }


def trace(case: Case, meter: Meter) -> dict[str, Any]:
    """One row."""
    started = time.perf_counter()
    model = build(case)
    with card(case.kernels), FakeTensorMode(allow_non_fake_inputs=True), meter:
        materialise(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        at_rest = 0
        for step in ("warm", "counted"):
            at_rest = meter.live
            meter.begin(f"{step} forward")
            loss = loss_of(model, case)
            meter.begin(f"{step} backward")
            loss.backward()
            del loss
            meter.begin(f"{step} step")
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    phases = {name: meter.peaks[f"counted {name}"] for name in ("forward", "backward", "step")}
    return {
        "id": case.id,
        "source": case.model.source,
        **({"layers_published": case.model.layers} if case.layers else {}),
        "config": case.full_config(),
        "job": case.job(importlib.metadata.version),
        "kernels": case.kernels,
        **({"padded": True} if case.padded else {}),
        **(layers_of(model) if case.model.unread else {}),
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "trainable": sum(parameter.numel() for parameter in trained),
        "at_rest_bytes": at_rest,
        **{f"{name}_peak_bytes": size for name, size in phases.items()},
        "allocated_bytes": max(phases.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    def traced(case: Case, names: bool) -> tuple[dict[str, Any], Meter]:
        meter = Meter(names=names)
        return trace(case, meter), meter

    record(__doc__, DATA, CASES, traced)
    return 0


if __name__ == "__main__":
    sys.exit(main())
