"""CPU time of one cold `plan --json` of a bundled model, beside a bare interpreter and `import pydantic`.

    python benchmarks/cold_start.py [RUNS]

Commands take turns, so that a busy moment hits all of them; the minimum is what the work takes, the median what a user
gets. With valgrind on the PATH, `--instructions` counts instructions instead: the same number each time, which shows
what a change of one per cent does.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAN = ["plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB", "--json"]
MODEL = "from pydantic import BaseModel\nclass Model(BaseModel):\n    field: int = 0"
COMMANDS = {
    "bare interpreter": ["-c", "pass"],
    "import pydantic": ["-c", "import pydantic"],
    "one pydantic model": ["-c", MODEL],
    "trlfit --version": ["-m", "tui", "--version"],
    "import of all that a plan needs": ["-c", "import launcher.cli, launcher.commands.plan"],
    "trlfit plan --json": ["-m", "tui", *PLAN],
}


def environment(bytecode: str) -> dict[str, str]:
    """Our own, without switches, and with bytecode that is kept between the runs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": bytecode}


def cpu_s(words: list[str], env: dict[str, str]) -> float:
    """User and system seconds of one child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words], cwd=env["PYTHONPYCACHEPREFIX"], env=env, stdout=subprocess.DEVNULL, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def instructions(words: list[str], env: dict[str, str]) -> float:
    """Instructions of one child, in millions, by valgrind."""
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    done = subprocess.run([*valgrind, sys.executable, *words], env=env, capture_output=True, text=True, check=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", "")) / 1e6


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=int, default=15)
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind, once each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:
        env = environment(bytecode)
        for words in COMMANDS.values():
            cpu_s(words, env)
        if args.instructions:
            counts = {name: instructions(words, env) for name, words in COMMANDS.items()}
            unit = counts["import pydantic"]
            rows = [["", "million instructions", "x pydantic"]]
            rows += [[name, f"{count:,.0f}", f"{count / unit:.2f}"] for name, count in counts.items()]
        else:
            times: dict[str, list[float]] = {name: [] for name in COMMANDS}
            for _ in range(args.runs):
                for name, words in COMMANDS.items():
                    times[name].append(cpu_s(words, env))
            least, middle = min(times["import pydantic"]), statistics.median(times["import pydantic"])
            rows = [["", "min s", "median s", "min x pydantic", "median x pydantic"]]
            rows += [
                [
                    name,
                    f"{min(t):.3f}",
                    f"{statistics.median(t):.3f}",
                    f"{min(t) / least:.2f}",
                    f"{statistics.median(t) / middle:.2f}",
                ]
                for name, t in times.items()
            ]
    print(table(rows))


if __name__ == "__main__":
    main()
