"""From tensor bytes to what the card shows: allocator-visible workspaces, reserved slack, context.

Constants are physical and named; the interval of the estimate covers what they miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.choice import Choice
from planner.hardware import Hardware
from planner.units import MIB

CUBLAS_WORKSPACE_BYTES = {9: 32 * MIB + 65536, 10: 32 * MIB + 65536}
"""cuBLAS workspace of one stream by major compute capability (torch CUDABlas, default CUBLAS_WORKSPACE_CONFIG)."""
CUBLAS_WORKSPACE_DEFAULT_BYTES = 8 * MIB + 128 * 1024
"""The same before Hopper: :4096:2:16:8."""
CUBLAS_THREADS = 2
"""Each thread has a cuBLAS handle with a workspace of its own: forward's and autograd's. With two, TRL's measurement of
one chunk of its loss (PR 6863) is met to 0.3 %."""
CONTEXT_BYTES = 500 * MIB
"""CUDA context with torch's kernels loaded: 0.4 to 0.6 GiB on cards from Ampere to Hopper. Not measured here; a probe
of the card puts its own in place."""
NCCL_BYTES = 800 * MIB
"""NCCL communicators and their channels on one card of a node: 0.3 to 1.2 GiB. Not measured here."""
SLACK_SHARE = 0.03
"""Reserved over allocated that a run cannot do without under expandable segments, which written runs switch on: pages
of 20 MiB of which a tensor fills a part. 0.1 to 2.2 % in 27 simulated steps above 16 GiB, to 4.8 % in 7 below
(benchmarks/whole_steps.py). While a card has room more is reserved, and given back when it has none."""
WHOLE_SEGMENTS_SHARE = 0.12
"""The same without expandable segments: tensors need segments whole, and a small one keeps a large segment from the
next large tensor. The median of the 27, 0.3 to 29 %; three published runs reserved 9.9 to 11.2 % more than
their tensors (PEFT's method comparison)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """The three metrics at the peak: ``max_memory_allocated``, ``max_memory_reserved``, NVML's used."""

    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int

    @property
    def slack_bytes(self) -> int:
        """Reserved but not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def total_bytes(self) -> int:
        """What NVML would show for this process."""
        return self.reserved_bytes + self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """From tensors to metrics for the runs of one card and number of GPUs."""

    workspace_bytes: int
    slack_share: float
    context_bytes: int

    def at(self, tensor_bytes: int) -> DeviceBytes:
        """Metrics of a run whose tensors peak at ``tensor_bytes``."""
        allocated = tensor_bytes + self.workspace_bytes
        reserved = allocated + int(self.slack_share * allocated)
        return DeviceBytes(allocated_bytes=allocated, reserved_bytes=reserved, context_bytes=self.context_bytes)

    def device_bytes(self, tensor_bytes: int) -> int:
        """``at(tensor_bytes).total_bytes``, for the search."""
        allocated = tensor_bytes + self.workspace_bytes
        return allocated + int(self.slack_share * allocated) + self.context_bytes


CPU = DeviceModel(workspace_bytes=0, slack_share=0.0, context_bytes=0)


def device_model(choice: Choice, hardware: Hardware, *, expandable_segments: bool = True) -> DeviceModel:
    """How tensors of ``choice`` become the metrics of ``hardware``.

    Args:
        choice: the knobs.
        hardware: the card.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF says expandable_segments:True, as written runs do.
    """
    if hardware.device == "cpu":
        return CPU
    return _cuda(hardware.compute_capability, choice.num_gpus > 1, expandable_segments, hardware.context_bytes)


@lru_cache(maxsize=64)
def _cuda(compute_capability: str | None, several: bool, expandable: bool, context: int | None) -> DeviceModel:
    major = int((compute_capability or "0").split(".")[0])
    return DeviceModel(
        workspace_bytes=CUBLAS_THREADS * CUBLAS_WORKSPACE_BYTES.get(major, CUBLAS_WORKSPACE_DEFAULT_BYTES),
        slack_share=SLACK_SHARE if expandable else WHOLE_SEGMENTS_SHARE,
        context_bytes=(CONTEXT_BYTES if context is None else context) + (NCCL_BYTES if several else 0),
    )
