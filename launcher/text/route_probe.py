"""The report of `trlfit probe --route` for people: three kinds of evidence, and what they do not say."""

from __future__ import annotations

import textwrap
from typing import Any

from launcher.output import table

Json = dict[str, Any]
COLUMNS = 100
NO_RANK = (
    "Errors of single products do not rank recipes: in the published runs the route with the smaller input-gradient"
    " error in every comparison lost as a whole, and an early cut of the training ranked routes in another order. Read"
    " all three together, on the whole route; validation.md beside a written run has the plan."
)


def probe_text(document: Json) -> str:
    """The whole report."""
    about = document["subject"]
    head = [
        f"{document['route']}: {document['name']}",
        f"on {about['model']} ({about['parameters']:,} parameters), {document['device']}; text: {about['text']}",
    ]
    if about["stand_in"]:
        head.append(f"a stand-in: {about['stand_in']}; what it shows of sizes holds for no other model")
    parts = ["\n".join(head), _errors(document), _outside(document), _training(document)]
    parts.append("\n".join(textwrap.wrap(f"warning: {NO_RANK}", COLUMNS)))
    return "\n\n".join(parts)


def _errors(document: Json) -> str:
    errors = document["errors"]
    rows = [[name, f"{value:.3g}"] for name, value in errors["mean"].items()]
    title = f"1. errors of products on {len(errors['layers'])} captured layers (energy, geometric mean)"
    lines = [title, table(("product", "error"), rows, right=(1,))]
    if errors["apart"]:
        lines.append(f"more than three times the median, so candidates to stay in bf16: {', '.join(errors['apart'])}")
    gap = document["forward_gap_nats"]
    lines.append(f"held-out loss under the route's forward alone, before any training: {_signed(gap)} nats")
    return "\n".join(lines)


def _outside(document: Json) -> str:
    traffic, times = document["traffic"], document["times"]
    outside = traffic["read"] + traffic["maxima"] + traffic["written"]
    lines = [
        "2. outside the products",
        f"counted over {traffic['layers']} layers: {outside / 1e3:,.1f} kB per token"
        f" ({traffic['read'] / 1e3:,.1f} read, {traffic['maxima'] / 1e3:,.1f} read for maxima,"
        f" {traffic['written'] / 1e3:,.1f} written), and once a micro-batch"
        f" {(traffic['weights_read'] + traffic['weights_written']) / 1e6:,.2f} MB of weights",
        f"timed at {times['tokens']:,} tokens of a layer {times['in_features']} x {times['out_features']}: three"
        f" products in bf16 {_ms(times['products_bf16_s'])}, quantising by the reference's kernels"
        f" {_ms(times['reference_quantising_s'])}",
    ]
    if times["package_step_s"] is not None:
        lines.append(
            f"the layer's step by its package: {_ms(times['package_step_s'])}, in bf16 {_ms(times['bf16_step_s'])}"
        )
    else:
        lines.append(f"the layer's step by its package: not timed ({times['package']})")
    return "\n".join(lines)


def _training(document: Json) -> str:
    training = document["training"]
    rows = [
        [
            str(row["seed"]),
            _loss(row["bf16"]),
            _loss(row["route"]),
            _percent(row["gap_percent"]),
            _percent(row["train_gap_percent"]),
            str(row["non_finite"]),
        ]
        for row in training["rows"]
    ]
    low, mean, high = training["gap_percent"]
    title = f"3. {training['steps']} steps ({training['tokens']:,} tokens) against bf16 with equal seeds"
    return "\n".join(
        [
            title,
            table(("seed", "bf16", "route", "held-out gap", "training gap", "not finite"), rows, right=range(6)),
            f"gap {_percent(mean)} ({_percent(low)} to {_percent(high)}) over {len(rows)} seeds; bf16 differs by"
            f" {_percent(training['bf16_spread_percent'])} between its own seeds",
            f"verdict: {training['verdict']}",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:+.2f} %"


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.4f}"
