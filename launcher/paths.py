"""Every folder trlfit reads or writes outside the run folder it was told about."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Traced and measured coefficients. ``TRLFIT_CACHE`` redirects it."""
    override = os.environ.get("TRLFIT_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("trlfit", appauthor=False))


def data_dir() -> Path:
    """History of runs. ``TRLFIT_DATA`` redirects it."""
    override = os.environ.get("TRLFIT_DATA")
    return Path(override) if override else Path(platformdirs.user_data_dir("trlfit", appauthor=False))


def runs_dir() -> Path:
    """Where `trlfit write` and `launch` put run folders when -o is not given: ``runs/`` here."""
    return Path("runs")
