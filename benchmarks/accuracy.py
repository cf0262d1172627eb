"""How good the predictions are: recorded runs and traces replayed, predicted beside seen.

`python benchmarks/accuracy.py` prints every row and a summary; with files, of the cases in them (JSON lines; their
format is in tests/planner/data/README.md). `--markdown` writes docs/accuracy.md, `--check` says whether that page is
what it would write, `--probe` traces anew what the recorded cases ask for and no bundled set holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy_cases import BadCases, Cases, default_cases, read_cases
from benchmarks.accuracy_page import PAGE, page
from benchmarks.accuracy_tables import (
    HEADLINE,
    Evaluation,
    limits_table,
    measured_table,
    percent,
    traced_table,
    unbundled_lines,
    verdict_table,
)
from planner.architecture import Architecture
from planner.memory.coefficients_json import option_key, shape_hash
from planner.memory.formula import ActivationOptions
from tests.planner.replay import (
    PROBES,
    TIERS,
    as_traced,
    bundled_coefficients,
    choice_of,
    measured_problem,
    traced_model,
)

__all__ = ["PAGE", "page"]


def rows_text(found: Evaluation) -> list[str]:
    """Every row: seen, then predicted and its error at each tier."""
    out: list[str] = []
    for errors in (found.traced, found.sharded):
        for index, (row, _) in enumerate(errors[HEADLINE]):
            seen = row["allocated_bytes"]
            out.append(_line(row["id"], seen, [errors[tier][index][1] for tier in TIERS]))
    for index, run in enumerate(found.runs[HEADLINE]):
        seen, at = run.row["measured"], [found.runs[tier][index] for tier in TIERS]
        line = f"{run.row['id'][:58]:58}"
        if run.error is not None:
            line = _line(run.row["id"], seen["bytes"], [other.error or 0.0 for other in at])
        if seen.get("oom"):
            said = "/".join("FITTING" if other.memory.fits else "too large" for other in at)
            line += f" out of memory, called {said}"
        if run.time and run.seen_step_s:
            off = percent(run.time.step_s / run.seen_step_s - 1, True)
            line += f" {run.time.step_s:7.2f} for {run.seen_step_s:6.2f} s {off:>8}"
        out.append(line)
    return out


def _line(name: str, seen: float, errors: list[float]) -> str:
    return f"{name[:58]:58} {seen / 1e9:7.2f} GB" + "".join(f" {percent(error, True):>8}" for error in errors)


def print_all(cases: Cases) -> None:
    """Rows and summary for a terminal."""
    found = Evaluation(cases)
    print(f"{'':58} {'seen':>7}   ", *(f"{tier:>8}" for tier in TIERS))
    print(*rows_text(found), sep="\n")
    tables = [traced_table(found)] if cases.traced or cases.sharded else []
    if any("bytes" in row["measured"] for row in cases.measured):
        tables.append(measured_table(found))
    if cases.measured:
        tables.append(verdict_table(found))
    if found.limits:
        tables.append(limits_table(found))
    unbundled = unbundled_lines(found)
    for table in (*tables, ["Priced by closed forms without a probe:", *unbundled] if unbundled else []):
        print("", *table, sep="\n")


def asked_sets(cases: Cases) -> dict[str, tuple[Architecture, dict[str, ActivationOptions]]]:
    """Shape -> (an architecture of it, option key -> options) of what the rows ask for and no bundled set holds."""
    found: dict[str, tuple[Architecture, dict[str, ActivationOptions]]] = {}
    for row in (*cases.traced, *cases.sharded, *cases.measured):
        measured = "measured" in row
        model = measured_problem(row).judge.memory if measured else traced_model(row)
        architecture, options = model.job.architecture, model.activation_options(choice_of(row))
        if not measured:
            options = as_traced(row, options)
        if bundled_coefficients(architecture, options).evidence == "formula":
            _, sets = found.setdefault(shape_hash(architecture), (architecture, {}))
            sets.setdefault(option_key(architecture, options), options)
    return found


def write_probes(cases: Cases) -> None:
    """Trace what the cases ask for and keep it beside them: a minute, and torch in this Python."""
    from launcher.evidence.tracing import trace

    documents = []
    for architecture, sets in asked_sets(cases).values():
        print(f"{architecture.model}: {', '.join(sets)}", file=sys.stderr)
        documents.append(trace(architecture, sets.values()).to_json())
    documents.sort(key=lambda document: document["model"])
    PROBES.write_text("".join(json.dumps(d, separators=(",", ":")) + "\n" for d in documents), encoding="utf-8")


def main() -> int:
    """Print, write or check; 2 for a file that is no list of cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=Path, metavar="CASES", help="JSON lines; the recorded ones if none")
    parser.add_argument("--markdown", action="store_true", help="write docs/accuracy.md")
    parser.add_argument("--check", action="store_true", help="exit 1 when docs/accuracy.md is out of date")
    parser.add_argument("--probe", action="store_true", help="write tests/planner/data/probes.jsonl")
    args = parser.parse_args()
    if args.cases and (args.markdown or args.check or args.probe):
        print("accuracy: --markdown, --check and --probe are of the recorded cases; drop the files", file=sys.stderr)
        return 2
    try:
        cases = read_cases(args.cases) if args.cases else default_cases()
    except BadCases as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    if args.probe:
        write_probes(cases)
    elif args.check:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else 1
    elif args.markdown:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print_all(cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
