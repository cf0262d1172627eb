"""Plans and ledgers as text for people. Reads the JSON documents, so the table and `--json` cannot disagree."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from launcher.output import block_character, table
from launcher.text.wrapping import wrapped
from planner.choice import ZERO
from planner.machine import BUSY_BYTES
from planner.units import GIB, format_bytes, format_count, format_gib, format_rate, format_seconds

Json = Mapping[str, Any]
FLAGS = 28
"""Of the column of flags beside a sentence."""
BAR_COLUMNS = 40
"""Of the longest bar of a chart."""


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
    optimizer = short.get(choice["optimizer"], choice["optimizer"])
    return {
        "train": choice["method"],
        "shard": choice["sharding"] + (f", {split}" if split else ""),
        "loss": choice["loss_path"],
        "recompute": choice["recompute"],
        "offload": ",".join(choice["offload"]) or "-",
        "mb x ga": f"{choice['micro_batch']} x {choice['grad_accum']}",
        "weights": held if choice["method"] != "full" and optimizer == "adamw" else f"{held}, {optimizer}",
    }


def _row(number: str, candidate: Json) -> list[str]:
    words = choice_words(candidate["choice"])
    memory, time = candidate["memory"], candidate["time"]
    headroom, offload = memory["headroom_bytes"], candidate["choice"]["offload"]
    return [
        number,
        str(candidate["num_gpus"]),
        words["train"],
        words["shard"],
        words["weights"],
        words["recompute"],
        words["offload"] if len(offload) < 2 else "+".join(target[:3] for target in offload),
        words["loss"],
        words["mb x ga"],
        format_gib(memory["device_bytes"]),
        _free(headroom),
        format_seconds(time["step_s"]) if time else "not known",
        format_rate(time["tokens_per_s"]) if time else "?",
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
)
RIGHT = (0, 1, 8, 9, 10, 11, 12)


def _free(headroom: int | None) -> str:
    """GiB; two digits where one would be a zero, so that what hardly fits differs from what hardly does not."""
    if headroom is None:
        return "?"
    return format_gib(headroom, 2 if 0 < abs(headroom) < 2**30 // 20 else 1)


def plan_text(plan: Json) -> str:
    """The whole plan for a terminal."""
    parts = [_headline(plan)]
    candidates = [c for c in plan["candidates"] if c["fits"]]
    if candidates:
        parts.append("\n".join(_table([(str(i), c) for i, c in enumerate(candidates, 1)])))
    best = plan["best"]
    if best:
        usable = [card["index"] for card in plan["machine"]["cards"] if card["usable"]]
        parts.append(_best(best, plan["job"], usable))
    if plan["near_misses"]:
        header, rule, *rows = _table([("-", c) for c in plan["near_misses"]])
        reasons = [c["why"][0] if c["why"] else "does not fit" for c in plan["near_misses"]]
        misses = [line for row, why in zip(rows, reasons, strict=True) for line in (row, *wrapped(why, "   ", "   "))]
        parts.append("\n".join(["does not fit, closest first", header, rule, *misses]))
    if plan["changes"]:
        title = "what would help" if best else "nothing fits as asked; what would"
        parts.append("\n".join([title, *(line for change in plan["changes"] for line in _change(change))]))
    elif not best:
        parts.append(
            "nothing fits, and nothing that was tried makes it fit: a newer TRL, no pins, lighter numerics, LoRA,\n"
            "QLoRA, more GPUs, other cards, fewer tokens, all of them together"
        )
    if plan.get("routes"):
        from launcher.text.routes import routes_text

        parts.append(routes_text(plan["routes"], whole=bool(plan.get("explanation"))))
    if plan.get("staircase"):
        parts.append(_staircase(plan["staircase"]))
    if plan.get("explanation"):
        from launcher.text.explanation import explanation_text

        parts.append(explanation_text(plan))
    if plan["rejected"]:
        rejected = sorted(plan["rejected"].items(), key=lambda item: -item[1]["count"])[:4]
        lines = [line for _, e in rejected for line in wrapped(e["example"], f"  {e['count']:>6,}  ", " " * 10)]
        parts.append("\n".join(["left out by the libraries' rules (combinations, reason)", *lines]))
    return "\n\n".join(parts)


def _table(rows: list[tuple[str, Json]]) -> list[str]:
    """Lines of a table of candidates; the method has a column where it differs."""
    cells = [_row(number, candidate) for number, candidate in rows]
    shown = [i for i, name in enumerate(HEADERS) if name != "train" or len({row[i] for row in cells}) > 1]
    right = [place for place, i in enumerate(shown) if i in RIGHT]
    return table([HEADERS[i] for i in shown], [[row[i] for i in shown] for row in cells], right=right).splitlines()


def _change(change: Json) -> list[str]:
    """How to ask for a change, and what becomes of it beside that, or below where it is long."""
    flags, sentence, below = change["flags"], change["sentence"], " " * (FLAGS + 3)
    if len(flags) <= FLAGS:
        return wrapped(sentence, f"  {flags:<{FLAGS}} ", below)
    return [f"  {flags}", *wrapped(sentence, below, below)]


def _headline(plan: Json) -> str:
    job, architecture = plan["job"], plan["architecture"]
    parameters = architecture["parameters"]
    lines = [
        f"{architecture['model']}: {format_count(parameters['total'])} parameters, {architecture['layers']} layers"
        f" ({architecture['origin']}); {format_count(parameters['trainable'])} train"
        f" ({_trained(plan)}, {job['trainer']})",
        f"{job['seq_len']:,} tokens, global batch {job['global_batch']}, on {machine_words(plan['machine'])}",
        "stack: "
        + ", ".join(
            f"{name} {version}"
            for name, version in sorted(plan["stack"]["versions"].items())
            if name in _packages(plan)
        ),
    ]
    notes = (*_busy_cards(plan["machine"]), *plan["machine"]["notes"], *plan["notes"])
    return "\n".join([*lines, *(line for note in notes for line in wrapped(note, "note: ", " " * 6))])


def _packages(plan: Json) -> set[str]:
    """Those that every run imports, and what the best plan needs besides."""
    names, best = {"torch", "transformers", "trl", "accelerate", "peft"}, plan["best"]
    if best and best["choice"]["sharding"] in ZERO:
        names.add("deepspeed")
    if best and best["choice"]["method"] == "qlora":
        names.add("bitsandbytes")
    return names


def _trained(plan: Json) -> str:
    """The method, and the job's own where another had to be taken."""
    own, best = plan["job"]["method"], plan["best"]
    method = best["choice"]["method"] if best else own
    return own if method == own else f"{method} instead of {own}"


