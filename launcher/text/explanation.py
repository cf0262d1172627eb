"""The explanation of a plan as text for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.output import table
from launcher.text.wrapping import wrapped
from planner.search.shortage import PART_NAMES
from planner.units import format_gib, format_seconds

Json = Mapping[str, Any]
RESOURCE_NAMES = {
    "compute": "arithmetic",
    "memory": "the card's memory bandwidth",
    "link": "the link between cards",
    "host_link": "the link to the host",
    "launches": "kernel launches",
    "host": "work on the host",
}


def explanation_text(plan: Json) -> str:
    """Every part that has something to say."""
    found = plan["explanation"]
    parts: list[str] = []
    if found["binds"]:
        parts.append(_binds(found["binds"], plan["best"]))
        parts.append(_levers(found["levers"]))
    if found["releases"]:
        trl = plan["stack"]["versions"]["trl"]
        lines = [line for entry in found["releases"] for line in indented(entry["sentence"])]
        parts.append(f"the same run with another TRL (here {trl})\n" + "\n".join(lines))
    if found["near_misses"]:
        parts.append(_near_misses(plan["near_misses"], found["near_misses"]))
    if found["ladder"]:
        parts.append(_ladder(found["ladder"]))
    return "\n\n".join(parts)


def indented(text: str, first: str = "  ", rest: str = "      ") -> list[str]:
    """A sentence below a headline."""
    return wrapped(text, first, rest)


def labelled(label: str, text: str) -> list[str]:
    """Lines of a paragraph with its label in front of it."""
    return indented(text, f"  {label:<8}", " " * 10)


def _binds(binds: Json, best: Json) -> str:
    peak = f"the peak is in {binds['phase']}: {format_gib(binds['device_bytes'])}"
    if binds["capacity_bytes"] is not None:
        peak += f" of {format_gib(binds['capacity_bytes'])}"
    peak += " GiB"
    if binds["headroom_bytes"] is not None:
        peak += f", {format_gib(binds['headroom_bytes'])} free beyond the reserve"
    parts = [f"{PART_NAMES[name]} {format_gib(size)}" for name, size in binds["parts"].items()]
    lines = ["what binds", *labelled("memory", f"{peak}; largest there: {', '.join(parts)} GiB")]
    if best["time"] and binds["resources"]:
        shares = sorted(binds["resources"].items(), key=lambda item: -item[1])
        waits = [f"{RESOURCE_NAMES[name]} {share:.0%}" for name, share in shares if share >= 0.005]
        pace = f"a step of {format_seconds(best['time']['step_s'])} waits for {', '.join(waits)}"
        lines += labelled("time", pace)
    return "\n".join(lines)


def _levers(levers: Sequence[Json]) -> str:
    title = "what one change of a knob would do"
    if not levers:
        return f"{title}\n  no single change frees 1 % of the peak or saves 1 % of the step"
    lines = [title]
    for lever in levers:
        lines += indented(f"{lever['change']}{_alters(lever)}: {lever['sentence']}")
    return "\n".join(lines)


def _alters(change: Json) -> str:
    return " (other numerics)" if change["alters"] == "numerics" else ""


def candidate_words(candidate: Json) -> str:
    """One line that tells a candidate from the others: ``2 GPUs, zero3, recompute selective, micro-batch 2 x 2``."""
    choice, gpus = candidate["choice"], candidate["num_gpus"]
    words = ["1 GPU" if gpus == 1 else f"{gpus} GPUs"]
    if choice["sharding"] != "none":
        words.append(choice["sharding"])
    words += [f"{knob} {choice[knob]}" for knob in ("cp", "sp", "tp") if choice[knob] > 1]
    words.append("no recompute" if choice["recompute"] == "none" else f"recompute {choice['recompute']}")
    if choice["offload"]:
        words.append("offload of " + " and ".join(choice["offload"]))
    if choice["method"] != "full":
        words.append(choice["method"])
    words.append(f"micro-batch {choice['micro_batch']} x {choice['grad_accum']}")
    return ", ".join(words)


def _near_misses(candidates: Sequence[Json], explained: Sequence[Json]) -> str:
    lines = ["what would make the closest misses fit"]
    for candidate, miss in zip(candidates, explained, strict=True):
        short = f"{format_gib(miss['short_bytes'])} GiB too many with reserve and interval in {miss['phase']}"
        lines += indented(f"{candidate_words(candidate)}: {short}")
        fix = miss["fix"]
        if fix is None:
            lines += indented("no one or two changes of a knob are enough", "    -> ", "       ")
        else:
            lines += indented(f"{fix['change']}{_alters(fix)}: {fix['sentence']}", "    -> ", "       ")
    return "\n".join(lines)


def _ladder(rungs: Sequence[Json]) -> str:
    """Bytes and verdict of each lever; the first ones add up."""
    rows: list[list[str]] = []
    for rung in rungs:
        size = format_gib(rung["device_bytes"]) if rung["device_bytes"] is not None else "-"
        short = "fits" if rung["fits"] else "-" if rung["short_bytes"] is None else format_gib(rung["short_bytes"])
        pace = format_seconds(rung["step_s"]) if rung["step_s"] is not None else "-"
        rows.append([rung["lever"], size, short, pace, rung["flags"] or "by itself"])
    notes = [
        line
        for rung in rungs
        if rung["device_bytes"] is None
        for line in indented(f"{rung['lever']}: {rung['sentence']}")
    ]
    title = (
        "what each lever leaves missing (GiB per GPU; levers that the planner pulls by itself add up,\n"
        "the others are each on their own)"
    )
    headers = ("lever", "GiB", "too many", "step", "how")
    return "\n".join([title, table(headers, rows, right=(1, 2, 3)), *notes])
