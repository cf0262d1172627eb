"""``trlfit.measurement/1``: one probe's answer as it is kept, and what the planner reads from it.

A document says what it was measured on (``card`` in the card table or the device's name, ``driver``, ``threads`` of a
CPU, ``versions``), when it was ``taken``, and holds ``rates``, ``job`` or ``whole``, all numbers as they were seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.choice import Choice
from planner.measured.probes import PHASES, Cell, MeasuredJob, MeasuredRates, MeasuredWhole

HALF = ("bfloat16", "float16")


def source_of(document: Mapping[str, Any]) -> str:
    """``NVIDIA H200, driver 570.86, torch 2.13.0``."""
    words = [str(document["name"])]
    words += [f"{document['threads']} threads"] if document.get("threads") else []
    words += [f"driver {document['driver']}"] if document.get("driver") else []
    wanted = ("torch",) if document["kind"] == "rates" else ("torch", "transformers", "trl", "peft")
    return ", ".join(words + [f"{p} {document['versions'][p]}" for p in wanted if p in document["versions"]])


def rates_of(document: Mapping[str, Any]) -> MeasuredRates:
    """The best of each kind of work; None where nothing was measured."""
    rates: Mapping[str, Any] = document["rates"]
    products: Sequence[Mapping[str, Any]] = rates.get("products", [])

    def best(*dtypes: str) -> float | None:
        return max((float(p["flops_per_s"]) for p in products if p["dtype"] in dtypes), default=None)

    ways = [rates.get(f"{way}_bytes_per_s") for way in ("host_to_device", "device_to_host")]
    links = [float(found["bytes_per_s"]) for found in rates.get("collectives", [])]
    stream, context = rates.get("streaming_bytes_per_s"), rates.get("context_bytes")
    return MeasuredRates(
        matmul_flops=best(*HALF),
        fp32_flops=best("float32"),
        bandwidth=None if stream is None else float(stream),
        host_link=min((float(way) for way in ways if way is not None), default=None),
        link=min(links, default=None),
        context_bytes=None if context is None else int(context),
        source=f"measured on {source_of(document)}",
    )


def job_of(document: Mapping[str, Any]) -> MeasuredJob | None:
    """The measured job, None where a cell did not run to its end: less than four say nothing of more layers."""
    job: Mapping[str, Any] = document["job"]
    cells = [_cell(cell) for cell in job["cells"] if "peaks" in cell]
    cells.sort(key=lambda cell: (cell.layers, cell.tokens))
    if len(cells) != 4:
        return None
    contexts = [int(cell["context_bytes"]) for cell in job["cells"] if cell.get("context_bytes")]
    return MeasuredJob(
        trainer=str(job["trainer"]),
        scored_beside=str(job.get("scored_beside", "")),
        shape=str(job["shape"]),
        vocab=int(job["vocab"]),
        tied=bool(job["tied"]),
        options=str(job["options"]),
        lora_r=int(job["lora_r"]),
        choice=Choice.from_json(dict(job["choice"])),
        cells=tuple(cells),
        context_bytes=max(contexts, default=None),
        source=f"measured on {source_of(document)}",
    )


def whole_of(document: Mapping[str, Any]) -> MeasuredWhole | None:
    """The plan that ran itself or ran out of memory, None where the document holds anything else than one such run."""
    whole: Mapping[str, Any] = document["whole"]
    if len(whole["cells"]) != 1:
        return None
    data: Mapping[str, Any] = whole["cells"][0]
    cell = _cell(data) if "peaks" in data else None
    short = "" if cell is not None else str(data.get("out_of_memory", ""))
    if cell is None and not short:
        return None
    return MeasuredWhole(
        trainer=str(whole["trainer"]),
        scored_beside=str(whole.get("scored_beside", "")),
        shape=str(whole["shape"]),
        vocab=int(whole["vocab"]),
        tied=bool(whole["tied"]),
        options=str(whole["options"]),
        lora_r=int(whole["lora_r"]),
        choice=Choice.from_json(dict(whole["choice"])),
        layers=int(data["layers"]),
        sequence=int(data["sequence"]),
        peaks=cell.peaks if cell is not None else {},
        step_s=sum(cell.seconds.values()) if cell is not None else 0.0,
        out_of_memory=short,
        source=f"measured on {source_of(document)}",
    )


def _cell(data: Mapping[str, Any]) -> Cell:
    return Cell(
        layers=int(data["layers"]),
        sequence=int(data["sequence"]),
        tokens=int(data["tokens"]),
        peaks={phase: int(data["peaks"][phase]) for phase in PHASES},
        seconds={name: float(data["seconds"][name]) for name in (*PHASES, "other")},
    )