def _busy_cards(machine: Json) -> list[str]:
    """Cards that others use, and those that cannot be used."""
    lines: list[str] = []
    for card in machine["cards"]:
        if not card["usable"]:
            lines.append(f"card {card['index']} is left out: {card['problem'] or 'it cannot be used'}")
        elif card["used_bytes"] >= BUSY_BYTES:
            who = [f"pid {p['pid']} {p['name'] or '?'} ({p['user'] or '?'})" for p in card["processes"]]
            taken = f"{format_gib(card['used_bytes'])} of {format_gib(card['total_bytes'])} GiB"
            lines.append(f"card {card['index']} is busy: {taken} are taken" + (f" by {', '.join(who)}" if who else ""))
    return lines


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


def _best(best: Json, job: Json, usable: list[int]) -> str:
    """The chosen plan; ``usable`` are the indices of the cards of a node."""
    memory, time = best["memory"], best["time"]
    where, others = "in tensors per process", ""
    if usable:
        where = "allocated per GPU"
        others = f", {format_gib(memory['reserved_bytes'])} reserved, {format_gib(memory['device_bytes'])} on the card"
    size, low, high = (memory[name] for name in ("allocated_bytes", "low_bytes", "high_bytes"))
    held = f"{format_gib(size)} GiB {where} ({format_gib(low)} to {format_gib(high)})"
    if high < GIB // 10 and not usable:
        held = f"{format_bytes(size)} {where} ({format_bytes(low)} to {format_bytes(high)})"
    lines = ["best plan", f"  memory  {held}{others}  [{memory['evidence']}]"]
    if 0 < len(best["cards"]) < len(usable):
        lines.append(f"  cards   {', '.join(map(str, best['cards']))} of {', '.join(map(str, usable))}")
    if usable:
        lines.append(f"  host    {_host_words(memory['host_bytes'])}")
    if time:
        mfu = f", MFU {time['mfu']:.0%}" if time["mfu"] is not None else ""
        speed = f"{format_rate(time['tokens_per_s'])} tokens/s{mfu}"
        lines.append(
            f"  time    {format_seconds(time['step_s'])} per step ({format_seconds(time['low_s'])} to"
            f" {format_seconds(time['high_s'])}), {speed}  [{time['evidence']}]"
        )
        lines += _run(time, job)
    else:
        lines.append("  time    not known: this card's rates are not in the table")
    lines += [f"  why     {reason}" for reason in best["why"]]
    lines += [f"  note    {warning}" for warning in best["warnings"]]
    # A line's own label is its indent, which wrapping would drop.
    return "\n".join([lines[0], *(part for line in lines[1:] for part in wrapped(line[10:], line[:10], " " * 10))])


