"""Peers: what other estimators say of the same cases, from benchmarks/results/peers.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy_tables import HEADLINE, Evaluation, percent
from tests.planner.replay import quantile

RESULTS = Path(__file__).resolve().parent / "results" / "peers.json"


def read_peers() -> dict[str, Any] | None:
    """What benchmarks/peers.py wrote, None where it has not."""
    if not RESULTS.is_file():
        return None
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def peers_table(found: Evaluation, peers: dict[str, Any]) -> list[str]:
    """Errors of every peer and ours on the rows that it can be told.

    Published rows are those of max_allocated; a row of another metric is compared by no peer.
    """
    out = [
        "| estimator | cases | expressed | median | 90th | worst | ours, median | 90th | worst | failures that fit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    seen, ours = _seen_and_ours(found)
    for peer in peers["peers"]:
        name = peer["name"]
        for kind, rows in seen.items():
            said = {i: answer["bytes"] for i in rows if (answer := peers["rows"].get(i, {}).get(name, {})).get("bytes")}
            cells = f"| {name} {peer['version']} | {kind} | {len(said)} of {len(rows)} "
            if not said:
                out.append(f"{cells}| | | | | | | |")
                continue
            cells += _cells([abs(size / rows[i] - 1) for i, size in said.items()])
            cells += _cells([abs(ours[i]) for i in said])
            verdict = _failures(found, peers, name) if kind == "published" else ""
            out.append(f"{cells}| {verdict} |")
    return out


def _cells(sizes: list[float]) -> str:
    return "".join(f"| {percent(x)} " for x in (median(sizes), quantile(sizes, 0.90), max(sizes)))


def _seen_and_ours(found: Evaluation) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Kind of case -> row -> bytes that were seen; row -> our error."""
    published = found.with_bytes(metric="max_allocated")
    seen = {
        "published": {r.row["id"]: int(r.row["measured"]["bytes"]) for r in published},
        "traced": {row["id"]: int(row["allocated_bytes"]) for row, _ in found.traced[HEADLINE]},
    }
    ours = {r.row["id"]: r.error or 0.0 for r in published} | {row["id"]: e for row, e in found.traced[HEADLINE]}
    return seen, ours


def _failures(found: Evaluation, peers: dict[str, Any], name: str) -> str:
    """Recorded out-of-memory runs whose figure is below the card's capacity."""
    sizes: list[bool] = []
    for run in found.runs[HEADLINE]:
        answer = peers["rows"].get(run.row["id"], {}).get(name, {})
        if run.row["measured"].get("oom") and "bytes" in answer:
            sizes.append(answer["bytes"] <= (run.memory.capacity_bytes or 0))
    return f"{sum(sizes)} of {len(sizes)}" if sizes else "gives no verdict"


def peer_lines(peers: dict[str, Any]) -> list[str]:
    """What each peer counts, how it was asked, and what it could not be told."""
    out: list[str] = []
    for peer in peers["peers"]:
        reasons = Counter(
            answers[peer["name"]]["cannot"]
            for answers in peers["rows"].values()
            if "cannot" in answers.get(peer["name"], {})
        )
        why = "; ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
        counts = peer["counts"].rstrip(".")
        out.append(f"- **{peer['name']}** (`{peer['command']}`) counts {counts}. Cannot express: {why or 'nothing'}.")
    return out
