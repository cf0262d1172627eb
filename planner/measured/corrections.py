"""What the probes of one job say of its choices: bytes for its memory model, seconds for its time model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.measured.memory import MeasuredMemory
from planner.measured.probes import Matcher, MeasuredJob, MeasuredWhole, first_layers
from planner.measured.time import MeasuredTime
from planner.measured.whole import WholeTime, by_choice, whole_correction
from planner.memory.parts import rank_tokens
from planner.time.correction import MeasuredTimeSource, Probe

if TYPE_CHECKING:
    from planner.choice import Choice
    from planner.memory.correction import Correction
    from planner.memory.model import MemoryModel
    from planner.time.step import TimeModel


class Corrections:
    """Probes of one job on its machine, each asked for what it knows of a choice."""

    def __init__(self, model: MemoryModel, jobs: tuple[MeasuredJob, ...], wholes: tuple[MeasuredWhole, ...]) -> None:
        """Nothing is simulated before a choice asks for it.

        Args:
            model: of the job on the machine, which knows no measurement.
            jobs: the job's layers at small depth.
            wholes: plans of the job that ran, each for its own choice alone.
        """
        self._model = model
        self._matcher = Matcher(jobs, model)
        self.ran = by_choice(wholes, model)
        """Plans of this very job that ran here, by what they chose."""
        self._probes: dict[int, MeasuredMemory] = {}
        self._of_ran: dict[Choice, Correction] = {}

    def whole(self, choice: Choice) -> MeasuredWhole | None:
        """The measured run of exactly ``choice``; None where there was none, or it ran out of memory."""
        found = self.ran.get(choice)
        return None if found is None or found.out_of_memory else found

    def memory(self, choice: Choice) -> Correction | None:
        """What a probe adds to the phases of ``choice``, None where none ran its layers."""
        whole = self.whole(choice)
        if whole is not None:
            if choice not in self._of_ran:
                self._of_ran[choice] = whole_correction(self._model, whole)
            return self._of_ran[choice]
        job = self._matcher(choice)
        if job is None:
            return None
        probe = self._probes.get(id(job))
        if probe is None:
            probe = self._probes[id(job)] = MeasuredMemory(self._model, job)
        planned = self._model.job
        return probe.correction(choice, planned.architecture.num_layers, rank_tokens(planned, choice))

    def seconds(self, time_of: Callable[[MemoryModel], TimeModel]) -> MeasuredTimeSource:
        """What the probes say of the seconds of a choice.

        Args:
            time_of: the time model beside a memory model.
        """
        model, find = self._model, self._matcher
        known: dict[int, MeasuredTime | None] = {}

        def model_at(layers: int, sequence: int) -> TimeModel:
            job = replace(model.job, architecture=first_layers(model.job.architecture, layers), seq_len=sequence)
            return time_of(model.of_job(job))

        def time_of_job(job: MeasuredJob) -> MeasuredTime | None:
            if id(job) not in known:
                try:
                    known[id(job)] = MeasuredTime(job, model_at)
                except ValueError:  # more layers took no longer: the model alone stands
                    known[id(job)] = None
            return known[id(job)]

        def measured(choice: Choice) -> Probe | None:
            ran = self.whole(choice)
            if ran is not None:
                return Probe(WholeTime(ran), own=True, whole=True)
            job = find(choice)
            near = find.nearest(choice) if job is None else job
            time = time_of_job(near) if near is not None else None
            return Probe(time, job is not None) if time is not None else None

        return measured
