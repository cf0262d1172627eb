"""Memory after a probe: what was seen at two depths and lengths less what the simulation says there, carried to any.

The simulation knows which moment decides; what it misses (kernels' own buffers, workspaces, copies that the trainer
makes) is affine in layers and tokens and small beside the rest, so its error at the real depth is small too.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from planner.measured.probes import PHASES, MeasuredJob, first_layers, near, same_states
from planner.memory.correction import MEASURED_ERROR, Correction

if TYPE_CHECKING:
    from planner.choice import Choice
    from planner.memory.model import MemoryModel


class Plane(NamedTuple):
    """A number that is affine in layers at fixed tokens and affine in tokens at fixed layers."""

    layers: tuple[int, int]
    tokens: tuple[int, int]
    values: tuple[float, float, float, float]
    """Fewer layers first, then fewer tokens."""

    def at(self, layers: int, tokens: int) -> float:
        """The number at ``layers`` and ``tokens``."""
        few_short, few_long, many_short, many_long = self.values
        few, many = self._along(few_short, few_long, tokens), self._along(many_short, many_long, tokens)
        first, second = self.layers
        return few + (many - few) * (layers - first) / (second - first)

    def _along(self, short: float, long: float, tokens: int) -> float:
        first, second = self.tokens
        return short + (long - short) * (tokens - first) / (second - first)


class MeasuredMemory:
    """What one measured job says about the memory of choices that run as it did."""

    def __init__(self, model: MemoryModel, job: MeasuredJob) -> None:
        """Simulate the probed steps.

        Args:
            model: of the plan, whatever its depth and length.
            job: matches the plan's layers.
        """
        self.job = job
        seen = [self._missed(model, job, index) for index in range(4)]
        self._planes = tuple(
            Plane(job.depths, job.lengths, tuple(cell[phase] for cell in seen))  # type: ignore[arg-type]
            for phase in PHASES
        )

    @staticmethod
    def _missed(model: MemoryModel, job: MeasuredJob, index: int) -> dict[str, float]:
        cell = job.cells[index]
        small = replace(model.job, architecture=first_layers(model.job.architecture, cell.layers), evaluates=False)
        there = model.of_job(replace(small, seq_len=cell.sequence))
        workspace = there.device_of(job.choice).workspace_bytes
        said = {
            phase.name: phase.bytes + workspace for phase in there.frame(job.choice).phases(job.choice.micro_batch, 1)
        }
        return {phase: float(cell.peaks[phase] - said[phase]) for phase in PHASES}

    def correction(self, choice: Choice, layers: int, tokens: int) -> Correction:
        """What is added to the phases of ``choice`` with ``layers`` layers and ``tokens`` tokens a micro-batch."""
        forward, loss, backward, step = (round(plane.at(layers, tokens)) for plane in self._planes)
        step = step if same_states(self.job, choice) else 0
        error = MEASURED_ERROR if near(self.job, tokens) else inf
        return Correction(forward, loss, backward, step, error)
