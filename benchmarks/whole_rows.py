"""The command line of the tracers of whole models: which cases, what is shown, and the file of rows that is renewed."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers


def record(
    description: str | None,
    data: Path,
    cases: Sequence[Any],
    traced: Callable[[Any, bool], tuple[dict[str, Any], Any]],
    wanted: Callable[[Any], bool] = lambda _: True,
) -> None:
    """Trace the cases that the command line asks for, show each, and replace their rows in its file.

    Args:
        description: Of the command.
        data: Where the rows are kept that the tests read.
        cases: All of them, in the order of the file.
        traced: One case's row and the meter that counted it; true where makers of tensors are to be named.
        wanted: Which of them the installed versions can trace.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose id holds this")
    parser.add_argument("--holders", type=int, default=0, help="show the N largest holders at the peak")
    parser.add_argument("-o", "--output", type=Path, help=f"replace rows there ({data.name} is {data})")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    known = {}
    if asked.output and asked.output.exists():
        known = {row["id"]: row for row in map(json.loads, asked.output.read_text().splitlines())}
    for case in cases:
        if asked.only not in case.id or not wanted(case):
            continue
        row, meter = traced(case, asked.holders > 0)
        print(f"{case.id:72} {row['allocated_bytes'] / 2**30:9.3f} GiB  {row.pop('seconds'):6.1f} s", flush=True)
        for made, size in meter.held().most_common(asked.holders) if asked.holders else ():
            print(f"    {size / 2**20:12,.1f} MiB  {made}")
        known[case.id] = row
        if asked.output:
            order = [case.id for case in cases if case.id in known]
            asked.output.write_text("".join(json.dumps(known[name]) + "\n" for name in order))
