"""The real FSDP1 on one CPU: what is alive while backward walks down. Runs in the Python that has torch.

Two pretended ranks (torch's `fake` process group) of a stack of small layers, each a frozen base with an adapter in a
unit of its own, as PEFT's policy wraps them, or all trainable. Prints for the frozen and the trained stack under
reentrant checkpoints, and the frozen one under the others, per layer from the last to the first: how many tensors of
the layers' width and how many bytes of flat parameters are alive when the gradient of the layer's input is complete.
"""

from __future__ import annotations

import functools
import gc
import json
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
LAYERS, WIDTH, TOKENS, VOCABULARY = 8, 64, 2048, 96
alive: dict[int, tuple[int, int]] = {}
"""Storage -> (dimensions of its first tensor, size of the last one)."""
seen: dict[int, tuple[int, int]] = {}


class Watch(TorchDispatchMode):
    """Keeps ``alive``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in alive:
                    alive[storage._cdata] = (tensor.dim(), tensor.shape[-1] if tensor.dim() else 0)
                    storages[storage._cdata] = weakref.ref(storage, functools.partial(forget, storage._cdata))
        return out


storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def forget(key: int, _reference: object) -> None:
    alive.pop(key, None)
    storages.pop(key, None)


def look(layer: int) -> None:
    """Count what is alive; the last call for a layer stands."""
    hidden = flat = 0
    for key, (dimensions, last) in list(alive.items()):
        storage = storages[key]()
        if storage is None:
            continue
        hidden += dimensions == 3 and last == WIDTH and storage.nbytes() == TOKENS * WIDTH * 4
        flat += storage.nbytes() if dimensions == 1 else 0
    seen[layer] = (hidden, flat)


class Layer(nn.Module):
    def __init__(self, index: int, frozen: bool) -> None:
        super().__init__()
        self.index = index
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not frozen)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: look(self.index))
        return x + torch.nn.functional.gelu(self.base(x)) + self.adapter(x)


class Model(nn.Module):
    def __init__(self, frozen: bool, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(not frozen)
        self.layers = nn.ModuleList(Layer(index, frozen) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(not frozen)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if x.is_leaf:
            x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def run(frozen: bool, reentrant: bool) -> list[tuple[int, int]]:
    policy = functools.partial(
        lambda_auto_wrap_policy,
        lambda_fn=lambda m: isinstance(m, Layer) or (frozen and isinstance(m, nn.Linear) and m.weight.requires_grad),
    )
    model = FullyShardedDataParallel(
        Model(frozen, reentrant),
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    for _ in range(2):
        with Watch():
            model(ids).logsumexp(-1).mean().backward()
    return [seen[index] for index in reversed(range(LAYERS))]


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = []
    for frozen, reentrant in ((True, True), (False, True), (True, False)):
        found.append(run(frozen, reentrant))
        gc.collect()
        alive.clear()
        storages.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
