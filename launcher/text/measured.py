"""Measurements for people: what was reached, and bytes and seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from launcher.output import table
from planner.measured.document import rates_of, source_of
from planner.measured.probes import PHASES
from planner.units import format_gib

Document = Mapping[str, Any]
ON_CARD = {"reserved_bytes": "reserved GiB", "device_used_bytes": "card GiB"}
"""What only a card says of a step."""
BUSY = 1.25
"""Wall clock over the processor's own time at which others had their share of it."""


def measurement_text(document: Document) -> str:
    """One measurement in full."""
    use = (
        "kept for exactly this plan, and no other is corrected by it"
        if document["kind"] == "whole"
        else "kept for plans of this machine"
    )
    head = f"{source_of(document)}; {use}"
    if document["kind"] == "rates":
        return "\n".join([head, *_rates_lines(document)])
    return "\n".join([head, *_job_lines(document[document["kind"]])])


def _rates_lines(document: Document) -> list[str]:
    rates = document["rates"]
    rows = [
        [f"{p['dtype']} product", f"{p['m']:,} x {p['n']:,} over {p['k']:,}", _flops(p["flops_per_s"], 2)]
        for p in rates.get("products", [])
    ]
    named = (
        ("streaming_bytes_per_s", "memory", "read and written"),
        ("host_to_device_bytes_per_s", "host to card", "pinned"),
        ("device_to_host_bytes_per_s", "card to host", "pinned"),
    )
    rows += [[name, how, f"{rates[key] / 1e9:,.1f} GB/s"] for key, name, how in named if rates.get(key)]
    rows += [
        [found["kind"], f"{found['ranks']} ranks", f"{found['bytes_per_s'] / 1e9:,.2f} GB/s"]
        for found in rates.get("collectives", [])
    ]
    if rates.get("context_bytes") is not None:
        rows.append(["context", "", f"{format_gib(rates['context_bytes'], 2)} GiB"])
    rows += [[name, "", "out of memory"] for name in rates.get("out_of_memory", [])]
    return [table(("what", "how", "reached"), rows, right=(2,)), *_busy(rates.get("stretched", 1.0))]


def _flops(per_second: float, digits: int) -> str:
    """``612.4 TFLOP/s``, and ``1.9 GFLOP/s`` of a CPU without kernels for a dtype, which would read as none."""
    if per_second < 1e11:
        return f"{per_second / 1e9:,.{digits}f} GFLOP/s"
    return f"{per_second / 1e12:,.{digits}f} TFLOP/s"


def _busy(times: float) -> list[str]:
    """What is said where others had their share of a CPU."""
    if times <= BUSY:
        return []
    return [f"it took up to {times:.1f} times the processor's own seconds: others work here; probe again alone"]


def _job_lines(job: Document) -> list[str]:
    choice, ranks = job["choice"], _ranks(job)
    offload = f", offload {'+'.join(choice['offload'])}" if choice["offload"] else ""
    beside = f" beside {job['scored_beside']}" if job.get("scored_beside") else ""
    lines = [
        f"{job['model']}: {job['trainer']}{beside}, {choice['method']}, {choice['weights']} weights, recompute"
        f" {choice['recompute']}, loss {choice['loss_path']}{offload}, {choice['attention']},"
        f" {choice['micro_batch']} x {choice['grad_accum']} rows{f', {ranks}' if ranks else ''}"
    ]
    places = [[f"{cell['layers']}", f"{cell['sequence']:,}"] for cell in job["cells"]]
    lines.append(_seen_table(("layers", "tokens"), places, job["cells"]))
    for cell in job["cells"]:
        if cell.get("ranks"):
            own = [[str(rank)] for rank in range(len(cell["ranks"]))]
            lines.append(_seen_table(("rank",), own, cell["ranks"]))
    short = [cell["out_of_memory"] for cell in job["cells"] if "out_of_memory" in cell] if ranks else []
    lines += short
    if any("peaks" not in cell for cell in job["cells"]):
        lines.append("plans take a probe into account where all of its cells ran")
    slowed = max((cell["wall_seconds"]["step_s"] / cell["processor_seconds"]["step_s"]
                  for cell in job["cells"] if "processor_seconds" in cell), default=1.0)  # fmt: skip
    return lines + _busy(slowed)


def _seen_table(heads: Sequence[str], places: Sequence[list[str]], seen: Sequence[Document]) -> str:
    """Bytes and seconds by phase, a row for each cell or rank."""
    rows: list[list[str]] = []
    for place, cell in zip(places, seen, strict=True):
        if "peaks" not in cell:
            rows.append([*place, cell.get("not_run", "out of memory")])
            continue
        peaks, seconds = cell["peaks"], cell["seconds"]
        rows.append(
            [
                *place,
                f"{format_gib(max(peaks.values()), 3)}",
                *(f"{format_gib(peaks[phase], 3)} / {seconds[phase]:.3f}" for phase in PHASES),
                f"{sum(seconds[name] for name in (*PHASES, 'other')):.3f}",
                *(format_gib(cell[name], 3) for name in ON_CARD if name in cell),
            ]
        )
    head = [*heads, "peak GiB", *(f"{phase} GiB / s" for phase in PHASES), "step s"]
    head += [text for name, text in ON_CARD.items() if any(name in cell for cell in seen)]
    rows = [row + [""] * (len(head) - len(row)) for row in rows]
    return table(head, rows, right=range(len(head)))


def _ranks(job: Document) -> str:
    """``2 ranks of ddp``; nothing where one rank ran."""
    choice = job["choice"]
    sizes = (choice[knob] for knob in ("cp", "sp", "tp", "dp_shard", "dp_replicate"))
    count = prod(sizes)
    split = "".join(f", {knob} {choice[knob]}" for knob in ("cp", "sp") if choice[knob] > 1)
    return f"{count} ranks of {choice['sharding']}{split}" if count > 1 else ""


def shown_text(kept: Sequence[tuple[str, Document]]) -> str:
    """A line for each measurement that is kept."""
    if not kept:
        return "nothing is measured; `trlfit probe --rates` and `trlfit probe MODEL --measure` do it"
    return table(
        ("file", "kind", "what", "on", "taken"),
        [[name, d["kind"], _summary(d), source_of(d), d["taken"][:19]] for name, d in kept],
    )


def _summary(document: Document) -> str:
    if document["kind"] == "rates":
        rates = rates_of(document)
        words = [_flops(rates.matmul_flops, 1)] if rates.matmul_flops else []
        words += [f"{rates.bandwidth / 1e9:,.0f} GB/s"] if rates.bandwidth else []
        words += [f"host {rates.host_link / 1e9:,.1f} GB/s"] if rates.host_link else []
        return ", ".join(words)
    job = document[document["kind"]]
    ranks = _ranks(job)
    choice, tokens = job["choice"], sorted({cell["sequence"] for cell in job["cells"]})
    layers = sorted({cell["layers"] for cell in job["cells"]})
    return (
        f"{job['model']} {job['trainer']} {choice['method']} {choice['recompute']} {choice['loss_path']},"
        f" {'/'.join(map(str, layers))} layers, {'/'.join(map(str, tokens))} tokens{f', {ranks}' if ranks else ''}"
    )