def _host_words(host: Json) -> str:
    """``34.2 GiB per node: 32.0 to load, 3.1 to train, 15.3 more to save``; all but the last with processes."""
    processes, offload = host["processes"], host["pinned"] + host["pageable"]
    pinned = f" ({format_gib(host['pinned'])} pinned)" if host["pinned"] else ""
    return (
        f"{format_gib(host['peak'])} GiB per node: {format_gib(processes + host['load'])} to load,"
        f" {format_gib(processes + offload)} to train{pinned}, {format_gib(host['save'])} more to save"
    )


def _run(time: Json, job: Json) -> list[str]:
    """What the whole run takes, in one line; where its steps are not known, why, to those who name data or a price."""
    steps = time.get("steps")
    if steps is None:
        asked = job["data"]["dataset"] is not None or job.get("price_per_hour") is not None
        return [f"  run     not known: {time['unknown']}"] if asked and time.get("unknown") else []
    words = [
        f"{steps:,} steps in {format_seconds(time['finish_s'])} ({format_seconds(steps * time['low_s'])} to"
        f" {format_seconds(steps * time['high_s'])})",
        f"{time['gpu_hours']:,.4g} GPU-hours",
    ]
    words += [f"at most {time['energy_kwh']:,.4g} kWh"] if time["energy_kwh"] is not None else []
    words += [f"cost {time['cost']:,.4g}"] if time["cost"] is not None else []
    return [f"  run     {', '.join(words)}"]


def _staircase(stairs: list[Json]) -> str:
    """A table with bars, and by what the next length of the last stair fails."""
    block = block_character()
    most = max(1, *(stair["tokens"] for stair in stairs))
    rows: list[list[str]] = []
    for stair in stairs:
        bar = block * round(BAR_COLUMNS * stair["tokens"] / most)
        size = format_gib(stair["device_bytes"]) if stair["device_bytes"] is not None else "-"
        tokens = f"{stair['tokens']:,}" if stair["tokens"] else "nothing fits"
        rows.append([stair["lever"], tokens, size, bar or "."])
    lines = ["longest sequence, lever by lever", table(("lever", "tokens", "GiB", ""), rows, right=(1, 2))]
    if stairs[-1]["stops"]:
        lines += wrapped(f"1,024 tokens more: {stairs[-1]['stops']}", rest=" " * 6)
    return "\n".join(lines)


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
    head += "".join(f"\nnote: {note}" for note in (*document["warnings"], *document["notes"]))
    groups = table(("group", "parameters", "trainable", *(f"{r} GiB" for r in roles)), rows, right=range(1, 8))
    phases = "\n\n".join(_phase(phase, phase["name"] == memory["peak_phase"]) for phase in document["phases"])
    return "\n\n".join([head, groups, phases, *_host(document["host"]), gap_text(document["textbook"])])


def _host(parts: list[Json]) -> list[str]:
    """What the host holds, by time; nothing where no part is there."""
    rows = [
        [part["when"], part["part"], format_gib(part["bytes"], 1), "pinned" if part["pinned"] else "", part["formula"]]
        for part in parts
    ]
    return ["host, GiB per node\n" + table(("when", "part", "GiB", "", "formula"), rows, right=(2,))] if rows else []


def gap_text(gap: Json, width: int = 80) -> str:
    """The textbook's count and where this stack differs from it, ``width`` columns wide."""
    total = format_gib(gap["total_bytes"])
    lines = [
        f"against the textbook: stage {gap['stage']}, 16 B a parameter, 17 tensors a layer: {total} GiB",
        f"  {'part':<18}{'textbook':>10}{'here':>9}  GiB, each where it is largest",
    ]
    for difference in gap["differences"]:
        sizes = f"{format_gib(difference['textbook_bytes']):>10}{format_gib(difference['bytes']):>9}"
        lines.append(f"  {difference['part']:<18}{sizes}")
        words = textwrap.wrap(f"{difference['why']} [{difference['source']}]", width - 6)
        lines += [f"      {line}" for line in words]
    return "\n".join(lines)


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
            "`trlfit ledger MODEL --machine NAME` says where a real stack differs, and why",
        ]
    )
