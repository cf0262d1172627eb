"""Traces decoder layers of a real transformers class on fake tensors: bytes and work as functions of tokens.

Runs in the training Python; needs no weights, no GPU and no network. Reads one JSON request on stdin, narrates as JSON
lines on stderr, prints one JSON document. Every set of options asked for is traced under each way of recomputing, at
two or three lengths and once more as a check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

try:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from trace_build import Refused, Stack, add_adapters, attention_of, build, make_fake, quantise
    from trace_fake import ShortWay
    from trace_fit import at, chords, envelope, fit, partners, slope_in_r
    from trace_kernels import gpu_kernels
    from trace_track import WORK, Tracker
except ImportError as missing:
    message = f"tracing needs torch and transformers in the training Python: {missing}"
    print(json.dumps({"error": {"kind": "environment", "message": message}}))
    sys.exit(0)

MODES = ("none", "full", "selective")
RANKS = (16, 64)
"""Adapters are traced at both; everything is affine in the rank."""
TOLERANCE = 0.01
PACKAGES = ("torch", "transformers", "peft", "trl")


class _Tail(torch.autograd.Function):
    """Stands for the loss: hands the body a gradient of its hidden states and keeps nothing."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.like = (hidden.shape, hidden.dtype)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx, _grad):
        shape, dtype = ctx.like
        return torch.zeros(shape, dtype=dtype)


@dataclasses.dataclass
class Step:
    """What one forward and backward at one length did."""

    owned: dict[int, int]
    timelines: dict[tuple[str, int], list[tuple[str, int]]]
    attention_starts: dict[int, int]
    work: dict[int, dict[str, float]]


class Traced:
    """One body under one set of options, ready to run at any length."""

    def __init__(self, request: Mapping[str, Any], options: Mapping[str, Any], r: int) -> None:
        self.options = options
        dtype = torch.float32 if options["residual_bytes"] == 4 else torch.bfloat16
        stack = build(request["config"], request["first_layers"], dtype, options["attention"])
        self.stack: Stack = stack
        self.model: torch.nn.Module = stack.body
        if options["lora_targets"] is not None:
            self.model = add_adapters(stack.body, options, r)
        if options["quantised"]:
            quantise(stack.layers)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.way = ShortWay(self.fake)
        with self.fake:
            make_fake(self.model)
        self._listen()
        self.tracker: Tracker | None = None

    def _listen(self) -> None:
        last = len(self.stack.layers) - 1
        for position, layer in enumerate(self.stack.layers):
            layer.register_forward_pre_hook(self._entering(position), with_kwargs=True)
            block = attention_of(layer)
            if block is not None:
                block.register_forward_hook(self._attending(position))
        self.stack.layers[last].register_forward_hook(self._leaving(last))

    def _entering(self, position: int):
        def hook(_module, args, kwargs):
            tracker = self.tracker
            if tracker is None or tracker.backward:
                return
            tracker.enter(position)
            hidden = args[0] if args else kwargs["hidden_states"]
            if position and hidden.requires_grad:
                # Its gradient is complete when the layer has run backward.
                hidden.register_hook(lambda _grad: tracker.enter(position - 1, backward=True))

        return hook

    def _attending(self, position: int):
        def hook(_module, _args, out):
            tracker = self.tracker
            first = out[0] if isinstance(out, tuple) else out
            if tracker is not None and not tracker.backward and first.requires_grad:
                first.register_hook(lambda _grad: tracker.attention_runs_backward(position))

        return hook

    def _leaving(self, last: int):
        def hook(_module, _args, out):
            tracker = self.tracker
            if tracker is None or tracker.backward:
                return
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:
                hidden.register_hook(lambda _grad: tracker.enter(last, backward=True))
            tracker.enter(last + 1)

        return hook

    @contextlib.contextmanager
    def recomputing(self, mode: str):
        """Recompute switched on as transformers and TRL switch it."""
        body = self.stack.body
        if mode == "none":
            yield
            return
        if mode == "selective":
            _selective()(body)
        body.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield
        finally:
            body.__dict__.pop("gradient_checkpointing_enable", None)
            body.gradient_checkpointing_disable()

    def step(self, length: int) -> Step:
        """One forward and backward of one sequence of ``length`` tokens."""
        parameters = list(self.model.parameters())
        adapters = {id(p) for name, p in self.model.named_parameters() if "lora_" in name}
        tracker = self.tracker = Tracker(parameters, adapters, self.way)
        lowers = self.options["compute_bytes"] == 2
        with self.fake, tracker:
            ids = torch.zeros(1, length, dtype=torch.long)
            inputs = {"input_ids": ids}
            labels = torch.zeros(1, length, dtype=torch.long)
            if self.options["masked"]:
                inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowers):
                hidden = self.model(**inputs, use_cache=False).last_hidden_state
                loss = _Tail.apply(hidden)
            owned = dict(tracker.owned_bytes())
            del hidden
            tracker.enter(len(self.stack.layers), backward=True)
            loss.backward()
            tracker.enter(-1, backward=True)
            for parameter in parameters:
                parameter.grad = None
            del loss, labels, inputs, ids
        self.tracker = None
        return Step(owned, tracker.timelines, tracker.attention_starts, tracker.work)


