"""A comparison as text: two columns and what B has more, 74 columns wide, as a box on a screen of 80 holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from launcher.text.plan import machine_words
from planner.search.shortage import PART_NAMES
from planner.units import format_gib, format_seconds

Json = Mapping[str, Any]
LABEL, VALUE, CHANGE = 26, 19, 10
WIDTH = LABEL + 2 * VALUE + CHANGE
SMALL_BYTES = 2**30 // 20
SMALL_SHARE = 0.005
"""Parts below 0.05 GiB, or half a per cent of the step, on both sides are left out."""


def comparison_text(document: Json) -> str:
    """The whole comparison for a terminal."""
    job, memory, time = document["job"], document["memory"], document["time"]
    head = (
        f"{job['model']}: {job['seq_len']:,} tokens, global batch {job['global_batch']}, on"
        f" {machine_words(document['machine'])}"
    )
    lines = [*wrap(head, WIDTH), ""]
    for letter, side in zip("AB", document["sides"], strict=True):
        verdict = (
            "fits"
            if side["candidate"]["fits"]
            else f"{format_gib(side['short_bytes'])} GiB too many with reserve and interval"
        )
        lines += wrap(f"{letter}: {side['asked'] or 'as asked'} ({verdict})", WIDTH, subsequent_indent="   ")
    lines += ["", _line("", "A", "B", "B - A"), "-" * WIDTH]
    lines += _knobs(document["differs"])
    lines += ["", "memory, GiB per GPU"]
    lines.append(_bytes("on the card", memory["device_bytes"]))
    lines.append(_bytes("allocated", memory["allocated_bytes"]))
    if any(memory["host_bytes"]):
        lines.append(_bytes("host, per node", memory["host_bytes"]))
    for phase in memory["phases"]:
        lines += _phase(phase, memory["peak_phase"])
    if time is not None:
        lines += ["", "time, seconds per step", _seconds("whole step", time["step_s"])]
        least = SMALL_SHARE * max(time["step_s"])
        lines += [_seconds(f"  {part}", pair) for part, pair in time["parts"].items() if max(pair) >= least]
    lines += ["", *wrap(document["sentence"], WIDTH)]
    return "\n".join(lines)


def _line(label: str, a: str, b: str, change: str = "") -> str:
    return f"{label:<{LABEL}}{a:>{VALUE}}{b:>{VALUE}}{change:>{CHANGE}}".rstrip()


def _knobs(differs: Sequence[Json]) -> list[str]:
    if not differs:
        return ["the two are one and the same choice"]
    return [_line(entry["knob"], *(_word(value) for value in entry["values"])) for entry in differs]


def _word(value: Any) -> str:
    return (",".join(value) or "-") if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def _bytes(label: str, pair: Sequence[int], mark: str = "") -> str:
    return _line(label + mark, format_gib(pair[0]), format_gib(pair[1]), _change((pair[1] - pair[0]) / 2**30, 1))


def _seconds(label: str, pair: Sequence[float]) -> str:
    return _line(label, format_seconds(pair[0]), format_seconds(pair[1]), _change(pair[1] - pair[0], 2))


def _change(value: float, digits: int) -> str:
    """With its sign; nothing where it rounds to nothing."""
    return f"{value:+,.{digits}f}" if round(value, digits) else ""


def _phase(phase: Json, peaks: Sequence[str]) -> list[str]:
    of = [letter for letter, peak in zip("AB", peaks, strict=True) if peak == phase["name"]]
    mark = f" (peak of {' and '.join(of)})" if of else ""
    lines = [_bytes(phase["name"], phase["bytes"], mark)]
    lines += [
        _bytes(f"  {PART_NAMES[part]}", pair) for part, pair in phase["parts"].items() if max(pair) >= SMALL_BYTES
    ]
    return lines
