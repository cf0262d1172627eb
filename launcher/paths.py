"""Every folder trlfit reads or writes outside the run folder it was told about, where it lies itself; typed names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES_FOLDER = Path(__file__).resolve().parents[1]
"""Where our packages lie: a process started here finds them by ``-m``."""


def expanded(name: str | Path) -> Path:
    """A name that somebody typed, with ``~`` as the home it means.

    Of a user whom the system does not know it stays as it is, as in a shell, and is then missed like any other file.
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises there


def cache_dir() -> Path:
    """Traced and measured coefficients. ``TRLFIT_CACHE`` redirects it."""
    override = os.environ.get("TRLFIT_CACHE")
    if override:
        return Path(override)
    if sys.platform == "linux":
        # As platformdirs has it, which a plan that asks for measurements need not load.
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        return (Path(base) if base else expanded("~/.cache")) / "trlfit"
    import platformdirs

    return Path(platformdirs.user_cache_dir("trlfit", appauthor=False))


def data_dir() -> Path:
    """History of runs. ``TRLFIT_DATA`` redirects it."""
    override = os.environ.get("TRLFIT_DATA")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_data_dir("trlfit", appauthor=False))


def runs_dir() -> Path:
    """Where `trlfit write` and `launch` put run folders when -o is not given: ``runs/`` here."""
    return Path("runs")