class Fitted:
    """The steps of one mode at all lengths, turned into functions of tokens."""

    def __init__(self, stack: Stack, lengths: Sequence[int], steps: Sequence[Step], wide: Sequence[Step]) -> None:
        self.stack, self.lengths, self.steps, self.wide = stack, lengths, steps, wide
        self.not_affine: list[str] = []

    def line(self, name: str, value) -> tuple[float, ...]:
        """``value(step)`` as a line, with its slope in the adapter's rank where there is one."""
        return self._line(name, [value(s) for s in self.steps], [value(s) for s in self.wide])

    def _line(self, name: str, values: Sequence[float], wide: Sequence[float]) -> tuple[float, ...]:
        line = fit(self.lengths, values)
        self._check(name, at(line, self.lengths[-1], self.lengths[-1]), values[-1], 0)
        return self._in_r(line, values, wide)

    def _in_r(self, line: tuple[float, ...], values: Sequence[float], wide: Sequence[float]) -> tuple[float, ...]:
        return line + slope_in_r(self.lengths, values, wide, RANKS[1] - RANKS[0]) if wide else line

    def _check(self, name: str, predicted: float, seen: float, kept: float) -> None:
        if abs(predicted - seen) > TOLERANCE * max(abs(seen) + kept, 2**20):
            self.not_affine.append(f"{name} ({predicted / seen - 1:+.1%})" if seen else name)

    def kept(self, position: int):
        """Bytes from forward to backward of the layer at ``position``."""
        return lambda step: step.owned.get(position, 0)

    def outside(self, step: Step) -> int:
        """Bytes kept before the layers: all that is kept, less what the looked-at layers say of each."""
        total = sum(size for owner, size in step.owned.items() if owner < len(self.stack.layers))
        return total - sum(self._of_kind(step, kind) for kind in self.stack.kinds)

    def _of_kind(self, step: Step, kind: int) -> int:
        return step.owned.get(self.stack.looked_at[kind], 0)

    def below(self, step: Step, position: int) -> int:
        """What the plan counts as kept when only the layers before ``position`` have run."""
        return self.outside(step) + sum(self._of_kind(step, kind) for kind in self.stack.kinds[:position])

    def highest(self, name: str, phase: str, position: int, *, attention: bool = False) -> list[tuple[float, ...]]:
        """The highest moment of a layer above what the plan counts as kept then, as the highest of a few lines."""
        runs: list[list[tuple[str, int]]] = []
        for step in (*self.steps, *self.wide):
            base = self.below(step, position + (phase == "backward"))
            start = step.attention_starts.get(position, 0) if attention else 0
            seen = step.timelines[phase, position][start:]
            runs.append([(operator, live - base) for operator, live in seen] or [("", 0)])
        count = len(self.steps)
        aligned, middle = self._moments(runs)
        lines = [self._in_r(fit(self.lengths, values[:count]), values, values[count:]) for values in aligned]
        if middle:
            lines += [self._in_r(line, middle, middle[count:]) for line in chords(self.lengths, middle[:count])]
        highest = envelope(lines)
        length = self.lengths[-1]
        predicted = max(at(line[:3], length, length) for line in highest)
        self._check(name, predicted, max(live for _, live in runs[count - 1]), self.kept(position)(self.steps[-1]))
        return highest

    def _moments(self, runs: Sequence[Sequence[tuple[str, int]]]) -> tuple[list[list[int]], list[int]]:
        """(each moment that all lengths share, at every length; the highest of the others at every length).

        A loop over chunks runs more often at more tokens. Moments before and after it have partners, as long as they
        are affine; those of the loop itself have none, so their highest stands for them together. At the shortest
        length the loop may be too short to leave any.
        """
        operators = [[operator for operator, _ in run] for run in runs]
        if all(names == operators[0] for names in operators):
            return [[run[index][1] for run in runs] for index in range(len(runs[0]))], []
        first, last = partners(operators)
        starts = self._while_affine([[run[index][1] for run in runs] for index in range(first)])
        ends = self._while_affine([[run[-1 - index][1] for run in runs] for index in range(last)])
        rest = [[live for _, live in run[len(starts) : len(run) - len(ends)]] for run in runs]
        highest = [max(run, default=0) for run in rest]
        count = len(self.steps)
        for first, second in ((0, 1), (count, count + 1)):
            if len(highest) > second and not rest[first]:
                highest[first] = highest[second] * self.lengths[0] // self.lengths[1]
        return starts + ends, highest

    def _while_affine(self, moments: list[list[int]]) -> list[list[int]]:
        length, count = self.lengths[-1], len(self.steps)
        for index, values in enumerate(moments):
            predicted = at(fit(self.lengths, values[:count]), length, length)
            if abs(predicted - values[count - 1]) > TOLERANCE / 10 * abs(values[count - 1]) + 65536:
                return moments[:index]
        return moments

    def layer(self, kind: int, mode: str) -> dict[str, Any]:
        """Bytes and work of one kind."""
        position, name = self.stack.looked_at[kind], f"{kind}.{mode}"
        work = {part: fit(self.lengths, [s.work[position][part] for s in self.steps], 0.5) for part in WORK}
        return {
            "kept": [self.line(f"{name}.kept", self.kept(position))],
            "forward": self.highest(f"{name}.forward", "forward", position),
            "backward": self.highest(f"{name}.backward", "backward", position),
            "attention_backward": self.highest(f"{name}.attention", "backward", position, attention=True),
            "work": {part: line for part, line in work.items() if any(line)},
        }


