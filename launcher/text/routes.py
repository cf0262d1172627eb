"""Precision routes for a terminal: what a machine offers, at what gain and price, and why not the others."""

from __future__ import annotations

from typing import Any

from launcher.text.wrapping import wrapped
from planner.advice.route_offers import by_reason

Json = dict[str, Any]


def routes_text(routes: list[Json], *, whole: bool) -> str:
    """The routes of a plan.

    Args:
        routes: of the document.
        whole: those that are offered one by one, the others by what keeps them away; else which are offered.
    """
    offered = [route for route in routes if route["offered"]]
    if not whole:
        listed = ", ".join(f"{route['route']} ({_gain(route)})" for route in offered) or "none"
        return "\n".join(wrapped(f"precision routes beside bf16: {listed}; --explain says why not the others"))
    lines = [
        "precision routes below 16 bits (bf16 unless pinned; the gain is of the best plan, the price of others' runs)"
    ]
    for route in offered:
        head = f"  {route['route']:<20} {_gain(route):>13}  "
        lines += wrapped(route["loss"], head, " " * len(head))
    if not offered:
        lines.append("  none is offered here")
    # The reason behind the colon is for `trlfit routes`.
    short = ((route["route"], route["why_not"].partition(": ")[0]) for route in routes if not route["offered"])
    kept_away = by_reason(short)
    for reason, names in kept_away.items():
        lines += wrapped(f"not {', '.join(names)}: {reason}", "  ", "    ")
    return "\n".join(lines)


def _gain(route: Json) -> str:
    if route["gain"] is None:
        return "gain unknown"
    return f"{abs(route['gain']):.0%} {'less time' if route['gain'] >= 0 else 'more time'}"


def table_text(document: Json) -> str:
    """Every route of `trlfit routes`, the offered ones first, with what the others lack."""
    from launcher.output import table

    routes: list[Json] = document["routes"]
    head = ("route", "below 16 bits", "cards", "packages", "run by")
    rows = [
        [
            route["id"],
            _formats(route),
            route["capability"].removeprefix("compute capability "),
            ", ".join(f"{name} {oldest}" for name, oldest in route["packages"].items()) or "-",
            {"here": "torch", "with": route["launch"]}.get(route["status"], "reference only"),
        ]
        for route in routes
    ]
    offered = [route["id"] for route in routes if route["offered"]]
    lines = [table(head, rows), "", f"offered on {document['machine']}: {', '.join(offered) or 'none'}"]
    for reason, names in by_reason((r["id"], r["why_not"]) for r in routes if not r["offered"]).items():
        lines += wrapped(f"not {', '.join(names)}: {reason}", rest="  ")
    lines += ["", "price: what is known of the loss against bf16, and tokens/s per GPU where somebody published them"]
    for route in routes:
        speeds = [
            f"{row['tokens_per_s']:,.0f} tokens/s on {row['gpu']}"
            if row["tokens_per_s"]
            else f"{row['speedup']} x bf16"
            for row in route["published"]
        ]
        said = f"{route['id']:<20} {route['loss']}" + (f"; {'; '.join(speeds)}" if speeds else "")
        lines += wrapped(said, rest=" " * 21)
    return "\n".join(lines)


def _formats(route: Json) -> str:
    """``e2m1 x e2m1``: the grids of the forward product, and how many products of three are low."""
    grids = dict.fromkeys(operand["values"] for operands in route["operands"].values() for operand in operands)
    names = [name for name in grids if name != "bf16"]
    low = sum(all(operand["values"] != "bf16" for operand in operands) for operands in route["operands"].values())
    return f"{' and '.join(names)}, {low} of 3 products" if names else "-"
