"""A written run, checked before it starts: every setting built by the class that will read it."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import UsageError
from launcher.writing.child_script import run_child
from launcher.writing.run_folder import is_run_folder

VALIDATE_TIMEOUT_S = 180.0


def validate_run(folder: Path, *, python: str | None, require_devices: bool = False) -> list[str]:
    """Sentences about what would fail at start; an empty list when nothing was found.

    The training Python parses accelerate.yaml as `accelerate launch` does, builds its FSDP, DeepSpeed and parallelism
    settings, imports train.py without running it, and gives its arguments to TRL's own config class. No model is
    built and no card is needed.

    Args:
        folder: a run folder.
        python: the training Python; None is the one running.
        require_devices: also report fewer cards than processes.

    Raises:
        UsageError: the folder is no run folder.
        EnvironmentLacks: the training Python cannot be run, or lacks what every run needs.
    """
    if not is_run_folder(folder):
        raise UsageError(f"{folder} is not a run folder; write one with `trlfit write`")
    answer = run_child(
        "validate_run.py",
        {"folder": str(folder.resolve()), "require_devices": require_devices},
        python=python,
        timeout_s=VALIDATE_TIMEOUT_S,
    )
    return [str(problem) for problem in answer["problems"]]