def _selective():
    """TRL's own switch for selective recompute, None where this TRL has none: no plan asks for it then."""
    try:
        from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing
    except ImportError:
        return None
    return enable_selective_activation_checkpointing


def lengths_of(request: Mapping[str, Any], options: Mapping[str, Any], *, within: bool) -> tuple[int, ...]:
    """Two lengths to fit, three where something grows with the square, and one between them for the check.

    All are beyond the window of sliding layers, or all inside it.
    """
    window = request["window"]
    if within:
        base = (window - 1) // 4 // 128 * 128
        return (base, 4 * base, 2 * base)
    # Linear attention without its kernels loops over chunks of 64 tokens, which takes its time.
    base = max(512 if request["loops"] else 1024, -(-(window + 1) // 1024) * 1024)
    sdpa = options["attention"] == "sdpa"
    if request["loops"] or options["attention"] == "eager" or options["masked"] or (window and sdpa):
        return (base, 2 * base, 4 * base, 3 * base)
    return (base, 4 * base, 2 * base)


def trace_set(request: Mapping[str, Any], options: Mapping[str, Any], *, within: bool) -> dict[str, Any]:
    """All kinds and modes under one set of options."""
    lengths = lengths_of(request, options, within=within)
    ranks = RANKS if options["lora_targets"] is not None else RANKS[:1]
    bodies = [Traced(request, options, r) for r in ranks]
    stack = bodies[0].stack
    layers: list[dict[str, Any]] = [{} for _ in request["first_layers"]]
    outer: dict[str, tuple[float, ...]] = {}
    not_affine: list[str] = []
    with gpu_kernels(cpu_attention=not options["mask_bias"]):
        for mode in MODES:
            if mode == "selective" and _selective() is None:
                for layer in layers:
                    layer[mode] = layer["full"]
                continue
            with bodies[0].recomputing(mode):
                steps = [bodies[0].step(length) for length in lengths]
            wide: list[Step] = []
            for body in bodies[1:]:
                with body.recomputing(mode):
                    wide = [body.step(length) for length in lengths[:2]]
            fitted = Fitted(stack, lengths, steps, wide)
            for kind, layer in enumerate(layers):
                layer[mode] = fitted.layer(kind, mode)
            if mode == "full":
                tail = len(stack.layers)
                outer["model_saved"] = fitted.line("model_saved", fitted.outside)
                outer["final_norm_saved"] = fitted.line("final_norm_saved", fitted.kept(tail))
            not_affine += fitted.not_affine
    return {"options": dict(options), "within": within, "layers": layers, **outer, "not_affine": not_affine}


def _say(**what: object) -> None:
    print(json.dumps(what), file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that ``request`` asks for; a set that cannot be traced says why in its place."""
    wanted = request["sets"]
    answers: list[dict[str, Any]] = []
    for index, entry in enumerate(wanted):
        _say(done=index, of=len(wanted), seconds=round(time.perf_counter() - _STARTED, 1))
        options, within = entry["options"], entry["within"]
        try:
            answers.append(trace_set(request, options, within=within))
        except Refused as error:
            answers.append({"options": options, "within": within, "refused": str(error)})
        except Exception as error:
            # Model code is anyone's: whatever it raises on fake tensors, the planner falls back to its formulas.
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            reason = f"the layers do not run on fake tensors ({said})"
            answers.append({"options": options, "within": within, "refused": reason})
    _say(done=len(wanted), of=len(wanted), seconds=round(time.perf_counter() - _STARTED, 1))
    return {"schema": "trlfit.trace/1", "versions": _versions(), "ranks": RANKS, "sets": answers}


_STARTED = time.perf_counter()


def main() -> int:
    """Read, trace, print."""
    request = json.load(sys.stdin)
    # Libraries may print while they load; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        answer = trace(request)
    print(json.dumps(answer, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
