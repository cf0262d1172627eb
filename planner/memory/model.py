"""Memory: the simulated step of one choice, turned into peaks, an interval and a verdict against the card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.choice import Choice
from planner.memory.coefficients import Coefficients
from planner.memory.frame import MemoryFrame, Verdict
from planner.memory.host import HostMemory
from planner.memory.parts import MemoryParts, rank_tokens
from planner.memory.phases import Phase
from planner.memory.states import RoleTable

if TYPE_CHECKING:
    from planner.measured import Matcher, MeasuredJob, MeasuredWhole
    from planner.measured_memory import Correction, MeasuredMemory


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

    measured: tuple[MeasuredJob, ...] = ()
    """Probes of the job's layers on this machine."""
    wholes: tuple[MeasuredWhole, ...] = ()
    """Plans of the job that ran here, each for its own choice alone."""
    _matching: Matcher | None = field(default=None, init=False)
    _probes: dict[int, MeasuredMemory] = field(default_factory=dict[int, "MeasuredMemory"], init=False)
    _ran: dict[Choice, MeasuredWhole] | None = field(default=None, init=False)
    _of_ran: dict[Choice, Correction] = field(default_factory=dict[Choice, "Correction"], init=False)

    def frame(self, choice: Choice) -> MemoryFrame:
        """``choice`` at any micro-batch and accumulation.

        Raises:
            ValueError: an optimizer that this model does not know.
        """
        return MemoryFrame(self, choice, self.correction if self.measured or self.wholes else None)

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

    def matcher(self) -> Matcher:
        """Which probe a choice goes by, for memory and time alike."""
        if self._matching is None:
            from planner.measured import Matcher  # only plans with a probe pay for it

            self._matching = Matcher(self.measured, self)
        return self._matching

    def whole(self, choice: Choice) -> MeasuredWhole | None:
        """The measured run of exactly ``choice``, which may have run out of memory; None where there was none."""
        return self.ran().get(choice) if self.wholes else None

    def ran(self) -> dict[Choice, MeasuredWhole]:
        """Plans of this very job that ran here, by what they chose."""
        if self._ran is None:
            from planner.measured_whole import by_choice  # only plans with a probe pay for it

            self._ran = by_choice(self.wholes, self)
        return self._ran

    def correction(self, choice: Choice) -> Correction | None:
        """What a probe adds to the phases of ``choice``, None where none ran its layers."""
        whole = self.whole(choice)
        if whole is not None and not whole.out_of_memory:
            if choice not in self._of_ran:
                from planner.measured_whole import whole_correction

                self._of_ran[choice] = whole_correction(self, whole)
            return self._of_ran[choice]
        if not self.measured:
            return None
        from planner.measured_memory import MeasuredMemory  # only plans with a probe pay for it

        job = self.matcher()(choice)
        if job is None:
            return None
        probe = self._probes.get(id(job))
        if probe is None:
            probe = self._probes[id(job)] = MeasuredMemory(self, job)
        return probe.correction(choice, self.job.architecture.num_layers, rank_tokens(self.job, choice))
