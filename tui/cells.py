"""Rows of cards and plans, titles and reasons, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.units import GIB, format_bytes, format_gib, format_rate, format_seconds

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
OVER, OVER_HOST = "over", "host"
"""In place of a rank: what a choice does not fit, the card (with reserve and interval) or the host's memory."""


def card_row(card: Card, sample: CardSample | None) -> tuple[str, ...]:
    """One card; the last sample over the first reading."""
    now: Card | CardSample = card if sample is None or sample.problem else sample
    name = card.name.removeprefix("NVIDIA ") + ("" if card.usable else " (not usable)")
    nobody = "not in sight" if "processes" in now.unknown else "none"
    others = ", ".join(f"pid {p.pid} {p.name or '?'} ({p.user or '?'})" for p in now.processes) or nobody
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
        str(rank) if candidate["fits"] else (OVER_HOST if lacks_host(candidate) else OVER),
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


def lacks_host(candidate: Json) -> bool:
    """Whether a choice that does not fit asks for more of the host's memory than there is."""
    return not candidate["fits"] and any("GiB of host memory" in reason for reason in candidate["why"][:1])


def plans_title(plan: Json | None, status: str, *, wide: bool = False) -> str:
    """How many fit, and what the order is; ``wide`` titles say how fine it is."""
    if plan is None:
        return f"Plans  {status}"
    fitting = sum(c["fits"] for c in plan["candidates"])
    order = {
        "fastest": f"fastest first{', in bands of 5 %' if wide else ''}",
        "longest": "longest first",
        "headroom": "most room first",
    }
    goal = order.get(plan["job"]["goal"], "fewest GPUs first")
    misses = len(plan["near_misses"])
    found = f"{fitting} shown that fit, {goal}; {misses} that do not, closest first"
    if not fitting:
        found = "nothing fits as asked, c says what would; closest first"
    return f"Plans  {found}" + (f"  ({status})" if status else "")


def reason_lines(candidate: Json, host: Json | None = None) -> list[str]:
    """Why a candidate is as it is; of one that the host has no room for, what ``host`` has."""
    lines = [*candidate["why"], *(f"note: {text}" for text in candidate["warnings"])]
    if host is not None and lacks_host(candidate):
        enough = "; the card has room" if (candidate["memory"]["headroom_bytes"] or 0) >= 0 else ""
        lines.insert(1, f"the host has {format_gib(host['available_bytes'])} GiB free{enough}")
    return lines


def best_words(plan: Json) -> str:
    """The best plan's memory and pace, and what they are known from, in one line."""
    best = plan["best"]
    if best is None:
        return "nothing fits"
    memory, time = best["memory"], best["time"]
    pace = f", {format_seconds(time['step_s'])} a step" if time else ""
    return f"{size_words(memory['device_bytes'])}{pace} ({memory['evidence']})"


def fact_lines(candidate: Json, plan: Json) -> list[str]:
    """``time``, ``cards``, ``host`` and ``alters`` of a candidate, a line each, where there is something to say."""
    lines: list[str] = []
    time = candidate["time"]
    if time:
        span = f"{format_seconds(time['low_s'])} to {format_seconds(time['high_s'])}"
        busy = f", MFU {time['mfu']:.0%}" if time["mfu"] is not None else ""
        pace = f"{format_seconds(time['step_s'])} a step ({span}), {format_rate(time['tokens_per_s'])} tokens/s{busy}"
        lines.append(f"time    {pace}  ({time['evidence']})")
    indices = [card["index"] for card in plan["machine"]["cards"] if card["usable"]]
    if 0 < len(candidate["cards"]) < len(indices):
        lines.append(f"cards   {', '.join(map(str, candidate['cards']))} of {', '.join(map(str, indices))}")
    if indices:
        lines.append(f"host    {size_words(candidate['memory']['host_bytes']['peak'])} of its memory per node at most")
    if candidate["alters"] != "nothing":
        lines.append(f"alters  {candidate['alters']}")
    return lines


def size_words(num_bytes: float) -> str:
    """``46.5 GiB``, and of a small model the unit that says more."""
    return f"{format_gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else format_bytes(num_bytes)


def bars_title(memory: Json, *, width: int, taken: int = 0, on_card: bool = True) -> str:
    """Over the bars of a candidate: the longest wording that a title of ``width`` cells holds.

    Args:
        memory: of the candidate.
        width: cells.
        taken: bytes of the card that others hold.
        on_card: it is a card's memory, not the host's.
    """
    capacity = memory["capacity_bytes"]
    of = f" of {format_gib(capacity)}" if capacity else ""
    others = f", {format_gib(taken)} taken" if taken else ""
    used = f"{format_gib(memory['device_bytes'])}{of} {'on a card' if on_card else 'in memory'}{others}"
    peak = f"Peak in {memory['peak_phase']}: {size_words(memory['allocated_bytes'])}"
    size = format_gib if memory["allocated_bytes"] >= GIB // 10 else format_bytes
    interval = f"({size(memory['low_bytes'])} to {size(memory['high_bytes'])})"
    wordings = (
        f"{peak} allocated {interval}, {used}  ({memory['evidence']})",
        f"{peak} allocated {interval}, {used}",
        f"{peak} allocated, {used}",
    )
    return next((words for words in wordings if len(words) <= width), wordings[-1])
