"""Traces decoder layers of a real transformers class on fake tensors: bytes and work as functions of tokens.

Runs in the training Python; needs no weights, no GPU and no network. Reads one JSON request on stdin, narrates as JSON
lines on stderr, prints one JSON document. Every set of options asked for is traced under each way of recomputing, at
two or three lengths and once more as a check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# Collections cost a quarter of the time, and tensors whose release waited for one would make the bytes of a step depend
# on what ran before it.
gc.disable()
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

# Triton kernels need a GPU: linear attention is traced as transformers writes it in torch operators.
sys.modules.update(dict.fromkeys(("fla", "causal_conv1d")))

try:
    import torch
    from child_guard import read_request, say, seconds, versions
    from trace_build import Refused, Stack, add_adapters, attention_of, build, make_hollow, quantise
    from trace_fit import NEGLIGIBLE, at, chords, envelope, fit, fit_work, partners, slope_in_r
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
        make_hollow(self.model)
        self.parameters = list(self.model.parameters())
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
            # It made the embedding's output need a gradient, which switching it off does not take back.
            if hasattr(body, "_require_grads_hook"):
                body.disable_input_require_grads()

    def step(self, length: int) -> Step:
        """One forward and backward of one sequence of ``length`` tokens."""
        tracker = self.tracker = Tracker(self.parameters)
        lowers = self.options["compute_bytes"] == 2 and self.options["autocast"]
        with tracker:
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
            for parameter in self.parameters:
                parameter.grad = None
            del loss, labels, inputs, ids
        self.tracker = None
        return Step(owned, tracker.timelines, tracker.attention_starts, tracker.work)


class Fitted:
    """The steps of one mode at all lengths, turned into functions of tokens."""

    def __init__(self, stack: Stack, lengths: Sequence[int], steps: Sequence[Step], wide: Sequence[Step]) -> None:
        self.stack, self.lengths, self.steps, self.wide = stack, lengths, steps, wide
        self.not_affine: list[str] = []
        self.bent = False
        """A value at the length for the check is beside its line: it grows with the square, or not at all evenly."""

    def line(self, name: str, value) -> tuple[float, ...]:
        """``value(step)`` as a line, with its slope in the adapter's rank where there is one."""
        return self._line(name, [value(s) for s in self.steps], [value(s) for s in self.wide])

    def _line(self, name: str, values: Sequence[float], wide: Sequence[float]) -> tuple[float, ...]:
        line = self._straight(values)
        self._check(name, at(line, self.lengths[-1], self.lengths[-1]), values[-1], 0)
        return self._in_r(line, values, wide)

    def _straight(self, values: Sequence[float]) -> tuple[float, float, float]:
        line, length = fit(self.lengths, values), self.lengths[-1]
        self.bent |= abs(at(line, length, length) - values[-1]) > 3 * NEGLIGIBLE * abs(values[-1]) + 65536
        return line

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
        runs: list[list[list[tuple[str, int]]]] = []
        for step in (*self.steps, *self.wide):
            base = self.below(step, position + (phase == "backward"))
            seen = [(operator, live - base) for operator, live in step.timelines[phase, position]]
            # What loops over chunks does so on both sides of the MLP's backward, so each side has partners of its own.
            turn = step.attention_starts.get(position, 0) if phase == "backward" else 0
            runs.append([seen[turn:]] if attention else [seen[:turn], seen[turn:]])
        lines = [line for part in zip(*runs, strict=True) for line in self._lines(part)] or [(0.0, 0.0, 0.0)]
        highest = envelope(lines)
        length = self.lengths[-1]
        predicted = max(at(line[:3], length, length) for line in highest)
        moments = [live for part in runs[len(self.steps) - 1] for _, live in part]
        self._check(name, predicted, max(moments, default=0), self.kept(position)(self.steps[-1]))
        return highest

    def _lines(self, runs: Sequence[Sequence[tuple[str, int]]]) -> list[tuple[float, ...]]:
        count = len(self.steps)
        aligned, middle, longer = self._moments(runs)
        lines = [self._in_r(self._straight(values[:count]), values, values[count:]) for values in aligned]
        if middle:
            chain = chords(self.lengths[longer:], middle[longer:count])
            lines += [self._in_r(line, middle, middle[count:]) for line in chain]
        return lines

    def _moments(self, runs: Sequence[Sequence[tuple[str, int]]]) -> tuple[list[list[int]], list[int], int]:
        """(each moment that all lengths share, the highest of the others, how many lengths have no others).

        A loop over chunks runs more often at more tokens. Moments before and after it have partners, as long as they
        are affine; those of the loop itself have none, so their highest stands for them together. At the shortest
        length the loop may be too short to leave any.
        """
        operators = [[operator for operator, _ in run] for run in runs]
        if all(names == operators[0] for names in operators):
            return [[run[index][1] for run in runs] for index in range(len(runs[0]))], [], 0
        first, last = partners(operators)
        starts = self._while_affine([[run[index][1] for run in runs] for index in range(first)])
        ends = self._while_affine([[run[-1 - index][1] for run in runs] for index in range(last)])
        rest = [[live for _, live in run[len(starts) : len(run) - len(ends)]] for run in runs]
        highest = [max(run, default=0) for run in rest]
        count = len(self.steps)
        # For the slope in the rank alone, which needs the two shortest lengths.
        for first, second in ((0, 1), (count, count + 1)):
            if len(highest) > second and not rest[first]:
                highest[first] = highest[second] * self.lengths[0] // self.lengths[1]
        return starts + ends, highest, 0 if rest[0] else 1

    def _while_affine(self, moments: list[list[int]]) -> list[list[int]]:
        length, count = self.lengths[-1], len(self.steps)
        for index, values in enumerate(moments):
            predicted = at(fit(self.lengths, values[:count]), length, length)
            if abs(predicted - values[count - 1]) > TOLERANCE / 10 * abs(values[count - 1]) + 65536:
                return moments[:index]
        return moments

    def work(self, position: int, part: str) -> tuple[float, ...]:
        """What the layer at ``position`` computes or moves, as a line."""
        values, wide = ([step.work[position][part] for step in steps] for steps in (self.steps, self.wide))
        return self._in_r(fit_work(self.lengths, values), values, wide)

    def layer(self, kind: int, mode: str) -> dict[str, Any]:
        """Bytes and work of one kind."""
        position, name = self.stack.looked_at[kind], f"{kind}.{mode}"
        work = {part: self.work(position, part) for part in WORK}
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
    base = max(256 if request["loops"] else 1024, -(-(window + 1) // 1024) * 1024 if window else 0)
    sdpa = options["attention"] == "sdpa"
    # A CPU has no fused kernel for heads whose values are narrower than their keys.
    squares = options["attention"] == "eager" or options["masked"] or (sdpa and (window or not options["mask_bias"]))
    if request["loops"] or squares:
        return (base, 2 * base, 4 * base, 3 * base)
    return (base, 4 * base, 2 * base)


def trace_set(request: Mapping[str, Any], options: Mapping[str, Any], *, within: bool) -> dict[str, Any]:
    """All kinds and modes under one set of options."""
    lengths = lengths_of(request, options, within=within)
    ranks = RANKS if options["lora_targets"] is not None else RANKS[:1]
    bodies = [Traced(request, options, r) for r in ranks]
    seen: dict[tuple[int, str, int], Step] = {}

    def step(body: int, mode: str, length: int) -> Step:
        if (body, mode, length) not in seen:
            with bodies[body].recomputing(mode):
                seen[body, mode, length] = bodies[body].step(length)
        return seen[body, mode, length]

    def fitted(mode: str) -> Fitted:
        steps = [step(0, mode, length) for length in lengths]
        wide = [step(1, mode, length) for length in lengths[:2]] if len(bodies) > 1 else []
        return Fitted(bodies[0].stack, lengths, steps, wide)

    modes = [mode for mode in MODES if mode != "selective" or _selective() is not None]
    with gpu_kernels(cpu_attention=not options["mask_bias"]):
        found = _all_modes(request, {mode: fitted(mode) for mode in modes})
        if found.pop("bent") and len(lengths) == 3:
            # Something grows with the square after all, as a mask that the body makes and no layer reads.
            lengths = (lengths[0], lengths[2], lengths[1], 3 * lengths[0])
            found = _all_modes(request, {mode: fitted(mode) for mode in modes})
            del found["bent"]
    return {"options": dict(options), "within": within, **found}


def _all_modes(request: Mapping[str, Any], fitted: Mapping[str, Fitted]) -> dict[str, Any]:
    """What is said of one set, and whether a straight line was too little for it."""
    layers: list[dict[str, Any]] = [
        {mode: fitted[mode if mode in fitted else "full"].layer(kind, mode) for mode in MODES}
        for kind in range(len(request["first_layers"]))
    ]
    none, full = fitted["none"], fitted["full"]
    return {
        "layers": layers,
        "model_saved": full.line("model_saved", full.outside),
        "model_saved_none": none.line("model_saved_none", none.outside),
        "final_norm_saved": full.line("final_norm_saved", full.kept(len(full.stack.layers))),
        "not_affine": [name for mode in fitted.values() for name in mode.not_affine],
        "bent": any(mode.bent for mode in fitted.values()),
    }


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that ``request`` asks for; a set that cannot be traced says why in its place."""
    wanted = request["sets"]
    answers: list[dict[str, Any]] = []
    for index, entry in enumerate(wanted):
        say(done=index, of=len(wanted), seconds=round(seconds(), 1))
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
    say(done=len(wanted), of=len(wanted), seconds=round(seconds(), 1))
    return {"schema": "trlfit.trace/1", "versions": versions(*PACKAGES), "ranks": RANKS, "sets": answers}


def main() -> int:
    """Read, trace, print."""
    request = read_request()
    # Libraries may print while they load; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        answer = trace(request)
    print(json.dumps(answer, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
