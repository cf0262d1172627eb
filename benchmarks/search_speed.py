"""How many candidates a second the search judges, in one process: `python benchmarks/search_speed.py`.

A candidate is one value for every knob. Refused ones cost the rules alone; judged ones cost memory, and time where they
fit. The fastest of several cold searches counts, in seconds of this process: other processes make them slower only.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.problem import Problem
from planner.search import SearchResult, search
from profiles.releases import newest_known
from tests.planner.replay import problem_of

STACK = {
    **newest_known(),
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.0",
    "flash-attn": "2.8.3",
    "liger-kernel": "0.8.0",
}
"""Everything installed, so that every knob has its values."""
JOBS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"model": "Qwen/Qwen3-8B", "machine": "8xH100-80GB", "seq_len": 4096, "global_batch": 64}),
    (
        4,
        {
            "model": "Qwen/Qwen3-8B",
            "machine": "8xH100-80GB",
            "seq_len": 32_768,
            "global_batch": 256,
            "allow": ["numerics"],
        },
    ),
    (
        1,
        {
            "model": "google/gemma-3-12b-pt",
            "machine": "8xH100-80GB",
            "method": "lora",
            "seq_len": 8192,
            "global_batch": 64,
        },
    ),
    (
        2,
        {
            "model": "Qwen/Qwen3-30B-A3B",
            "machine": "8xH200",
            "method": "lora",
            "seq_len": 16_384,
            "global_batch": 128,
        },
    ),
    (8, {"model": "Qwen/Qwen2.5-72B", "machine": "8xH100-80GB", "seq_len": 8192, "global_batch": 512}),
)
"""(nodes, job): one layer kind and several, dense and mixture, mostly fitting and mostly not."""


def fastest(nodes: int, job: dict[str, Any], repeats: int) -> tuple[float, SearchResult]:
    """Seconds of the fastest cold search, and what it found."""
    best, result = float("inf"), SearchResult()
    for _ in range(repeats):
        problem: Problem = problem_of(job, stack=STACK, nodes=nodes)
        begun = time.process_time()
        result = search(problem.judge, problem.options, "fastest")
        best = min(best, time.process_time() - begun)
    return best, result


def main() -> None:
    """Print one line a job and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'job':52} {'judged':>8} {'refused':>8} {'ms':>8} {'judged/s':>10} {'candidates/s':>13}")
    total_s = total_judged = total_refused = 0.0
    for nodes, job in JOBS:
        seconds, result = fastest(nodes, job, repeats)
        refused = sum(count for count, _, _ in result.rejected.values())
        name = f"{job['model']} {job.get('method', 'full')} {nodes} x {job['machine']}"
        rates = f"{result.judged / seconds:10,.0f} {(result.judged + refused) / seconds:13,.0f}"
        print(f"{name:52} {result.judged:8,} {refused:8,} {seconds * 1e3:8.1f} {rates}")
        total_s, total_judged, total_refused = total_s + seconds, total_judged + result.judged, total_refused + refused
    rates = f"{total_judged / total_s:10,.0f} {(total_judged + total_refused) / total_s:13,.0f}"
    print(f"{'all':52} {total_judged:8,.0f} {total_refused:8,.0f} {total_s * 1e3:8.1f} {rates}")


if __name__ == "__main__":
    main()
