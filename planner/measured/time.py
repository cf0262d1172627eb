"""Time after a probe: seconds at two depths and lengths beside what the model says there, carried to the whole model.

A layer's measured seconds over its modelled ones are a factor at each length; everything outside the layers is taken as
measured. Between the lengths the factor goes with the logarithm of the tokens, beyond them it stays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING

from planner.measured.probes import MeasuredJob, same_states

if TYPE_CHECKING:
    from planner.choice import Choice
    from planner.time.step import TimeModel

MEASURED_TIME_ERROR = 0.15
"""Half-width said for a step on one device after a probe of the job, as a share of it: predictions from depth 1 and 2
for depth 8 lie inside (docs/probe.md)."""
LAYER_PARTS = ("matmul", "elementwise", "attention", "recompute", "offload", "other")
MICRO_PHASES = ("forward", "loss", "backward")


class MeasuredTime:
    """What one measured job says about the seconds of choices that run as it did."""

    def __init__(self, job: MeasuredJob, model_at: Callable[[int, int], TimeModel]) -> None:
        """Ask the model for the probed steps.

        Args:
            job: matches the plan's layers.
            model_at: the time model of the plan cut to (layers, tokens of a row), which knows no measurement.

        Raises:
            ValueError: more layers did not take longer, so nothing can be said of one.
        """
        self.job = job
        (self._short, self._long), depths = job.lengths, job.depths
        modelled = [self._modelled(model_at(cell.layers, cell.sequence)) for cell in job.cells]
        micro = [sum(cell.seconds[phase] for phase in MICRO_PHASES) for cell in job.cells]
        self._factors = tuple((micro[i + 2] - micro[i]) / (modelled[i + 2] - modelled[i]) for i in (0, 1))
        if min(self._factors) <= 0:
            raise ValueError("more layers did not take longer")
        self._rests = tuple(micro[i] - self._factors[i] * modelled[i] for i in (0, 1))
        steps = [(job.cells[i].seconds["step"] + job.cells[i + 1].seconds["step"]) / 2 for i in (0, 2)]
        self._step_per_layer = max(0.0, (steps[1] - steps[0]) / (depths[1] - depths[0]))
        self._step = steps[0] - self._step_per_layer * depths[0]
        self.error = MEASURED_TIME_ERROR
        self.other_s = max(0.0, sum(cell.seconds["other"] for cell in job.cells) / 4)
        """Per optimizer step, beside its phases: data, records, callbacks."""

    def _modelled(self, model: TimeModel) -> float:
        found = model.estimate(self.job.choice)
        assert found is not None
        return sum(found.parts[part] for part in LAYER_PARTS)

    def factor(self, tokens: int) -> float:
        """Measured over modelled seconds of layers at ``tokens`` tokens a micro-batch."""
        near = min(max(tokens, self._short), self._long)
        share = log(near / self._short) / log(self._long / self._short)
        return self._factors[0] + (self._factors[1] - self._factors[0]) * share

    def rest(self, tokens: int) -> float:
        """Seconds of a micro-batch outside the layers: embedding, loss, what the trainer adds."""
        slope = (self._rests[1] - self._rests[0]) / (self._long - self._short)
        return max(0.0, self._rests[0] + slope * (tokens - self._short))

    def corrected(
        self, parts: tuple[float, ...], choice: Choice, layers: int, tokens: int, grad_accum: int, *, own: bool = True
    ) -> tuple[tuple[float, ...], float]:
        """Modelled seconds by part of one optimizer step as the probe has them, and their sum.

        Args:
            parts: in the order of ``planner.time.step.TIME_PARTS``.
            choice: the knobs.
            layers: of the whole model.
            tokens: of one micro-batch.
            grad_accum: micro-batches of a step.
            own: the probe ran these knobs; else its loss may be another, and the modelled one stays.
        """
        factor, rest = self.factor(tokens), self.rest(tokens) * grad_accum
        optimizer = self.optimizer_s(choice, layers)
        matmul, elementwise, attention, recompute, loss, modelled, communication, offload, other = parts
        # What the loss takes is most of the rest; what is left of it is the trainer's and the embedding's.
        loss = min(loss, rest) if own else loss
        found = (
            matmul * factor,
            elementwise * factor,
            attention * factor,
            recompute * factor,
            loss,
            modelled if optimizer is None else optimizer,
            communication,
            offload if choice.offload - {"activations"} else offload * factor,
            other * factor + max(0.0, rest - loss) + self.other_s,
        )
        return found, sum(found)

    def optimizer_s(self, choice: Choice, layers: int) -> float | None:
        """Seconds of the optimizer's step at ``layers`` layers, None where ``choice`` holds its states otherwise."""
        return max(0.0, self._step + self._step_per_layer * layers) if same_states(self.job, choice) else None
