"""What can go wrong outside our own code, and the exit code that says so.

TrlfitError
├── UsageError             2    bad input: flags, job file, pins, paths
├── EnvironmentLacks       4    a package, a driver, a file or the network is missing
├── ProbeFailed            5
└── TrainingFailed         6
"Nothing fits" (3) is an answer, not an error; 1 is our bug; 130 is Ctrl-C.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that scripts rely on."""

    DONE = 0
    BUG = 1
    USAGE = 2
    NOTHING_FITS = 3
    ENVIRONMENT = 4
    PROBE = 5
    TRAINING = 6
    INTERRUPTED = 130


class TrlfitError(Exception):
    """One line for the user: what is wrong, where, what to do."""

    exit_code = ExitCode.BUG

    def __str__(self) -> str:
        return " ".join(str(self.args[0]).split()) if self.args else self.__class__.__name__


class UsageError(TrlfitError):
    """The input is wrong: a flag, a job file, a pin, a path, a data set."""

    exit_code = ExitCode.USAGE


class EnvironmentLacks(TrlfitError):
    """The environment lacks something: a package, a driver, a readable file, the network, disk space."""

    exit_code = ExitCode.ENVIRONMENT


class ProbeFailed(TrlfitError):
    """A probe started and did not finish."""

    exit_code = ExitCode.PROBE


class TrainingFailed(TrlfitError):
    """The training started and did not finish."""

    exit_code = ExitCode.TRAINING
