"""Plans and ledgers as text for people. Reads the JSON documents, so the table and `--json` cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.output import table
from planner.units import format_bytes, format_count, format_gib, format_seconds

Json = Mapping[str, Any]


def choice_words(choice: Json) -> dict[str, str]:
    """Short words for the columns of a choice."""
    split = ""
    for knob in ("cp", "sp", "tp"):
        if choice[knob] > 1:
            split = f"{knob} {choice[knob]}"
    held = "bf16" if choice["weights"] == "bf16" and choice["mixed_precision"] == "no" else choice["weights"]
    short = {
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw 8-bit",
        "adamw_torch_8bit": "adamw 8-bit",
    }
    return {
        "train": choice["method"],
        "shard": choice["sharding"] + (f", {split}" if split else ""),
        "loss": choice["loss_path"],
        "recompute": choice["recompute"],
        "offload": ",".join(choice["offload"]) or "-",
        "mb x ga": f"{choice['micro_batch']} x {choice['grad_accum']}",
        "weights": held
        + ("" if choice["method"] != "full" else f", {short.get(choice['optimizer'], choice['optimizer'])}"),
    }


def _row(number: str, candidate: Json) -> list[str]:
    words = choice_words(candidate["choice"])
    memory, time = candidate["memory"], candidate["time"]
    headroom = memory["headroom_bytes"]
    verdict = "fits" if candidate["fits"] else candidate["why"][0] if candidate["why"] else "does not fit"
    return [
        number,
        str(candidate["num_gpus"]),
        words["train"],
        words["shard"],
        words["weights"],
        words["recompute"],
        words["offload"],
        words["loss"],
        words["mb x ga"],
        format_gib(memory["device_bytes"]),
        format_gib(headroom) if headroom is not None else "?",
        format_seconds(time["step_s"]) if time else "not known",
        f"{time['tokens_per_s']:,.0f}" if time else "?",
        verdict,
    ]


HEADERS = (
    "#",
    "GPUs",
    "train",
    "shard",
    "weights",
    "recompute",
    "offload",
    "loss",
    "mb x ga",
    "GiB",
    "free",
    "step",
    "tok/s",
    "verdict",
)
RIGHT = (0, 1, 8, 9, 10, 11, 12)


def plan_text(plan: Json) -> str:
    """The whole plan for a terminal."""
    parts = [_headline(plan)]
    candidates = [c for c in plan["candidates"] if c["fits"]]
    if candidates:
        parts.append(table(HEADERS, [_row(str(i), c) for i, c in enumerate(candidates, 1)], right=RIGHT))
    best = plan["best"]
    if best:
        parts.append(_best(best))
    if plan["near_misses"]:
        rows = [_row("-", c) for c in plan["near_misses"]]
        parts.append("does not fit, closest first\n" + table(HEADERS, rows, right=RIGHT))
    if plan["changes"]:
        title = "what would help" if best else "nothing fits as asked; what would"
        lines = [f"  {change['flags']:<28} {change['sentence']}" for change in plan["changes"]]
        parts.append(title + "\n" + "\n".join(lines))
    elif not best:
        parts.append(
            "nothing fits, and no single change tried would make it fit:"
            " 8-bit states, LoRA, QLoRA, fewer tokens, more GPUs"
        )
    if plan.get("staircase"):
        parts.append(_staircase(plan["staircase"]))
    if plan["rejected"]:
        rejected = sorted(plan["rejected"].items(), key=lambda item: -item[1]["count"])[:4]
        lines = [f"  {entry['count']:>6,}  {entry['example']}" for _, entry in rejected]
        parts.append("left out by the libraries' rules (combinations, reason)\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _headline(plan: Json) -> str:
    job, architecture = plan["job"], plan["architecture"]
    parameters = architecture["parameters"]
    lines = [
        f"{architecture['model']}: {format_count(parameters['total'])} parameters, {architecture['layers']} layers"
        f" ({architecture['origin']}); {format_count(parameters['trainable'])} train"
        f" ({job['method']}, {job['trainer']})",
        f"{job['seq_len']:,} tokens, global batch {job['global_batch']}, on {machine_words(plan['machine'])}",
        "stack: "
        + ", ".join(
            f"{name} {version}"
            for name, version in sorted(plan["stack"]["versions"].items())
            if name in ("torch", "transformers", "trl", "accelerate", "peft")
        ),
    ]
    lines += [f"note: {note}" for note in plan["machine"]["notes"]]
    return "\n".join(lines)


def machine_words(machine: Json) -> str:
    """``8 x H100-80GB`` or ``this CPU``."""
    cards = [card for card in machine["cards"] if card["usable"]]
    if not cards:
        host = machine["host"]
        memory = f", {format_gib(host['available_bytes'])} GiB free" if host else ""
        return f"CPU ({host['cores']} cores{memory})" if host else "CPU"
    names = sorted({card["card_id"] or card["name"] for card in cards})
    nodes = f" on each of {machine['nodes']} nodes" if machine["nodes"] > 1 else ""
    return f"{len(cards)} x {', '.join(names)}{nodes}"


def _best(best: Json) -> str:
    memory, time = best["memory"], best["time"]
    lines = [
        "best plan",
        f"  memory  {format_gib(memory['allocated_bytes'])} GiB allocated per GPU"
        f" ({format_gib(memory['low_bytes'])} to {format_gib(memory['high_bytes'])}),"
        f" {format_gib(memory['reserved_bytes'])} reserved, {format_gib(memory['device_bytes'])} on the card"
        f"  [{memory['evidence']}]",
    ]
    host = memory["host_bytes"]["pinned"] + memory["host_bytes"]["pageable"]
    if host:
        lines.append(
            f"  host    {format_gib(host)} GiB per node for offload,"
            f" {format_gib(memory['host_bytes']['pinned'])} of it pinned"
        )
    if time:
        mfu = f", MFU {time['mfu']:.0%}" if time["mfu"] is not None else ""
        lines.append(
            f"  time    {format_seconds(time['step_s'])} per step ({format_seconds(time['low_s'])} to"
            f" {format_seconds(time['high_s'])}), {time['tokens_per_s']:,.0f} tokens/s{mfu}  [{time['evidence']}]"
        )
    else:
        lines.append("  time    not known: this card's rates are not in the table")
    lines += [f"  why     {reason}" for reason in best["why"]]
    lines += [f"  note    {warning}" for warning in best["warnings"]]
    return "\n".join(lines)


def _staircase(stairs: list[Json]) -> str:
    rows = [[stair["lever"], f"{stair['tokens']:,}" if stair["tokens"] else "nothing fits"] for stair in stairs]
    return "longest sequence, lever by lever\n" + table(("lever", "tokens"), rows, right=(1,))


def ledger_text(document: Json) -> str:
    """The ledger of one choice for a terminal."""
    roles = ("weights", "gradients", "master", "moment1", "moment2")
    rows = [
        [
            g["group"],
            f"{g['parameters']:,}",
            f"{g['trainable']:,}",
            *(format_gib(g["bytes"][r], 2) for r in roles),
        ]
        for g in document["groups"]
    ]
    words = choice_words(document["choice"])
    memory = document["memory"]
    head = (
        f"{document['job']['model']}: {', '.join(f'{k} {v}' for k, v in words.items())}\n"
        f"{format_gib(memory['allocated_bytes'])} GiB allocated per GPU, peak in {memory['peak_phase']}"
        f" [{memory['evidence']}]; " + ("fits" if document["fits"] else "does not fit")
    )
    head += "".join(f"\nthe libraries refuse this: {r['reason']}  [{r['source']}]" for r in document["refusals"])
    head += "".join(f"\nnote: {warning}" for warning in document["warnings"])
    groups = table(("group", "parameters", "trainable", *(f"{r} GiB" for r in roles)), rows, right=range(1, 8))
    phases = "\n\n".join(_phase(phase, phase["name"] == memory["peak_phase"]) for phase in document["phases"])
    return f"{head}\n\n{groups}\n\n{phases}"


def _phase(phase: Json, is_peak: bool) -> str:
    mark = "  <- peak" if is_peak else ""
    lines = [f"{phase['name']}: {format_bytes(phase['bytes'])}{mark}"]
    lines += [f"  {p['part']:<18} {p['text']:>10}  {p['formula']}  [{p['source']}]" for p in phase["parts"]]
    return "\n".join(lines)


def textbook_text(sheet: Json) -> str:
    """The textbook sheet for a terminal."""
    rows = [
        [
            role,
            str(r["bytes_per_parameter"]),
            format_gib(r["total_bytes"]),
            str(r["divided_from_stage"]),
            format_gib(r["per_device_bytes"]),
        ]
        for role, r in sheet["roles"].items()
    ]
    verdict = "fits" if sheet["fits"] else f"does not fit, short {format_gib(sheet['short_bytes'])} GiB"
    fewest = ", ".join(
        f"stage {stage}: {count if count is not None else 'no number of them'}"
        for stage, count in sheet["fewest_devices"].items()
    )
    by_stage = " / ".join(format_gib(size) for size in sheet["by_stage_bytes"].values())
    return "\n".join(
        [
            table(
                (
                    "role",
                    "bytes per parameter",
                    "total GiB",
                    "divided from stage",
                    "per device GiB",
                ),
                rows,
                right=range(1, 5),
            ),
            f"states {format_gib(sheet['states_bytes'])} GiB + activations {format_gib(sheet['activations_bytes'])} GiB"
            f" = {format_gib(sheet['total_bytes'])} GiB per device of {format_gib(sheet['card_bytes'])}: {verdict}",
            f"stage 0 / 1 / 2 / 3: {by_stage} GiB; fewest devices that fit: {fewest}",
            f"left out: {sheet['left_out']}",
        ]
    )
