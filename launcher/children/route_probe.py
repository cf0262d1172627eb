"""What a precision route does to a model here: errors of its products, traffic outside them, a short training.

A line of JSON on stdin asks, progress goes to stderr as lines of JSON, one document to stdout. Three kinds of evidence
that must be read together: errors of single products rank no recipe.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from child_guard import read_request, say, seconds, versions
from route_linear import Quantiser, RouteLinear, body_linears, quantise, read_recipe
from route_trial import (
    PLAIN,
    Trial,
    as_tokens,
    byte_decoder,
    captured,
    forward_gap,
    geometric_mean,
    operator_errors,
    python_texts,
    train,
)
from torch import nn

CPU_PARAMETERS = 3_000_000
"""A model above this is not trained here on a CPU: 300 steps of it would take an hour."""
STATE_BYTES = 28
"""Per parameter of a trial on a card: two copies in fp32, gradients and two moments, and as much for the rest."""
LAYERS_FLAGGED = 3.0
"""A layer whose forward error is this many times the median is named."""
TIMED_TOKENS = 1024
VALUE_BYTES = {"bf16": 2.0, "e4m3": 1.0, "e5m2": 1.0, "e2m1": 0.5}
SCALE_BYTES = {"none": 0.0, "fp32": 4.0, "e8m0": 1.0, "e4m3": 1.0}


class Progress:
    """Told to the other side: how many parts are done, and what comes next."""

    def __init__(self, parts: int) -> None:
        self.parts, self.done = parts, 0

    def next(self, what: str) -> None:
        """The next part begins."""
        say(done=self.done, of=self.parts, what=what, seconds=seconds())
        self.done += 1

    def over(self) -> None:
        """All parts are done."""
        say(done=self.parts, of=self.parts, what="", seconds=seconds())


def subject(request: dict[str, Any], device: str) -> tuple[nn.Module, Trial, dict[str, Any]]:
    """The model that is tried, the text it reads, and in words what both are."""
    steps, name = request["steps"], request["model"]
    text, origin = text_of(request["dataset"])
    found, why = loaded(name, request["parameters"], device) if name else (None, "no model was named")
    if found is None:
        model = byte_decoder(0, layers=request["stand_in_layers"])
        about = {"model": "a byte decoder of the Llama class, 64 wide, random weights", "stand_in": why}
        return model, Trial(as_tokens(text), steps=steps, rows=8, device=device), {**about, "text": origin}
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(name, local_files_only=True)(text.decode("utf-8", "replace"))["input_ids"]
    length = 128 if device == "cpu" else 512
    trial = Trial(torch.tensor(ids), steps=steps, rows=4, length=length, learning_rate=request["rate"], device=device)
    return found, trial, {"model": name, "stand_in": None, "text": origin}


def loaded(name: str, parameters: int, device: str) -> tuple[nn.Module | None, str]:
    """The model with its weights in float32, or why it is not taken."""
    most = CPU_PARAMETERS if device == "cpu" else torch.cuda.mem_get_info()[0] // STATE_BYTES
    if parameters > most:
        return None, f"{parameters:,} parameters are more than the {most:,} that are tried on this device"
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        return None, f"its weights are not here: {str(error).splitlines()[0][:160]}"
    return model, ""


def text_of(path: str | None) -> tuple[bytes, str]:
    """Real text: a local file's, or what every Python brings."""
    if path is None:
        return python_texts()[0], "the language reference that this Python brings (pydoc_data)"
    raw = Path(path).read_bytes()
    if path.endswith((".jsonl", ".json")):
        rows = [json.loads(line) for line in raw.splitlines() if line.strip()]
        raw = "\n".join(value for row in rows for value in row.values() if isinstance(value, str)).encode()
    return raw, path


def errors_of(model: nn.Module, trial: Trial, recipe: dict[str, Any]) -> dict[str, Any]:
    """Errors of every product on captured tensors, over some of the layers, and bf16's own beside them."""
    rows = []
    for tensors in captured(model, trial, seed=1):
        rows.append({"layer": tensors["name"], **operator_errors(tensors, recipe)})
        rows[-1]["forward, in bf16"] = operator_errors(tensors, PLAIN, draws=1)["forward"]
    names = [name for name in rows[0] if name != "layer"]
    middle = statistics.median(row["forward"] for row in rows)
    return {
        "layers": rows,
        "mean": {name: geometric_mean([row[name] for row in rows if name in row]) for name in names},
        "apart": [row["layer"] for row in rows if row["forward"] > LAYERS_FLAGGED * middle],
    }


