"""Who holds how many bytes: follows every tensor storage of a fake step and says which layer's turn made it.

A dispatch mode sees every operator. A storage counts from the operator that returns it until Python and autograd drop
it, rounded up as the CUDA allocator rounds. Parameters never count. Low-precision copies of weights that autocast
makes in the forward are kept apart, because the plan counts them as a part of their own, and a parameter's gradient
stops counting when the layer that made it has run backward, because the plan counts it at rest from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trace_fake import OPERATORS, Hollow, Known, Store

ALLOCATION_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""

BEFORE = -1
"""Owner of what is made before the first layer."""

_TO_COPY = torch.ops.aten._to_copy.default
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
_GROUPED = {"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
_NO_KERNEL = {
    "detach", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "_unsafe_view", "alias",
    "lift_fresh", "device", "is_same_size", "_local_scalar_dense", "sym_size", "scalar_tensor", "_reshape_alias",
}  # fmt: skip
WORK = (
    "matmul_flops",
    "expert_flops",
    "attention_flops",
    "masked_attention_flops",
    "elementwise_bytes",
    "launches",
)
"""What is counted of a layer's operators; the names of planner.time.work."""


class Tracker(TorchDispatchMode):
    """Live bytes over one forward and one backward of a stack of layers."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._weights = frozenset(map(id, self._parameters))
        for parameter in self._parameters:
            parameter.store.parameter = True
        self._live: dict[int, tuple[int, int]] = {}
        self._hidden: dict[int, tuple[int, int]] = {}
        self.live_bytes = 0
        self._freed_casts = 0
        self.owner = BEFORE
        self.backward = False
        self.timelines: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        self.work: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(WORK, 0.0))
        self._timeline = self.timelines["forward", BEFORE]
        self._work = self.work[BEFORE]
        self.attention_starts: dict[int, int] = {}

    def enter(self, owner: int, *, backward: bool = False) -> None:
        """From here on storages belong to ``owner``, and the timeline is that layer's."""
        if self.backward:
            self._hide_gradients()
        self.owner, self.backward, self._freed_casts = owner, backward, 0
        self._timeline = self.timelines["backward" if backward else "forward", owner]
        self._work = self.work[owner]

    def attention_runs_backward(self, owner: int) -> None:
        """The MLP of ``owner`` has run backward; its attention block is next."""
        if self.backward and owner == self.owner:
            self.attention_starts.setdefault(owner, len(self._timeline))

    def owned_bytes(self) -> dict[int, int]:
        """Live bytes by owner; call it when the forward, its autocast included, is over."""
        owned: dict[int, int] = defaultdict(int)
        for size, owner in self._live.values():
            owned[owner] += size
        return owned

    def _hide_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._drop(parameter.grad.store)

    def _drop(self, store: Store) -> None:
        key = id(store)
        found = self._live.pop(key, None)
        if found is not None:
            self.live_bytes -= found[0]
        hidden = self._hidden.pop(key, None)
        if hidden is not None and self.backward and hidden[1] == self.owner:
            # The plan counts a layer's copies until its backward is over; here they go one by one.
            self._freed_casts += hidden[0]

    def _add(self, store: Store, name: str, *, of_weight: bool) -> None:
        if store.watcher is not None or store.parameter:
            return
        store.watcher = self._drop
        size = -(-store.nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if of_weight and not self.backward:
            self._hidden[id(store)] = (size, self.owner)
            return
        self._live[id(store)] = (size, self.owner)
        self.live_bytes += size
        self._timeline.append((name, self.live_bytes - self._freed_casts))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the guard costs as much as an operator.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, known, new = OPERATORS.run(func, args, kwargs or {})
        if known is None:
            return out
        if new:
            _price(known, func, args, out)
        if known.fresh:
            # A view of a weight is no leaf: its copy is in no cache of autocast's, and counts as any other tensor.
            of_weight = func is _TO_COPY and id(args[0]) in self._weights
            name = func._schema.name
            for tensor in (out,) if isinstance(out, torch.Tensor) else _tensors(out):
                self._add(tensor.store, name, of_weight=of_weight)
        if known.counter is not None:
            self._work["launches"] += 1
            share = _share_in_window(args) if known.counter == "attention_flops" else 1.0
            self._work[known.counter] += known.amount * share
        return out


def _price(known: Known, func, args, out) -> None:
    """Note what the operator computes and moves."""
    kind = _kind_of(func)
    if kind == "matmul":
        known.counter, known.amount = "matmul_flops", _matmul_flops(func, args)
    elif kind == "grouped":
        known.counter, known.amount = "expert_flops", _matmul_flops(func, args)
    elif kind == "attention":
        masked, flops = _attention_flops(func, args)
        known.counter, known.amount = "masked_attention_flops" if masked else "attention_flops", flops
    elif kind == "other":
        moved = sum(map(_touched, _tensors(args))) + sum(map(_touched, _tensors((out,))))
        known.counter, known.amount = "elementwise_bytes", float(moved)


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes read or written: an expanded tensor is read from what it really holds."""
    nbytes = tensor.numel() * tensor.element_size()
    return min(nbytes, tensor.store.nbytes) if isinstance(tensor, Hollow) else nbytes


def _kind_of(func) -> str:
    name = func._schema.name.split("::")[-1]
    if name in _MATMULS:
        return "matmul"
    if name in _GROUPED:
        return "grouped"
    if name.startswith("_scaled_dot_product"):
        return "attention"
    if name in _NO_KERNEL or func.is_view:
        return "view"
    return "other"


def _matmul_flops(func, args) -> float:
    """Two per multiply and add of one (batched or grouped) product."""
    name = func._schema.name.split("::")[-1]
    if name == "grouped_mm_fallback_backward":
        inputs, weight = args[1], args[2]
        return 4.0 * inputs.shape[0] * weight.shape[-2] * weight.shape[-1]
    first, second = (args[1], args[2]) if name in ("addmm", "baddbmm") else (args[0], args[1])
    if name in _GROUPED:
        # Rows are spread over the groups: every row meets one group's matrix. Two 2-D operands give one matrix a group.
        if first.dim() == 2 and second.dim() == 2:
            return 2.0 * first.shape[0] * first.shape[1] * second.shape[1]
        return 2.0 * first.shape[-2] * second.shape[-2] * second.shape[-1]
    return 2.0 * first.numel() * second.shape[-1]


def _attention_flops(func, args) -> tuple[bool, float]:
    """(whether a mask is read, FLOPs): scores and their product with the values, half the square in a causal kernel."""
    name = func._schema.name
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    bias = args[4 if backward else 3] if "efficient" in name else None
    pairs = float(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2])
    flops = 2.0 * pairs * (query.shape[3] + value.shape[3]) * (2.5 if backward else 1.0)
    masked = bias is not None
    return masked, flops if masked else flops / 2.0


def _share_in_window(args) -> float:
    """What a window leaves of a causal kernel's half square; the query says its window, before or behind a gradient."""
    window, length = max(tensor.store.window for tensor in args[:2]), args[0].shape[2]
    return 1.0 if not window or window >= length else (2.0 * length - window) * window / length**2
