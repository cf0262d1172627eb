"""What the first screen shows, as text: rows of the two tables, the lines above and below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.gpus import CardSample
from launcher.plan_text import choice_words, machine_words
from planner.machine import Card
from planner.units import format_gib, format_seconds

Json = Mapping[str, Any]

CARD_COLUMNS = ("#", "card", "used/total GiB", "util", "temp", "power", "other processes")
PLAN_COLUMNS = (
    "#", "GiB", "free", "step", "GPUs", "shard", "recompute", "offload", "loss", "mb x ga", "train",
)  # fmt: skip
"""What decides comes first: a narrow terminal cuts the rest."""
DOES_NOT_FIT = "over"
"""In place of a rank."""


def card_row(card: Card, sample: CardSample | None) -> tuple[str, ...]:
    """One card; the last sample over the first reading."""
    now: Card | CardSample = card if sample is None or sample.problem else sample
    name = card.name if card.usable else f"{card.name} (not usable)"
    others = ", ".join(f"pid {p.pid} {p.name or '?'} ({p.user or '?'})" for p in now.processes) or "none"
    return (
        str(card.index),
        name,
        f"{format_gib(now.used_bytes)}/{format_gib(card.total_bytes)}",
        "?" if now.utilisation_percent is None else f"{now.utilisation_percent}%",
        "?" if now.temperature_c is None else f"{now.temperature_c}C",
        "?" if now.power_w is None else f"{now.power_w:.0f} W",
        sample.problem if sample is not None and sample.problem else others,
    )


def shown_candidates(plan: Json) -> list[Json]:
    """What fits, best first, then the closest that does not."""
    return [c for c in plan["candidates"] if c["fits"]] + list(plan["near_misses"])


def plan_row(rank: int, candidate: Json) -> tuple[str, ...]:
    """One candidate; ``rank`` from 1."""
    words, memory, time = choice_words(candidate["choice"]), candidate["memory"], candidate["time"]
    headroom = memory["headroom_bytes"]
    return (
        str(rank) if candidate["fits"] else DOES_NOT_FIT,
        format_gib(memory["device_bytes"]),
        "?" if headroom is None else format_gib(headroom),
        format_seconds(time["step_s"]) if time else "not known",
        str(candidate["num_gpus"]),
        words["shard"],
        words["recompute"],
        words["offload"],
        words["loss"],
        words["mb x ga"],
        words["train"],
    )


def head_lines(plan: Json, source: str) -> list[str]:
    """The job, the machine and what the user should know before reading the table."""
    job = plan["job"]
    lines = [
        f"{job['model']}  {job['trainer']} {job['method']}  {job['seq_len']:,} tokens"
        f"  global batch {job['global_batch']}  on {machine_words(plan['machine'])}  ({source})",
        *plan["machine"]["notes"],
    ]
    if plan["best"] is None:
        changes = "; ".join(f"{change['flags']}: {change['sentence']}" for change in plan["changes"][:3])
        lines.append("nothing fits as asked" + (f"; what would: {changes}" if changes else ""))
    return lines


def reason_lines(candidate: Json) -> list[str]:
    """Why a candidate is as it is."""
    return [*candidate["why"], *(f"note: {text}" for text in candidate["warnings"])]
