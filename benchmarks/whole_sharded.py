"""One rank of FSDP2 traced on fake tensors: the exact peak of one training step, to hold the planner against.

    python benchmarks/whole_sharded.py [--only PART] [--holders N] [-o FILE]

The model, its loss and the counting are those of benchmarks/whole_models.py. Here accelerate's own
``fsdp2_prepare_model`` wraps it, with the plugin that an accelerate config makes, over torch's ``fake`` process group:
of any number of ranks the first one runs, and its collectives are over at once. Every tensor of FSDP2 is made and let
go on the host's own order of calls, which is what the allocator of a card follows too; streams decide when memory is
written, not when it is taken. So what is counted here is what a card allocates.

Cases are in benchmarks/sharded_cases.py, rows in tests/planner/data/traced_fsdp_more.jsonl. Those that end in
``-older`` run when an accelerate before 1.14 is installed, the others when it is not.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as distributed
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.sharded_cases import CASES, ShardedCase
from benchmarks.whole_models import ATEN, Meter, build, card, loss_of
from benchmarks.whole_rows import record

DATA = Path(__file__).resolve().parents[1] / "tests" / "planner" / "data" / "traced_fsdp_more.jsonl"


class ShardMeter(Meter):
    """A meter that looks into distributed tensors and sees storages grow and shrink."""

    def __init__(self, *, names: bool = False) -> None:
        super().__init__(names=names)
        self._host: set[int] = set()

    tied: torch.Size | None = None
    """Shape of an embedding that is the head as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The real operator hands on what it waits for; the one for fake tensors makes another.
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        # Autograd adds to a gradient that nobody else holds in place, unless it is fake or a view (torch's
        # input_buffer.cpp). The fused head makes such a one; that of full logits is transposed.
        adds = func is ATEN.add.Tensor and not torch.is_grad_enabled() and args[0].shape == self.tied
        if adds and not args[0]._is_view():
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    on_host = False
    """What is made now is the host's."""

    def see_of(self, tensor: Any, func: Any) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        address = tensor.untyped_storage()._cdata
        if self.on_host and address not in self.sizes:
            self._host.add(address)
            weakref.finalize(tensor.untyped_storage(), self._host.discard, address)
        if address not in self._host:
            super().see_of(tensor, func)

    def move_to_host(self, tensor: Any) -> None:
        """A card's copy is gone when the host has one; here both are the same tensor."""
        address = tensor.untyped_storage()._cdata
        self.live -= self.sizes[address]
        self.sizes[address] = 0
        self._host.add(address)
        weakref.finalize(tensor.untyped_storage(), self._host.discard, address)

    @contextlib.contextmanager
    def watching_shards(self) -> Iterator[None]:
        """Inside, gathered parameters are counted when FSDP2 resizes their storages, which no operator shows."""
        before = fsdp_param.alloc_storage, fsdp_param.free_storage

        def seen(resize: Any) -> Any:
            def run(tensor: Any) -> None:
                resize(tensor)
                self.see_of(tensor, "fsdp gathered parameter")

            return run

        fsdp_param.alloc_storage, fsdp_param.free_storage = map(seen, before)
        try:
            yield
        finally:
            fsdp_param.alloc_storage, fsdp_param.free_storage = before


@contextlib.contextmanager
def copies_from_host(meter: ShardMeter) -> Iterator[None]:
    """Inside, an offloaded shard is copied to the card to be gathered, and its gradient leaves the card."""
    kind = fsdp_param.FSDPParam
    inputs, to_sharded = kind.all_gather_inputs, kind.to_sharded_dtensor

    def moved(self: Any) -> list[Any]:
        if self.sharded_state != fsdp_param.ShardedState.SHARDED:
            return list(inputs.fget(self))
        return [fsdp_param._to_dtype_if_needed(self._sharded_param_data.clone(), self.param_dtype)]

    def left(self: Any, gradient: Any) -> Any:
        meter.move_to_host(gradient)
        return to_sharded(self, gradient)

    kind.all_gather_inputs, kind.to_sharded_dtensor = property(moved), left
    try:
        yield
    finally:
        kind.all_gather_inputs, kind.to_sharded_dtensor = inputs, to_sharded


@contextlib.contextmanager
def first_rank(sharded: ShardedCase) -> Iterator[Any]:
    """The first of the ranks, as what accelerate's wrapper asks an Accelerator for."""
    ranks = sharded.shard * sharded.replicate
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        parallelism = ParallelismConfig(dp_replicate_size=sharded.replicate, dp_shard_size=sharded.shard)
        mesh = parallelism.build_device_mesh("cpu") if sharded.replicate > 1 else None
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=sharded.reshard,
            state_dict_type="FULL_STATE_DICT",
        )
        plugin.set_mixed_precision("bf16")
        if sharded.offload:
            # There is no card here to pin memory for.
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        yield SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="bf16",
            is_main_process=False,
            device=torch.device("cpu"),
            torch_device_mesh=mesh,
            parallelism_config=parallelism,
        )
    finally:
        distributed.destroy_process_group()


def trace(sharded: ShardedCase, meter: ShardMeter) -> dict[str, Any]:
    """One row."""
    started, case = time.perf_counter(), sharded.case
    model = build(case)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    embedding = model.get_input_embeddings().weight
    meter.tied = embedding.shape if model.get_output_embeddings().weight is embedding else None
    with first_rank(sharded) as accelerator:
        fsdp2_prepare_model(accelerator, model)
        with contextlib.ExitStack() as stack:
            for context in (card(case.kernels), FakeTensorMode(allow_non_fake_inputs=True), meter):
                stack.enter_context(context)
            stack.enter_context(meter.watching_shards())
            if sharded.offload:
                stack.enter_context(copies_from_host(meter))
            meter.on_host = sharded.offload
            model.to_empty(device="cpu")
            weights = meter.live
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
            at_rest = 0
            for step in ("warm", "counted"):
                at_rest, meter.on_host = meter.live, False
                meter.begin(f"{step} forward")
                loss = loss_of(model, case)
                meter.begin(f"{step} backward")
                loss.backward()
                del loss
                meter.begin(f"{step} step")
                meter.on_host = sharded.offload
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    phases = {name: meter.peaks[f"counted {name}"] for name in ("forward", "backward", "step")}
    return {
        "id": sharded.id,
        "source": case.model.source,
        "layers_published": case.model.layers,
        "config": case.full_config(),
        "job": sharded.job(importlib.metadata.version),
        "kernels": case.kernels,
        "params": parameters,
        "trainable": trainable,
        "at_rest_params_bytes": weights,
        "at_rest_bytes": at_rest,
        **{f"{name}_peak_bytes": size for name, size in phases.items()},
        "allocated_bytes": max(phases.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    older = Version(importlib.metadata.version("accelerate")) < Version("1.14")

    def traced(case: ShardedCase, names: bool) -> tuple[dict[str, Any], ShardMeter]:
        meter = ShardMeter(names=names)
        return trace(case, meter), meter

    record(__doc__, DATA, CASES, traced, wanted=lambda case: case.older == older)
    return 0


if __name__ == "__main__":
    sys.exit(main())
