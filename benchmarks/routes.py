"""A tiny model trained on every precision route, on a CPU: loss against bf16 with equal seeds, and its spread.

    python benchmarks/routes.py              trains what results/route_trials.jsonl lacks (an hour on one core)
    python benchmarks/routes.py --markdown   renews the tables of docs/precision.md from it

Two regimes, 300 steps each: from random weights, and a fine-tune of what bf16 made of them on another text. The model
is a byte decoder of three blocks, 64 wide: far more sensitive than a real one, so the order of gaps may say something,
their size nothing.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from profiles.routes import PRODUCTS, Route, load_routes  # noqa: E402

RESULTS = Path(__file__).with_name("results") / "route_trials.jsonl"
PAGE = ROOT / "docs" / "precision.md"
MARKS = ("<!-- benchmarks/routes.py -->", "<!-- end -->")
SEEDS = (0, 1, 2)
STEPS = 300
ROWS = 8
FINE_TUNE_RATE = 1e-3
REGIMES = ("from scratch", "fine-tune")
LAYERS = 3
FINE_TUNED = (
    "bf16",
    "fp8-ao-rowwise",
    "mxfp8-ao",
    "nvfp4-te",
    "nvfp4-te-last4",
    "nvfp4-global",
    "nvfp4-cta",
    "mxfp4-sr",
    "mxfp4-sr-h32",
)
"""Every route of four bits, and two of eight."""

Row = dict[str, Any]


def trial_recipe(route: Route, layers: int) -> dict[str, Any] | None:
    """The route's recipe; blocks kept in bf16 are as large a share of a small model as of one with 32."""
    if route.id == "bf16":
        return None
    recipe: dict[str, Any] = {p: [q.to_json() for q in route.operands[p]] for p in PRODUCTS}
    kept = max(1, round(route.keep_last * layers / 32)) if route.keep_last else 0
    return {**recipe, "keep_last": kept, "features": 16}


def trained(done: set[tuple[str, str, int]]) -> Iterator[Row]:
    """A row for every training that is not done yet."""
    sys.path.insert(0, str(ROOT / "launcher" / "children"))  # whose scripts find each other there
    import torch
    from route_trial import Trial, as_tokens, byte_decoder, forward_gap, python_texts, train

    torch.set_num_threads(1)
    first, second = map(as_tokens, python_texts())
    same: dict[tuple[str, int, str], Row] = {}
    for seed in SEEDS:
        base = None
        for regime in REGIMES:
            tuned = regime == "fine-tune"
            trial = Trial(second if tuned else first, steps=STEPS, rows=ROWS)
            if tuned:
                trial.learning_rate = FINE_TUNE_RATE
            for route in load_routes():
                if (regime, route.id, seed) in done or (tuned and route.id not in FINE_TUNED):
                    continue
                recipe = trial_recipe(route, LAYERS)
                key = (regime, seed, json.dumps(recipe))
                if key in same:
                    # Two packages, one recipe: the same numbers to the last bit.
                    yield {**same[key], "route": route.id}
                    continue
                if tuned and base is None:
                    base = byte_decoder(seed, layers=LAYERS)
                    train(base, None, Trial(first, steps=STEPS, rows=ROWS), seed)
                    base = plain(base)
                model = copy.deepcopy(base) if tuned else byte_decoder(seed, layers=LAYERS)
                gap = forward_gap(copy.deepcopy(model), recipe, trial) if recipe and tuned else None
                # The order of the data in the fine-tune is its own, and the same for every route.
                found = train(model, recipe, trial, seed + 100 * tuned)
                if not tuned and recipe is None:
                    base = plain(copy.deepcopy(model))
                same[key] = {
                    "regime": regime,
                    "route": route.id,
                    "seed": seed,
                    "train_loss": round(found.train_loss, 5),
                    "held_out": round(found.held_out, 5),
                    "start": round(found.start, 5),
                    "forward_gap": None if gap is None else round(gap, 5),
                    "non_finite": found.non_finite,
                    "gradient_norm": round(found.gradient_norm, 4),
                    "seconds": round(found.seconds, 1),
                }
                yield same[key]


def plain(model: Any) -> Any:
    """The same weights in torch's own linears."""
    from route_linear import RouteLinear
    from torch import nn

    for name, module in list(model.named_modules()):
        if isinstance(module, RouteLinear):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            linear.weight, linear.bias = module.weight, module.bias
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear)
    return model


def read_rows() -> list[Row]:
    """What has been trained."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    if "--markdown" in sys.argv[1:]:
        write_page()
        return
    done = {(row["regime"], row["route"], row["seed"]) for row in read_rows()}
    for row in trained(done):
        with RESULTS.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def gaps(rows: list[Row], regime: str, route: str, what: str) -> list[float]:
    """Percent above the bf16 training of the same seed."""
    plain_rows = {row["seed"]: row[what] for row in rows if row["regime"] == regime and row["route"] == "bf16"}
    own = [row for row in rows if row["regime"] == regime and row["route"] == route]
    return [100 * (row[what] / plain_rows[row["seed"]] - 1) for row in own if row["seed"] in plain_rows]


def write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1], 1)[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n{tables(read_rows())}\n{MARKS[1]}{after}", encoding="utf-8")


def tables(rows: list[Row]) -> str:
    """Both regimes: gaps of training loss and of held-out loss, mean and extremes over the seeds."""

    def cell(values: list[float]) -> str:
        return f"{statistics.fmean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})" if values else "-"

    parts: list[str] = []
    for regime in REGIMES:
        found = [route.id for route in load_routes() if gaps(rows, regime, route.id, "held_out")]
        found.sort(key=lambda name: statistics.fmean(gaps(rows, regime, name, "held_out")))
        plain_rows = [row for row in rows if row["regime"] == regime and row["route"] == "bf16"]
        losses = [row["held_out"] for row in plain_rows]
        lines = [
            f"{regime.capitalize()}, {STEPS} steps, {len(plain_rows)} seeds; bf16's held-out loss is"
            f" {min(losses):.3f} to {max(losses):.3f} nats over the seeds. Percent above bf16 of the same seed:",
            "",
            "| route | held-out loss | training loss | forward alone, before | steps not finite |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name in found:
            own = [row for row in rows if row["regime"] == regime and row["route"] == name]
            forward = [100 * row["forward_gap"] / row["start"] for row in own if row.get("forward_gap") is not None]
            held_out, training = (cell(gaps(rows, regime, name, what)) for what in ("held_out", "train_loss"))
            lost = sum(row["non_finite"] for row in own)
            lines.append(f"| {name} | {held_out} | {training} | {cell(forward)} | {lost} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