def traffic_of(model: nn.Module, recipe: dict[str, Any]) -> dict[str, float]:
    """Bytes per token that the route moves outside its products, counted over its layers.

    Read once for each layout that is quantised, or once for both where one quantisation serves them; read before that
    where a scale needs a maximum over more than a block; codes and scales written.
    """
    names = body_linears(model, recipe["keep_last"], recipe["features"])
    counted = dict.fromkeys(("read", "maxima", "written", "weights_read", "weights_written"), 0.0)
    quantisers = read_recipe(recipe)
    (x, w), (dy, again), (dy_t, x_t) = quantisers["input"], quantisers["igrad"], quantisers["wgrad"]
    for name in names:
        linear = model.get_submodule(name)
        wide, high = linear.in_features, linear.out_features
        for values, first, second in ((wide, x, x_t), (high, dy, dy_t)):
            _count(counted, values, (first, second), "")
        _count(counted, wide * high, (w, again), "weights_")
    return {"layers": len(names), **counted}


def _count(counted: dict[str, float], values: float, layouts: tuple[Quantiser, Quantiser], prefix: str) -> None:
    shared = layouts[0] == layouts[1] and layouts[0].serves_both_layouts
    for quantiser in layouts[:1] if shared else layouts:
        if quantiser.values == "bf16":
            continue
        counted[f"{prefix}read"] += 2.0 * values
        if quantiser.rule != "history" and (not quantiser.block or quantiser.second == "tensor"):
            counted["maxima" if not prefix else f"{prefix}read"] += 2.0 * values
    for quantiser in layouts:
        if quantiser.values != "bf16":
            group = (quantiser.block or math.inf) * (quantiser.rows or math.inf)
            size = VALUE_BYTES[quantiser.values] + SCALE_BYTES[quantiser.scale] / group
            counted[f"{prefix}written"] += size * values


