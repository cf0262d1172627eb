"""Memory: the simulated step of one choice, turned into peaks, an interval and a verdict against the card."""

from __future__ import annotations

from dataclasses import dataclass

from planner.choice import Choice
from planner.memory.coefficients import Coefficients
from planner.memory.correction import Correct, Correction
from planner.memory.frame import MemoryFrame, Verdict
from planner.memory.host import HostMemory
from planner.memory.parts import MemoryJob, MemoryParts
from planner.memory.phases import Phase
from planner.memory.states import RoleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peaks of one choice on one rank, with the interval and the evidence."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    capacity_bytes: int | None
    headroom_bytes: int | None
    """Capacity less the reserve, less ``device_bytes``; negative when it does not fit."""
    fits: bool
    host: HostMemory
    host_fits: bool
    peak_phase: str
    evidence: str
    phases: tuple[Phase, ...]
    roles: RoleTable
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The phase that decides."""
        return next(phase for phase in self.phases if phase.name == self.peak_phase)


@dataclass(slots=True)
class MemoryModel(MemoryParts):
    """Memory of any choice for one job on one machine."""

    correct: Correct | None = None
    """What probes add to a choice; None where nothing was measured."""

    def of_job(self, job: MemoryJob) -> MemoryModel:
        """The same of another job, as if nothing had been measured."""
        return MemoryModel(job=job, hardware=self.hardware, reserve=self.reserve, source=self.source)

    def frame(self, choice: Choice) -> MemoryFrame:
        """``choice`` at any micro-batch and accumulation.

        Raises:
            ValueError: an optimizer that this model does not know.
        """
        return MemoryFrame(self, choice, self.correct)

    def estimate(self, choice: Choice) -> MemoryEstimate:
        """Simulate one optimizer step of ``choice``.

        Raises:
            ValueError: an optimizer or loss path that this model does not know.
        """
        frame = self.frame(choice)
        found = frame.phases(choice.micro_batch, choice.grad_accum)
        peak = max(found, key=lambda phase: phase.bytes)
        verdict = frame.verdict(choice.micro_batch, choice.grad_accum)
        device = self.device_of(choice).at(peak.bytes)
        for phase in found:
            phase.parts["context"] = device.context_bytes
            phase.parts["slack"] = device.slack_bytes if phase is peak else 0
        return MemoryEstimate(
            allocated_bytes=device.allocated_bytes,
            reserved_bytes=device.reserved_bytes,
            device_bytes=device.total_bytes,
            low_bytes=device.allocated_bytes - verdict.spread_bytes,
            high_bytes=device.allocated_bytes + verdict.spread_bytes,
            capacity_bytes=self.hardware.capacity_bytes,
            headroom_bytes=verdict.headroom_bytes,
            fits=verdict.fits,
            host=frame.host(choice.micro_batch, choice.grad_accum),
            host_fits=verdict.host_fits,
            peak_phase=peak.name,
            evidence="measured" if self.correction(choice) else self.coefficients(choice).evidence,
            phases=tuple(found),
            roles=self.roles(choice),
        )

    def verdict(self, choice: Choice) -> Verdict:
        """Whether ``choice`` fits, without the parts."""
        return self.frame(choice).verdict(choice.micro_batch, choice.grad_accum)

    def coefficients(self, choice: Choice) -> Coefficients:
        """The coefficients that ``choice`` is priced with."""
        return self.frame(choice).activations(choice.micro_batch)[0]

    def correction(self, choice: Choice) -> Correction | None:
        """What a probe adds to the phases of ``choice``, None where none ran its layers."""
        return None if self.correct is None else self.correct(choice)
