"""Measures what each rank reaches in collectives among the local cards, or among processes on the CPU.

Runs in the training Python. The first process reads a JSON request on stdin (device, ranks, memory_bytes, seconds) and
starts the others; all live in one session, which ends with whoever asked. Bytes per second one way per rank: a ring of
n ranks moves (n - 1) / n of the whole over each link.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from child_guard import device_facts, limit_memory, read_request, say, versions

WHOLE_BYTES = {"cuda": 2**29, "cpu": 2**25}
"""Gathered by every rank: large enough that latency does not count."""
REPETITIONS = 10


def work(rank: int, request: dict) -> list[dict]:
    """Both collectives on this rank."""
    device, ranks = request["device"], int(request["ranks"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    limit_memory(device, int(request["memory_bytes"]))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{request['meeting']}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=float(request["seconds"])),
    )
    share = min(WHOLE_BYTES[device], int(request["memory_bytes"]) // 4) // 4 // ranks
    part, whole = torch.ones(share, device=device), torch.ones(share * ranks, device=device)
    found: list[dict] = []
    for name, run in (
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, part)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole)),
    ):
        took = [_seconds(run, device) for _ in range(REPETITIONS + 1)][1:]
        moved = 4 * share * (ranks - 1)
        found.append(
            {
                "kind": name,
                "ranks": ranks,
                "bytes": 4 * share * ranks,
                "bytes_per_s": moved / statistics.median(took),
            }
        )
    dist.destroy_process_group()
    return found


def _seconds(run, device: str) -> float:
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def lead() -> dict:
    """Start the other ranks, be the first of them."""
    request = read_request()
    say(done=0, of=1, what=f"collectives of {request['ranks']}", seconds=0.0)
    with tempfile.TemporaryDirectory() as folder:
        request["meeting"] = os.path.join(folder, "meeting")  # noqa: PTH118
        command = [sys.executable, __file__]
        others = [
            subprocess.Popen([*command, str(rank), json.dumps(request)], stdin=subprocess.DEVNULL)
            for rank in range(1, int(request["ranks"]))
        ]
        try:
            found = work(0, request)
            for other in others:
                other.wait()
        finally:
            for other in others:
                other.kill()
                other.wait()
    return {"versions": versions("torch"), "on": device_facts(request["device"]), "collectives": found}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        print(json.dumps(lead()))
    sys.exit(0)
