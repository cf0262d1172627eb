"""Composed coefficients against whole models: predicted beside traced for every row of traced_more.jsonl.

    python benchmarks/whole_compare.py [--trace | --missing]

--trace first traces the few layers of every model again, in the Python that has torch, and writes what the rows need to
tests/planner/data/coefficients_more.jsonl; --missing only what is not there yet; without them nothing is traced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.evidence.tracing import trace
from planner.architecture import Architecture
from planner.memory.coefficients_json import CoefficientDocument, option_key, shape_hash
from planner.memory.formula import ActivationOptions
from planner.units import GIB
from tests.planner.replay import quantile, rows
from tests.planner.replay_more import DOCUMENTS, architecture_of, compared, documents, options_of


def trace_layers(known: Mapping[str, CoefficientDocument]) -> None:
    """Write the coefficients that the rows need, one document a shape, but for sets of ``known`` documents."""
    wanted: dict[str, tuple[Architecture, dict[str, ActivationOptions]]] = {}
    for row in rows("traced_more"):
        architecture, options = architecture_of(row), options_of(row)
        _, sets = wanted.setdefault(shape_hash(architecture), (architecture, {}))
        sets[option_key(architecture, options)] = options
    lines: list[str] = []
    for shape, (architecture, sets) in wanted.items():
        there = known.get(shape)
        lacking = {key: options for key, options in sets.items() if there is None or key not in there.sets}
        document = there
        if lacking:
            found = trace(architecture, lacking.values())
            document = found if there is None else there.merged(found)
            print(f"{architecture.model}: {', '.join(lacking)}", file=sys.stderr, flush=True)
        assert document is not None
        content = document.to_json()
        for entry in content["sets"].values():
            drop_work(entry)
        lines.append(json.dumps(content, separators=(",", ":")))
    DOCUMENTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def drop_work(entry: dict[str, Any]) -> None:
    """FLOPs are not compared here, and are most of the text."""
    for layer in entry.get("layers", ()):
        for mode in layer.values():
            mode.pop("work", None)


def table() -> list[str]:
    """Every row, then a summary."""
    lines = [
        f"{'model and options':62} {'GiB':>8} {'traced':>8} {'error':>7} {'above rest':>11} {'forward':>8}  formula"
    ]
    for found in compared():
        by_formula = found.by_formula / found.seen - 1
        lines.append(
            f"{found.row['id']:62} {found.predicted / GIB:8.3f} {found.seen / GIB:8.3f} {found.error:+7.2%}"
            f" {found.error_above_rest:+11.2%} {found.forward_error:+8.2%} {by_formula:+8.1%}"
        )
    for name, errors in (
        ("peak", [found.error for found in compared()]),
        ("above what is at rest", [found.error_above_rest for found in compared()]),
        ("forward", [found.forward_error for found in compared()]),
        ("peak by closed forms", [found.by_formula / found.seen - 1 for found in compared()]),
    ):
        sizes = [abs(error) for error in errors]
        lines.append(
            f"{name}: {len(sizes)} rows, median {median(sizes):.2%}, 95th percentile {quantile(sizes, 0.95):.2%},"
            f" worst {max(sizes):.2%}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="trace the coefficients again first")
    parser.add_argument("--missing", action="store_true", help="trace those that are not there first")
    asked = parser.parse_args()
    if asked.trace or asked.missing:
        trace_layers({} if asked.trace else documents())
        documents.cache_clear()
    print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
