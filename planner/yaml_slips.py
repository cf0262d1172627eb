"""Values of a ``trl`` section as they were meant: what YAML 1.1 reads as text or false, put right."""

from __future__ import annotations

import re
from math import isfinite
from typing import cast

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def mended(value: object, name: str) -> object:
    """A JSON value with YAML's own slips put right, at any depth.

    Args:
        value: what the job holds.
        name: of the setting.
    """
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) and isfinite(float(value)):
        return float(value)  # 2e-5 is read as text for want of a point
    if value is False and name.endswith("_strategy"):
        return "no"  # and an unquoted no as false
    if isinstance(value, list | tuple):
        return [mended(item, name) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return {key: mended(item, key) for key, item in pairs}
    return value
