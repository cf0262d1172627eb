"""How many candidates a second the search judges, and what the questions to a plan cost.

    python benchmarks/search_speed.py [--repeats N] [--page]

A candidate is one value for every knob. Refused ones cost the rules alone; judged ones cost memory, and time where they
fit. The fastest of several cold searches counts, in seconds of this process: other processes make them slower only.
Commands are whole processes, bytecode cached: their CPU seconds and the most memory that they held. `--page` writes
docs/speed.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.problem import Problem
from planner.search.search import SearchResult, search
from profiles.releases import newest_known
from tests.planner.replay import problem_of

ROOT = Path(__file__).resolve().parents[1]
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


QWEN = ["plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB"]
LONGEST = ["plan", "Qwen/Qwen3-4B", "--machine", "8xH100-80GB", "--goal", "longest", "--global-batch", "1"]
COMMANDS: dict[str, list[str]] = {
    "plan --json": [*QWEN, "--json"],
    "plan, global batch 256, 32,768 tokens": [*QWEN, "--seq-len", "32k", "--global-batch", "256"],
    "plan --explain": [*QWEN, "--explain"],
    "plan --explain, nothing fits": ["plan", "Qwen/Qwen3-8B", "--machine", "1xRTX4090", "--explain"],
    "plan --compare": [*QWEN, "--compare", "recompute=full", "recompute=none"],
    "plan --goal longest": LONGEST,
    "plan --cards all": ["plan", "Qwen/Qwen3-8B", "--cards", "all"],
}
RUN_AND_TELL = """
import sys
from tui.__main__ import main
main()
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""
"""The console script, and then the most memory that it held; what a parent is told of a child includes the parent's."""
PAGE = ROOT / "docs" / "speed.md"


def command_cost(words: list[str], repeats: int, env: dict[str, str]) -> tuple[float, int]:
    """Least CPU seconds of a whole process, and the most bytes that it held."""
    least, most = float("inf"), 0
    for _ in range(repeats + 1):  # the first writes bytecode
        command = [sys.executable, "-c", RUN_AND_TELL, *words]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=env["PYTHONPYCACHEPREFIX"], env=env, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        least, most = min(least, seconds), max(most, 1024 * int(done.stderr.split()[-2]))
    return least, most


def rows_of_jobs(repeats: int) -> list[list[str]]:
    """One row a job, and the sum."""
    rows: list[list[str]] = []
    total_s = total_judged = total_refused = 0.0
    for nodes, job in JOBS:
        seconds, result = fastest(nodes, job, repeats)
        refused = sum(count for count, _, _ in result.rejected.values())
        rows.append(
            job_row(
                f"{job['model']} {job.get('method', 'full')} {nodes} x {job['machine']}",
                result.judged,
                refused,
                seconds,
            )
        )
        total_s, total_judged, total_refused = total_s + seconds, total_judged + result.judged, total_refused + refused
    return [*rows, job_row("all", total_judged, total_refused, total_s)]


def job_row(name: str, judged: float, refused: float, seconds: float) -> list[str]:
    return [
        name,
        f"{judged:,.0f}",
        f"{refused:,.0f}",
        f"{seconds * 1e3:,.0f}",
        f"{judged / seconds:,.0f}",
        f"{(judged + refused) / seconds:,.0f}",
    ]


def rows_of_commands(repeats: int) -> list[list[str]]:
    """One row a command."""
    with tempfile.TemporaryDirectory() as bytecode:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env = {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": bytecode, "HF_HUB_OFFLINE": "1"}
        costs = {name: command_cost(words, repeats, env) for name, words in COMMANDS.items()}
    return [[name, f"{seconds:.2f}", f"{size / 2**20:,.0f}"] for name, (seconds, size) in costs.items()]


JOB_HEADERS = ["job", "judged", "refused", "ms", "judged/s", "candidates/s"]
COMMAND_HEADERS = ["command", "CPU s", "peak MiB"]


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in [headers, *rows]
    )


def page(jobs: list[list[str]], commands: list[list[str]]) -> str:
    """docs/speed.md."""
    return f"""# Speed

<!-- python benchmarks/search_speed.py --page -->
Python {platform.python_version()}, one core of a shared machine ({platform.machine()}). Other work on it
makes times longer, never shorter. A candidate is one value for every knob: refused ones cost the rules alone, judged
ones their memory, and their time where they fit. The aim is 20,000 candidates a second in one process.

{markdown(JOB_HEADERS, jobs)}

The stack of these searches has everything that brings values for knobs: DeepSpeed, bitsandbytes, flash-attn and Liger.

Whole commands, each a process of its own with cached bytecode:

{markdown(COMMAND_HEADERS, commands)}

`python benchmarks/cold_start.py` sets a plan beside a bare interpreter and `import pydantic`.
"""


def main() -> None:
    """Print both tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="write docs/speed.md")
    args = parser.parse_args()
    jobs, commands = rows_of_jobs(args.repeats), rows_of_commands(args.repeats)
    print(plain(JOB_HEADERS, jobs), plain(COMMAND_HEADERS, commands), sep="\n\n")
    if args.page:
        PAGE.write_text(page(jobs, commands), encoding="utf-8")


if __name__ == "__main__":
    main()
