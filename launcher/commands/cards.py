"""`trlfit plan MODEL --cards all`: which machine would do the job, by time and by cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from math import isfinite
from typing import Any

from launcher.errors import ExitCode, UsageError
from launcher.inputs.machines import resolve_machine
from launcher.output import print_json_lines, print_text, table
from launcher.planning import answered, inputs_of_job, job_from_args
from launcher.text.plan import choice_words
from launcher.text.wrapping import wrapped
from planner.advice.card_ranking import Offer, rank_offers
from planner.units import format_gib, format_seconds
from profiles.cards import CardNotFound, CardProfile, find_card, load_cards

USUAL_COUNTS = (1, 2, 4, 8)
MAX_LENGTHS = 8
"""Machines of which the longest sequence is looked for: seconds each."""
NOT_SHOWN_FROM = 12
"""Machines that do not fit are listed up to here; the JSON has all of them."""
Json = Mapping[str, Any]


def run_cards_ranking(args: argparse.Namespace) -> int:
    """Rank what could be had; exit 3 when nothing of it fits."""
    job, origins = job_from_args(args)
    prices = dict(_prices(args.price or []))
    if not args.cards:
        raise UsageError("--cards names no card; write all, or ids such as H100-80GB,A100-80GB (`trlfit cards`)")
    cards = list(load_cards()) if args.cards == ["all"] else [_card(name, "--cards") for name in args.cards]
    cards = list({card.id: card for card in cards}.values())
    unused = prices.keys() - {card.id for card in cards}
    if unused:
        raise UsageError(f"--price {min(unused)}: that card is not among --cards; add it there")
    counts = args.count or _counts(job.machine)
    offers = [
        Offer(profile=card, count=number, nodes=job.nodes, price=prices.get(card.id, job.price_per_hour))
        for card in cards
        for number in dict.fromkeys(counts)
    ]
    if job.goal == "longest" and len(offers) > MAX_LENGTHS:
        raise UsageError(
            f"goal longest looks for the length of each of {len(offers)} machines, which takes minutes; name at most"
            f" {MAX_LENGTHS} by --cards and --count, or take --goal fastest"
        )
    # Any of them: the model, the stack and what was traced do not depend on the machine.
    first = job.model_copy(update={"machine": f"{offers[0].count}x{offers[0].profile.id}"})
    document = answered(partial(rank_offers, offers=offers), inputs_of_job(first, origins, args))
    if args.json:
        print_json_lines(document)
    else:
        print_text(ranking_text(document))
    return ExitCode.DONE if any(entry["fits"] for entry in document["machines"]) else ExitCode.NOTHING_FITS


def _counts(machine: str) -> tuple[int, ...]:
    """The number of cards of a machine that was named; the usual numbers otherwise."""
    if machine in ("local", "cpu"):
        return USUAL_COUNTS
    return (len(resolve_machine(machine).usable_cards) or 1,)


def _card(name: str, flag: str) -> CardProfile:
    try:
        return find_card(name)
    except CardNotFound as error:
        raise UsageError(f"{flag} {name[:40]}: {error} (`trlfit cards` lists them)") from None


def _prices(pairs: list[tuple[str, str]]) -> Iterator[tuple[str, float]]:
    for name, text in pairs:
        card = _card(name, "--price")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not isfinite(price) or price < 0:
            about = "write that of one card for one hour, such as 2.49"
            raise UsageError(f"--price {card.id}={text[:40]} is no price; {about}")
        yield card.id, price


def ranking_text(document: Json) -> str:
    """For people: what fits, fastest first, then what does not, closest first."""
    job = document["job"]
    tokens = "the longest sequence" if job["goal"] == "longest" else f"{job['seq_len']:,} tokens"
    size = f"{tokens}, global batch {job['global_batch']}"
    parts = [f"{job['model']} ({job['method']}, {job['trainer']}): {size}"]
    fitting = [entry for entry in document["machines"] if entry["fits"]]
    priced = any(entry["cost_per_step"] is not None for entry in fitting)
    if fitting:
        parts.append(_fitting(fitting, priced=priced, lengths=job["goal"] == "longest"))
    if priced:
        cheapest = min(
            (entry for entry in fitting if entry["rank_by_cost"]), key=lambda entry: float(entry["rank_by_cost"])
        )
        cost = f"{cheapest['cost_per_million_tokens']:.3g} per million tokens"
        if cheapest["run_cost"] is not None:
            cost = f"{_money(cheapest['run_cost'])} for the run"
        parts.append(f"cheapest: {_name(cheapest)}, {cost}; every card of a machine is paid for, used or not")
    others = [entry for entry in document["machines"] if not entry["fits"]]
    if others:
        parts.append(_missing(others))
    return "\n\n".join(parts)


def _name(entry: Json) -> str:
    return f"{entry['machine']}" + (f" x {entry['nodes']} nodes" if entry["nodes"] > 1 else "")


def _how(entry: Json) -> str:
    words = choice_words(entry["choice"])
    parts = [words["train"]] if entry["alters"] == "method" else []
    parts += [] if words["shard"] == "none" else [words["shard"]]
    if words["recompute"] != "none":
        parts.append(f"recompute {words['recompute']}")
    if words["offload"] != "-":
        parts.append(f"host {entry['host_bytes'] / 2**30:,.0f} GiB")
    if entry["num_gpus"] < entry["count"] * entry["nodes"]:
        parts.append(f"{entry['num_gpus']} of its cards")
    return "; ".join(parts) or "nothing needed"


def _fitting(entries: list[Json], *, priced: bool, lengths: bool) -> str:
    """The table of what fits: the whole run where its length is known, else a step and a million tokens."""
    length = entries[0]["steps"]
    headers = ["#", "machine", "GiB", "step" if length is None else "finish"]
    headers += ["per hour", "per M tok" if length is None else "run", "#"] if priced else ["tok/s"]
    rows: list[list[str]] = []
    for entry in entries:
        pace = _seconds(entry["step_s"] if length is None else entry["finish_s"])
        if lengths:
            pace = f"{pace} at {entry['seq_len']:,} tokens"
        row = [str(entry["rank_by_time"]), _name(entry), format_gib(entry["device_bytes"]), pace]
        if priced:
            cost = entry["cost_per_million_tokens"] if length is None else entry["run_cost"]
            row += [_money(entry["cost_per_hour"]), _money(cost), str(entry["rank_by_cost"] or "-")]
        else:
            row.append("?" if entry["tokens_per_s"] is None else f"{entry['tokens_per_s']:,.0f}")
        rows.append([*row, _how(entry)])
    text = table((*headers, "how"), rows, right=(0, *range(2, 6 if priced else 5)))
    title = ("fits, longest sequence first" if lengths else "fits, fastest first") + (
        " (the second # is the order by cost)" if priced else ""
    )
    steps = "" if length is None else f"; a run of {length:,} steps"
    return f"{title}{steps}\n{text}"


def _seconds(seconds: float | None) -> str:
    return "not known" if seconds is None else format_seconds(seconds)


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"


def _missing(entries: list[Json]) -> str:
    lines = ["does not fit, closest first"]
    for entry in entries[:NOT_SHOWN_FROM]:
        if entry["refused"] is not None:
            lines += wrapped(f"{_name(entry)}: {entry['refused']}", "  ", " " * 6)
        else:
            short = (
                f"{format_gib(entry['short_bytes'])} GiB too many per GPU with reserve and interval in {entry['phase']}"
            )
            lines.append(f"  {_name(entry):<24} {short}")
    if len(entries) > NOT_SHOWN_FROM:
        lines.append(f"  and {len(entries) - NOT_SHOWN_FROM} more (--json lists all)")
    return "\n".join(lines)
