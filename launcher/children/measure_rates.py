"""Measures one card, or the CPU: products by dtype and shape, streaming, copies to the host, the context's size.

Runs in the training Python. One JSON request on stdin (device, memory_bytes, used_bytes before, seconds), progress as
JSON lines on stderr, one JSON document on stdout. Every figure is the median of repetitions after a first that does not
count, unless that first alone takes longer than the figure is given.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

try:
    import torch
    from child_guard import device_facts, is_shortage, limit_memory, read_request, say, seconds, versions
except ImportError as missing:
    message = f"measuring rates needs torch in the training Python: {missing}"
    print(json.dumps({"error": {"kind": "environment", "message": message}}))
    sys.exit(0)

SHAPES = {
    "cuda": ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 14336, 4096), (16384, 1024, 4096), (2048, 32000, 2048)),
    "cpu": ((512, 2048, 1024), (1024, 1024, 1024), (256, 4096, 1024)),
}
"""Rows x columns of the result, and what is summed over: square, an MLP's, a narrow projection's, a head's."""
STREAM_BYTES = {"cuda": 2**31, "cpu": 2**28}
"""Far beyond any cache."""
COPY_BYTES = 2**28
REPETITIONS = 4
"""Of a product, at least, if it can be: rows are left out for it."""
FEWEST_ROWS = 64
"""With fewer, the other matrix is read for too little work."""
SHARE = 0.25
"""Of the allowed memory, what one measurement may hold."""


class Clock:
    """Seconds of one call, by the card's own events where there are any."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def of(self, run: Callable[[], object]) -> float:
        """Seconds of one ``run``."""
        if not self.cuda:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def median(self, run: Callable[[], object], budget_s: float) -> tuple[float, int]:
        """(median seconds, repetitions) within about ``budget_s``."""
        started = time.perf_counter()
        first = self.of(run)
        times: list[float] = []
        while len(times) < 30 and time.perf_counter() - started < budget_s:
            times.append(self.of(run))
        return statistics.median(times or [first]), max(1, len(times))


def rows_within(left: torch.Tensor, right: torch.Tensor, clock: Clock, budget_s: float) -> int:
    """As many rows of ``left`` as leave time for some repetitions; a CPU without bf16 units takes seconds for all."""
    rows = min(FEWEST_ROWS, len(left))
    took = min(clock.of(lambda: torch.mm(left[:rows], right)) for _ in range(2))
    return max(rows, min(len(left), int(rows * budget_s / REPETITIONS / took)))


def products(device: str, most: int, clock: Clock, budget_s: float) -> list[dict]:
    """FLOP/s of each dtype and shape; a shape that does not fit is left out."""
    dtypes = [torch.bfloat16, torch.float32]
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        dtypes[0] = torch.float16
    found: list[dict] = []
    for dtype in dtypes:
        for m, n, k in SHAPES[device]:
            width = torch.empty(0, dtype=dtype).element_size()
            if width * (m * k + k * n + m * n) > SHARE * most:
                continue
            left = torch.randn(m, k, device=device).to(dtype)
            right = torch.randn(k, n, device=device).to(dtype)
            m = rows_within(left, right, clock, budget_s)
            left, out = left[:m], torch.empty(m, n, device=device, dtype=dtype)
            took, times = clock.median(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), budget_s)
            found.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "m": m,
                    "n": n,
                    "k": k,
                    "flops_per_s": 2.0 * m * n * k / took,
                    "repetitions": times,
                }
            )
    return found


def streaming(device: str, most: int, clock: Clock, budget_s: float) -> float:
    """Bytes read and written per second by a kernel that scales a large tensor."""
    count = min(STREAM_BYTES[device], int(SHARE * most)) // 8
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    took, _ = clock.median(lambda: torch.mul(source, 2.0, out=target), budget_s)
    return 2 * 4 * count / took


def copies(most: int, clock: Clock, budget_s: float) -> dict[str, float]:
    """Bytes per second one way between pinned host memory and the card."""
    count = min(COPY_BYTES, int(SHARE * most))
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(count, dtype=torch.uint8, device="cuda")
    up, _ = clock.median(lambda: card.copy_(host, non_blocking=True), budget_s)
    down, _ = clock.median(lambda: host.copy_(card, non_blocking=True), budget_s)
    return {"host_to_device_bytes_per_s": count / up, "device_to_host_bytes_per_s": count / down}


def measure(request: dict) -> dict:
    """Everything, in the order of what is wanted most."""
    device, most = request["device"], int(request["memory_bytes"])
    answer: dict = {"versions": versions("torch"), "products": []}
    if device == "cuda":
        torch.cuda.init()
    limit_memory(device, most)
    answer |= {"on": device_facts(device)}
    clock, budget_s = Clock(device), float(request["seconds"]) / 20
    steps: list[tuple[str, Callable[[], dict]]] = [
        ("products", lambda: {"products": products(device, most, clock, budget_s)}),
        ("streaming", lambda: {"streaming_bytes_per_s": streaming(device, most, clock, budget_s)}),
    ]
    if device == "cuda":
        steps.append(("copies to the host", lambda: copies(most, clock, budget_s)))
    wall, own = time.perf_counter(), time.process_time()
    for index, (name, step) in enumerate(steps):
        say(done=index, of=len(steps), what=name, seconds=round(seconds(), 1))
        try:
            answer |= step()
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            answer.setdefault("out_of_memory", []).append(name)
    if device == "cpu" and torch.get_num_threads() == 1:
        # One thread that never sleeps: what the wall clock has more, others had.
        answer["stretched"] = (time.perf_counter() - wall) / (time.process_time() - own)
    if device == "cuda":
        # Last, because kernels are loaded when they first run.
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        held = total - free - torch.cuda.memory_reserved()
        answer["context_bytes"] = max(0, held - int(request["used_bytes"]))
    say(done=len(steps), of=len(steps), what="", seconds=round(seconds(), 1))
    return answer


if __name__ == "__main__":
    print(json.dumps(measure(read_request())))
    sys.exit(0)
