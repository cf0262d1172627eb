"""Rows of cards and plans, titles and reasons, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.units import format_gib, format_rate, format_seconds

if TYPE_CHECKING:
    from launcher.nvml.gpus import CardSample
    from planner.machine import Card

Json = Mapping[str, Any]

CARD_COLUMNS = ("#", "card", "used/total GiB", "util", "temp", "power", "other processes")
PLAN_COLUMNS = (
    "#", "train", "shard", "recompute", "offload", "loss", "mb x ga", "GPUs", "GiB", "free", "step", "tok/s", "alters",
    "verdict",
)  # fmt: skip
SHORT_OFFLOAD = {"activations": "act", "optimizer": "opt", "params": "par"}
DOES_NOT_FIT = "over"
"""In place of a rank."""


def card_row(card: Card, sample: CardSample | None) -> tuple[str, ...]:
    """One card; the last sample over the first reading."""
    now: Card | CardSample = card if sample is None or sample.problem else sample
    name = card.name.removeprefix("NVIDIA ") + ("" if card.usable else " (not usable)")
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
    from launcher.text.plan import choice_words  # the first plan comes after the first frame

    words, memory, time = choice_words(candidate["choice"]), candidate["memory"], candidate["time"]
    headroom = memory["headroom_bytes"]
    return (
        str(rank) if candidate["fits"] else DOES_NOT_FIT,
        words["train"],
        words["shard"],
        words["recompute"],
        "+".join(SHORT_OFFLOAD[what] for what in candidate["choice"]["offload"]) or "-",
        words["loss"],
        words["mb x ga"],
        str(candidate["num_gpus"]),
        format_gib(memory["device_bytes"]),
        "?" if headroom is None else format_gib(headroom),
        format_seconds(time["step_s"]) if time else "not known",
        format_rate(time["tokens_per_s"]) if time else "?",
        candidate["alters"],
        "fits" if candidate["fits"] else (candidate["why"] or ["does not fit"])[0],
    )


def plans_title(plan: Json | None, status: str) -> str:
    """How many fit, and what the order is."""
    if plan is None:
        return f"Plans  {status}"
    fitting = sum(c["fits"] for c in plan["candidates"])
    order = {"fastest": "fastest first", "longest": "longest first", "headroom": "most room first"}
    goal = order.get(plan["job"]["goal"], "fewest GPUs first")
    misses = len(plan["near_misses"])
    found = f"{fitting} shown that fit, {goal}; {misses} that do not, closest first"
    if not fitting:
        found = "nothing fits as asked, c says what would; closest first"
    return f"Plans  {found}" + (f"  ({status})" if status else "")


def reason_lines(candidate: Json) -> list[str]:
    """Why a candidate is as it is."""
    return [*candidate["why"], *(f"note: {text}" for text in candidate["warnings"])]


def bars_title(memory: Json, *, width: int, on_card: bool = True) -> str:
    """Over the bars of a candidate: the longest of three wordings that a title of ``width`` cells holds."""
    capacity = memory["capacity_bytes"]
    of = f" of {format_gib(capacity)}" if capacity else ""
    used = f"{format_gib(memory['device_bytes'])}{of} {'on a card' if on_card else 'in memory'}"
    peak = f"Peak in {memory['peak_phase']}: {format_gib(memory['allocated_bytes'])} GiB"
    interval = f"({format_gib(memory['low_bytes'])} to {format_gib(memory['high_bytes'])})"
    wordings = (
        f"{peak} allocated {interval}, {used}  ({memory['evidence']})",
        f"{peak} allocated {interval}, {used}",
        f"{peak} allocated, {used}",
    )
    return next((words for words in wordings if len(words) <= width), wordings[-1])
