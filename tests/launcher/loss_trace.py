"""The loss code of a TRL release, run on fake tensors: its peaks in forward and backward.

Runs in the Python that has torch. argv names the folder of unpacked releases; stdin holds ``{RELEASE: [CASE, ...]}``.
Every case builds the real transformers class, whose backbone is replaced by one that only makes hidden states, and
calls the release's own ``SFTTrainer.compute_loss`` and then ``backward``. Storages are counted from the operator that
returns them until nothing holds them, rounded up to 512 bytes as CUDA's allocator rounds. Shares nothing with planner.

What is not the release's own, because there is no CUDA here:

- Triton kernels write into tensors that exist, so they are replaced by nothing, and the tests for a CUDA device in
  front of them and of ``addmm(out=)`` are answered as on a card.
- CUDA's autocast runs exp, log_softmax and sum in float32 (aten/src/ATen/autocast_mode.h); the CPU's does not and is
  told to.
- Labels are real tensors, since the loops over valid tokens read their counts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import json
import logging
import sys
import types
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from live_storages import LiveStorages
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

ATEN = torch.ops.aten
INDEXED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN._index_put_impl_.default)
EXTRA = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
}


class Counter(LiveStorages, TorchDispatchMode):
    """Sees what operators return, answering those that fake tensors cannot."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        elif func is ATEN._local_scalar_dense.default:
            return True if tensors[0].dtype == torch.bool else 1.0
        elif func is ATEN.equal.default:
            return True
        elif "out" in kwargs:
            return kwargs["out"]
        elif func in INDEXED:
            out = func(args[0], whole_indices(args[1]), *args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.see(value)
        return out


def whole_indices(indices: Any) -> list[Any]:
    """Masks among ``indices`` as the positions that they hold: a fake tensor cannot be as long as a mask is true."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            with unset_fake_temporarily():
                found.extend(index.nonzero(as_tuple=True))
        else:
            found.append(index)
    return found


def autocast_like_cuda() -> torch.library.Library:
    """exp, log_softmax and sum in float32 under the CPU's autocast."""
    library = torch.library.Library("aten", "IMPL")
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(op: Any) -> Any:
        def run(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(below):
                return op(*(wide(value) for value in args), **kwargs)

        return run

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

    for name in ("exp", "log_softmax.int", "sum", "sum.dim_IntList"):
        op, _, overload = name.partition(".")
        library.impl(name, widened(getattr(getattr(ATEN, op), overload or "default")), "AutocastCPU")
    return library


class Kernel:
    """A Triton kernel: launched over a grid, it writes into its arguments and allocates nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class HiddenStates(torch.autograd.Function):
    """Hidden states out of nothing; their gradient ends the loss's own backward."""

    @staticmethod
    def forward(ctx, trigger, done, shape, dtype):
        ctx.done = done
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx, gradient):
        ctx.done()
        return torch.zeros(()), None, None, None


class Backbone(torch.nn.Module):
    """Stands for everything below the head."""

    def __init__(self, embedding: torch.nn.Module, done: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.trigger = torch.nn.Parameter(torch.zeros(()))
        self.made = (done, shape, dtype)

    def forward(self, *args, **kwargs):
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=HiddenStates.apply(self.trigger, *self.made))


def load_trl(root: Path, release: str) -> Any:
    """``trl.trainer.sft_trainer`` of one release."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    sys.path.insert(0, str(root / f"trl-{release}"))
    try:
        found = importlib.import_module("trl.trainer.sft_trainer")
    finally:
        sys.path.pop(0)
    assert f"trl-{release}" in found.__file__, found.__file__
    return found


@functools.cache
def load_liger(root: Path, version: str) -> Any:
    """liger-kernel's fused linear cross entropy, with its packages' own ``__init__`` left out and Triton stubbed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    stub_triton()
    folder = root / f"liger-kernel-{version}" / "liger_kernel"
    for name, place in (("liger_kernel", folder), ("liger_kernel.ops", folder / "ops")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(place)]
    path = folder / "ops" / "fused_linear_cross_entropy.py"
    text = path.read_text(encoding="utf-8").replace('"cuda"', '"cpu"')
    text = text.replace("torch.is_autocast_enabled()", 'torch.is_autocast_enabled("cpu")')
    found = types.ModuleType("liger_kernel.ops.fused_linear_cross_entropy")
    exec(compile(text, str(path), "exec"), found.__dict__)
    found.liger_cross_entropy_kernel = found.element_mul_kernel = Kernel()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    return found


def stub_triton() -> None:
    """Modules named triton, enough to import what is written in it."""

    class Anything:
        def __init__(self, *args, **kwargs) -> None: ...

    class Stub(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

    names = ("triton", "triton.language", "triton.language.math", "triton.language.extra")
    for name in (*names, "triton.language.extra.libdevice", "triton.language.extra.cuda", "triton.runtime"):
        sys.modules[name] = Stub(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    triton = sys.modules["triton"]
    triton.language = sys.modules["triton.language"]
    triton.jit = lambda function=None, **options: Kernel() if function else lambda inner: Kernel()
    triton.cdiv = lambda whole, part: -(-whole // part)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.__version__ = "3.4.0"


def liger_forward(root: Path, version: str) -> Any:
    """A causal model's forward as liger_kernel.transformers makes it: the shifted labels go into the fused loss."""
    function = load_liger(root, version).LigerFusedLinearCrossEntropyFunction
    names = list(inspect.signature(function.forward).parameters)[1:]
    defaults = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "chunk_mem_const": 1}
    flags = dict.fromkeys(("return_z_loss", "use_token_scaling", "return_predicted_tokens"), False)

    def forward(self, input_ids, labels, num_items_in_batch, **kwargs):
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.model(input_ids).last_hidden_state[:, slice(0, None), :]
        target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        values = {**defaults, **flags, "return_token_accuracy": True, "reduction": "sum"}
        values |= {"_input": hidden.view(-1, hidden.size(-1)), "weight": self.lm_head.weight, "target": target}
        loss, _, accuracy, *_ = function.apply(*(values.get(name) for name in names))
        out = CausalLMOutputWithPast(loss=loss / num_items_in_batch)
        out.token_accuracy = accuracy
        return out

    return forward


def fused_as_on_cuda() -> None:
    """The fused head of TRL 1.15 and later takes its CUDA branches."""
    kernels, utils = sys.modules["trl.kernels.chunked_logprob"], sys.modules["trl.trainer.utils"]
    kernels._use_triton = utils._use_triton = lambda device: True
    kernels._forward_kernel = kernels._backward_kernel = Kernel()
    kernels._addmm_fp32 = lambda total, first, second: None
    kernels.triton = SimpleNamespace(cdiv=lambda whole, part: -(-whole // part))


def model_of(case: dict[str, Any], dtype: torch.dtype) -> Any:
    """The real class with one tiny layer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[case["family"]](
        vocab_size=case["vocab"], hidden_size=case["hidden"], intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=case["tied"], pad_token_id=0,
        **EXTRA.get(case["family"], {}),
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def trainer_of(sft: Any, model: Any, path: str) -> Any:
    """An SFTTrainer with what ``compute_loss`` reads, and nothing prepared."""
    trainer = object.__new__(sft.SFTTrainer)
    trainer.__dict__.update(
        dict.fromkeys(("compute_loss_func", "label_smoother", "compute_metrics", "preprocess_logits_for_metrics")),
        model=model, model_accepts_loss_kwargs=True, num_virtual_tokens=0, aux_loss_enabled=False, _tp_size=1,
        _total_train_tokens=0, _metrics={"train": defaultdict(list)}, get_tp_size=lambda: 1,
        args=SimpleNamespace(
            use_liger_kernel=path == "liger", loss_type="chunked_nll" if path.startswith("chunked") else "nll",
            average_tokens_across_devices=True, n_gpu=1, prediction_loss_only=False,
        ),
        accelerator=SimpleNamespace(gather_for_metrics=lambda value: value, num_processes=1, parallelism_config=None),
    )  # fmt: skip
    return trainer


def trace(sft: Any, root: Path, case: dict[str, Any]) -> dict[str, int]:
    """Bytes above the head's weights at the widest moments, and those that wait between forward and backward."""
    from accelerate.utils import convert_outputs_to_fp32

    counter, found = Counter(), {}
    dtype = torch.float32 if case["weights"] == "fp32" else torch.bfloat16
    model, path = model_of(case, dtype), case["path"]
    labels = torch.zeros(case["rows"], case["seq"], dtype=torch.long)
    inputs = {"input_ids": labels.clone(), "labels": labels, "attention_mask": torch.ones_like(labels)}

    def done() -> None:
        found["backward"] = counter.highest - start

    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        shape = (case["rows"], case["seq"], case["hidden"])
        model.model = Backbone(model.model.embed_tokens, done, shape, dtype)
        weight = torch.nn.Parameter(torch.empty(case["vocab"], case["hidden"], dtype=dtype), case["trains"])
        model.get_output_embeddings().weight = weight
        if case["tied"]:
            model.model.embed_tokens.weight = weight
        if path.startswith("chunked"):
            sft._patch_chunked_ce_lm_head(model, chunk_size=sft._CHUNKED_LM_HEAD_CHUNK_SIZE)
        elif path == "fused":
            fused_as_on_cuda()
            sft.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        elif path == "liger":
            model.forward = types.MethodType(liger_forward(root, case["liger"]), model)
        if case["autocast"]:
            model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
        trainer = trainer_of(sft, model, path)
        start = counter.highest = counter.live
        num_items = torch.tensor(case["rows"] * (case["seq"] - 1))
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        found |= {"forward": counter.highest - start, "saved": counter.live - start}
        counter.highest = counter.live
        loss.backward()
    return found


def main() -> None:
    root, asked = Path(sys.argv[1]), json.load(sys.stdin)
    kept = autocast_like_cuda()
    with contextlib.redirect_stdout(sys.stderr):
        answers = {}
        for release, cases in asked.items():
            sft = load_trl(root, release)
            answers[release] = [trace(sft, root, case) for case in cases]
    del kept
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
