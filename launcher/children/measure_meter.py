"""Two gauges of one step: a card's own statistics, and a count of every live storage where there are none."""

from __future__ import annotations

import gc
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""torch's allocator for cards hands out multiples of this; counted the same on a CPU, so that the two compare."""


class CardGauge:
    """torch.cuda's peaks, and seconds by its events, which wait for nothing."""

    slow = False

    def __init__(self, used_bytes: int) -> None:
        self._used = used_bytes
        self._reserved = 0

    def now(self):
        """A moment."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all moments have come."""
        torch.cuda.synchronize()

    def between(self, first, second) -> float:
        """Seconds from one moment to another."""
        return first.elapsed_time(second) / 1e3

    def start(self) -> None:
        """The counted step begins."""
        self._reserved = 0
        torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        """A phase begins."""
        torch.cuda.reset_peak_memory_stats()

    def highest(self) -> int:
        """Most bytes allocated since the phase began."""
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        return torch.cuda.max_memory_allocated()

    def beside(self) -> dict[str, int]:
        """Reserved at most since the phase began, and all that is in use on the card where it ends."""
        free, total = torch.cuda.mem_get_info()
        return {"reserved_peaks": torch.cuda.max_memory_reserved(), "device_used": total - free}

    def stop(self) -> dict[str, int]:
        """The counted step is over."""
        free, total = torch.cuda.mem_get_info()
        used = total - free
        context = max(0, used - torch.cuda.memory_reserved() - self._used)
        return {"reserved_bytes": self._reserved, "device_used_bytes": used, "context_bytes": context}


class StorageGauge:
    """Bytes of all live storages, followed by a dispatch mode during the counted step; wall-clock seconds."""

    slow = True
    """Counting takes time of its own, so the counted step is not timed."""

    def __init__(self) -> None:
        self._counter: _Counter | None = None

    def now(self) -> tuple[float, float]:
        """A moment, and the processor's time until then."""
        return time.perf_counter(), time.process_time()

    def settle(self) -> None:
        """Nothing is pending."""

    def between(self, first, second) -> float:
        """Seconds from one moment to another."""
        return second[0] - first[0]

    def busy(self, first, second) -> float:
        """Seconds of the processor between the two, all threads together: what other processes do not stretch."""
        return second[1] - first[1]

    def start(self) -> None:
        """The counted step begins: what is live already counts first."""
        self._counter = _Counter()
        self._counter.take_in_all()
        self._counter.__enter__()

    def begin(self) -> None:
        """A phase begins."""
        if self._counter is not None:
            self._counter.highest = self._counter.live

    def highest(self) -> int:
        """Most bytes live since the phase began."""
        assert self._counter is not None
        return self._counter.highest

    def beside(self) -> dict[str, int]:
        """Nothing is reserved, and the host is everyone's."""
        return {}

    def stop(self) -> dict[str, int]:
        """The counted step is over."""
        assert self._counter is not None
        self._counter.__exit__(None, None, None)
        self._counter = None
        return {}


class _Counter(TorchDispatchMode):
    """Every operator is seen; a storage counts until Python and autograd have dropped it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.highest = 0
        self._sizes: dict[int, int] = {}
        self._of_collective = False
        """What appears now is a collective's own."""

    def __enter__(self):
        # FSDP2 empties the storages of gathered weights and fills them again, which no operator shows.
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage, *args):
            done = resize(storage, *args)
            if storage._cdata in self._sizes:
                self._note(storage)
            return done

        torch.UntypedStorage.resize_ = resized
        if torch.distributed.is_available():
            self._wait = wait = torch.distributed.Work.wait

            def waited(work, *args, **kwargs):
                # gloo hands a copy of its own to the operators that end a reduce-scatter; NCCL makes none.
                self._of_collective = True
                try:
                    return wait(work, *args, **kwargs)
                finally:
                    self._of_collective = False

            torch.distributed.Work.wait = waited
        return super().__enter__()

    def __exit__(self, *args):
        torch.UntypedStorage.resize_ = self._resize
        if torch.distributed.is_available():
            torch.distributed.Work.wait = self._wait
        return super().__exit__(*args)

    def take_in_all(self) -> None:
        """Count what exists: weights, states, the batch."""
        gc.collect()
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor):
                self._see(found)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            # A rank's share of a sharded one, say: the outer tensor has no bytes of its own.
            for name in tensor.__tensor_flatten__()[0]:
                part = getattr(tensor, name)
                if isinstance(part, torch.Tensor):
                    self._see(part)
            return
        if tensor.device.type != "meta":
            self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        before = self._sizes.get(address)
        if before == size or (before is None and self._of_collective):
            return
        self._sizes[address] = size
        self.live += size - (before or 0)
        if before is None:
            weakref.finalize(storage, self._gone, address)
        self.highest = max(self.highest, self.live)

    def _gone(self, address: int) -> None:
        self.live -= self._sizes.pop(address)