def seconds_of(model: nn.Module, recipe: dict[str, Any], device: str, launch: str, name: str) -> dict[str, Any]:
    """Seconds of the largest layer's step here, at ``TIMED_TOKENS`` tokens.

    Its products in bf16, quantising by the reference's kernels, and the layer by the route's package where that runs.
    """
    names = body_linears(model, recipe["keep_last"], recipe["features"])
    widest = max((model.get_submodule(n) for n in names), key=lambda m: m.in_features * m.out_features)
    wide, high = widest.in_features, widest.out_features
    x = torch.randn(TIMED_TOKENS, wide, device=device, dtype=torch.bfloat16)
    dy = torch.randn(TIMED_TOKENS, high, device=device, dtype=torch.bfloat16)
    linear = nn.Linear(wide, high, bias=False, device=device, dtype=torch.bfloat16)
    layer = RouteLinear.of(linear, recipe, seed=0)
    layer.dtype = torch.bfloat16

    def products() -> None:
        with torch.no_grad():
            linear(x), dy @ linear.weight, dy.t() @ x

    def quantising() -> None:
        chance = layer.chance(x.device)
        with torch.no_grad():
            for product, operands in (("input", (x, linear.weight)), ("igrad", (dy, linear.weight.t()))):
                for quantiser, matrix in zip(layer.recipe[product], operands, strict=True):
                    if quantiser.values != "bf16":
                        quantise(matrix, quantiser, chance)
            for quantiser, matrix in zip(layer.recipe["wgrad"], (dy.t(), x.t()), strict=True):
                if quantiser.values != "bf16":
                    quantise(matrix, quantiser, chance)

    found: dict[str, Any] = {
        "tokens": TIMED_TOKENS,
        "in_features": wide,
        "out_features": high,
        "products_bf16_s": _timed(products, device),
        "reference_quantising_s": _timed(quantising, device),
        "package_step_s": None,
        "bf16_step_s": None,
    }

    def step_of(module: nn.Module) -> float:
        def step() -> None:
            entering = x.clone().requires_grad_()
            module(entering).backward(dy)

        return _timed(step, device)

    found["bf16_step_s"] = step_of(linear)
    try:
        found["package_step_s"] = step_of(_by_package(linear, launch, name))
    except Exception as error:
        # Whatever a package without its kernels or its card raises.
        found["package"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return found


def _by_package(linear: nn.Linear, launch: str, name: str) -> nn.Module:
    """The layer as the route's package makes it."""
    holder = nn.Sequential(copy.deepcopy(linear))
    if launch in ("torchao-float8", "accelerate") and "-ao-" in name:
        from torchao import float8

        recipe = {"fp8-ao-rowwise": "rowwise", "fp8-ao-rowwise-gw-hp": "rowwise_with_gw_hp"}.get(name, "tensorwise")
        return float8.convert_to_float8_training(holder, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    if launch == "torchao-mx":
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

        made = MXFP8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight = linear.weight
        return made
    raise NotImplementedError("only torchao's layers are timed here")


def _timed(run: Any, device: str, rounds: int = 5) -> float:
    """Median seconds of a call, waiting for the device."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    seconds = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def trainings(model: nn.Module, trial: Trial, recipe: dict[str, Any], seeds: int, progress: Progress) -> dict[str, Any]:
    """bf16 and the route with each seed: losses, and the gap of every pair in percent."""
    rows = []
    for seed in range(seeds):
        outcomes = {}
        for name, asked in (("bf16", None), ("route", recipe)):
            progress.next(f"training with {name}, seed {seed}")
            outcomes[name] = train(copy.deepcopy(model), asked, trial, seed)
        plain, low = outcomes["bf16"], outcomes["route"]
        rows.append(
            {
                "seed": seed,
                "bf16": plain.held_out,
                "route": low.held_out,
                "gap_percent": 100 * (low.held_out / plain.held_out - 1),
                "train_gap_percent": 100 * (low.train_loss / plain.train_loss - 1),
                "non_finite": low.non_finite,
                "gradient_norms": [plain.gradient_norm, low.gradient_norm],
                "seconds": [plain.seconds, low.seconds],
            }
        )
    gaps, plain = [row["gap_percent"] for row in rows], [row["bf16"] for row in rows]
    return {
        "steps": trial.steps,
        "tokens": trial.steps * trial.rows * trial.length,
        "rows": rows,
        "gap_percent": [min(gaps), statistics.fmean(gaps), max(gaps)],
        "bf16_spread_percent": 100 * (max(plain) / min(plain) - 1),
        "verdict": verdict(gaps, [row["non_finite"] for row in rows]),
    }


def verdict(gaps: list[float], non_finite: list[int]) -> str:
    """One of three, never a rank: broken, worse beyond noise, or not told apart at this length."""
    if any(non_finite) or not all(map(math.isfinite, gaps)):
        return "broken"
    spread = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.inf
    return "worse beyond noise" if statistics.fmean(gaps) > 2 * spread else "not told apart at this length"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The whole document."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    progress = Progress(3 + 2 * request["seeds"])
    progress.next("loading")
    model, trial, about = subject(request, device)
    layers = len({next(part for part in name.split(".") if part.isdigit()) for name in body_linears(model)})
    kept = request["recipe"]["keep_last"]
    # Of a model with fewer blocks the same share stays in bf16.
    recipe = {**request["recipe"], "keep_last": max(1, round(kept * layers / 32)) if kept and layers < 32 else kept}
    recipe["features"] = min(recipe["features"], 32) if about["stand_in"] else recipe["features"]
    if not body_linears(model, recipe["keep_last"], recipe["features"]):
        raise ValueError(f"no layer of the model is a multiple of {recipe['features']} wide and high")
    progress.next("errors of products")
    errors = errors_of(copy.deepcopy(model), trial, recipe)
    step_zero = forward_gap(copy.deepcopy(model), recipe, trial)
    progress.next("traffic outside the products")
    traffic = traffic_of(model, recipe)
    times = seconds_of(model, recipe, device, request["launch"], request["route"])
    found = trainings(model, trial, recipe, request["seeds"], progress)
    progress.over()
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "subject": {
            **about,
            "parameters": sum(p.numel() for p in model.parameters()),
            "kept_blocks": recipe["keep_last"],
        },
        "device": where,
        "errors": errors,
        "forward_gap_nats": step_zero,
        "traffic": traffic,
        "times": times,
        "training": found,
        "versions": versions("torch", "torchao", "transformers"),
    }


def finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list) else value


def main() -> None:
    """Answer the one line on stdin."""
    request = read_request()
    stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no part of the document
    try:
        document = finite(answer(request))
    except (ValueError, RuntimeError) as error:
        document = {"error": {"kind": "environment", "message": str(error).splitlines()[0][:300]}}
    os.write(stdout, json.dumps(document).encode())


if __name__ == "__main__":
    main()
